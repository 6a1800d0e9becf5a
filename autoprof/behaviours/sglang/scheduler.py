"""Captures in SGLang's scheduler, which receives autoprof's requests and records forward passes.

All schedulers of a replica receive a request between the same two passes, so they record the same passes. Recording
begins with the first requested pass. Before it, an idle scheduler only polls.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from autoprof.base import process
from autoprof.base.originals import time
from autoprof.behaviours.rollout.engine import MARK, ROLE, Request, problem_of
from autoprof.capture import profilers
from autoprof.capture.artifacts import Subject
from autoprof.capture.pass_capture import TOO_EARLY, PassCapture
from autoprof.config.kinds import GENERATE
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Reply
from autoprof.run import process_state, runtime
from autoprof.run.process_state import EngineState, read_part
from autoprof.run.runtime import Runtime

EXTEND, DECODE = "EXTEND", "DECODE"
# Word in `AUTOPROF_CONTENTS` that requests one trace per stage.
BY_STAGE = "profile-by-stage"
# Method that a scheduler without work polls, in all releases (managers/scheduler.py, event loops).
_POLLED = "get_next_batch_to_run"
# Turns of the loop without a pass after which a scheduler is idle. A pipeline makes one turn for each of its parts.
IDLE_AFTER_TURNS = 16
# Longest pause between two turns, in seconds.
MAX_PAUSE_S = 0.02


class SchedulerCapture:
    """A capture from start to stop: one trace, or one for each stage."""

    def __init__(self, run: Runtime, settings: Settings, subject: Subject) -> None:
        """Create the step's folder.

        Raises:
            OSError: The folder can't be created.
        """
        stages = (EXTEND, DECODE) if BY_STAGE in settings.contents else ("",)
        self._traces = [StageTrace(run, settings, subject, stage) for stage in stages]
        self._pauses: _Pauses | None = None

    def passing(self, scheduler: Any, stage: str) -> AbstractContextManager[Any] | None:
        """Count a pass of this stage that begins. If it is recorded, return the context manager to use around it."""
        for trace in self._traces:
            if trace.stage in ("", stage):
                trace.before_pass(wanted=not self._recording)
            elif (trace.stage, stage) == (EXTEND, DECODE):
                trace.stop()
        if not self._recording:
            self._let_run()
            return None
        if self._pauses is None:
            self._pauses = _Pauses(scheduler)
        self._pauses.turns = 0
        import torch.profiler

        around: AbstractContextManager[Any] = torch.profiler.record_function(f"run_batch {stage}".rstrip())
        return around

    def stop(self, cut: str = "") -> str:
        """End the recording. Return why there is no trace, or an empty string.

        Args:
            cut: Reason why the recording ends early, if it does.
        """
        self._let_run()
        for trace in self._traces:
            if cut:
                trace.abort(cut)
            else:
                trace.stop()
        # The engine may be ended after the stop, so the traces must be written before it returns.
        begun = [trace for trace in self._traces if trace.tried] or self._traces[:1]
        problems = [trace.close(cut and f"{cut}{TOO_EARLY}") for trace in begun]
        for trace in self._traces:
            if trace not in begun:  # its stage never began, so its file name is free again
                trace.give_back()
        return next(filter(None, problems), "")

    @property
    def _recording(self) -> bool:
        return any(trace.recording for trace in self._traces)

    def _let_run(self) -> None:
        if self._pauses is not None:
            self._pauses.close()
            self._pauses = None


class StageTrace(PassCapture):
    """Capture of the passes of one stage in one file, or of all stages if `stage` is empty."""

    def __init__(self, run: Runtime, settings: Settings, subject: Subject, stage: str) -> None:
        """Create the step's folder.

        Raises:
            OSError: The folder can't be created.
        """
        part = f"{subject.part}-{stage}" if stage else subject.part
        passes = parse_iterations(settings.rollout_iterations)
        super().__init__(run, msgspec.structs.replace(subject, part=part), settings, profilers.choose(settings), passes)
        self.stage = stage
        self.open()

    def begin(self) -> bool:
        begun = super().begin()
        if begun:
            self.open().contents += [BY_STAGE] * bool(self.stage)
        elif self.state == "waiting":
            self.fail("another profiler is recording in the scheduler's process")
        return begun


class _Pauses:
    """Pauses between the turns of an idle scheduler's loop during a recording.

    Without them, it would poll thousands of times per second. With stacks, every call of every turn would be in the
    trace. Since 0.4.9, a server that is started with `--sleep-on-idle` pauses in the same way.
    """

    def __init__(self, scheduler: Any) -> None:
        self.turns = 0
        self._scheduler: Any = None
        # If the instance itself has the attribute, another library has patched it. That patch could not be restored.
        if not hasattr(scheduler, _POLLED) or _POLLED in vars(scheduler):
            return
        poll = getattr(scheduler, _POLLED)

        def paused(*args: Any, **kwargs: Any) -> Any:
            self.turns += 1
            if self.turns > IDLE_AFTER_TURNS:
                time.sleep(min(MAX_PAUSE_S, (self.turns - IDLE_AFTER_TURNS) * 1e-3))
            return poll(*args, **kwargs)

        setattr(scheduler, _POLLED, paused)
        self._scheduler = scheduler

    def close(self) -> None:
        """Restore the method that is polled."""
        if self._scheduler is not None:
            vars(self._scheduler).pop(_POLLED, None)


# Smallest time, in seconds, that counts as time since the epoch. Monotonic clocks are below it.
_EPOCH_S = 1e9


class _RecordingState(process.State):
    """Capture in this process's scheduler, and True if the scheduler is registered for snapshots of its state."""

    def begin(self) -> None:
        self.session: SchedulerCapture | None = None
        self.registered = False

    def in_child(self) -> None:
        self.registered = False


