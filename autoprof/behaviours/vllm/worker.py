"""Captures in vLLM's workers, and the state of vLLM's scheduler.

A worker holds an autoprof object in place of its own profiler. The engine starts and stops it. It records with the tool
in the settings, counts forward passes, and writes into the step's folder. vllm-ascend's workers work alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from autoprof.base import interrupts
from autoprof.base.originals import threading, time
from autoprof.behaviours.rollout.engine import ROLE, Request
from autoprof.capture import lifecycle, profilers
from autoprof.capture.pass_capture import PassCapture
from autoprof.config.kinds import GENERATE
from autoprof.config.selection import parse_iterations
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, follow
from autoprof.run import process_state, runtime
from autoprof.run.process_state import EngineState, read_part


class Passes:
    """Calls `before` ahead of each forward pass of a worker, until `close`.

    vLLM counts only from 0.12 on, and not alike: a delay of 0 and one of 1 are both none, `max_iterations` left
    a profiler that could not be started again until 0.29, and 0.31 and 0.32 take them in other places
    (vllm/profiler/wrapper.py). One count of autoprof's own means the same in all of them.

    A pass is a call of `execute_model`, as in vLLM's own count and its annotations; asynchronous scheduling makes some
    that compute no token. It is counted where the worker's begins, ahead of vLLM's annotation of it, so that a trace
    holds whole passes. Ray's executor calls the model runner without the worker (vllm/v1/executor/ray_utils.py in 0.12
    to 0.32, vllm/executor/ray_utils.py before), so that is watched as well.
    """

    def __init__(self, worker: Any, before: Callable[[], bool]) -> None:
        """Args:
        worker: The worker.
        before: Called ahead of each pass; it returns whether the pass is recorded.
        """
        self._before = before
        self._inside = False
        self._watched: list[Any] = []
        # From 0.11.1 on the worker annotates its passes (gpu_worker.py, annotate_profile).
        self._watch(worker, annotate=not hasattr(worker, "annotate_profile"))
        self._watch(getattr(worker, "model_runner", None), annotate=True)

    def close(self) -> None:
        """Give back what is watched."""
        for owner in self._watched:
            vars(owner).pop("execute_model", None)
        self._watched.clear()

    def _watch(self, owner: Any, annotate: bool) -> None:
        # One that has it as an attribute of its own is somebody else's patch, which could not be given back.
        if not hasattr(owner, "execute_model") or "execute_model" in vars(owner):
            return
        execute = owner.execute_model

        @functools.wraps(execute)
        def execute_model(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return execute(*args, **kwargs)
            recorded = self._counted()
            self._inside = True
            try:
                with annotation("execute_model") if recorded and annotate else contextlib.nullcontext():
                    return execute(*args, **kwargs)
            finally:
                self._inside = False

        owner.execute_model = execute_model
        self._watched.append(owner)

    def _counted(self) -> bool:
        try:
            return self._before()
        except Exception as error:
            interrupts.pass_on(error)
            runtime.report("vllm/worker", error)
            return False


class Recorder:
    """Recorder behind a stand-in; this one records nothing.

    A worker that does not take part in a capture needs it, too: the engine starts the profilers of all workers, and one
    that the user configured must not start with autoprof's.
    """

    recording = False

    def switch_on(self) -> None:
        """Start to record: the engine starts its profiler."""

    def switch_off(self, state: str = "complete", reason: str = "") -> None:
        """End the recording: the engine stops its profiler, or shuts down. May be called without a start, and again."""


class StandIn:
    """An object of autoprof's in `worker.profiler`, with all that any vLLM does with what it keeps there.

    Until 0.11 that is a `torch.profiler.profile` (`start`, `stop`, `key_averages().table()`: gpu_worker.py; in 0.12
    still cpu_worker.py), after that a `WorkerProfiler` (vllm/profiler/gpu_profiler.py in 0.12, wrapper.py since):
    `step` and `annotate_context_manager` in each forward pass, `is_running` before that in 0.28 to 0.30 and
    `should_annotate` since 0.31, `set_output_name` and arguments of `start` from 0.32. One of vLLM's own classes would
    need a module, a configuration and a way to count for each of them, and would write tables to disk. What a later
    vLLM may ask for beside these is answered by `_Nothing`, not by an error in a forward pass.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def start(self, *_: Any, **__: Any) -> None:
        _safely(self._recorder.switch_on)

    def stop(self) -> None:
        _safely(self._recorder.switch_off)

    def shutdown(self) -> None:
        _safely(lambda: self._recorder.switch_off("truncated", "the engine was shut down"))

    def step(self) -> None:
        """Do nothing: autoprof counts forward passes itself (passes.py)."""

    @property
    def is_running(self) -> bool:
        return self._recorder.recording

    should_annotate = is_running

    def annotate_context_manager(self, name: str) -> Any:
        return annotation(name) if self._recorder.recording else contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Nothing:
    """Can be called, entered, and asked for anything, and is false."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return ""


class Configured:
    """A worker's profiler configuration, but with a profiler: from 0.17 on `Worker.profile` refuses without one
    (gpu_worker.py), and asks for it again at stop."""

    profiler = "torch"

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_own"), name)


class Place:
    """`worker.profiler` and `worker.profiler_config` with a stand-in, until they are given back."""

    def __init__(self, worker: Any, recorder: Recorder) -> None:
        self._worker = worker
        self._before = {name: vars(worker)[name] for name in ("profiler", "profiler_config") if name in vars(worker)}
        worker.profiler = StandIn(recorder)
        worker.profiler_config = Configured(self._before.get("profiler_config"))

    def give_back(self) -> None:
        for name in ("profiler", "profiler_config"):
            vars(self._worker).pop(name, None)
        vars(self._worker).update(self._before)


def annotation(name: str) -> Any:
    """Return a context manager that shows in the trace."""
    import torch.profiler

    return torch.profiler.record_function(name)


def _safely(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("vllm/worker", error)


# On a worker: the session, and the place that is to be given back.
_SESSION = "_autoprof_session"
_PLACE = "_autoprof_place"


class Worker(Behaviour):
    """Gives vLLM's worker class the methods that `collective_rpc` calls."""

    def install(self, owner: Any) -> bool:
        owner.autoprof_prepare = _prepare
        owner.autoprof_cut = _cut
        owner.autoprof_release = _release
        return True


