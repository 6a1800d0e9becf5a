"""Captures of an SGLang engine. The `TokenizerManager` sends requests to autoprof's recorder in each scheduler.

autoprof does not use SGLang's profiler. The profiler's arguments and its count of forward passes differ between
releases. The profiler writes gzip in the thread that generates, and ends the server if the disk is full or an argument
is invalid. In all releases, `start_profile` reaches every scheduler, also on other nodes. So autoprof sends its
requests as text in the argument `output_dir` of `start_profile`. A hook in the scheduler (`scheduler.py`) handles
autoprof's requests before SGLang reads them.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import msgspec

from autoprof.behaviours.rollout import engine as rollout_engine
from autoprof.behaviours.rollout.engine import MARK, Request, awaited_problem
from autoprof.hooks.behaviour import follow
from autoprof.hooks.wrapper import wrapped_by
from autoprof.run import runtime
from autoprof.run.timeline import Span

# Attribute that a `TokenizerManager` has while autoprof records its engine. Its value is the `_EngineCapture`.
OPEN = "_autoprof_open"


class SglangActor(rollout_engine.EngineActor):
    """A method of SGLang's server actor. A call with `autoprof=` is a request to the actor's `TokenizerManager`."""

    default_engine = "self.tokenizer_manager"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        return await start(engine, request)

    async def stop(self, engine: Any) -> dict[str, Any]:
        return await stop(engine)


class _EngineCapture:
    """A capture in all schedulers of an engine, from the start request to the stop request."""

    def __init__(self, engine: Any, timeout_s: float, span: Span) -> None:
        self.ending = False
        self._span = span
        self._engine = engine
        self._timeout_s = timeout_s
        # This reference keeps the task alive, because an event loop holds only weak references to its tasks.
        self._work: asyncio.Task[str] | None = None
        self._late = False

    async def start(self, request: Request) -> dict[str, Any]:
        return await self._within(self._start(request))

    async def stop(self, cut: str) -> dict[str, Any]:
        self.ending = True
        return await self._within(self._stop(cut))

    async def _start(self, request: Request) -> str:
        problem = await _send(self._engine, request)
        if problem:
            self._close(recorded=False)
        elif self._late and not self.ending:
            self.ending = True
            await self._stop("the engine started too late")
        return problem

    async def _stop(self, cut: str) -> str:
        try:
            return await _send(self._engine, Request(action="stop", reason=cut))
        finally:
            self._close()

    async def _within(self, work: Any) -> dict[str, Any]:
        """Await `work` for at most the stop timeout. After the timeout, `work` continues in the background.

        `work` must not be cancelled: after a cancelled call, SGLang's communicator waits for ever (0.5.8,
        _Communicator).
        """
        self._work = asyncio.ensure_future(work)
        await asyncio.wait({self._work}, timeout=self._timeout_s)
        if self._work.done():
            return {"problem": self._work.result()}
        self._late = True
        return {"problem": f"the engine did not answer within {self._timeout_s:g} s"}

    def _close(self, recorded: bool = True) -> None:
        if getattr(self._engine, OPEN, None) is self:
            delattr(self._engine, OPEN)
            if recorded:
                self._span.end()


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
