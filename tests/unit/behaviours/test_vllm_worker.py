"""Workers of vLLM releases that can't run here. They use `self.profiler` as the releases' sources do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof.behaviours import vllm_worker
from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers.torch import TorchTool
from autoprof.run import end
from tests.support.helpers import in_thread
from tests.support.vllm_workers import ASKED, ERAS, V012, V032, V09, found, passes


def started(worker: Any, count: int, **asked: Any) -> Any:
    """Return the worker after the start of its recording and some passes."""
    assert worker.autoprof_prepare(ASKED | asked) == {"problem": ""}
    worker.profile(True)
    passes(worker, count)
    return worker


def stop(worker: Any, problem: str = "") -> None:
    worker.profile(False)
    assert worker.autoprof_release() == {"problem": problem}


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.needs("torch")
def test_the_passes_that_were_asked_for_are_recorded_in_every_release(start: Any, era: Any) -> None:
    run = start(rollout_iterations="2:5", contents=("cpu",))
    worker = era()
    before = dict(vars(worker))
    assert worker.autoprof_prepare(ASKED) == {"problem": ""}
    passes(worker, 1)  # before the capture: not counted
    worker.profile(True)
    passes(worker, 2)
    passes(worker, 6)
    stop(worker)
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
        started(worker, 5, global_step=step)
        worker.profile(False)
        stop(worker)  # a second stop
    end.wait_for_files(run)
    assert len(list(run.rundir.step(3).glob("*.gz"))) == len(list(run.rundir.step(4).glob("*.gz"))) == 1


@pytest.mark.needs("torch")
def test_rays_executor_which_calls_the_model_runner_is_counted(start: Any) -> None:
    run = start(rollout_iterations="1:3", contents=("cpu",))
    worker = started(V032(), 0)
    for _ in range(5):
        worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=3))
    stop(worker)
    assert "execute_model" not in vars(worker.model_runner)
    _, names = found(run)
    assert names.count("work") == names.count("execute_model") == 2


@pytest.mark.needs("torch")
def test_passes_in_another_thread_do_not_stop_the_recording_there(start: Any) -> None:
    run = start(rollout_iterations="0:2", contents=("cpu",))
    worker = started(V032(), 0)
    in_thread(passes, worker, 4)
    stop(worker)
    assert found(run)[0]["state"] == "complete"


@pytest.mark.needs("torch")
def test_a_capture_that_is_cut_before_its_first_pass_answers_the_reason(start: Any) -> None:
    run = start(rollout_iterations="5:7", contents=("cpu",))
    worker = V032()
    worker.autoprof_prepare(ASKED)
    worker.profile(True)
    worker.autoprof_cut("the run was stopped")
    worker.profile(False)
    why = "the engine ran 0 forward passes; recording was to begin after 5"
    assert worker.autoprof_release() == {"problem": why}
    assert found(run)[0]["reason"] == why


def test_a_stop_in_another_thread_gives_the_capture_up(start: Any) -> None:
    run = start(rollout_iterations="all", contents=("cpu",))
    worker = started(V032(), 0)
    in_thread(worker.profile, False)
    worker.autoprof_release()
    meta, names = found(run)
    assert (meta["state"], names) == ("failed", [])
    assert meta["reason"] == "the stage ended in another thread than it began in"


def test_the_users_profiler_does_not_run_in_a_worker_that_takes_no_part(start: Any, tmp_path: Path) -> None:
    (tmp_path / "run").touch()  # the step's folder can't be made
    start()
    worker = V09()
    worker.profiler = users = SimpleNamespace()  # neither a start nor a stop
    assert worker.autoprof_prepare(ASKED)["problem"].startswith("FileExistsError")
    worker.profile(True)
    passes(worker, 2)
    stop(worker)
    assert worker.profiler is users


def test_a_worker_whose_process_records_something_else_takes_no_part(start: Any) -> None:
    run = start(contents=("cpu",))
    stage = recorder.begin(run, Subject(step=3, role="actor", stage="update_actor", rank=0))
    worker = V032()
    assert worker.autoprof_prepare(ASKED) == {"problem": "another profiler is recording in the worker's process"}
    worker.profile(True)
    stop(worker)
    assert stage is not None
    stage.stop()
    assert "execute_model" not in vars(worker)


def test_a_capture_without_an_end_is_ended_by_the_next(start: Any) -> None:
    run = start(contents=("cpu",))
    worker = V032()
    before = dict(vars(worker))
    for step in (3, 4):
        started(worker, 1, global_step=step)
    stop(worker)
    assert vars(worker) == before
    end.wait_for_files(run)
    states = [json.loads(next(run.rundir.step(step).glob("*.json")).read_text())["state"] for step in (3, 4)]
    assert states == ["truncated", "complete"]


@pytest.mark.needs("torch")
def test_an_engine_that_never_starts_is_noticed(start: Any) -> None:
    run = start()
    worker = V012()
    worker.autoprof_prepare(ASKED)
    passes(worker, 2)
    assert worker.autoprof_release() == {"problem": "the engine recorded nothing"}
    assert found(run)[0]["state"] == "failed"


def test_a_profiler_that_does_not_start_is_in_the_meta_file_only(start: Any, mocker: MockerFixture) -> None:
    run = start(contents=("cpu",))
    mocker.patch.object(TorchTool, "start", side_effect=RuntimeError("no"))
    stop(started(V032(), 2))
    assert found(run)[0]["reason"] == "the profiler did not start: RuntimeError: no"


def test_an_engine_that_shuts_down_leaves_what_was_recorded(start: Any) -> None:
    run = start(contents=("cpu",))
    started(V032(), 2).profiler.shutdown()
    meta, names = found(run)
    assert (meta["state"], meta["reason"]) == ("truncated", "the engine was shut down")
    assert names.count("work") == 2


def test_an_engine_whose_stop_never_comes_is_marked(start: Any) -> None:
    run = start(contents=("cpu",))
    assert started(V032(), 2).autoprof_release() == {"problem": ""}
    assert found(run)[0]["state"] == "truncated"


def test_another_profiler_before_the_first_pass_that_was_asked_for(start: Any) -> None:
    run = start(rollout_iterations="2:4", contents=("cpu",))
    worker = started(V032(), 0)
    recorder.make_way("somebody else profiles")
    passes(worker, 5)
    stop(worker)
    meta, _ = found(run)
    assert (meta["state"], meta["reason"].split(",")[0]) == ("failed", "somebody else profiles")


def test_an_error_of_the_models_passes_unchanged(start: Any) -> None:
    start(contents=("cpu",))
    worker = V032()
    worker.model_runner.execute_model = None  # type: ignore[method-assign]
    started(worker, 0)
    with pytest.raises(TypeError, match="not callable"):
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
    stop(worker)
    assert vars(worker.model_runner) == {"execute_model": None}


@pytest.mark.parametrize("era", ERAS)
def test_a_rank_that_is_not_asked_for_is_not_recorded(start: Any, era: Any) -> None:
    run = start(ranks="8,10:")  # the worker's is 9
    worker = era()
    before = dict(vars(worker))
    stop(started(worker, 2))
    assert vars(worker) == before
    assert not run.rundir.path.exists()


def test_the_ranks_of_data_parallel_engines_are_consecutive() -> None:
    parallel = SimpleNamespace(data_parallel_rank=2, world_size=4)
    worker = SimpleNamespace(rank=1, parallel_config=parallel)
    assert vllm_worker._rank_in_replica(worker) == 9
    assert vllm_worker._rank_in_replica(SimpleNamespace(rank=1)) == 1


def test_the_configuration_of_a_worker_keeps_its_own_attributes() -> None:
    own = SimpleNamespace(profiler=None, torch_profiler_dir="x")
    configured = vllm_worker.Configured(own)
    configured.warm_up = 3
    assert (configured.profiler, configured.torch_profiler_dir) == ("torch", "x")
    assert vars(own) == {"profiler": None, "torch_profiler_dir": "x"}
    assert vllm_worker.Configured(None)