_state = _RecordingState()


class Scheduler(Behaviour):
    """The method that receives profiling requests, in SGLang's scheduler or in its profiler manager."""

    def around(self, call: Call) -> Around:
        text = str(getattr(call.argument("recv_req"), "output_dir", ""))
        if not text.startswith(MARK):
            yield CALL
            return None
        problem = problem_of("sglang/scheduler", lambda: _obey(call.instance, Request.read(text)))
        return Reply(_answer(MARK + problem))


class SchedulerPass(Behaviour):
    """The scheduler's method that runs one forward pass."""

    def around(self, call: Call) -> Around:
        session = _state.session
        if not _state.registered:
            _state.registered = True
            process_state.register_scheduler(call.instance, read)
        if session is None:
            yield CALL
            return None
        stage = _stage(call.argument("batch"))
        with session.passing(call.instance, stage) or contextlib.nullcontext():
            yield CALL
        return None


def _obey(holder: Any, request: Request) -> str:
    """Carry out a request. Return the problem, or an empty string."""
    session, _state.session = _state.session, None
    if request.action == "stop":
        return session.stop(request.reason) if session is not None else ""
    if session is not None:
        session.stop("a new request came before the stop")
    run = runtime.start()
    if run is None:
        return "autoprof is off in the scheduler's process"
    rank, part = _place(holder, request)
    settings = request.settings(run)
    if not settings.takes(ROLE, range(rank, rank + 1), GENERATE):
        return ""
    if problem := profilers.choose(settings).busy():
        return problem
    _state.session = SchedulerCapture(run, settings, request.subject(part, rank))
    return ""


def _place(holder: Any, request: Request) -> tuple[int, str]:
    """Return the scheduler's global rank, and its parallel ranks in the form of SGLang's own trace names."""
    # The ranks are attributes of the scheduler up to 0.5.12, then of its profiler manager's `ps`; in 0.5.23 a function
    # returns them.
    ranks = holder if hasattr(holder, "tp_rank") else getattr(holder, "ps", None) or _parallel()

    def number(*names: str, default: int) -> int:
        return next((int(getattr(ranks, name)) for name in names if getattr(ranks, name, None) is not None), default)

    tensor, pipeline, data = (number(f"{kind}_rank", default=0) for kind in ("tp", "pp", "dp"))
    tensors, pipelines = number("tp_size", default=1), number("pp_size", default=1)
    part = [f"TP-{tensor}"]
    if number("dp_size", "num_dp_ranks", default=1) > 1:
        part.append(f"DP-{data}")
    if pipelines > 1:
        part.append(f"PP-{pipeline}")
    if number("moe_ep_size", default=1) > 1:
        part.append(f"EP-{number('moe_ep_rank', default=0)}")
    rank = request.rank + tensor + pipeline * tensors + (data * tensors * pipelines if request.replicas_in_one else 0)
    return rank, "-".join(part)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _stage(batch: Any) -> str:
    """Return the stage of a pass, or an empty string for an empty pass of an idle rank."""
    mode = batch.forward_mode
    if mode.is_decode():
        return DECODE
    return EXTEND if mode.is_extend() else ""


def _answer(message: str) -> Any:
    from sglang.srt.managers.io_struct import ProfileReqOutput

    return ProfileReqOutput(success=True, message=message)


def read(scheduler: Any, left_out: list[str]) -> EngineState:
    """Return the state of a `Scheduler`. Blocks are pages of its token pool; free ones include evictable cache."""
    state: EngineState = {}
    waiting = list(scheduler.waiting_queue)
    batches = (scheduler.running_batch, getattr(scheduler, "cur_batch", None))
    # A request in its prefill is in the current batch only.
    running_requests = {request.rid: request for batch in batches if batch is not None for request in batch.reqs}
    running = list(running_requests.values())
    state["running"], state["waiting"] = len(running), len(waiting)
    pool, cache = getattr(scheduler, "token_to_kv_pool_allocator", None), getattr(scheduler, "tree_cache", None)
    page = getattr(pool, "page_size", 1) or 1
    read_part(state, left_out, "free_blocks", lambda: int(pool.available_size() + cache.evictable_size()) // page)  # type: ignore[union-attr]
    read_part(state, left_out, "total_blocks", lambda: int(pool.size) // page)  # type: ignore[union-attr]
    if running or waiting:
        read_part(state, left_out, "longest_s", lambda: _longest(state, [*running, *waiting]))
    return state


def _longest(state: EngineState, requests: list[Any]) -> float:
    """Return the age of the oldest request, in seconds, and store its id in the state."""
    since, oldest = min(((_since(request), request) for request in requests), key=lambda pair: pair[0])
    state["longest"] = str(oldest.rid)
    return round((time.time() if since > _EPOCH_S else time.perf_counter()) - since, 3)


def _since(request: Any) -> float:
    """Return the time at which a request came to the queue, on one of two clocks, in seconds."""
    stats = getattr(request, "time_stats", request)
    return float(getattr(stats, "wait_queue_entry_time", 0.0) or stats.queue_time_start)
