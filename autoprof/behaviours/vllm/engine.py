"""Captures of a vLLM engine. autoprof starts and stops the engine's profiler, and each worker records.

vLLM's own profiler must be configured at the engine's start, with a fixed directory. autoprof needs no configuration.
Before a capture, autoprof replaces the profiler of every worker by a profiler of autoprof (`worker.py`). The engine's
`start_profile` and `stop_profile` then start and stop autoprof's profilers, which write into the step's folder. After
the capture, autoprof restores the workers' profilers.
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

# Share of the stop timeout that the engine's own start or stop may take. The remaining time is for autoprof's work.
ENGINE_STOP_SHARE = 0.75
# Attribute that an engine has while autoprof records the engine. Its value is the span of the recording.
_OPEN = "_autoprof_open"
# Attribute that an engine has while another caller profiles the engine.
USER_PROFILING = "_autoprof_user_profiling"
own_call: ContextVar[bool] = ContextVar("autoprof_own_call", default=False)


class VllmActor(rollout_engine.EngineActor):
    """A method of vLLM's server actor. A call with `autoprof=` is the trainer's request to the actor's `AsyncLLM`."""

    default_engine = "self.engine"

    async def start(self, engine: Any, request: Request) -> dict[str, Any]:
        return await start(engine, request)

    async def stop(self, engine: Any) -> dict[str, Any]:
        return await stop(engine)


class Engine(Behaviour):
    """`AsyncLLM.start_profile` and `stop_profile` when the user calls them. The user's profiling has priority.

    Before the user's profiling begins, autoprof ends its own recording. Until the user's profiling ends, autoprof
    begins no recording. The reason: vLLM up to 0.29 has one profiler in its front end. A second start empties this
    profiler, and a second stop kills the process. Since 0.32, a second start raises `ProfilerAlreadyActiveError`.

    Attributes:
        action: Method that the hook wraps: `start_profile` or `stop_profile`.
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
    """Prepare every worker of an `AsyncLLM`, then start the profiler of the `AsyncLLM`. Return `{"problem": text}`.

    The text is empty if the start succeeded.
    """
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, _OPEN):
        return {"problem": "it is recording already"}
    if hasattr(engine, USER_PROFILING):
        return {"problem": "another caller is profiling the engine"}
    async with contextlib.AsyncExitStack() as undo:
        # If the start fails, the workers must not keep autoprof's profilers. These would record a later profiling of
        # the user.
        undo.push_async_callback(_rpc, engine, run, "autoprof_release")
        workers = await _rpc(engine, run, "autoprof_prepare", request.fields())
        undo.pop_all()
    if all(worker["problem"] for worker in workers):
        await _rpc(engine, run, "autoprof_release")
        return _answer(workers)
    setattr(engine, _OPEN, request.span(run))
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(stop, engine)
        # Since 0.32, if a start has failed, for example because no profiler is configured, vLLM refuses every start
        # until a stop (async_llm.py). `USER_PROFILING` is not set, so no other caller is profiling. In the workers, the
        # stop does nothing.
        if getattr(engine, "_profile_session_active", False):
            await _own(engine.stop_profile, run)
        await _own(engine.start_profile, run)
        undo.pop_all()
    frontend.begin(engine, run, request.subject("frontend"), request.settings(run))
    return _answer(workers)


async def stop(engine: Any, cut: str = "") -> dict[str, Any]:
    """Stop the profiler of an `AsyncLLM` and restore the workers' profilers. Return `{"problem": text}`, as `start`.

    If autoprof does not record the engine, call no `stop_profile`: a second stop kills the front end of vLLM up to
    0.29.

    Args:
        engine: The `AsyncLLM`.
        cut: Reason why the recording ends early. Empty if the recording ends normally.
    """
    run = runtime.current()
    if run is None or not hasattr(engine, _OPEN):
        return {"problem": "it was not recording"}
    frontend.end(engine, cut)
    timeouts: list[dict[str, str]] = []
    try:
        if cut:
            await _rpc(engine, run, "autoprof_cut", cut)
        await _own(engine.stop_profile, run)
    except asyncio.TimeoutError as error:
        seam.pass_on(error)
        timeouts = [{"problem": "the engine's own stop did not end in time"}]
    finally:
        span: Span = getattr(engine, _OPEN)
        delattr(engine, _OPEN)
        span.end()
        workers = await _rpc(engine, run, "autoprof_release")
    return _answer([*timeouts, *workers])


async def _own(method: Any, run: runtime.Runtime) -> None:
    """Call the engine's own `start_profile` or `stop_profile`, and wait for at most ENGINE_STOP_SHARE of the timeout.

    During the call, autoprof removes the front end's own profiler, which exists since 0.10 if a profiler is configured.
    vLLM starts and stops this profiler in any free thread of a pool (`asyncio.to_thread` in async_llm.py, 0.10 to
    0.32). If the two threads differ, torch crashes (seen with vLLM 0.27.1 and torch 2.13).
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
    """Call a method of every worker and return the workers' answers: `{"problem": text}`, with no text on success."""
    timeout_s = run.settings.for_role(ROLE).stop_timeout_s
    answers: list[dict[str, str]] = await asyncio.wait_for(engine.collective_rpc(method, args=arguments), timeout_s)
    return answers


def _answer(workers: list[dict[str, str]]) -> dict[str, Any]:
    return {"problem": "; ".join(dict.fromkeys(worker["problem"] for worker in workers if worker["problem"]))}
