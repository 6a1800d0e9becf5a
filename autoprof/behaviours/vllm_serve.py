"""`vllm serve` on its own: without a trainer, a step is a generation batch or what a `/start_profile` request opens.

A generation batch lasts from the first request that an idle engine gets to the moment when it has none left, which for
a trainer that sends its prompts over HTTP is one rollout. Batches are counted from 1, and `AUTOPROF_STEPS` chooses.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from autoprof import _boot, log, runtime
from autoprof.behaviours import Behaviour, vllm
from autoprof.behaviours import engine as engines
from autoprof.timeline import Span
from autoprof.waits import Coroutine
from autoprof.window import Steps
from autoprof.wrapping import CALL, Around, Call


class _Server:
    """The one API server of this process and what it is recording."""

    def __init__(self) -> None:
        self.batches = 0
        self.batch: Span | None = None
        self.captured = False
        self.requested = False
        # Requests that arrive while a recording starts or stops wait for it, or they would be outside of it.
        self.lock = asyncio.Lock()
        self.ending: asyncio.Task[None] | None = None

    async def begin_batch(self, run: runtime.Runtime, engine: Any) -> None:
        async with self.lock:
            if engine.output_processor.has_unfinished_requests():
                return
            await self._end_batch(engine)
            self.batches += 1
            self.batch = Span(run, "step", "step", step=self.batches, role=engines.ROLE, rank=None)
            if not self.requested and Steps.parse(run.settings.steps).match(self.batches, self.batches):
                self.captured = not _said(await vllm.start(engine, _request(self.batches)))

    async def end_batch(self, engine: Any) -> None:
        async with self.lock:
            if not engine.output_processor.has_unfinished_requests():
                await self._end_batch(engine)

    async def _end_batch(self, engine: Any) -> None:
        batch, self.batch = self.batch, None
        if batch is None:
            return
        captured, self.captured = self.captured, False
        if captured:
            _said(await vllm.stop(engine))
        batch.end()

    async def start_requested(self, engine: Any, step: int | None) -> str:
        async with self.lock:
            if self.requested or self.captured:
                return "a window is open already"
            number = self.batches + (self.batch is None) if step is None else step
            problem = _said(await vllm.start(engine, _request(number)))
            self.requested = not problem
            return problem

    async def stop_requested(self, engine: Any) -> str:
        async with self.lock:
            if not self.requested:
                return "no window was opened by /start_profile"
            self.requested = False
            return _said(await vllm.stop(engine))


_server: _Server | None = None


class Routes(Behaviour):
    """Builds the API server: `/start_profile` and `/stop_profile` are added, where vLLM has not attached its own.

    vLLM attaches them only with a profiler configured, and then they stay the user's.

    Attributes:
        app: The parameter that takes the application; without it the function returns the application.
    """

    app: str = ""

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
        if run is not None and _server is not None and not call.instance.output_processor.has_unfinished_requests():
            _engine_of[id(call.instance.output_processor)] = call.instance
            yield Coroutine(_server.begin_batch(run, call.instance))
        yield CALL
        return None


class ProcessOutputs(Behaviour):
    """The engine's outputs are handed on: if no request is left, the generation batch has ended."""

    def around(self, call: Call) -> Around:
        yield CALL
        processor = call.instance
        if _server is not None and _server.batch is not None and not processor.has_unfinished_requests():
            engine = _engine_of.get(id(processor))
            if engine is not None and (_server.ending is None or _server.ending.done()):
                _server.ending = asyncio.get_running_loop().create_task(_guarded(_server.end_batch(engine)))
        return None


_engine_of: dict[int, Any] = {}


def _add_routes(app: Any) -> None:
    global _server
    from fastapi import Request
    from fastapi.responses import JSONResponse

    if _server is None:
        _server = _Server()
    server = _server
    if any(getattr(route, "path", "") == "/start_profile" for route in app.routes):
        return

    async def start_profile(raw_request: Request) -> JSONResponse:
        try:
            body = await raw_request.json() if await raw_request.body() else {}
            step = body.get("global_step")
            if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
                raise ValueError(f"global_step: got {step!r}; it takes a whole number from 0")
        except (ValueError, AttributeError) as error:
            return JSONResponse({"problem": str(error)}, 400)
        return _response(await server.start_requested(raw_request.app.state.engine_client, step))

    async def stop_profile(raw_request: Request) -> JSONResponse:
        return _response(await server.stop_requested(raw_request.app.state.engine_client))

    def _response(problem: str) -> JSONResponse:
        return JSONResponse({"problem": problem}, 409 if problem else 200)

    # FastAPI reads the annotations, which it can't find by name in a function's locals.
    start_profile.__annotations__ = stop_profile.__annotations__ = {"raw_request": Request}
    app.add_api_route("/start_profile", start_profile, methods=["POST"])
    app.add_api_route("/stop_profile", stop_profile, methods=["POST"])


def _request(step: int) -> engines.Request:
    return engines.Request(action="start", step=step, replica=0, rank=0)


def _said(answer: dict[str, Any]) -> str:
    problem = str(answer["problem"])
    if problem:
        log.warning(f"the engine could not be recorded: {problem}")
    return problem


async def _guarded(ending: Any) -> None:
    try:
        await ending
    except Exception as error:
        runtime.report("vllm/serve", error)
