"""vLLM's workers: for one capture each keeps autoprof's profiler where it keeps its own.

It is a `TorchProfilerWrapper` of vLLM's, with autoprof's settings and handler, so that the engine starts, counts and
stops it as it would its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import msgspec

from autoprof import capture, runtime
from autoprof.behaviours import Behaviour
from autoprof.behaviours.vllm import ROLE, Request
from autoprof.capture import Placement, Recording, Subject
from autoprof.tools.torch import TorchTool, mark_own, profile_arguments
from autoprof.window import parse_iterations


class Worker(Behaviour):
    """Gives vLLM's worker class the methods that `collective_rpc` calls."""

    def install(self, owner: Any) -> bool:
        owner.autoprof_prepare = _prepare
        owner.autoprof_cut = _cut
        owner.autoprof_release = _release
        return True


class _Session(Recording):
    """autoprof's profiler in one worker, from prepare to release."""

    def __init__(self, worker: Any, run: runtime.Runtime, request: Request) -> None:
        rank = int(worker.rank)
        super().__init__(
            Subject(
                step=request.step,
                role=ROLE,
                stage="rollout",
                rank=request.rank + rank,
                replica=request.replica,
                part=_rank_part(rank),
            )
        )
        self.saved = False
        self.state = ("complete", "")
        self._worker = worker
        self._run = run
        self._before = (worker.profiler, getattr(worker, "profiler_config", None))

    def install(self) -> None:
        """Put autoprof's profiler where the worker keeps its own."""
        settings = self._run.settings.for_role(ROLE)
        self.placement = Placement(self._run, self.subject, settings, TorchTool.name)
        self.profiler = _make_profiler(self._worker, settings, self.placement, self._ready)
        self._worker.profiler = self.profiler
        self._worker.profiler_config = self.profiler.profiler_config

    def uninstall(self) -> None:
        """Give the worker back what it had."""
        self._worker.profiler, self._worker.profiler_config = self._before

    def finish(self, state: str, reason: str) -> None:
        self.state = (state, reason)
        self.profiler.stop()

    def abandon(self, reason: str) -> None:
        self.saved = True
        self.profiler.stop()
        self.placement.fail(reason)

    def _ready(self, profile: Any) -> None:
        # Called by stop_profile, or by the engine itself after the last iteration asked for.
        capture.release(self)
        if self.saved:  # abandoned: there is nothing that could be exported
            return
        self.saved = True
        try:
            self.placement.save(profile.export_chrome_trace, *self.state)
        finally:
            self.ended.set()


def _prepare(worker: Any, asked: dict[str, Any]) -> dict[str, str]:
    """`autoprof_prepare` of a vLLM worker: put autoprof's profiler where the worker keeps its own."""
    try:
        run = runtime.start()
        if run is None:
            return {"problem": "autoprof is off in the worker's process"}
        session = _Session(worker, run, msgspec.convert(asked, Request))
        if not capture.claim(session, TorchTool()):
            return {"problem": "another profiler is recording in the worker's process"}
        try:
            session.install()
        except BaseException:
            capture.release(session)
            raise
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
