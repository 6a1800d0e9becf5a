"""Workers of the vLLM releases that can't run here, by what their source does with `self.profiler`."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoprof import capture, ending, rundir
from autoprof.behaviours import vllm_worker
from autoprof.behaviours.vllm_worker import Worker
from autoprof.naming import Subject
from autoprof.runtime import Runtime

ASKED = {"action": "start", "step": 3, "replica": 1, "rank": 8}


class Runner:
    """A model runner; `work` is what a forward pass leaves in a trace."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> int:
        with torch.profiler.record_function("work"):
            return int(torch.ones(3).sum())


class V09:
    """0.9.2 and 0.10.2, gpu_worker.py: a torch profile or None, no annotation of passes."""

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
    """0.11.2, gpu_worker.py: passes are annotated, without a step of the profiler."""

    def annotate_profile(self, scheduler_output: Any) -> Any:
        if not self.profiler:
            return contextlib.nullcontext()
        return torch.profiler.record_function("execute_new_1_cached_0")

    def execute_model(self, scheduler_output: Any) -> int:
        with self.annotate_profile(scheduler_output):
            return self.model_runner.execute_model(scheduler_output)


class V012(V011):
    """0.12.0, gpu_worker.py: a wrapper that is stepped in each pass and annotates it."""

    def profile(self, is_start: bool = True) -> None:
        if self.profiler is None:
            raise RuntimeError("Profiling is not enabled.")
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
    """0.17 to 0.27, gpu_worker.py: a profiler made at the first start, if one is configured."""

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
    """0.28 to 0.30, gpu_worker.py: a question before an annotation."""

    def annotate_profile(self, scheduler_output: Any) -> Any:
        if not self.profiler:
            return contextlib.nullcontext()
        self.profiler.step()
        if not self.profiler.is_running:
            return contextlib.nullcontext()
        return self.profiler.annotate_context_manager("execute_context_1(3)_generation_0(0)")


class V032(V017):
    """0.31 and 0.32, gpu_worker.py: arguments of the start, a name for each, and another question."""

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
    """vllm-ascend 0.9.1 to 0.13, worker_v1.py and worker.py: as vLLM 0.9, but the runner is handed tensors, too."""

    def profile(self, is_start: bool = True) -> None:
        if self.profiler is None:
            raise RuntimeError("Profiler is not enabled.")
        if is_start:
            self.profiler.start()
        else:
            self.profiler.stop()

    def execute_model(self, scheduler_output: Any) -> int:
        return self.model_runner.execute_model(scheduler_output, None)


class Ascend18(Ascend09):
    """vllm-ascend 0.18, worker.py: a profiler made at the first start, if one is configured; no annotation."""

    def __init__(self) -> None:
        super().__init__()
        self.profiler_config = SimpleNamespace(profiler=None)

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        if self.profiler_config is None or self.profiler_config.profiler is None:
            raise RuntimeError("Profiling is not enabled.")
        super().profile(is_start)


class Ascend23(Ascend18):
    """vllm-ascend 0.23, worker.py: the profiler is stepped in each pass."""

    def execute_model(self, scheduler_output: Any) -> int:
        if self.profiler is not None:
            self.profiler.step()
        return super().execute_model(scheduler_output)


class V033(V032):
    """0.33, gpu_worker.py: arguments of torch.profiler as well."""

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **given: Any) -> None:
        if is_start:
            assert self.profiler is not None
            self.profiler.set_profiler_kwargs(given.get("profiler_kwargs"))
        super().profile(is_start, profile_prefix)


class Later(V033):
    """A release that asks for more than any that is known."""

    def annotate_profile(self, scheduler_output: Any) -> Any:
        with self.profiler.observed(scheduler_output) as observed:
            if self.profiler.wants_more and observed.really():
                raise AssertionError("what is not known must be false")
        return super().annotate_profile(scheduler_output)


ERAS = [V09, V011, V012, V017, V028, V032, V033, Later, Ascend09, Ascend18, Ascend23]


@pytest.fixture
def start(joined: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """Makes this process part of a run with these settings, of all ranks, and returns it."""
    monkeypatch.setattr(vllm_worker, "_rank_part", lambda worker: f"rank{worker.rank}")
    for era in ERAS:
        Worker().install(era)
    return lambda **settings: joined(**({"ranks": "all"} | settings))


def passes(worker: Any, count: int) -> None:
    for _ in range(count):
        assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=3)) == 3


