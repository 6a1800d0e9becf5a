"""Captures of an SGLang engine: its requests, its schedulers, and the routes of a server without a trainer.

autoprof does not use SGLang's profiler. The profiler's arguments and its count of forward passes differ between
releases. The profiler writes gzip in the thread that generates, and ends the server if the disk is full or an argument
is invalid. In all releases, `start_profile` reaches every scheduler, also on other nodes. So autoprof sends its
requests as text in the argument `output_dir` of `start_profile`. The scheduler's hook (`Scheduler`) handles autoprof's
requests before SGLang reads them.

In a server without a trainer (`python -m sglang.launch_server`, `sglang serve`), hooks show when requests begin and
end. A request begins after its text is tokenized, before the scheduler gets the request. A running request holds a
lock, so that the weights do not change. The request ends when all its samples are answered, refused or aborted, and the
request releases the lock (tokenizer_manager.py, 0.4.6 to 0.5.23). autoprof can't wrap
`TokenizerManager.generate_request`, because this method is an async generator.

A scheduler receives autoprof's requests and records forward passes. All schedulers of a replica receive a request
between the same two passes. So they record the same passes. A recording begins at the first selected pass, not at the
request, because an idle scheduler only polls until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base import log, process
from autoprof.base.originals import time
from autoprof.behaviours import rollout, serving
from autoprof.behaviours.rollout import MARK, ROLE, ObjectPatches, Request, awaited_problem, problem_of
from autoprof.capture import profilers
from autoprof.capture.artifacts import Subject
from autoprof.capture.recorder import TOO_EARLY, PassCapture
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.config.values import GENERATE
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Reply, follow
from autoprof.hooks.dispatch import Coroutine
from autoprof.hooks.wrapper import wrapped_by
from autoprof.run import raised, runtime, snapshot
from autoprof.run.journal import Span
from autoprof.run.snapshot import EngineState, read_part
from autoprof.rundir.records import ENGINE, RaisedLine

# Attribute that a `TokenizerManager` has while autoprof records its engine. Its value is the `_EngineCapture`.
OPEN = "_autoprof_open"


class _EngineCapture(msgspec.Struct, eq=False):
    """A capture in all schedulers of an engine, from the start request to the stop request.

    Attributes:
        engine: The `TokenizerManager`.
        timeout_s: Seconds after which a request continues in the background.
        span: Span of the recording.
        ending: True after the stop request.
    """

    engine: Any
    timeout_s: float
    span: Span
    ending: bool = False
    # This reference keeps the task alive, because an event loop holds only weak references to its tasks.
    _work: asyncio.Task[str] | None = None
    _late: bool = False

    async def start(self, request: Request) -> dict[str, Any]:
        return await self._await_with_timeout(self._start(request))

    async def stop(self, cut: str) -> dict[str, Any]:
        self.ending = True
        return await self._await_with_timeout(self._stop(cut))

    async def _start(self, request: Request) -> str:
        problem = await _send(self.engine, request)
        if problem:
            self._close_recording(was_recorded=False)
        elif self._late and not self.ending:
            self.ending = True
            await self._stop("the engine started too late")
        return problem

    async def _stop(self, cut: str) -> str:
        try:
            return await _send(self.engine, Request(action="stop", reason=cut))
        finally:
            self._close_recording()

    async def _await_with_timeout(self, work: Any) -> dict[str, Any]:
        """Await `work` for at most the stop timeout. After the timeout, `work` continues in the background.

        `work` must not be cancelled: after a cancelled call, SGLang's communicator waits for ever (0.5.8,
        _Communicator).
        """
        self._work = asyncio.ensure_future(work)
        await asyncio.wait({self._work}, timeout=self.timeout_s)
        if self._work.done():
            return {"problem": self._work.result()}
        self._late = True
        return {"problem": f"the engine did not answer within {self.timeout_s:g} s"}

    def _close_recording(self, was_recorded: bool = True) -> None:
        if getattr(self.engine, OPEN, None) is self:
            delattr(self.engine, OPEN)
            if was_recorded:
                self.span.end()


async def start(engine: Any, request: Request) -> dict[str, Any]:
    """Start a recording in the schedulers of a `TokenizerManager`. In the answer, `problem` is empty on success."""
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, OPEN):
        return {"problem": "it is recording already"}
    if not _reaches_the_scheduler():
        return {"problem": "autoprof's hook in SGLang's scheduler was not applied"}
    replicas_in_one = not getattr(engine.server_args, "enable_dp_attention", False)
    session = _EngineCapture(engine, request.settings(run).stop_timeout_s, request.span(run))
    setattr(engine, OPEN, session)
    return await session.start(msgspec.structs.replace(request, replicas_in_one=replicas_in_one))


async def stop(engine: Any, cut: str = "") -> dict[str, Any]:
    """Stop the recording in the schedulers of a `TokenizerManager`. In the answer, `problem` is empty on success.

    Args:
        engine: The `TokenizerManager`.
        cut: Reason why the recording ends early. Empty if the recording ends normally.
    """
    session = getattr(engine, OPEN, None)
    if session is None:
        return {"problem": "it was not recording"}
    if session.ending:
        return {"problem": "it is being stopped already"}
    answer: dict[str, Any] = await session.stop(cut)
    return answer


class SglangActor(rollout.EngineActor):
    """A method of SGLang's server actor. A call with `autoprof=` is a request to the actor's `TokenizerManager`."""

    default_engine = "self.tokenizer_manager"
    start = staticmethod(start)
    stop = staticmethod(stop)


async def _send(engine: Any, request: Request) -> str:
    """Send a request to the schedulers. Return the problem of the scheduler that answers, or an empty string.

    The argument `activities` is an empty list. So if a scheduler runs without autoprof's hook, SGLang's profiler
    records nothing (0.4.6 to 0.5.23).
    """

    async def send() -> str:
        method, fields = engine.start_profile, {"output_dir": request.text(), "activities": []}
        if "output_dir" in inspect.signature(method).parameters:
            answer = await method(**fields)
        else:
            answer = await method(_request_type()(**fields))
        message = str(getattr(answer, "message", ""))
        return message.removeprefix(MARK) if message.startswith(MARK) else "the scheduler runs without autoprof"

    return await awaited_problem("", send())


def _request_type() -> type:
    """Return SGLang's class `ProfileReq`. Since 0.5.15, an object of this class is `start_profile`'s only argument."""
    from sglang.srt.managers.io_struct import ProfileReq

    kind: type = ProfileReq
    return kind


def _reaches_the_scheduler() -> bool:
    """Return True if the hooks are applied to the scheduler's modules, which this process imports, too."""
    methods = (
        ("sglang.srt.managers.scheduler", "Scheduler.profile"),
        ("sglang.srt.managers.scheduler_components.profiler_manager", "SchedulerProfilerManager._profile"),
    )
    return any(wrapped_by(follow(sys.modules.get(module), path, None)) for module, path in methods)


