"""vLLM: its own profiler is driven, and each of its workers records into the step's folder.

vLLM fixes the directory of its profiler at start, and needs it configured. So for each capture every worker gets a
profiler of its own making (`TorchProfilerWrapper`), with autoprof's settings and handler, which `start_profile` and
`stop_profile` of the engine then drive, and which is taken out again. Nothing is configured when the engine starts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import msgspec

from autoprof import capture, runtime
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


async def start(engine: Any, request: Request) -> dict[str, Any]:
    """Prepare every worker of an `AsyncLLM`, then start its profiler."""
    run = runtime.current()
    if run is None:
        return {"problem": "autoprof is off in the server's process"}
    if hasattr(engine, _OPEN):
        return {"problem": "it is recording already"}
    timeout_s = run.settings.for_role(ROLE).stop_timeout_s
    asked = msgspec.to_builtins(request)
    workers = await asyncio.wait_for(engine.collective_rpc("autoprof_prepare", args=(asked,)), timeout_s)
    if any(not worker["problem"] for worker in workers):
        setattr(engine, _OPEN, None)
        try:
            _redirect_front_end(engine, run, request)
            await asyncio.wait_for(engine.start_profile(), timeout_s)
        except BaseException:
            await stop(engine)
            raise
    return _answer(workers)


async def stop(engine: Any) -> dict[str, Any]:
    """Stop the profiler of an `AsyncLLM` and take autoprof's out of its workers.

    Without a start before it does nothing: a second stop kills the front end of vLLM up to 0.29.
    """
    run = runtime.current()
    if run is None or not hasattr(engine, _OPEN):
        return {"problem": "it was not recording"}
    timeout_s = run.settings.for_role(ROLE).stop_timeout_s
    try:
        await asyncio.wait_for(engine.stop_profile(), timeout_s)
    finally:
        _restore_front_end(engine)
        delattr(engine, _OPEN)
        workers = await asyncio.wait_for(engine.collective_rpc("autoprof_release"), timeout_s)
    return _answer(workers)


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
    """Gives vLLM's worker class the two methods that `collective_rpc` calls."""

    def install(self, owner: Any) -> bool:
        owner.autoprof_prepare = _prepare
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
        self._state = ("complete", "")
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
        self._state = (state, reason)
        self.profiler.stop()

    def _ready(self, profile: Any) -> None:
        # Called by stop_profile, or by the engine itself after the last iteration asked for.
        capture.release(self)
        self.saved = True
        self.placement.save(profile.export_chrome_trace, *self._state)


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