class _Session(PassCapture, Recorder):
    """A capture in one worker, from prepare to release. Passes count while the engine's profiler is on."""

    def __init__(self, worker: Any, run: runtime.Runtime, request: Request) -> None:
        subject = request.subject(_rank_part(worker), request.rank + _rank_in_replica(worker))
        settings = request.settings(run)
        part = parse_iterations(settings.rollout_iterations)
        super().__init__(run, subject, settings, profilers.choose(settings), part)
        self.cut = ""
        self._worker = worker
        self._armed = False

    def put_in(self) -> None:
        """Make the step's folder and count the worker's passes.

        Raises:
            OSError: The folder can't be made.
        """
        self.open()
        self._passes = Passes(self._worker, self._before_pass)

    def switch_on(self) -> None:
        if not self._armed:
            self._armed = True
            self.reach()

    def switch_off(self, state: str = "complete", reason: str = "") -> None:
        if not self.recording:
            return
        if self.thread == threading.get_ident():
            self.end("truncated" if self.cut else state, self.cut or reason)
        elif lifecycle.release(self):
            self.abandon("the engine stopped it in another thread than it began in")

    def finish(self, state: str, reason: str) -> None:
        super().finish(state, reason or ("" if self.passed else "the engine ran no forward pass"))

    def take_out(self) -> str:
        """Take the session out of the worker; return a problem that was not told before, or an empty text."""
        self._passes.close()
        self._armed = False
        self.switch_off("truncated", "the engine's own stop did not reach the worker")
        lifecycle.release(self)
        # The engine may be ended once it is stopped: the trace has to be written by then.
        told = self.told
        problem = self.close("" if self._first else "the engine recorded nothing")
        return self.artifacts.problem if told else problem

    def _before_pass(self) -> bool:
        return self._armed and self.before_pass()