# Attribute of a `TokenizerManager` and of its lock that holds the `ServedEngine`.
_SERVER = "_autoprof_server"
_START, _STOP = "/start_profile", "/stop_profile"
_HEALTH = "HEALTH_CHECK"


class SetUp(Behaviour):
    """`set_global_state`, which gives SGLang's HTTP server its `TokenizerManager` before the server listens."""

    def around(self, call: Call) -> Around:
        outcome = yield CALL
        # A trainer's server actor calls `set_global_state`, too, but the trainer opens the actor's windows.
        if outcome.error is None and not _boot.COMMAND.ray_worker:
            _set_up(call.argument("global_state").tokenizer_manager, call.function.__globals__["app"])


class Tokenized(Behaviour):
    """After the call, a request goes to the scheduler. If the engine was idle, a generation batch begins.

    SGLang's own requests, for warm-up and health checks, begin no batch.
    """

    def around(self, call: Call) -> Around:
        _watch_processes(call.instance)
        outcome = yield CALL
        server = getattr(call.instance, _SERVER, None)
        if server is None or outcome.error is not None:
            return
        status = getattr(call.instance, "server_status", None)
        if getattr(status, "name", "") != "Starting" and not str(call.argument("obj").rid).startswith(_HEALTH):
            yield Coroutine(server.request(call.run))


