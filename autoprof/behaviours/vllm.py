"""Captures of a vLLM engine. autoprof starts and stops the engine's profiler, and each worker records.

vLLM's own profiler must be configured at the engine's start, with a fixed directory. autoprof needs no configuration.
Before a capture, autoprof replaces the profiler of every worker by a profiler of autoprof (`vllm_worker.py`). The
engine's `start_profile` and `stop_profile` then start and stop autoprof's profilers, which write into the step's
folder. After the capture, autoprof restores the workers' profilers.

The engine's front end, which is the server process's work on requests and outputs, is captured, too. vLLM's own
profiler of the front end starts and stops in any free thread of a pool (async_llm.py, 0.10 to 0.32), which crashes
torch (2.13). vLLM's profiler also records everything from start to stop. autoprof's capture begins and ends in the
thread of the event loop, and ends after as many outputs as the workers record passes.

In `vllm serve` and in the synchronous `LLM` of a user's script, a step is a generation batch, as in `serving.py`. A
batch of an `LLM` lasts from the first request to an idle engine until the engine's step that finishes the last request.
So one call of `generate`, `chat` or another generating method is one batch. A beam search makes such a call for each
token, but the whole search is one batch. autoprof starts and stops the `LLMEngine` of an `LLM` like an `AsyncLLM`.

In a trainer's process (TRL's colocated mode, where each rank has an `LLM`), batches are not counted. A batch is
recorded if the trainer's step is captured.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Literal

import msgspec

from autoprof import _boot
from autoprof.base import log, process, seam
from autoprof.base.identity import own_rank
from autoprof.base.originals import threading
from autoprof.behaviours import rollout, serving
from autoprof.behaviours.rollout import ROLE, ObjectPatches, Request
from autoprof.behaviours.serving import ANOTHER_CALLER, Batches
from autoprof.behaviours.stages import in_whole_span
from autoprof.behaviours.vllm_worker import annotation
from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers.torch import FLAGS, TorchTool
from autoprof.capture.recorder import PassCapture
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.config.values import GENERATE
from autoprof.hooks import dispatch
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Parameter, follow
from autoprof.run import cluster, runtime
from autoprof.run.journal import Span

# Share of the stop timeout that the engine's own start or stop may take. The remaining time is for autoprof's work.
ENGINE_STOP_SHARE = 0.75
# Attribute that an engine has while autoprof records the engine. Its value is the span of the recording.
_OPEN = "_autoprof_open"
# Attribute that an engine has while another caller profiles the engine.
USER_PROFILING = "_autoprof_user_profiling"
own_call: ContextVar[bool] = ContextVar("autoprof_own_call", default=False)


class Engine(Behaviour):
    """`AsyncLLM.start_profile` and `stop_profile` when the user calls them. The user's profiling has priority.

    Before the user's profiling begins, autoprof ends its own recording. Until the user's profiling ends, autoprof
    begins no recording. The reason: vLLM up to 0.29 has one profiler in its front end. A second start empties this
    profiler, and a second stop kills the process. Since 0.32, a second start raises `ProfilerAlreadyActiveError`.

    Attributes:
        action: Method that the hook wraps: `start_profile` or `stop_profile`.
    """

    action: Literal["start", "stop"]

    def around(self, call: Call) -> Around:
        engine = call.instance
        if own_call.get():
            yield CALL
            return
        if self.action == "start":
            if hasattr(engine, _OPEN):
                log.warning("another caller starts the engine's profiler; autoprof's recording ends early")
                yield dispatch.Coroutine(stop(engine, ANOTHER_CALLER))
            setattr(engine, USER_PROFILING, True)
        outcome = yield CALL
        if hasattr(engine, USER_PROFILING) and (self.action == "stop" or outcome.error is not None):
            delattr(engine, USER_PROFILING)


async def start(engine: Any, request: Request) -> dict[str, Any]:
    """Prepare every worker of an `AsyncLLM`, then start the profiler of the `AsyncLLM`. Return `{"problem": text}`.

    The text is empty if the start succeeded.
    """
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, _OPEN):
        return {"problem": "it is recording already"}
    if hasattr(engine, USER_PROFILING):
        return {"problem": "another caller is profiling the engine"}
    async with contextlib.AsyncExitStack() as undo:
        # If the start fails, the workers must not keep autoprof's profilers. These would record a later profiling of
        # the user.
        undo.push_async_callback(_rpc, engine, run, "autoprof_release")
        workers = await _rpc(engine, run, "autoprof_prepare", request.fields())
        undo.pop_all()
    if all(worker["problem"] for worker in workers):
        await _rpc(engine, run, "autoprof_release")
        return _answer(workers)
    setattr(engine, _OPEN, request.span(run))
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(stop, engine)
        # Since 0.32, if a start has failed, for example because no profiler is configured, vLLM refuses every start
        # until a stop (async_llm.py). `USER_PROFILING` is not set, so no other caller is profiling. In the workers, the
        # stop does nothing.
        if getattr(engine, "_profile_session_active", False):
            await _call_own_method(engine.stop_profile, run)
        await _call_own_method(engine.start_profile, run)
        undo.pop_all()
    begin_front_end(engine, run, request.subject("frontend"), request.settings(run))
    return _answer(workers)


async def stop(engine: Any, cut: str = "") -> dict[str, Any]:
    """Stop the profiler of an `AsyncLLM` and restore the workers' profilers. Return `{"problem": text}`, as `start`.

    If autoprof does not record the engine, call no `stop_profile`: a second stop kills the front end of vLLM up to
    0.29.

    Args:
        engine: The `AsyncLLM`.
        cut: Reason why the recording ends early. Empty if the recording ends normally.
    """
    run = runtime.current()
    if run is None or not hasattr(engine, _OPEN):
        return {"problem": "it was not recording"}
    end_front_end(engine, cut)
    timeouts: list[dict[str, str]] = []
    try:
        if cut:
            await _rpc(engine, run, "autoprof_cut", cut)
        await _call_own_method(engine.stop_profile, run)
    except asyncio.TimeoutError as error:
        seam.pass_on(error)
        timeouts = [{"problem": "the engine's own stop did not end in time"}]
    finally:
        span: Span = getattr(engine, _OPEN)
        delattr(engine, _OPEN)
        span.end()
        workers = await _rpc(engine, run, "autoprof_release")
    return _answer([*timeouts, *workers])


class VllmActor(rollout.EngineActor):
    """A method of vLLM's server actor. A call with `autoprof=` is the trainer's request to the actor's `AsyncLLM`."""

    default_engine = "self.engine"
    start = staticmethod(start)
    stop = staticmethod(stop)


