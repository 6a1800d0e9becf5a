"""Captures of an SGLang engine: requests to its schedulers, and the hooks and routes of a server without a trainer.

autoprof does not use SGLang's profiler. The profiler's arguments and its count of forward passes differ between
releases. The profiler writes gzip in the thread that generates, and ends the server if the disk is full or an argument
is invalid. In all releases, `start_profile` reaches every scheduler, also on other nodes. So autoprof sends its
requests as text in the argument `output_dir` of `start_profile`. A hook in the scheduler (`scheduler.py`) handles
autoprof's requests before SGLang reads them.

In a server without a trainer (`python -m sglang.launch_server`, `sglang serve`), hooks show when requests begin and
end. A request begins after its text is tokenized, before the scheduler gets the request. A running request holds a
lock, so that the weights do not change. The request ends when all its samples are answered, refused or aborted, and the
request releases the lock (tokenizer_manager.py, 0.4.6 to 0.5.23). autoprof can't wrap
`TokenizerManager.generate_request`, because this method is an async generator.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base import log
from autoprof.behaviours import rollout, serving
from autoprof.behaviours.rollout import MARK, Request, awaited_problem
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, follow
from autoprof.hooks.dispatch import Coroutine
from autoprof.hooks.wrapper import wrapped_by
from autoprof.run import runtime
from autoprof.run.journal import Span

# Attribute that a `TokenizerManager` has while autoprof records its engine. Its value is the `_EngineCapture`.
OPEN = "_autoprof_open"


class SglangActor(rollout.EngineActor):
    """A method of SGLang's server actor. A call with `autoprof=` is a request to the actor's `TokenizerManager`."""

    default_engine = "self.tokenizer_manager"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        return await start(engine, request)

    async def stop(self, engine: Any) -> dict[str, Any]:
        return await stop(engine)


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


def _set_up(manager: Any, app: Any) -> None:
    # Only the first node of a server has a manager. If there are several tokenizers, the manager has another class,
    # which has no such lock.
    lock = getattr(manager, "model_update_lock", None)
    if lock is None or getattr(manager.server_args, "tokenizer_worker_num", 1) != 1:
        log.info("the server has several tokenizers or nodes; autoprof does not record from this process")
        return
    server = serving.ServedEngine(manager, start, stop)
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