class Released(Behaviour):
    """By the call, a request releases its lock. If no other request holds the lock, the batch ends."""

    def around(self, call: Call) -> Around:
        yield CALL
        server = getattr(call.instance, _SERVER, None)
        if server is not None and call.instance._readers == 0:
            server.idle()


def _watch_processes(manager: Any) -> None:
    """Record the deaths of the engine's processes. SGLang then kills the server with all its processes."""
    watchdog = getattr(manager, "_subprocess_watchdog", None)
    named = zip(getattr(watchdog, "_names", ()), getattr(watchdog, "_processes", ()), strict=True)
    rollout.watch_processes(
        watchdog,
        [(f"SGLang's {name}", each) for name, each in named],
        "SGLang",
        lambda: "the server ends, and kills its processes",
        lambda: getattr(getattr(manager, _SERVER, None), "step", None),
    )


def _set_up(manager: Any, app: Any) -> None:
    serving.begin_serving()
    # Only the first node of a server has a manager. If there are several tokenizers, the manager has another class,
    # which has no such lock.
    lock = getattr(manager, "model_update_lock", None)
    if lock is None or getattr(manager.server_args, "tokenizer_worker_num", 1) != 1:
        log.info("the server has several tokenizers or nodes; autoprof does not record from this process")
        return
    server = serving.ServedEngine(manager, start, stop, lambda: getattr(manager, "last_receive_tstamp", None))
    if wrapped_by(type(lock).release_reader):
        setattr(manager, _SERVER, server)
        setattr(lock, _SERVER, server)
    _add_routes(app, server)


def _add_routes(app: Any, server: serving.ServedEngine) -> None:
    """Put autoprof's routes in front of SGLang's routes of the same names.

    A start request without a body, or with only autoprof's fields in the body, opens a window of autoprof. Any other
    start request is for SGLang's profiler. autoprof forwards this request, and the stop request that follows it, to
    SGLang's routes.
    """
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    own = {route.path: route for route in app.router.routes if getattr(route, "path", "") in (_START, _STOP)}
    if len(own) != 2:
        raise LookupError(f"SGLang's server has no {_START} and {_STOP}")
    sglang_profiling = False

    async def start_profile(request: Any) -> Any:
        nonlocal sglang_profiling
        body = await request.body()
        fields = serving.fields_of(body)
        if fields is None or not fields.keys() <= serving.KEYS:
            sglang_profiling = True
            await server.give_way()
            return _ForwardingResponse(own[_START], body)
        status, content = await serving.answer_start(server, body)
        if status == 200:  # SGLang's profiling has ended: a profiling with num_steps needs no stop request
            sglang_profiling = False
        return JSONResponse(content, status)

    async def stop_profile(request: Any) -> Any:
        nonlocal sglang_profiling
        if sglang_profiling:
            sglang_profiling = False
            return _ForwardingResponse(own[_STOP], await request.body())
        status, content = await serving.answer_stop(server, b"")
        return JSONResponse(content, status)

    for path, endpoint in ((_START, start_profile), (_STOP, stop_profile)):
        # Require the same key as SGLang's route. SGLang stores the requirement in attributes of the function
        # (srt/utils/auth.py).
        vars(endpoint).update(vars(own[path].endpoint))
        app.router.routes.insert(0, Route(path, endpoint, methods=["GET", "POST"]))


