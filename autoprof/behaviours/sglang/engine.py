"""SGLang: autoprof's own recorder in each scheduler is driven through the `TokenizerManager`.

SGLang's profiler takes other arguments in each release, counts forward passes in other ways, writes gzip in the thread
that generates, and ends the server when the disk is full or an argument is not to its taste. All releases have
a way for a request to reach every scheduler, those of other nodes too: `start_profile`. autoprof's requests travel as
text in its `output_dir`, and a hook in the scheduler (`scheduler.py`) takes them out before SGLang sees them.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import msgspec

from autoprof.base import interrupts
from autoprof.behaviours.rollout import engine as rollout_engine
from autoprof.behaviours.rollout.engine import MARK, Request
from autoprof.hooks.behaviour import follow
from autoprof.hooks.wrapper import wrapped_by
from autoprof.run import runtime
from autoprof.run.timeline import Span

# Set on a TokenizerManager while autoprof records its engine.
OPEN = "_autoprof_open"


class Server(rollout_engine.Server):
    """A method of the server actor, as in `rollout.engine.Server`; the engine is the `TokenizerManager`."""

    default_engine = "self.tokenizer_manager"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        return await start(engine, request)

    async def stop(self, engine: Any) -> dict[str, Any]:
        return await stop(engine)


class _Session:
    """One capture of an engine, from start to stop."""

    def __init__(self, engine: Any, timeout_s: float, span: Span) -> None:
        self.ending = False
        self._span = span
        self._engine = engine
        self._timeout_s = timeout_s
        # Kept here: an event loop keeps no hold of its tasks.
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
        """Await `work` for the time that a stop may take, and let it go on after that.

        A call of SGLang's that is cancelled leaves its communicator waiting for ever (0.5.8, _Communicator).
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
    """Have the schedulers of a `TokenizerManager` record. Answers with a problem, or an empty text."""
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, OPEN):
        return {"problem": "it is recording already"}
    if not _reaches_the_scheduler():
        return {"problem": "autoprof's hook in SGLang's scheduler was not applied"}
    replicas_in_one = not getattr(engine.server_args, "enable_dp_attention", False)
    session = _Session(engine, request.settings(run).stop_timeout_s, request.span(run))
    setattr(engine, OPEN, session)
    return await session.start(msgspec.structs.replace(request, replicas_in_one=replicas_in_one))


async def stop(engine: Any, cut: str = "") -> dict[str, Any]:
    """Have the schedulers of a `TokenizerManager` stop. Answers with a problem, or an empty text.

    Args:
        engine: The `TokenizerManager`.
        cut: Why the recording ends early, if it does.
    """
    session = getattr(engine, OPEN, None)
    if session is None:
        return {"problem": "it was not recording"}
    if session.ending:
        return {"problem": "it is being stopped already"}
    answer: dict[str, Any] = await session.stop(cut)
    return answer


async def _send(engine: Any, request: Request) -> str:
    """Send a request to the schedulers; return what went wrong in the one that answers, or an empty text.

    Without activities SGLang itself records nothing, where a scheduler is without autoprof's hook (0.4.6 to 0.5.23).
    """
    fields = {"output_dir": request.text(), "activities": []}
    try:
        method = engine.start_profile
        if "output_dir" in inspect.signature(method).parameters:
            answer = await method(**fields)
        else:
            answer = await method(_request_type()(**fields))
    except Exception as error:
        interrupts.pass_on(error)
        return f"{type(error).__name__}: {error}"
    message = str(getattr(answer, "message", ""))
    return message.removeprefix(MARK) if message.startswith(MARK) else "the scheduler runs without autoprof"


def _request_type() -> type:
    """Return SGLang's `ProfileReq`, the one argument of `start_profile` from 0.5.15 on."""
    from sglang.srt.managers.io_struct import ProfileReq

    kind: type = ProfileReq
    return kind


def _reaches_the_scheduler() -> bool:
    """Return whether the hooks are in place, told by this process, which imports the scheduler's modules too."""
    places = (
        ("sglang.srt.managers.scheduler", "Scheduler.profile"),
        ("sglang.srt.managers.scheduler_components.profiler_manager", "SchedulerProfilerManager._profile"),
    )
    return any(wrapped_by(follow(sys.modules.get(module), path, None)) for module, path in places)