async def _call_own_method(method: Any, run: runtime.Runtime) -> None:
    """Call the engine's own `start_profile` or `stop_profile`, and wait for at most ENGINE_STOP_SHARE of the timeout.

    During the call, autoprof removes the front end's own profiler, which exists since 0.10 if a profiler is configured.
    vLLM starts and stops this profiler in any free thread of a pool (`asyncio.to_thread` in async_llm.py, 0.10 to
    0.32). If the two threads differ, torch crashes (seen with vLLM 0.27.1 and torch 2.13).
    """
    engine = method.__self__
    front_end = getattr(engine, "profiler", None)
    if front_end is not None:
        engine.profiler = None
    token = own_call.set(True)
    try:
        await asyncio.wait_for(method(), run.settings.for_role(ROLE).stop_timeout_s * ENGINE_STOP_SHARE)
    finally:
        own_call.reset(token)
        if front_end is not None:
            engine.profiler = front_end


async def _rpc(engine: Any, run: runtime.Runtime, method: str, *arguments: Any) -> list[dict[str, str]]:
    """Call a method of every worker and return the workers' answers: `{"problem": text}`, with no text on success."""
    timeout_s = run.settings.for_role(ROLE).stop_timeout_s
    answers: list[dict[str, str]] = await asyncio.wait_for(engine.collective_rpc(method, args=arguments), timeout_s)
    return answers