def found(run: Runtime) -> tuple[dict[str, Any], list[str]]:
    """The meta file of the one capture, and the names of its events."""
    ending.wait_for_files(run)
    (path,) = run.rundir.path.rglob("*.meta.json")
    trace = Path(str(path).replace(rundir.META, rundir.TRACE))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if trace.exists() else []
    return json.loads(path.read_text()), [event.get("name", "") for event in events if event.get("ph") == "X"]


@pytest.mark.parametrize("era", ERAS)
def test_the_passes_that_were_asked_for_are_recorded_in_every_release(start: Any, era: Any) -> None:
    run = start(rollout_iterations="2:5", contents=("cpu",))
    worker = era()
    before = dict(vars(worker))
    assert worker.autoprof_prepare(ASKED) == {"problem": ""}
    passes(worker, 1)  # before the capture: not counted
    worker.profile(True)
    passes(worker, 2)
    passes(worker, 6)
    worker.profile(False)
    assert worker.autoprof_release() == {"problem": ""}
    assert vars(worker) == before
    meta, names = found(run)
    assert (meta["state"], meta["reason"], meta["rank"], meta["step"]) == ("complete", "", 9, 3)
    assert names.count("work") == 3
    assert sum(name.startswith("execute_") for name in names) == 3


@pytest.mark.parametrize("era", ERAS)
def test_two_windows_without_a_restart(start: Any, era: Any) -> None:
    run = start(rollout_iterations="0:2", contents=("cpu",))
    worker = era()
    for step in (3, 4):
        worker.autoprof_prepare(ASKED | {"step": step})
        worker.profile(True)
        passes(worker, 5)
        worker.profile(False)
        worker.profile(False)  # a second stop
        assert worker.autoprof_release() == {"problem": ""}
    ending.wait_for_files(run)
    assert len(list(run.rundir.step(3).glob("*.gz"))) == len(list(run.rundir.step(4).glob("*.gz"))) == 1


def test_rays_executor_which_calls_the_model_runner_is_counted(start: Any) -> None:
    run = start(rollout_iterations="1:3", contents=("cpu",))
    worker = V032()
    worker.autoprof_prepare(ASKED)
    worker.profile(True)
    for _ in range(5):
        worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=3))
    worker.profile(False)
    worker.autoprof_release()
    assert "execute_model" not in vars(worker.model_runner)
    _, names = found(run)
    assert names.count("work") == names.count("execute_model") == 2


def test_passes_in_another_thread_do_not_stop_the_recording_there(start: Any) -> None:
    run = start(rollout_iterations="0:2", contents=("cpu",))
    worker = V032()
    worker.autoprof_prepare(ASKED)
    worker.profile(True)
    thread = threading.Thread(target=passes, args=(worker, 4))
    thread.start()
    thread.join()
    worker.profile(False)
    assert worker.autoprof_release() == {"problem": ""}
    assert found(run)[0]["state"] == "complete"


def test_a_stop_in_another_thread_gives_the_capture_up(start: Any) -> None:
    run = start(rollout_iterations="all", contents=("cpu",))
    worker = V032()
    worker.autoprof_prepare(ASKED)
    worker.profile(True)
    thread = threading.Thread(target=worker.profile, args=(False,))
    thread.start()
    thread.join()
    worker.autoprof_release()
    meta, names = found(run)
    assert (meta["state"], names) == ("failed", [])
    assert meta["reason"] == "the engine stopped it in another thread than it began in"


def test_the_users_profiler_does_not_run_in_a_worker_that_takes_no_part(start: Any, tmp_path: Path) -> None:
    (tmp_path / "run").touch()  # the step's folder can't be made
    start()
    worker = V09()
    worker.profiler = users = SimpleNamespace()  # neither a start nor a stop
    assert worker.autoprof_prepare(ASKED)["problem"].startswith("FileExistsError")
    worker.profile(True)
    passes(worker, 2)
    worker.profile(False)
    assert worker.autoprof_release() == {"problem": ""}
    assert worker.profiler is users


