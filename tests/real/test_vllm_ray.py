"""Real AsyncLLM whose worker is a Ray actor, with the executor that vLLM chooses by default from 0.21 on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm_runs import SCRIPT, Driven, drive


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    return drive(
        tmp_path_factory.mktemp("ray"),
        script=SCRIPT.with_name("ray_executor.py"),
        PYTHONPATH=str(Path(__file__).with_name("vllm_ray")),
        AUTOPROF_ROLLOUT_ITERATIONS="1:3",
    )


@pytest.mark.parametrize("step", [1, 2])
def test_exactly_the_requested_passes_are_recorded(driven: Driven, step: int) -> None:
    assert driven.said[f"start {step}"] == driven.said[f"stop {step}"] == {"problem": ""}
    assert driven.passes(step) == driven.annotations(step, "process_outputs") == 2
    meta = driven.meta(step)
    assert (meta["state"], meta["reason"], meta["rank"]) == ("complete", "", 4)


def test_the_worker_is_a_ray_actor(driven: Driven) -> None:
    assert f"(RayWorkerProc pid={driven.meta(1)['pid']})" in driven.output


def test_the_engine_always_generates_the_same_tokens(driven: Driven) -> None:
    assert len(driven.said["before"]) == 6
    assert driven.said["before"] == driven.said["during 1"] == driven.said["during 2"] == driven.said["after"]
