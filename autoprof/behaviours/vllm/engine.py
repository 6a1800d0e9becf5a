"""vLLM's engine: autoprof drives its profiler, and each of its workers records into the step's folder.

vLLM fixes the directory of its profiler at start, and needs it configured. So for each capture every worker gets a
profiler of autoprof's making (`worker.py`), which `start_profile` and `stop_profile` of the engine then drive, and
which is taken out again. Nothing is configured when the engine starts.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, Literal

from autoprof.base import interrupts, log
from autoprof.behaviours.rollout import engine as rollout_engine
from autoprof.behaviours.rollout.engine import ROLE, Request
from autoprof.behaviours.vllm import frontend
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call
from autoprof.hooks.dispatch import Coroutine
from autoprof.run import runtime
from autoprof.run.timeline import Span

# Of the time that a stop may take, what the engine's own may: what follows then has the rest.
_ITS_SHARE = 0.75
# Set on an engine while autoprof records it: the span of that.
_OPEN = "_autoprof_open"
# Set on an engine while somebody else profiles it.
TAKEN = "_autoprof_taken"
own_call: ContextVar[bool] = ContextVar("autoprof_own_call", default=False)


class Server(rollout_engine.Server):
    """A method of the server actor, as in `rollout.engine.Server`; the engine is the `AsyncLLM`."""

    default_engine = "self.engine"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        return await start(engine, request)

    async def stop(self, engine: Any) -> dict[str, Any]:
        return await stop(engine)


class Engine(Behaviour):
    """`AsyncLLM.start_profile` and `stop_profile`, as somebody else calls them: autoprof's recording ends before theirs
    begins, and none begins before theirs ends.

    vLLM up to 0.29 has one profiler in its front end: a second start empties it, a second stop kills the process. From
    0.32 on a second start raises `ProfilerAlreadyActiveError`.

    Attributes:
        action: Which of the two the hook is on.
    """

    action: Literal["start", "stop"]

    def around(self, call: Call) -> Around:
        engine = call.instance
        if own_call.get():
            yield CALL
            return None
        if self.action == "start":
            if hasattr(engine, _OPEN):
                log.warning("another caller starts the engine's profiler; autoprof's recording ends early")
                yield Coroutine(stop(engine, "somebody else started the engine's profiler"))
            setattr(engine, TAKEN, True)
        outcome = yield CALL
        if hasattr(engine, TAKEN) and (self.action == "stop" or outcome.error is not None):
            delattr(engine, TAKEN)
        return None


async def start(engine: Any, request: Request) -> dict[str, Any]:
    """Prepare every worker of an `AsyncLLM`, then start its profiler."""
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, _OPEN):
        return {"problem": "it is recording already"}
    if hasattr(engine, TAKEN):
        return {"problem": "somebody else profiles the engine"}
    try:
        workers = await _rpc(engine, run, "autoprof_prepare", request.fields())
    except Exception:
        # Those workers that were prepared must not keep it: a later profiling of the user's would be autoprof's.
        with interrupts.suppress(Exception):
            await _rpc(engine, run, "autoprof_release")
        raise
    if all(worker["problem"] for worker in workers):
        await _rpc(engine, run, "autoprof_release")
        return _answer(workers)
    setattr(engine, _OPEN, request.span(run))
    try:
        # From 0.32 on a start that failed, as with no profiler configured, bars the next until a stop (async_llm.py).
        # Whoever made it is not profiling: autoprof would have seen that. In the workers this stop does nothing.
        if getattr(engine, "_profile_session_active", False):
            await _own(engine.stop_profile, run)
        await _own(engine.start_profile, run)
    except BaseException:
        await stop(engine)
        raise
    frontend.begin(engine, run, request.subject("frontend"), request.settings(run))
    return _answer(workers)


async def stop(engine: Any, cut: str = "") -> dict[str, Any]:
    """Stop the profiler of an `AsyncLLM` and take autoprof's out of its workers.

    Without a start before it does nothing: a second stop kills the front end of vLLM up to 0.29.

    Args:
        engine: The `AsyncLLM`.
        cut: Why the recording ends early, if it does.
    """
    run = runtime.current()
    if run is None or not hasattr(engine, _OPEN):
        return {"problem": "it was not recording"}
    frontend.end(engine, cut)
    hung: list[dict[str, str]] = []
    try:
        if cut:
            await _rpc(engine, run, "autoprof_cut", cut)
        await _own(engine.stop_profile, run)
    except asyncio.TimeoutError as error:
        interrupts.pass_on(error)
        hung = [{"problem": "the engine's own stop did not end in time"}]
    finally:
        span: Span = getattr(engine, _OPEN)
        delattr(engine, _OPEN)
        span.end()
        workers = await _rpc(engine, run, "autoprof_release")
    return _answer([*hung, *workers])


async def _own(method: Any, run: runtime.Runtime) -> None:
    """Call the engine's own `start_profile` or `stop_profile`, within the time that a stop may take.

    The profiler that a configured front end has (from 0.10 on) is kept out of it: vLLM starts and stops it in whichever
    thread of a pool is free (`asyncio.to_thread` in async_llm.py, 0.10 to 0.32), and torch crashes when the two differ
    (seen with vLLM 0.27.1 and torch 2.13).
    """
    engine = method.__self__
    front_end = getattr(engine, "profiler", None)
    if front_end is not None:
        engine.profiler = None
    token = own_call.set(True)
    try:
        await asyncio.wait_for(method(), run.settings.for_role(ROLE).stop_timeout_s * _ITS_SHARE)
    finally:
        own_call.reset(token)
        if front_end is not None:
            engine.profiler = front_end


async def _rpc(engine: Any, run: runtime.Runtime, method: str, *arguments: Any) -> list[dict[str, str]]:
    """Call a method of every worker; each answers with a problem, or an empty text."""
    timeout_s = run.settings.for_role(ROLE).stop_timeout_s
    answers: list[dict[str, str]] = await asyncio.wait_for(engine.collective_rpc(method, args=arguments), timeout_s)
    return answers


def _answer(workers: list[dict[str, str]]) -> dict[str, Any]:
    return {"problem": "; ".join(dict.fromkeys(worker["problem"] for worker in workers if worker["problem"]))}
