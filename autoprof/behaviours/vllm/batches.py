"""Generation batches of vLLM, with their hooks: of `vllm serve`, and of the synchronous `LLM` in a user's script.

A step is a generation batch, as in `serving.py`. A batch of an `LLM` lasts from the first request to an idle engine
until the engine's step that finishes the last request. So one call of `generate`, `chat` or another generating method
is one batch. A beam search makes such a call for each token, but the whole search is one batch. autoprof starts and
stops the `LLMEngine` of an `LLM` like an `AsyncLLM`.

In a trainer's process (TRL's colocated mode, where each rank has an `LLM`), batches are not counted. A batch is
recorded if the trainer's step is captured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from autoprof import _boot
from autoprof.base import process
from autoprof.base.identity import own_rank
from autoprof.behaviours import serving
from autoprof.behaviours.rollout import ROLE, Request
from autoprof.behaviours.serving import ANOTHER_CALLER, Batches
from autoprof.behaviours.trainer.stages import in_whole_span
from autoprof.behaviours.vllm import engine as vllm_engine
from autoprof.capture import recorder
from autoprof.config.values import GENERATE
from autoprof.hooks import dispatch
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Parameter, follow
from autoprof.run import cluster, runtime

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
        if not _state.serving:
            yield CALL
            return
        yield dispatch.Coroutine(_server_of(call.instance).request(call.run))
        outcome = yield CALL
        if outcome.error is not None:
            _end_if_idle(call.instance.output_processor)


class Outputs(Behaviour):
    """The call processes the engine's outputs or aborts requests. If no request is left, the batch ends."""

    def around(self, call: Call) -> Around:
        yield CALL
        _end_if_idle(call.instance)


def _end_if_idle(processor: Any) -> None:
    server = getattr(processor, _SERVER, None)
    if server is not None and not processor.has_unfinished_requests():
        server.idle()


def _server_of(engine: Any) -> serving.ServedEngine:
    server: serving.ServedEngine | None = getattr(engine, _SERVER, None)
    if server is None:
        server = serving.ServedEngine(engine, vllm_engine.start, vllm_engine.stop)
        setattr(engine, _SERVER, server)
        setattr(engine.output_processor, _SERVER, server)
    return server


def _add_routes(app: Any) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    _state.serving = True

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
        if vllm_engine.own_call.get():
            yield CALL
            return
        offline = _offline(call.instance)
        if self.action == "start":
            offline.stop(ANOTHER_CALLER)
        outcome = yield CALL
        vars(offline.async_engine).pop(vllm_engine.USER_PROFILING, None)
        if self.action == "start" and outcome.error is None:
            setattr(offline.async_engine, vllm_engine.USER_PROFILING, True)


class _AsyncEngine:
    """An `LLMEngine` with those coroutines of an `AsyncLLM` that `engine.start` and `engine.stop` call.

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
        self._batches = Batches(self.async_engine, vllm_engine.start, vllm_engine.stop)

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
        """End the batch if the engine has no request left."""
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
        request = Request(
            action="start",
            step=announcement.step,
            loop=announcement.loop,
            replica=replica,
            rank=replica * ranks_per_replica,
            overrides=announcement.overrides,
        )
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