def test_a_worker_whose_process_records_something_else_takes_no_part(start: Any) -> None:
    run = start(contents=("cpu",))
    stage = capture.begin(run, Subject(step=3, role="actor", stage="update_actor", rank=0))
    worker = V032()
    assert worker.autoprof_prepare(ASKED) == {"problem": "another profiler is recording in the worker's process"}
    worker.profile(True)
    worker.profile(False)
    worker.autoprof_release()
    assert stage is not None
    capture.end(stage)
    assert "execute_model" not in vars(worker)


def test_a_capture_that_nobody_ended_gives_way_to_the_next(start: Any) -> None:
    run = start(contents=("cpu",))
    worker = V032()
    before = dict(vars(worker))
    for step in (3, 4):
        assert worker.autoprof_prepare(ASKED | {"step": step}) == {"problem": ""}
        worker.profile(True)
        passes(worker, 1)
    worker.profile(False)
    assert worker.autoprof_release() == {"problem": ""}
    assert vars(worker) == before
    ending.wait_for_files(run)
    states = [json.loads(next(run.rundir.step(step).glob("*.json")).read_text())["state"] for step in (3, 4)]
    assert states == ["truncated", "complete"]


def test_an_engine_that_never_starts_is_noticed(start: Any) -> None:
    run = start()
    worker = V012()
    worker.autoprof_prepare(ASKED)
    passes(worker, 2)
    assert worker.autoprof_release() == {"problem": "the engine recorded nothing"}
    assert found(run)[0]["state"] == "failed"


def test_an_engine_that_shuts_down_leaves_what_was_recorded(start: Any) -> None:
    run = start(contents=("cpu",))
    worker = V032()
    worker.autoprof_prepare(ASKED)
    worker.profile(True)
    passes(worker, 2)
    worker.profiler.shutdown()
    meta, names = found(run)
    assert (meta["state"], meta["reason"]) == ("truncated", "the engine was shut down")
    assert names.count("work") == 2


def test_an_engine_whose_stop_never_comes_is_marked(start: Any) -> None:
    run = start(contents=("cpu",))
    worker = V032()
    worker.autoprof_prepare(ASKED)
    worker.profile(True)
    passes(worker, 2)
    assert worker.autoprof_release() == {"problem": ""}
    assert found(run)[0]["state"] == "truncated"


def test_another_profiler_before_the_first_pass_that_was_asked_for(start: Any) -> None:
    run = start(rollout_iterations="2:4", contents=("cpu",))
    worker = V032()
    worker.autoprof_prepare(ASKED)
    worker.profile(True)
    capture.interrupt("somebody else profiles")
    passes(worker, 5)
    worker.profile(False)
    worker.autoprof_release()
    meta, _ = found(run)
    assert (meta["state"], meta["reason"].split(",")[0]) == ("failed", "somebody else profiles")


def test_an_error_of_the_models_passes_unchanged(start: Any) -> None:
    start(contents=("cpu",))
    worker = V032()
    worker.model_runner.execute_model = None  # type: ignore[method-assign]
    worker.autoprof_prepare(ASKED)
    worker.profile(True)
    with pytest.raises(TypeError, match="not callable"):
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
    worker.profile(False)
    worker.autoprof_release()
    assert vars(worker.model_runner) == {"execute_model": None}


@pytest.mark.parametrize("era", ERAS)
def test_a_rank_that_is_not_asked_for_is_not_recorded(start: Any, era: Any) -> None:
    run = start(ranks="8,10:")  # the worker's is 9
    worker = era()
    before = dict(vars(worker))
    assert worker.autoprof_prepare(ASKED) == {"problem": ""}
    worker.profile(True)
    passes(worker, 2)
    worker.profile(False)
    assert worker.autoprof_release() == {"problem": ""}
    assert vars(worker) == before
    assert not run.rundir.path.exists()


def test_the_ranks_of_data_parallel_engines_go_on_where_the_one_before_ends() -> None:
    parallel = SimpleNamespace(data_parallel_rank=2, world_size=4)
    worker = SimpleNamespace(rank=1, parallel_config=parallel)
    assert vllm_worker._rank_in_replica(worker) == 9
    assert vllm_worker._rank_in_replica(SimpleNamespace(rank=1)) == 1
