"""vLLM: its own profiler is driven, and each of its workers records into the step's folder.

vLLM fixes the directory of its profiler at start, and needs it configured. So for each capture every worker gets a
profiler of its own making (`TorchProfilerWrapper`), with autoprof's settings and handler, which `start_profile` and
`stop_profile` of the engine then drive, and which is taken out again. Nothing is configured when the engine starts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoprof import capture, log, runtime
from autoprof.behaviours import Behaviour
from autoprof.capture import Placement, Subject
from autoprof.paths import follow
from autoprof.tools.torch import TorchTool, mark_own, profile_arguments
from autoprof.waits import Coroutine
from autoprof.window import parse_iterations
from autoprof.wrapping import CALL, Around, Call, Reply

ROLE = "rollout"
# Set on an engine while autoprof records it: the handler that its front end's profiler had, or None.
_OPEN = "_autoprof_open"
# Set on an engine while somebody else profiles it.
_TAKEN = "_autoprof_taken"
_own_call: ContextVar[bool] = ContextVar("autoprof_own_call", default=False)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer asks of an engine. `rank` is the first global rank that its replica owns."""

    action: str
    step: int
    replica: int
    rank: int


class Server(Behaviour):
    """A method of the server actor that takes any keyword: a call with `autoprof=` is a request of the trainer's.

    Attributes:
        engine: Attribute path on the actor to the `AsyncLLM`.
        node_rank: Attribute path to the actor's number in a replica over several nodes; only 0 has an engine.
    """

    engine: str = "engine"
    node_rank: str = "node_rank"

    def around(self, call: Call) -> Around:
        asked = call.kwargs.get("autoprof")
        if asked is None:
            yield CALL
            return None
        if follow(call.instance, self.node_rank, 0) != 0:
            return Reply({})
        try:
            request = msgspec.convert(asked, Request)
            engine = follow(call.instance, self.engine)
            answer = yield Coroutine(start(engine, request) if request.action == "start" else stop(engine))
        except Exception as error:
            return Reply({"problem": f"{type(error).__name__}: {error}"})
        return Reply(answer)


class Engine(Behaviour):
    """`AsyncLLM.start_profile` and `stop_profile`, as somebody else calls them: autoprof's recording ends before theirs
    begins, and none begins before theirs ends.

    vLLM up to 0.29 has one profiler in its front end: a second start empties it, a second stop kills the process.

    Attributes:
        action: Which of the two the hook is on.
    """

    action: Literal["start", "stop"]

    def around(self, call: Call) -> Around:
        engine = call.instance
        if _own_call.get():
            yield CALL
            return None
        if self.action == "start":
            if hasattr(engine, _OPEN):
                log.warning("somebody else starts the engine's profiler; autoprof's recording ends early")
                yield Coroutine(stop(engine, "somebody else started the engine's profiler"))
            setattr(engine, _TAKEN, True)
        outcome = yield CALL
        if hasattr(engine, _TAKEN) and (self.action == "stop" or outcome.error is not None):
            delattr(engine, _TAKEN)
        return None


async def start(engine: Any, request: Request) -> dict[str, Any]:
    """Prepare every worker of an `AsyncLLM`, then start its profiler."""
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, _OPEN):
        return {"problem": "it is recording already"}
    if hasattr(engine, _TAKEN):
        return {"problem": "somebody else profiles the engine"}
    workers = await _rpc(engine, run, "autoprof_prepare", msgspec.to_builtins(request))
    if any(not worker["problem"] for worker in workers):
        setattr(engine, _OPEN, None)
        try:
            _redirect_front_end(engine, run, request)
            await _own(engine.start_profile, run)
        except BaseException:
            await stop(engine)
            raise
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
    try:
        if cut:
            await _rpc(engine, run, "autoprof_cut", cut)
        await _own(engine.stop_profile, run)
    finally:
        _restore_front_end(engine)
        delattr(engine, _OPEN)
        workers = await _rpc(engine, run, "autoprof_release")
    return _answer(workers)


async def _own(method: Any, run: runtime.Runtime) -> None:
    """Call the engine's own `start_profile` or `stop_profile`, within the time that a stop may take."""
    token = _own_call.set(True)
    try:
        await asyncio.wait_for(method(), run.settings.for_role(ROLE).stop_timeout_s)
    finally:
        _own_call.reset(token)


async def _rpc(engine: Any, run: runtime.Runtime, method: str, *arguments: Any) -> list[dict[str, str]]:
    """Call a method of every worker; each answers with a problem, or an empty text."""
    timeout_s = run.settings.for_role(ROLE).stop_timeout_s
    answers: list[dict[str, str]] = await asyncio.wait_for(engine.collective_rpc(method, args=arguments), timeout_s)
    return answers


def _answer(workers: list[dict[str, str]]) -> dict[str, Any]:
    return {"problem": "; ".join(dict.fromkeys(worker["problem"] for worker in workers if worker["problem"]))}


def _redirect_front_end(engine: Any, run: runtime.Runtime, request: Request) -> None:
    """Place the front end's trace too, where the user configured vLLM's profiler and so made one (up to 0.29)."""
    profile = getattr(engine, "profiler", None)
    if profile is None or not hasattr(profile, "on_trace_ready"):
        return
    subject = Subject(
        step=request.step, role=ROLE, stage="rollout", rank=request.rank, replica=request.replica, part="frontend"
    )
    placement = Placement(run, subject, run.settings.for_role(ROLE), TorchTool.name)
    setattr(engine, _OPEN, profile.on_trace_ready)
    mark_own(profile, True)
    profile.on_trace_ready = lambda done: placement.save(done.export_chrome_trace, "complete")


