"""Captures of a vLLM engine: autoprof drives its profiler, and each worker records into the step's folder.

vLLM's own profiler must be configured at the engine's start, with a fixed directory. autoprof needs no configuration:
for each capture, it puts its own profiler into every worker (`worker.py`), which `start_profile` and `stop_profile` of
the engine then start and stop. After the capture, it removes the profiler again.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import Any, Literal

from autoprof.base import log, seam
from autoprof.behaviours.rollout import engine as rollout_engine
from autoprof.behaviours.rollout.engine import ROLE, Request
from autoprof.behaviours.serving.server import ANOTHER_CALLER
from autoprof.behaviours.vllm import frontend
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call
from autoprof.hooks.dispatch import Coroutine
from autoprof.run import runtime
from autoprof.run.timeline import Span

# Share of the stop timeout for the engine's own stop. autoprof's work after it has the remaining time.
ENGINE_STOP_SHARE = 0.75
# Attribute of an engine while autoprof records it: the span of the recording.
_OPEN = "_autoprof_open"
# Attribute of an engine while another caller profiles it.
USER_PROFILING = "_autoprof_user_profiling"
own_call: ContextVar[bool] = ContextVar("autoprof_own_call", default=False)


class VllmActor(rollout_engine.EngineActor):
    """A method of vLLM's server actor. A call with `autoprof=` is the trainer's request to its `AsyncLLM`."""

    default_engine = "self.engine"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        return await start(engine, request)

    async def stop(self, engine: Any) -> dict[str, Any]:
        return await stop(engine)


class Engine(Behaviour):
    """`AsyncLLM.start_profile` and `stop_profile` when the user calls them. The user's profiling has priority.

    autoprof's recording ends before the user's profiling begins, and none begins before it ends. vLLM up to 0.29 has
    one profiler in its front end: a second start empties it, and a second stop kills the process. Since 0.32, a second
    start raises `ProfilerAlreadyActiveError`.

    Attributes:
        action: Method that the hook is on.
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
                yield Coroutine(stop(engine, ANOTHER_CALLER))
            setattr(engine, USER_PROFILING, True)
        outcome = yield CALL
        if hasattr(engine, USER_PROFILING) and (self.action == "stop" or outcome.error is not None):
            delattr(engine, USER_PROFILING)
        return None


async def start(engine: Any, request: Request) -> dict[str, Any]:
    """Prepare every worker of an `AsyncLLM`, then start its profiler."""
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, _OPEN):
        return {"problem": "it is recording already"}
    if hasattr(engine, USER_PROFILING):
        return {"problem": "another caller is profiling the engine"}
    async with contextlib.AsyncExitStack() as undo:
        # Prepared workers must not keep autoprof's profiler: it would record a later profiling of the user.
        undo.push_async_callback(_rpc, engine, run, "autoprof_release")
        workers = await _rpc(engine, run, "autoprof_prepare", request.fields())
        undo.pop_all()
    if all(worker["problem"] for worker in workers):
        await _rpc(engine, run, "autoprof_release")
        return _answer(workers)
    setattr(engine, _OPEN, request.span(run))
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(stop, engine)
        # Since 0.32, after a failed start, for example without a configured profiler, vLLM refuses further starts until
        # a stop (async_llm.py). The failed caller is not profiling, or `USER_PROFILING` would be set. In the workers,
        # this stop does nothing.
        if getattr(engine, "_profile_session_active", False):
            await _own(engine.stop_profile, run)
        await _own(engine.start_profile, run)
        undo.pop_all()
    frontend.begin(engine, run, request.subject("frontend"), request.settings(run))
    return _answer(workers)


async def stop(engine: Any, cut: str = "") -> dict[str, Any]:
    """Stop the profiler of an `AsyncLLM` and remove autoprof's profilers from its workers.

    Without a preceding start, do nothing: a second stop kills the front end of vLLM up to 0.29.

    Args:
        engine: The `AsyncLLM`.
        cut: Reason why the recording ends early, if it does.
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
        seam.pass_on(error)
        hung = [{"problem": "the engine's own stop did not end in time"}]
    finally:
        span: Span = getattr(engine, _OPEN)
        delattr(engine, _OPEN)
        span.end()
        workers = await _rpc(engine, run, "autoprof_release")
    return _answer([*hung, *workers])


async def _own(method: Any, run: runtime.Runtime) -> None:
    """Call the engine's own `start_profile` or `stop_profile`, for at most a share of the stop timeout.

    During the call, the front end's own profiler is hidden, which a configured vLLM has since 0.10. vLLM starts and
    stops it in any free thread of a pool (`asyncio.to_thread` in async_llm.py, 0.10 to 0.32), and torch crashes if the
    two threads differ (seen with vLLM 0.27.1 and torch 2.13).
    """
    engine = method.__self__
    front_end = getattr(engine, "profiler", None)
    if front_end is not None:
        engine.profiler = None
    token = own_call.set(True)
    try:
        await asyncio.wait_for(method(), run.settings.for_role(ROLE).stop_timeout_s * ENGINE_STOP_SHARE)
    finally:
        own_call.reset(token)
        if front_end is not None:
            engine.profiler = front_end


async def _rpc(engine: Any, run: runtime.Runtime, method: str, *arguments: Any) -> list[dict[str, str]]:
    """Call a method of every worker and return the answers. `problem` is empty for each worker that succeeded."""
    timeout_s = run.settings.for_role(ROLE).stop_timeout_s
    answers: list[dict[str, str]] = await asyncio.wait_for(engine.collective_rpc(method, args=arguments), timeout_s)
    return answers


def _answer(workers: list[dict[str, str]]) -> dict[str, Any]:
    return {"problem": "; ".join(dict.fromkeys(worker["problem"] for worker in workers if worker["problem"]))}