class _ForwardingResponse:
    """Response that passes a request to SGLang's own route, although autoprof has already read the request's body."""

    def __init__(self, route: Any, body: bytes) -> None:
        self._route = route
        self._body: bytes | None = body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def replay() -> Any:
            body, self._body = self._body, None
            if body is None:
                return await receive()
            return {"type": "http.request", "body": body, "more_body": False}

        _, match = self._route.matches(scope)
        scope.update(match)
        await self._route.handle(scope, replay, send)


EXTEND, DECODE = "EXTEND", "DECODE"
# Word in `AUTOPROF_CONTENTS` that requests a separate trace for each stage (EXTEND, DECODE).
BY_STAGE = "profile-by-stage"
# Method that a scheduler without work calls again and again, in all releases (managers/scheduler.py, event loops).
_POLL_METHOD = "get_next_batch_to_run"
# A scheduler is idle after this number of turns of its event loop without a pass. A pipeline makes one turn for each of
# its parts.
IDLE_AFTER_TURNS = 16
# Longest pause between two turns of the event loop, in seconds.
MAX_PAUSE_S = 0.02


class SchedulerCapture:
    """A capture in one scheduler, from start to stop. It has one trace, or one trace for each stage."""

    def __init__(self, run: runtime.Runtime, settings: Settings, subject: Subject) -> None:
        """Create the step's folder.

        Raises:
            OSError: The folder can't be created.
        """
        stages = (EXTEND, DECODE) if BY_STAGE in settings.contents else ("",)
        self._traces = [StageTrace(run, settings, subject, stage) for stage in stages]
        self._pauses: _Pauses | None = None

    def passing(self, scheduler: Any, stage: str) -> AbstractContextManager[Any] | None:
        """Count a pass of the stage that begins now.

        If the pass is recorded, return the context manager of its range in the trace. Otherwise, return None.
        """
        for trace in self._traces:
            if trace.stage in ("", stage):
                trace.before_pass(may_begin=not self._recording)
            elif (trace.stage, stage) == (EXTEND, DECODE):
                trace.stop()
        if not self._recording:
            self._end_pauses()
            return None
        if self._pauses is None:
            self._pauses = _Pauses(scheduler)
        self._pauses.turns = 0
        import torch.profiler

        pass_range: AbstractContextManager[Any] = torch.profiler.record_function(f"run_batch {stage}".rstrip())
        return pass_range

    def stop(self, cut: str = "") -> str:
        """End the recording. Return the reason why there is no trace, or an empty string.

        Args:
            cut: Reason why the recording ends early. Empty if the recording ends normally.
        """
        self._end_pauses()
        for trace in self._traces:
            if cut:
                trace.abort(cut)
            else:
                trace.stop()
        # The engine may be ended after the stop, so the traces must be written before this function returns.
        begun_traces = [trace for trace in self._traces if trace.tried] or self._traces[:1]
        problems = [trace.close(cut and f"{cut}{TOO_EARLY}") for trace in begun_traces]
        for trace in self._traces:
            if trace not in begun_traces:  # the stage of the trace never began, so the trace gives back its file name
                trace.artifacts.give_back()
        return next(filter(None, problems), "")

    @property
    def _recording(self) -> bool:
        return any(trace.recording for trace in self._traces)

    def _end_pauses(self) -> None:
        if self._pauses is not None:
            self._pauses.close()
            self._pauses = None


class StageTrace(PassCapture):
    """Capture of the passes of one stage, or of all stages if `stage` is empty. The trace is one file."""

    def __init__(self, run: runtime.Runtime, settings: Settings, subject: Subject, stage: str) -> None:
        """Create the step's folder.

        Raises:
            OSError: The folder can't be created.
        """
        part = f"{subject.part}-{stage}" if stage else subject.part
        passes = parse_iterations(settings.rollout_iterations)
        super().__init__(run, msgspec.structs.replace(subject, part=part), settings, profilers.choose(settings), passes)
        self.stage = stage
        self.artifacts.open()

    def begin(self) -> bool:
        has_begun = super().begin()
        if has_begun:
            self.artifacts.contents += [BY_STAGE] * bool(self.stage)
        elif self.state == "waiting":
            self.fail("another profiler is recording in the scheduler's process")
        return has_begun