def _restore_front_end(engine: Any) -> None:
    handler = getattr(engine, _OPEN)
    if handler is not None:
        mark_own(engine.profiler, False)
        engine.profiler.on_trace_ready = handler


class Worker(Behaviour):
    """Gives vLLM's worker class the methods that `collective_rpc` calls."""

    def install(self, owner: Any) -> bool:
        owner.autoprof_prepare = _prepare
        owner.autoprof_cut = _cut
        owner.autoprof_release = _release
        return True


class _Session:
    """autoprof's profiler in one worker, from prepare to release."""

    def __init__(self, worker: Any, run: runtime.Runtime, request: Request) -> None:
        rank = int(worker.rank)
        settings = run.settings.for_role(ROLE)
        self.subject = Subject(
            step=request.step,
            role=ROLE,
            stage="rollout",
            rank=request.rank + rank,
            replica=request.replica,
            part=_rank_part(rank),
        )
        self.saved = False
        self.state = ("complete", "")
        self._worker = worker
        self._before = (worker.profiler, getattr(worker, "profiler_config", None))
        self.placement = Placement(run, self.subject, settings, TorchTool.name)
        self.profiler = _make_profiler(worker, settings, self.placement, self._ready)

    def install(self) -> None:
        self._worker.profiler = self.profiler
        self._worker.profiler_config = self.profiler.profiler_config

    def uninstall(self) -> None:
        self._worker.profiler, self._worker.profiler_config = self._before

    def finish(self, state: str, reason: str) -> None:
        self.state = (state, reason)
        self.profiler.stop()

    def _ready(self, profile: Any) -> None:
        # Called by stop_profile, or by the engine itself after the last iteration asked for.
        capture.release(self)
        self.saved = True
        self.placement.save(profile.export_chrome_trace, *self.state)


def _prepare(worker: Any, asked: dict[str, Any]) -> dict[str, str]:
    """`autoprof_prepare` of a vLLM worker: put autoprof's profiler where the worker keeps its own."""
    try:
        run = runtime.start()
        if run is None:
            return {"problem": "autoprof is off in the worker's process"}
        session = _Session(worker, run, msgspec.convert(asked, Request))
        if not capture.claim(session, TorchTool()):
            return {"problem": "another profiler is recording in the worker's process"}
        session.install()
        worker._autoprof_session = session
        return {"problem": ""}
    except Exception as error:
        runtime.report("vllm/worker", error)
        return {"problem": f"{type(error).__name__}: {error}"}


def _cut(worker: Any, reason: str) -> dict[str, str]:
    """`autoprof_cut` of a vLLM worker: what is recorded ends early."""
    session = worker.__dict__.get("_autoprof_session")
    if session is not None:
        session.state = ("truncated", reason)
    return {"problem": ""}


def _release(worker: Any) -> dict[str, str]:
    """`autoprof_release` of a vLLM worker: give it back the profiler that it had."""
    try:
        session = worker.__dict__.pop("_autoprof_session", None)
        if session is None:
            return {"problem": ""}
        session.uninstall()
        if capture.release(session) or not session.saved:
            session.placement.fail("the engine recorded nothing")
            return {"problem": "the engine recorded nothing"}
        return {"problem": ""}
    except Exception as error:
        runtime.report("vllm/worker", error)
        return {"problem": f"{type(error).__name__}: {error}"}


def _rank_part(rank: int) -> str:
    try:
        from vllm.distributed.utils import get_worker_rank_suffix  # from 0.17 on
    except ImportError:
        return f"rank{rank}"
    return str(get_worker_rank_suffix(global_rank=rank))


def _make_profiler(worker: Any, settings: Any, placement: Placement, ready: Any) -> Any:
    """A `TorchProfilerWrapper` (vLLM 0.13 on, vllm/profiler/wrapper.py) with autoprof's settings and handler."""
    from vllm.config import ProfilerConfig
    from vllm.profiler.wrapper import TorchProfilerWrapper

    first, stop_before = parse_iterations(settings.rollout_iterations)
    arguments, contents = profile_arguments(settings.contents)
    placement.contents = contents
    wanted = {
        "profiler": "torch",
        "torch_profiler_dir": str(Path(placement.folder).absolute()),
        "torch_profiler_with_stack": "stack" in contents,
        "torch_profiler_record_shapes": "shapes" in contents,
        "torch_profiler_with_memory": "memory" in contents,
        "torch_profiler_with_flops": "flops" in contents,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
        # vLLM counts a delay up to the pass that it begins with, 0 and 1 both meaning the first (0.27.1, step()).
        "delay_iterations": first + 1 if first else 0,
        "max_iterations": 0 if stop_before is None else stop_before - first,
    }
    known = {field.name for field in dataclasses.fields(ProfilerConfig)}
    config = ProfilerConfig(**{name: value for name, value in wanted.items() if name in known})
    offered = {
        "profiler_config": config,
        "worker_name": "autoprof",
        "local_rank": worker.local_rank,
        "activities": [activity.name for activity in arguments["activities"]],
        "on_trace_ready": ready,
    }
    taken = inspect.signature(TorchProfilerWrapper).parameters
    profiler = TorchProfilerWrapper(**{name: value for name, value in offered.items() if name in taken})
    profiler.dump_cpu_time_total = False
    mark_own(profiler.profiler)
    profiler.profiler.on_trace_ready = ready
    return profiler
