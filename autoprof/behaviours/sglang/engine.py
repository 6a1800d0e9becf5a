"""Captures of an SGLang engine: requests to autoprof's recorder in each scheduler, sent by the `TokenizerManager`.

autoprof does not use SGLang's profiler. Its arguments and its count of forward passes differ between releases, it
writes gzip in the thread that generates, and it ends the server if the disk is full or an argument is invalid. In all
releases, `start_profile` reaches every scheduler, also on other nodes. So autoprof sends its requests as text in the
`output_dir` of this call. A hook in the scheduler (`scheduler.py`) handles them before SGLang sees them.
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

# Attribute of a TokenizerManager while autoprof records its engine: the `_EngineCapture`.
OPEN = "_autoprof_open"


class SglangActor(rollout_engine.EngineActor):
    """A method of SGLang's server actor. A call with `autoprof=` is the trainer's request to its `TokenizerManager`."""

    default_engine = "self.tokenizer_manager"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        return await start(engine, request)

    async def stop(self, engine: Any) -> dict[str, Any]:
        return await stop(engine)


class _EngineCapture:
    """One capture of an engine, from start to stop."""

    def __init__(self, engine: Any, timeout_s: float, span: Span) -> None:
        self.ending = False
        self._span = span
        self._engine = engine
        self._timeout_s = timeout_s
        # Keeps the task alive: an event loop holds its tasks only weakly.
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
        """Await `work` for at most the stop timeout. After that, it continues in the background.

        It must not be cancelled: a cancelled call leaves SGLang's communicator waiting for ever (0.5.8, _Communicator).
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
    """Start recording in the schedulers of a `TokenizerManager`. The answer's `problem` is empty on success."""
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
    """Stop recording in the schedulers of a `TokenizerManager`. The answer's `problem` is empty on success.

    Args:
        engine: The `TokenizerManager`.
        cut: Reason why the recording ends early, if it does.
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

    `activities` is empty: if a scheduler lacks autoprof's hook, SGLang's profiler then records nothing (0.4.6 to
    0.5.23).
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
    """Return SGLang's `ProfileReq`, the only argument of `start_profile` since 0.5.15."""
    from sglang.srt.managers.io_struct import ProfileReq

    kind: type = ProfileReq
    return kind


def _reaches_the_scheduler() -> bool:
    """Return whether the scheduler's hooks are applied. This process imports the scheduler's modules, too."""
    methods = (
        ("sglang.srt.managers.scheduler", "Scheduler.profile"),
        ("sglang.srt.managers.scheduler_components.profiler_manager", "SchedulerProfilerManager._profile"),
    )
    return any(wrapped_by(follow(sys.modules.get(module), path, None)) for module, path in methods)
