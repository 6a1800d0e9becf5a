"""Real AsyncLLM whose workers record a fake NPU, through the stand-in for torch_npu that torch itself imports.

These tests need --thorough. A step of the run `critic` of verl also uses the stand-in (test_verl_table.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.npu_stand_in import RELEASES, STAND_INS
from tests.support.vllm_runs import Driven, drive


@pytest.fixture(scope="module")
def driven(thorough: None, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    found = {"PYTHONPATH": str(STAND_INS), "TORCH_NPU_STAND_IN": RELEASES[-1]}
    return drive(tmp_path_factory.mktemp("npu"), "plain", AUTOPROF_CONTENTS="cpu,npu,shapes", **found)


@pytest.mark.parametrize("step", [1, 2])
def test_each_capture_is_a_folder_in_its_steps_folder(driven: Driven, step: int) -> None:
    assert driven.said[f"start {step}"] == driven.said[f"stop {step}"] == {"problem": ""}
    meta = driven.meta(step)
    assert (meta["tool"], meta["state"], meta["reason"]) == ("npu", "complete", "")
    assert (meta["contents"], meta["left_out"]) == (["cpu", "npu", "shapes"], [])
    (folder,) = driven.step(step).glob("rollout.replica1.*_ascend_pt")
    assert (folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").exists()
    (info,) = folder.glob("profiler_info*.json")
    common = json.loads(info.read_text())["config"]["common_config"]
    assert (common["record_shapes"], common["with_stack"]) == (True, False)


def test_the_engine_always_generates_the_same_tokens(driven: Driven) -> None:
    assert driven.said["before"] == driven.said["recorded"] == driven.said["after"]


def test_no_part_files_remain(driven: Driven) -> None:
    run: Path = driven.step(1).parent
    assert [path.name for path in run.rglob("*.part")] == []