def _prepare(worker: Any, asked: dict[str, Any]) -> dict[str, str]:
    """Put an object of autoprof's where a vLLM worker keeps its profiler (`autoprof_prepare`)."""
    _release(worker)  # of a capture whose trainer went away
    session: Recorder = Recorder()
    try:
        session, problem = _session(worker, Request.read(asked))
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("vllm/worker", error)
        problem = f"{type(error).__name__}: {error}"
    setattr(worker, _PLACE, Place(worker, session))
    return {"problem": problem}


def _session(worker: Any, request: Request) -> tuple[Recorder, str]:
    run = runtime.start()
    if run is None:
        return Recorder(), "autoprof is off in the worker's process"
    session = _Session(worker, run, request)
    rank = session.subject.rank
    if not request.settings(run).takes(ROLE, range(rank, rank + 1), GENERATE):
        return Recorder(), ""
    if not lifecycle.claim(session, session.tool):
        return Recorder(), "another profiler is recording in the worker's process"
    try:
        session.put_in()
    except BaseException:
        lifecycle.release(session)
        raise
    setattr(worker, _SESSION, session)
    return session, ""


def _cut(worker: Any, reason: str) -> dict[str, str]:
    """End the recording of a vLLM worker early (`autoprof_cut`)."""
    session = vars(worker).get(_SESSION)
    if session is not None:
        session.cut = reason
    return {"problem": ""}


def _release(worker: Any) -> dict[str, str]:
    """Give a vLLM worker back the profiler that it had (`autoprof_release`)."""
    try:
        place = vars(worker).pop(_PLACE, None)
        if place is not None:
            place.give_back()
        session = vars(worker).pop(_SESSION, None)
        return {"problem": session.take_out() if session is not None else ""}
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("vllm/worker", error)
        return {"problem": f"{type(error).__name__}: {error}"}


def _rank_in_replica(worker: Any) -> int:
    """Return the rank among all of the replica: `rank` counts anew in each data-parallel engine (0.27.1, core.py).

    With an external launcher it is the global one, of as many replicas as there are (0.27.1, uniproc_executor.py).
    """
    if follow(worker, "parallel_config.distributed_executor_backend", None) == "external_launcher":
        return int(worker.rank) % int(follow(worker, "parallel_config.world_size", 1))
    return _data_parallel_rank(worker) * int(follow(worker, "parallel_config.world_size", 1)) + int(worker.rank)


def _rank_part(worker: Any) -> str:
    """Return the part that tells workers of a replica apart in file names, as vLLM itself names them from 0.17 on."""
    part = f"rank{worker.rank}"
    with interrupts.suppress(ImportError):
        from vllm.distributed.utils import get_worker_rank_suffix

        part = str(get_worker_rank_suffix(global_rank=worker.rank))
    engine = _data_parallel_rank(worker)
    return f"dp{engine}_{part}" if engine and "dp" not in part else part


def _data_parallel_rank(worker: Any) -> int:
    return int(follow(worker, "parallel_config.data_parallel_rank", 0))


# Where requests wait, in some releases in several queues.
_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


class Start(Behaviour):
    """`EngineCore.__init__` and `WorkerBase.__init__`: from then on the process tells where it stands, and an engine
    core what its scheduler has to do. Nothing else is called there, where workers have processes of their own.
    """

    def around(self, call: Call) -> Around:
        yield CALL
        scheduler = getattr(call.instance, "scheduler", None)
        if scheduler is not None:
            process_state.register_scheduler(scheduler, read)
        return None


def read(scheduler: Any, left_out: list[str]) -> EngineState:
    """Return the state of a `Scheduler` of vLLM 0.9 to 0.33."""
    found: EngineState = {}
    running = list(scheduler.running)
    waiting = [request for name in _QUEUES for request in tuple(getattr(scheduler, name, ()))]
    found["running"], found["waiting"] = len(running), len(waiting)
    read_part(found, left_out, "free_blocks", lambda: scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
    read_part(found, left_out, "total_blocks", lambda: scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
    if running or waiting:
        oldest = min((*running, *waiting), key=lambda request: request.arrival_time)
        found["longest"] = str(oldest.request_id)
        found["longest_s"] = round(time.time() - oldest.arrival_time, 3)
    return found
