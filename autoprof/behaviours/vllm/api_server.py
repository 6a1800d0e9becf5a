"""Behaviours of `vllm serve` without a trainer: begin and end of generation batches, and autoprof's routes."""

from __future__ import annotations

from typing import Any

from autoprof._boot import command
from autoprof.base import process
from autoprof.behaviours.serving import http
from autoprof.behaviours.serving import server as serving
from autoprof.behaviours.vllm import engine as vllm_engine
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Parameter
from autoprof.hooks.dispatch import Coroutine
from autoprof.run import runtime

# Attribute of an `AsyncLLM` and of its `OutputProcessor` that holds the `ServedEngine`.
_SERVER = "_autoprof_server"


class _ApiServerState(process.State):
    """API server of this process.

    Attributes:
        serving: True after the API server was built, except in a trainer's server actor.
    """

    def begin(self) -> None:
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
        if outcome.error is None and not command.THIS.ray_worker:
            _add_routes(call.argument(self.app) if self.app else outcome.result)
        return None


class AddRequest(Behaviour):
    """The call brings a request to the engine. If the engine was idle, a generation batch begins."""

    def around(self, call: Call) -> Around:
        run = runtime.current()
        if run is None or not _state.serving:
            yield CALL
            return None
        yield Coroutine(_server_of(call.instance).request(run))
        outcome = yield CALL
        if outcome.error is not None:
            _end_if_idle(call.instance.output_processor)
        return None


class Outputs(Behaviour):
    """The call processes the engine's outputs or aborts requests. If no request is left, the batch ends."""

    def around(self, call: Call) -> Around:
        yield CALL
        if _state.serving:
            _end_if_idle(call.instance)
        return None


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

    async def trainer(raw_request: Request) -> JSONResponse:
        run = runtime.current()
        directory = str(run.rundir.path) if run is not None else ""
        server = _server_of(raw_request.app.state.engine_client)
        status, content = await http.answer_trainer(server, directory, await raw_request.body())
        return JSONResponse(content, status)

    # FastAPI evaluates annotations by name, which fails for a name in a function's locals.
    trainer.__annotations__ = {"raw_request": Request}
    app.add_api_route("/autoprof", trainer, methods=["POST"], include_in_schema=False)
    if any(getattr(route, "path", "") == "/start_profile" for route in app.routes):
        return

    async def start_profile(raw_request: Request) -> JSONResponse:
        server = _server_of(raw_request.app.state.engine_client)
        status, content = await http.answer_start(server, await raw_request.body())
        return JSONResponse(content, status)

    async def stop_profile(raw_request: Request) -> JSONResponse:
        status, content = await http.answer_stop(_server_of(raw_request.app.state.engine_client))
        return JSONResponse(content, status)

    start_profile.__annotations__ = stop_profile.__annotations__ = {"raw_request": Request}
    app.add_api_route("/start_profile", start_profile, methods=["POST"])
    app.add_api_route("/stop_profile", stop_profile, methods=["POST"])
