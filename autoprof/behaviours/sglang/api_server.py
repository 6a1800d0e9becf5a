"""Behaviours of SGLang's server without a trainer (`python -m sglang.launch_server`, `sglang serve`).

Hooks show when requests begin and end. The routes `/start_profile` and `/stop_profile` open and close windows.

A request begins after its text is tokenized, before the scheduler gets the request. A running request holds a lock, so
that the weights do not change. The request ends when all its samples are answered, refused or aborted, and the request
releases the lock (tokenizer_manager.py, 0.4.6 to 0.5.23). autoprof can't wrap `TokenizerManager.generate_request`,
because this method is an async generator.
"""

from __future__ import annotations

from typing import Any

from autoprof._boot import command
from autoprof.base import log
from autoprof.behaviours.serving import http
from autoprof.behaviours.serving import server as serving
from autoprof.behaviours.sglang import engine
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call
from autoprof.hooks.dispatch import Coroutine
from autoprof.hooks.wrapper import wrapped_by
from autoprof.run import runtime

# Attribute of a `TokenizerManager` and of its lock that holds the `ServedEngine`.
_SERVER = "_autoprof_server"
_START, _STOP = "/start_profile", "/stop_profile"
_HEALTH = "HEALTH_CHECK"


class SetUp(Behaviour):
    """`set_global_state`, which gives SGLang's HTTP server its `TokenizerManager` before the server listens."""

    def around(self, call: Call) -> Around:
        outcome = yield CALL
        # A trainer's server actor calls `set_global_state`, too, but the trainer opens the actor's windows.
        if outcome.error is None and not command.THIS.ray_worker:
            _set_up(call.argument("global_state").tokenizer_manager, call.function.__globals__["app"])
        return None


class Tokenized(Behaviour):
    """After the call, a request goes to the scheduler. If the engine was idle, a generation batch begins.

    SGLang's own requests, for warm-up and health checks, begin no batch.
    """

    def around(self, call: Call) -> Around:
        outcome = yield CALL
        run, server = runtime.current(), getattr(call.instance, _SERVER, None)
        if run is None or server is None or outcome.error is not None:
            return None
        status = getattr(call.instance, "server_status", None)
        if getattr(status, "name", "") != "Starting" and not str(call.argument("obj").rid).startswith(_HEALTH):
            yield Coroutine(server.request(run))
        return None


class Released(Behaviour):
    """By the call, a request releases its lock. If no other request holds the lock, the batch ends."""

    def around(self, call: Call) -> Around:
        yield CALL
        server = getattr(call.instance, _SERVER, None)
        if server is not None and call.instance._readers == 0:
            server.idle()
        return None


def _set_up(manager: Any, app: Any) -> None:
    # Only the first node of a server has a manager. If there are several tokenizers, the manager has another class,
    # which has no such lock.
    lock = getattr(manager, "model_update_lock", None)
    if lock is None or getattr(manager.server_args, "tokenizer_worker_num", 1) != 1:
        log.info("the server has several tokenizers or nodes; autoprof does not record from this process")
        return
    server = serving.ServedEngine(manager, engine.start, engine.stop)
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
        fields = http.fields_of(body)
        if fields is None or not fields.keys() <= http.KEYS:
            sglang_profiling = True
            await server.give_way()
            return _ForwardingResponse(own[_START], body)
        status, content = await http.answer_start(server, body)
        if status == 200:  # SGLang's profiling has ended: a profiling with num_steps needs no stop request
            sglang_profiling = False
        return JSONResponse(content, status)

    async def stop_profile(request: Any) -> Any:
        nonlocal sglang_profiling
        if sglang_profiling:
            sglang_profiling = False
            return _ForwardingResponse(own[_STOP], await request.body())
        status, content = await http.answer_stop(server)
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
