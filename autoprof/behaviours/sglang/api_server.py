"""SGLang's server on its own (`python -m sglang.launch_server`, `sglang serve`).

Hooks see its requests begin and end; its `/start_profile` and `/stop_profile` open and close windows.

`TokenizerManager.generate_request` is an async generator in every release, which can't be wrapped. A request begins
where its text has become tokens, ahead of the scheduler, and has ended when it gives back the lock that keeps weights
from changing under it: answered, refused or abandoned, with all its samples (tokenizer_manager.py, 0.4.6 to 0.5.23).
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

# Set on a TokenizerManager and on its lock.
_SERVER = "_autoprof_server"
_START, _STOP = "/start_profile", "/stop_profile"
_HEALTH = "HEALTH_CHECK"


class SetUp(Behaviour):
    """`set_global_state`: SGLang's HTTP server is given its `TokenizerManager`, before it listens."""

    def around(self, call: Call) -> Around:
        outcome = yield CALL
        # A server actor of a trainer sets the same state; its windows are the trainer's.
        if outcome.error is None and not command.THIS.ray_worker:
            _set_up(call.argument("global_state").tokenizer_manager, call.function.__globals__["app"])
        return None


class Tokenized(Behaviour):
    """A request is about to reach the scheduler: if the engine was idle, a generation batch begins.

    SGLang's own generations, to warm up and to see whether it is healthy, begin none.
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
    """A request gives its lock back: if no other has it, the batch has ended."""

    def around(self, call: Call) -> Around:
        yield CALL
        server = getattr(call.instance, _SERVER, None)
        if server is not None and call.instance._readers == 0:
            server.idle()
        return None


def _set_up(manager: Any, app: Any) -> None:
    # None on the further nodes of a server, and what hands requests to several tokenizers is of another kind.
    lock = getattr(manager, "model_update_lock", None)
    if lock is None or getattr(manager.server_args, "tokenizer_worker_num", 1) != 1:
        log.info("a server of several tokenizers or nodes: autoprof leaves this process alone")
        return
    server = serving.Server(manager, engine.start, engine.stop)
    if wrapped_by(type(lock).release_reader):
        setattr(manager, _SERVER, server)
        setattr(lock, _SERVER, server)
    _take_routes(app, server)


def _take_routes(app: Any, server: serving.Server) -> None:
    """Put routes in front of SGLang's own, which go on to answer requests that are theirs.

    A request for a window of autoprof's has no body, or only what autoprof knows in it. Every other is of somebody
    who drives SGLang's profiler.
    """
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    own = {route.path: route for route in app.router.routes if getattr(route, "path", "") in (_START, _STOP)}
    if len(own) != 2:
        raise LookupError(f"SGLang's server has no {_START} and {_STOP}")
    theirs = False

    async def start_profile(request: Any) -> Any:
        nonlocal theirs
        body = await request.body()
        asked = http.fields_of(body)
        if asked is None or not asked.keys() <= http.KEYS:
            theirs = True
            await server.give_way()
            return _Passed(own[_START], body)
        status, content = await http.answer_start(server, body)
        if status == 200:  # theirs ended by itself: after num_steps nobody needs to stop it
            theirs = False
        return JSONResponse(content, status)

    async def stop_profile(request: Any) -> Any:
        nonlocal theirs
        if theirs:
            theirs = False
            return _Passed(own[_STOP], await request.body())
        status, content = await http.answer_stop(server)
        return JSONResponse(content, status)

    for path, endpoint in ((_START, start_profile), (_STOP, stop_profile)):
        # Whoever needs a key for SGLang's needs it here: it keeps that on the function (srt/utils/auth.py).
        vars(endpoint).update(vars(own[path].endpoint))
        app.router.routes.insert(0, Route(path, endpoint, methods=["GET", "POST"]))


class _Passed:
    """The response to a request that SGLang's own route answers; its body has been read."""

    def __init__(self, route: Any, body: bytes) -> None:
        self._route = route
        self._body: bytes | None = body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def replay() -> Any:
            body, self._body = self._body, None
            if body is None:
                return await receive()
            return {"type": "http.request", "body": body, "more_body": False}

        _, found = self._route.matches(scope)
        scope.update(found)
        await self._route.handle(scope, replay, send)