class _Pauses:
    """Pauses between the turns of an idle scheduler's event loop during a recording.

    Without pauses, the scheduler would poll thousands of times per second. If stacks are recorded, the trace would
    contain every call of every turn. Since 0.4.9, a server that is started with `--sleep-on-idle` pauses in the same
    way.
    """

    def __init__(self, scheduler: Any) -> None:
        self.turns = 0
        self._patches = ObjectPatches()
        self._patches.replace(scheduler, _POLL_METHOD, self._with_pause)

    def close(self) -> None:
        """Restore the scheduler's own method, which does not pause."""
        self._patches.undo()

    def _with_pause(self, poll: Any) -> Any:
        def poll_with_pause(*args: Any, **kwargs: Any) -> Any:
            self.turns += 1
            if self.turns > IDLE_AFTER_TURNS:
                time.sleep(min(MAX_PAUSE_S, (self.turns - IDLE_AFTER_TURNS) * 1e-3))
            return poll(*args, **kwargs)

        return poll_with_pause


# A time above this number of seconds is a time since the epoch. A smaller time is a time of a monotonic clock.
_EPOCH_S = 1e9


class _RecordingState(process.State):
    """Capture in the scheduler of this process.

    Attributes:
        session: Capture, if any, from its start to its stop.
        registered: True if the scheduler is registered, so that snapshots contain the scheduler's state.
    """

    def reset(self) -> None:
        self.session: SchedulerCapture | None = None
        self.registered = False

    def after_fork_in_child(self) -> None:
        self.registered = False


_state = _RecordingState()


class Scheduler(Behaviour):
    """The method of SGLang's scheduler, or of the scheduler's profiler manager, that receives profiling requests."""

    def around(self, call: Call) -> Around:
        text = str(getattr(call.argument("recv_req"), "output_dir", ""))
        if not text.startswith(MARK):
            yield CALL
            return None
        problem = problem_of("sglang/scheduler", lambda: _carry_out(call.instance, Request.read(text)))
        return Reply(_answer(MARK + problem))


class SchedulerPass(Behaviour):
    """The scheduler's method that runs one forward pass. An exception in a pass ends the scheduler."""

    def around(self, call: Call) -> Around:
        session = _state.session
        if not _state.registered:
            _state.registered = True
            snapshot.register_scheduler(call.instance, read)
        stage = _stage(call.argument("batch")) if session is not None else ""
        with (session and session.passing(call.instance, stage)) or contextlib.nullcontext():
            outcome = yield CALL
        # SGLang does not handle exceptions such as `KeyboardInterrupt`, which Ctrl-C raises.
        if isinstance(outcome.error, Exception) and (run := runtime.current()) is not None:
            exception = raised.read_exception(outcome.error)
            run.timeline.write(RaisedLine(time.time_ns(), ENGINE, "SGLang's scheduler", None, ROLE, None, exception))


def _carry_out(holder: Any, request: Request) -> str:
    """Carry out a request of autoprof. Return the problem, or an empty string.

    `holder` is the scheduler or its profiler manager.
    """
    session, _state.session = _state.session, None
    if request.action == "stop":
        return session.stop(request.reason) if session is not None else ""
    if session is not None:
        session.stop("a new request came before the stop")
    run = runtime.start()
    if run is None:
        return "autoprof is off in the scheduler's process"
    rank, part = _rank_and_part(holder, request)
    settings = request.settings(run)
    if not settings.takes(ROLE, range(rank, rank + 1), GENERATE):
        return ""
    if problem := profilers.choose(settings).busy():
        return problem
    _state.session = SchedulerCapture(run, settings, request.subject(part, rank))
    return ""


