"""`vllm serve` on its own: the places in vLLM that say what `serve.py` needs to know."""

from __future__ import annotations

import sys
from typing import Any

from autoprof import _boot, runtime
from autoprof.behaviours import Behaviour, serve, serve_http, vllm
from autoprof.paths import Parameter
from autoprof.waits import Coroutine
from autoprof.wrapping import CALL, Around, Call

# Set on an AsyncLLM and on its OutputProcessor.
_SERVER = "_autoprof_server"
# Whether this process has built an API server, and not a trainer's.
_serving = False


class Routes(Behaviour):
    """Builds the API server: `/start_profile` and `/stop_profile` are added, where vLLM has not attached its own, and
    `/autoprof` for a trainer that autoprof is in.

    vLLM attaches its own only with a profiler configured, and then they stay the user's.

    Attributes:
        app: The parameter that takes the application; without it the function returns the application.
    """

    app: Parameter = ""

    def around(self, call: Call) -> Around:
        outcome = yield CALL
        # A server actor of a trainer builds the same application; its windows are the trainer's.
        if outcome.error is None and not _boot.ray_worker(sys.orig_argv):
            _add_routes(call.argument(self.app) if self.app else outcome.result)
        return None


class AddRequest(Behaviour):
    """A request reaches the engine: if it was idle, a generation batch begins."""

    def around(self, call: Call) -> Around:
        run = runtime.current()
        if run is None or not _serving:
            yield CALL
            return None
        yield Coroutine(_server_of(call.instance).request(run))
        outcome = yield CALL
        if outcome.error is not None:
            _look(call.instance.output_processor)
        return None


class Outputs(Behaviour):
    """The engine's outputs are handed on, or requests are taken back: if none is left, the batch has ended."""

    def around(self, call: Call) -> Around:
        yield CALL
        if _serving:
            _look(call.instance)
        return None


def _look(processor: Any) -> None:
    server = getattr(processor, _SERVER, None)
    if server is not None and not processor.has_unfinished_requests():
        server.idle()


def _server_of(engine: Any) -> serve.Server:
    server: serve.Server | None = getattr(engine, _SERVER, None)
    if server is None:
        server = serve.Server(engine, vllm.start, vllm.stop)
        setattr(engine, _SERVER, server)
        setattr(engine.output_processor, _SERVER, server)
    return server


def _add_routes(app: Any) -> None:
    global _serving
    from fastapi import Request
    from fastapi.responses import JSONResponse

    _serving = True

    async def trainer(raw_request: Request) -> JSONResponse:
        run = runtime.current()
        directory = str(run.rundir.path) if run is not None else ""
        server = _server_of(raw_request.app.state.engine_client)
        status, content = await serve_http.answer_trainer(server, directory, await raw_request.body())
        return JSONResponse(content, status)

    # FastAPI reads the annotations, which it can't find by name in a function's locals.
    trainer.__annotations__ = {"raw_request": Request}
    app.add_api_route("/autoprof", trainer, methods=["POST"], include_in_schema=False)
    if any(getattr(route, "path", "") == "/start_profile" for route in app.routes):
        return

    async def start_profile(raw_request: Request) -> JSONResponse:
        server = _server_of(raw_request.app.state.engine_client)
        status, content = await serve_http.answer_start(server, await raw_request.body())
        return JSONResponse(content, status)

    async def stop_profile(raw_request: Request) -> JSONResponse:
        status, content = await serve_http.answer_stop(_server_of(raw_request.app.state.engine_client))
        return JSONResponse(content, status)

    start_profile.__annotations__ = stop_profile.__annotations__ = {"raw_request": Request}
    app.add_api_route("/start_profile", start_profile, methods=["POST"])
    app.add_api_route("/stop_profile", stop_profile, methods=["POST"])