def _answer(workers: list[dict[str, str]]) -> dict[str, Any]:
    return {"problem": "; ".join(dict.fromkeys(worker["problem"] for worker in workers if worker["problem"]))}


# Attribute that an engine has while its front end is recorded. Its value is the `FrontEnd`.
_FRONT_END = "_autoprof_front_end"
# A recording ends when its estimated size reaches this number of bytes. The event loop is blocked while a recording is
# stopped and written: about one second for this size (vLLM 0.27.1, torch 2.13). This size is enough for 200,000
# outputs, or, if stacks are recorded, for the tokens of 16 requests in 100 passes.
MAX_FRONT_END_BYTES = 60_000_000
# Size of one annotation in a trace, in bytes.
ANNOTATION_BYTES = 300
# Size in a trace of the Python calls for one token of a request, in bytes (vLLM 0.27.1).
STACK_BYTES_PER_TOKEN = 35_000
# Size in a trace of the Python calls for the arrival of one request, in bytes (vLLM 0.27.1).
STACK_BYTES_PER_REQUEST = 200_000


class FrontEnd:
    """A recording of the front end, from `open` to `close`.

    The event loop's thread runs hardly any operator. So if the contents do not include `stack`, the trace contains only
    the annotations `add_request` and `process_outputs`, which this class adds.
    """

    def __init__(self, engine: Any, run: runtime.Runtime, subject: Subject, settings: Settings) -> None:
        """Prepare the recording.

        Args:
            engine: The `AsyncLLM`.
            run: Run of this process.
            subject: Subject of the capture.
            settings: Settings of the window for the role rollout.
        """
        contents = ("cpu", *(word for word in settings.contents if word in FLAGS))
        self._stacks = "stack" in contents
        self._max_bytes = min(MAX_FRONT_END_BYTES, settings.max_trace_mb * 1e6)
        first_pass, stop_before = parse_iterations(settings.rollout_iterations)
        # Each data-parallel engine behind the front end produces one output per pass.
        engine_count = int(follow(engine, "vllm_config.parallel_config.data_parallel_size", 1))
        outputs = first_pass * engine_count, stop_before and stop_before * engine_count
        capture_settings = msgspec.structs.replace(settings, contents=contents)
        self._capture = PassCapture(run, subject, capture_settings, TorchTool(), outputs)
        self._capture.artifacts.left_out = [word for word in settings.contents if word not in contents]
        self._processor = engine.output_processor
        self._patches = ObjectPatches()
        self._last_timestamp: float | None = None
        self._bytes = 0

    def open(self) -> None:
        """Wrap the methods that handle requests and outputs. If the first pass is selected, begin to record at once."""
        self._patches.replace(
            self._processor, "process_outputs", functools.partial(_with_context, self._before_outputs)
        )
        self._patches.replace(self._processor, "add_request", functools.partial(_with_context, self._before_request))
        self._capture.reach()

    def close(self, cut: str = "") -> None:
        """Restore the methods, and end the recording, if the recording has not ended yet.

        Args:
            cut: Reason why the recording ends early. Empty if the recording ends normally.
        """
        self._patches.undo()
        if cut:
            self._capture.abort(cut)
        else:
            self._capture.stop("" if self._capture.passed else "the engine produced no output")

    def _before_request(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[Any]:
        self._count_next_call(STACK_BYTES_PER_REQUEST)
        return self._annotated("add_request")

    def _before_outputs(
        self, engine_core_outputs: Any, engine_core_timestamp: float | None = None, *_: Any, **__: Any
    ) -> contextlib.AbstractContextManager[Any]:
        token_count = len(engine_core_outputs)
        # Outputs for more than 128 requests come in several pieces with the same timestamp (async_llm.py, 0.9 to 0.33).
        if token_count and (engine_core_timestamp is None or engine_core_timestamp != self._last_timestamp):
            self._last_timestamp = engine_core_timestamp
            self._capture.before_pass()
        self._count_next_call(STACK_BYTES_PER_TOKEN * token_count)
        return self._annotated("process_outputs")

    def _count_next_call(self, stacks_bytes: int) -> None:
        """Add the size of the next call to the estimated size of the recording, or end a recording that is too large.

        Args:
            stacks_bytes: Estimated size of the call's stacks, in bytes. It counts only if stacks are recorded.
        """
        if self._bytes > self._max_bytes:
            self._capture.abort(f"a recording of the front end is limited to {self._max_bytes / 1e6:g} MB")
        elif self._capture.recording:
            self._bytes += ANNOTATION_BYTES + self._stacks * stacks_bytes

    def _annotated(self, name: str) -> contextlib.AbstractContextManager[Any]:
        if not self._capture.recording or self._capture.thread != threading.get_ident():
            return contextlib.nullcontext()
        return annotation(name)  # type: ignore[no-any-return]


def _with_context(around: Callable[..., contextlib.AbstractContextManager[Any]], method: Any) -> Any:
    """Return a method that calls `method` inside the context manager that `around` makes for the call."""

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        annotation_block: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        with _guard():
            annotation_block = around(*args, **kwargs)
        with annotation_block:
            return method(*args, **kwargs)

    return surrounded


def begin_front_end(engine: Any, run: runtime.Runtime, subject: Subject, settings: Settings) -> None:
    """Start to record the front end of an `AsyncLLM`. Never raise an exception.

    Do nothing if `AUTOPROF_DISABLE` contains `vllm/front-end`.
    """
    if run.settings.disabled("vllm", "front-end"):
        return
    with _guard():
        front_end = FrontEnd(engine, run, subject, settings)
        setattr(engine, _FRONT_END, front_end)
        front_end.open()


def end_front_end(engine: Any, cut: str) -> None:
    """End the recording that `begin_front_end` started, if any. Never raise an exception."""
    with _guard():
        front_end = vars(engine).pop(_FRONT_END, None)
        if front_end is not None:
            front_end.close(cut)


def _guard() -> seam.guard:
    return seam.guard("vllm/front-end", runtime.report)


# Attribute of an `AsyncLLM` and of its `OutputProcessor` that holds the `ServedEngine`.
_SERVER = "_autoprof_server"


class _ApiServerState(process.State):
    """API server of this process.

    Attributes:
        serving: True after the API server was built, except in a trainer's server actor.
    """

    def reset(self) -> None:
        self.serving = False


_state = _ApiServerState()


class Routes(Behaviour):
    """The call builds the API server. autoprof adds `/autoprof`, for trainers, and the routes that control windows.

    The routes `/start_profile` and `/stop_profile` open and close windows. If a profiler is configured, vLLM has added
    its own routes with these names. Then autoprof does not add the two routes, and the user controls vLLM's profiler.

    Attributes:
        app: Parameter whose argument is the application. If `app` is empty, the call returns the application.
    """

    app: Parameter = ""

    def around(self, call: Call) -> Around:
        outcome = yield CALL
        # A trainer's server actor builds the same application, but the trainer opens its windows.
        if outcome.error is None and not _boot.COMMAND.ray_worker:
            _add_routes(call.argument(self.app) if self.app else outcome.result)


class AddRequest(Behaviour):
    """The call brings a request to the engine. If the engine was idle, a generation batch begins."""

    def around(self, call: Call) -> Around:
        _watch_cores(call.instance)
        if not _state.serving:
            yield CALL
            return
        yield dispatch.Coroutine(_server_of(call.instance).request(call.run))
        outcome = yield CALL
        if outcome.error is not None:
            _end_if_idle(call.instance.output_processor)


def _watch_cores(engine: Any) -> None:
    """Record the deaths of engine cores. Their requests then fail, but `vllm serve` ends with status 0."""
    manager = follow(engine, "engine_core.resources.engine_manager", None)
    # A strong reference to the processor would keep the engine: vLLM shuts down when the engine has no references.
    processor = weakref.ref(engine.output_processor)

    def message() -> str:
        failing = len(getattr(processor(), "request_states", ()))
        return f"{failing} requests failed" if failing else "no request was open"

    def step() -> int | None:
        return getattr(getattr(processor(), _SERVER, None), "step", None)

    cores = [(f"vLLM's {core.name}", core) for core in getattr(manager, "processes", ())]
    rollout.watch_processes(manager, cores, "vLLM", message, step)


class Outputs(Behaviour):
    """The call processes the engine's outputs or aborts requests. If no request is left, the batch ends."""

    def around(self, call: Call) -> Around:
        yield CALL
        _end_if_idle(call.instance)


def _end_if_idle(processor: Any) -> None:
    server = getattr(processor, _SERVER, None)
    if server is not None:
        server.put_out()
        if not processor.has_unfinished_requests():
            server.idle()


def _server_of(engine: Any) -> serving.ServedEngine:
    server: serving.ServedEngine | None = getattr(engine, _SERVER, None)
    if server is None:
        server = serving.ServedEngine(engine, start, stop)
        setattr(engine, _SERVER, server)
        setattr(engine.output_processor, _SERVER, server)
    return server


def _add_routes(app: Any) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    _state.serving = True
    serving.begin_serving()

    def endpoint(name: str, answer: serving.AnswerRoute) -> Callable[..., Any]:
        async def handle(raw_request: Request) -> JSONResponse:
            server = _server_of(raw_request.app.state.engine_client)
            status, content = await answer(server, await raw_request.body())
            return JSONResponse(content, status)

        handle.__name__ = name
        # FastAPI evaluates annotations by name, which fails for a name in a function's locals.
        handle.__annotations__ = {"raw_request": Request}
        return handle

    trainer = endpoint("trainer", serving.answer_trainer)
    app.add_api_route("/autoprof", trainer, methods=["POST"], include_in_schema=False)
    if any(getattr(route, "path", "") == "/start_profile" for route in app.routes):
        return
    for name, answer in (("start_profile", serving.answer_start), ("stop_profile", serving.answer_stop)):
        app.add_api_route(f"/{name}", endpoint(name, answer), methods=["POST"])


# Attribute of an `LLMEngine` that holds its `_OfflineEngine`.
_OFFLINE = "_autoprof_offline"


class OfflineRequest(Behaviour):
    """The call brings a request to the engine. If the engine was idle, a generation batch begins."""

    def around(self, call: Call) -> Around:
        _watch_cores(call.instance)
        offline = _offline(call.instance)
        offline.request(call.run)
        outcome = yield CALL
        if outcome.error is not None:
            offline.look()


class OfflineStep(Behaviour):
    """The call is one step of the engine. If the engine has no request left after the call, the batch ends."""

    def around(self, call: Call) -> Around:
        yield CALL
        _offline(call.instance).look()


class Whole(Behaviour):
    """The call is one batch, although the engine becomes idle several times during the call.

    Attributes:
        engine: Path from a parameter of the call to the `LLMEngine`.
    """

    engine: CallPath = "self.llm_engine"

    def around(self, call: Call) -> Around:
        offline = _offline(call.at(self.engine))
        offline.inside += 1
        yield CALL
        offline.inside -= 1
        offline.look()


class Profile(Behaviour):
    """`LLMEngine.start_profile` and `stop_profile` when the user calls them. The user's profiling has priority.

    Attributes:
        action: Method that the hook wraps: `start_profile` or `stop_profile`.
    """

    action: Literal["start", "stop"]

    def around(self, call: Call) -> Around:
        if own_call.get():
            yield CALL
            return
        offline = _offline(call.instance)
        if self.action == "start":
            offline.stop(ANOTHER_CALLER)
        outcome = yield CALL
        vars(offline.async_engine).pop(USER_PROFILING, None)
        if self.action == "start" and outcome.error is None:
            setattr(offline.async_engine, USER_PROFILING, True)


class _AsyncEngine:
    """An `LLMEngine` with those coroutines of an `AsyncLLM` that `start` and `stop` call.

    The coroutines never suspend. A proxy of wrapt would write autoprof's attributes into the `LLMEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_engine"], name)

    async def start_profile(self) -> None:
        self._engine.start_profile()

    async def stop_profile(self) -> None:
        self._engine.stop_profile()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return self._engine.collective_rpc(method, args=args)


class _OfflineEngine:
    """An `LLMEngine`, its generation batches, and the recording of the batches."""

    def __init__(self, llm_engine: Any) -> None:
        self.inside = 0
        self.async_engine = _AsyncEngine(llm_engine)
        self._engine = llm_engine
        self._batches = Batches(self.async_engine, start, stop)

    def request(self, run: runtime.Runtime) -> None:
        """Handle a request to the engine. If the engine was idle, begin a batch, or record for the trainer's step."""
        if self._batch_open and (self.inside or self._unfinished()):
            return
        trainer_here, announcement = cluster.own_announcement()
        if trainer_here:
            self.stop()
            if announcement is not None and announcement.captured:
                self._start(self._step_request(run, announcement))
        # If a trainer in another process announces steps, its recipe captures the engines.
        elif not _boot.COMMAND.ray_worker and cluster.announced_step(run.info.id) is None:
            self._end()
            self._batches.look(run)
            self._start(self._batches.begin(run))

    def look(self) -> None:
        """Count an output of the engine. End the batch if the engine has no request left."""
        self._batches.outputs["outputs"] += 1
        if self._batch_open and not self.inside and not self._unfinished():
            self._end()

    def stop(self, cut: str = "") -> None:
        """End the current recording, if any.

        Args:
            cut: Reason why the recording ends early. Empty if the recording ends normally.
        """
        if self._batches.captured:
            _run_now(self._batches.finish(cut))

    @property
    def _batch_open(self) -> bool:
        return self._batches.captured or self._batches.is_open

    def _step_request(self, run: runtime.Runtime, announcement: cluster.StepAnnouncement) -> Request | None:
        """Return the request that starts the engine's recording in a step of this process's trainer.

        Return None if the window does not select this rank. Every rank of the trainer has an engine (vLLM's
        `external_launcher`), and `world_size` ranks form one replica.
        """
        # The capture of the running stage contains the rollout, or the rollout belongs to no stage of the step.
        if recorder.current() is not None or in_whole_span():
            return None
        ranks_per_replica = int(follow(self._engine, "vllm_config.parallel_config.world_size", 1))
        replica = own_rank() // ranks_per_replica
        request = Request.of_step(announcement, replica, replica * ranks_per_replica, announcement.overrides)
        ranks = range(own_rank(), own_rank() + 1)
        return request if request.settings(run).takes(ROLE, ranks, GENERATE) else None

    def _start(self, request: Request | None) -> None:
        if request is not None:
            _run_now(self._batches.capture(request))

    def _end(self) -> None:
        try:
            self.stop()
        finally:
            self._batches.end()

    def _unfinished(self) -> bool:
        # Don't call the engine's own method, which asks the other data-parallel ranks and waits for their answers.
        return bool(self._engine.output_processor.has_unfinished_requests())


def _offline(engine: Any) -> _OfflineEngine:
    offline: _OfflineEngine | None = getattr(engine, _OFFLINE, None)
    if offline is None:
        offline = _OfflineEngine(engine)
        setattr(engine, _OFFLINE, offline)
    return offline


def _run_now(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in this thread, because an engine must be recorded in the thread that runs it.

    Raises:
        RuntimeError: An event loop is running in this thread.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        work.close()
        loop.close()