def _rank_and_part(holder: Any, request: Request) -> tuple[int, str]:
    """Return the scheduler's global rank, and a text with its parallel ranks, such as `TP-0-PP-1`.

    The text has the form of SGLang's own trace names.
    """
    # Up to 0.5.12, the ranks are attributes of the scheduler. Later, they are attributes of the profiler manager's
    # `ps`. In 0.5.23, a function returns an object with the ranks.
    ranks = holder if hasattr(holder, "tp_rank") else getattr(holder, "ps", None) or _parallel()

    def number(*names: str, default: int) -> int:
        return next((int(getattr(ranks, name)) for name in names if getattr(ranks, name, None) is not None), default)

    tp_rank, pp_rank, dp_rank = (number(f"{kind}_rank", default=0) for kind in ("tp", "pp", "dp"))
    tp_size, pp_size = number("tp_size", default=1), number("pp_size", default=1)
    rank_texts = [f"TP-{tp_rank}"]
    if number("dp_size", "num_dp_ranks", default=1) > 1:
        rank_texts.append(f"DP-{dp_rank}")
    if pp_size > 1:
        rank_texts.append(f"PP-{pp_rank}")
    if number("moe_ep_size", default=1) > 1:
        rank_texts.append(f"EP-{number('moe_ep_rank', default=0)}")
    rank = request.rank + tp_rank + pp_rank * tp_size + (dp_rank * tp_size * pp_size if request.replicas_in_one else 0)
    return rank, "-".join(rank_texts)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _stage(batch: Any) -> str:
    """Return the stage of the pass that runs the batch, or an empty string for an empty pass of an idle rank."""
    mode = batch.forward_mode
    if mode.is_decode():
        return DECODE
    return EXTEND if mode.is_extend() else ""


def _answer(message: str) -> Any:
    from sglang.srt.managers.io_struct import ProfileReqOutput

    return ProfileReqOutput(success=True, message=message)


def read(scheduler: Any, left_out: list[str]) -> EngineState:
    """Return the state of a `Scheduler`. Add errors of single fields to `left_out`.

    Blocks are pages of the scheduler's token pool. Pages of the cache that can be evicted count as free blocks.
    """
    state: EngineState = {}
    waiting = list(scheduler.waiting_queue)
    batches = (scheduler.running_batch, getattr(scheduler, "cur_batch", None))
    # A request that is in its prefill is only in the current batch, not in the running batch.
    running_requests = {request.rid: request for batch in batches if batch is not None for request in batch.reqs}
    running = list(running_requests.values())
    state["running"], state["waiting"] = len(running), len(waiting)
    pool, cache = getattr(scheduler, "token_to_kv_pool_allocator", None), getattr(scheduler, "tree_cache", None)
    page_size = getattr(pool, "page_size", 1) or 1
    read_part(state, left_out, "free_blocks", lambda: int(pool.available_size() + cache.evictable_size()) // page_size)  # type: ignore[union-attr]
    read_part(state, left_out, "total_blocks", lambda: int(pool.size) // page_size)  # type: ignore[union-attr]
    if running or waiting:
        read_part(state, left_out, "longest_s", lambda: _oldest_age(state, [*running, *waiting]))
    return state


def _oldest_age(state: EngineState, requests: list[Any]) -> float:
    """Return the age of the oldest request in seconds, and store the id of this request in the state."""
    entry_time_s, oldest = min(((_entry_time(request), request) for request in requests), key=lambda pair: pair[0])
    state["longest"] = str(oldest.rid)
    return round((time.time() if entry_time_s > _EPOCH_S else time.perf_counter()) - entry_time_s, 3)


def _entry_time(request: Any) -> float:
    """Return the time in seconds at which a request entered the queue: since the epoch, or on a monotonic clock."""
    stats = getattr(request, "time_stats", request)
    return float(getattr(stats, "wait_queue_entry_time", 0.0) or stats.queue_time_start)
