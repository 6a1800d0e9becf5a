"""Fakes of the workers of vLLM's and vllm-ascend's releases."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprof.behaviours import vllm_worker
from autoprof.behaviours.vllm_worker import Worker
from autoprof.run import end
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names
from tests.support import packages

torch = packages.package("torch")

ASKED = {"action": "start", "global_step": 3, "replica": 1, "rank": 8}


class Runner:
    """Fake model runner; each forward pass adds an event `work` to a trace."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> int:
        with torch.profiler.record_function("work"):
            return int(torch.ones(3).sum())


class V09:
    """Fake of vLLM 0.9.2 and 0.10.2, gpu_worker.py: a torch profile or None; passes are not annotated."""

    def __init__(self) -> None:
        self.rank = 1
        self.local_rank = 1
        self.model_runner = Runner()
        self.profiler: Any = None

    def profile(self, is_start: bool = True) -> None:
        if self.profiler is None:
            raise RuntimeError("Profiler is not enabled.")
        if is_start:
            self.profiler.start()
        else:
            self.profiler.stop()
            print(self.profiler.key_averages().table(sort_by="self_cuda_time_total"))

    def execute_model(self, scheduler_output: Any) -> int:
        return self.model_runner.execute_model(scheduler_output)


class V011(V09):
    """Fake of vLLM 0.11.2, gpu_worker.py: passes are annotated; `step` of the profiler is not called."""

    def annotate_profile(self, scheduler_output: Any) -> Any:
        if not self.profiler:
            return contextlib.nullcontext()
        return torch.profiler.record_function("execute_new_1_cached_0")

    def execute_model(self, scheduler_output: Any) -> int:
        with self.annotate_profile(scheduler_output):
            return self.model_runner.execute_model(scheduler_output)


class V012(V011):
    """Fake of vLLM 0.12.0, gpu_worker.py: each pass calls `step` of a wrapper, which annotates the pass."""

    without = "Profiling is not enabled."

    def profile(self, is_start: bool = True) -> None:
        if self.profiler is None:
            raise RuntimeError(self.without)
        if is_start:
            self.profiler.start()
        else:
            self.profiler.stop()

    def annotate_profile(self, scheduler_output: Any) -> Any:
        if not self.profiler:
            return contextlib.nullcontext()
        self.profiler.step()
        return self.profiler.annotate_context_manager("execute_new_1_cached_0")


class V017(V012):
    """Fake of vLLM 0.17 to 0.27, gpu_worker.py: the first start makes a profiler, if one is configured."""

    def __init__(self) -> None:
        super().__init__()
        self.profiler_config = SimpleNamespace(profiler=None, detailed=False)

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        if self.profiler_config is None or self.profiler_config.profiler is None:
            raise RuntimeError("Profiling is not enabled.")
        if is_start:
            assert self.profiler is not None
            self.profiler.start()
        else:
            self.profiler.stop()


class V028(V017):
    """Fake of vLLM 0.28 to 0.30, gpu_worker.py: `is_running` is checked before an annotation."""

    def annotate_profile(self, scheduler_output: Any) -> Any:
        if not self.profiler:
            return contextlib.nullcontext()
        self.profiler.step()
        if not self.profiler.is_running:
            return contextlib.nullcontext()
        return self.profiler.annotate_context_manager("execute_context_1(3)_generation_0(0)")


class V032(V017):
    """Fake of vLLM 0.31 and 0.32, gpu_worker.py: a name and bounds at each start; `should_annotate` is checked."""

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **bounds: int | None) -> None:
        if self.profiler_config is None or self.profiler_config.profiler is None:
            raise RuntimeError("Profiling is not enabled.")
        if is_start:
            self.profiler.set_output_name("dp0_rank1")
            self.profiler.start(delay_iterations=None, max_iterations=None)
            return
        self.profiler.stop()
        if self.profiler_config.profiler == "proton" and not self.profiler.has_cuda_graph_session:
            self.profiler = None

    def annotate_profile(self, scheduler_output: Any) -> Any:
        if not self.profiler:
            return contextlib.nullcontext()
        self.profiler.step()
        if not self.profiler.should_annotate:
            return contextlib.nullcontext()
        return self.profiler.annotate_context_manager("execute_context_1(3)_generation_0(0)")


class Ascend09(V09):
    """Fake of vllm-ascend 0.9.1 to 0.13, worker_v1.py and worker.py: like vLLM 0.9; the runner gets tensors too."""

    without = "Profiler is not enabled."
    profile = V012.profile

    def execute_model(self, scheduler_output: Any) -> int:
        return self.model_runner.execute_model(scheduler_output, None)


class Ascend18(Ascend09):
    """Fake of vllm-ascend 0.18, worker.py: the first start makes a profiler if configured; no annotations."""

    def __init__(self) -> None:
        super().__init__()
        self.profiler_config = SimpleNamespace(profiler=None)

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        if self.profiler_config is None or self.profiler_config.profiler is None:
            raise RuntimeError("Profiling is not enabled.")
        super().profile(is_start)


class Ascend23(Ascend18):
    """Fake of vllm-ascend 0.23, worker.py: each pass calls `step` of the profiler."""

    def execute_model(self, scheduler_output: Any) -> int:
        if self.profiler is not None:
            self.profiler.step()
        return super().execute_model(scheduler_output)


class V033(V032):
    """Fake of vLLM 0.33, gpu_worker.py: the start takes arguments of torch.profiler too."""

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **given: Any) -> None:
        if is_start:
            assert self.profiler is not None
            self.profiler.set_profiler_kwargs(given.get("profiler_kwargs"))
        super().profile(is_start, profile_prefix)


class Later(V033):
    """Fake of a future release, which uses attributes of the profiler that no known release uses."""

    def annotate_profile(self, scheduler_output: Any) -> Any:
        with self.profiler.observed(scheduler_output) as observed:
            if self.profiler.wants_more and observed.really():
                raise AssertionError("what is not known must be false")
        return super().annotate_profile(scheduler_output)


ERAS = [V09, V011, V012, V017, V028, V032, V033, Later, Ascend09, Ascend18, Ascend23]


@pytest.fixture
def start(joined: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """Install autoprof on all fakes; return a function that makes this process part of a run of all ranks."""
    monkeypatch.setattr(vllm_worker, "_rank_part", lambda worker: f"rank{worker.rank}")
    for era in ERAS:
        Worker().install(era)
    return lambda **settings: joined(**({"ranks": "all"} | settings))


def passes(worker: Any, count: int) -> None:
    for _ in range(count):
        assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=3)) == 3


def found(run: Runtime) -> tuple[dict[str, Any], list[str]]:
    """Return the meta file of the only capture, and the names of its events."""
    end.wait_for_files(run)
    (path,) = run.rundir.path.rglob("*.meta.json")
    trace = Path(str(path).replace(file_names.META, file_names.TRACE))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if trace.exists() else []
    return json.loads(path.read_text()), [event.get("name", "") for event in events if event.get("ph") == "X"]
