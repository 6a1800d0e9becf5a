"""A real AsyncLLM, driven as a verl server drives it: no profiler configured, and one that the user configured."""

from __future__ import annotations

import gzip
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
import pytest
from helpers import ROOT, clean_environment

SCRIPT = Path(__file__).parent / "vllm_scripts" / "engine.py"


@dataclass(frozen=True)
class Driven:
    folder: Path
    said: dict[str, Any]
    output: str

    def step(self, number: int) -> Path:
        return self.folder / "autoprof_runs" / "latest" / f"global_step_{number:06d}"

    def passes(self, number: int, beginning: str = "rollout.replica1.rank") -> int:
        (path,) = self.step(number).glob(f"{beginning}*.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return sum(str(event.get("name")).startswith("execute_") for event in events)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("assets")
    make = [sys.executable, str(ROOT / "examples" / "verl_cpu" / "make_assets.py"), str(folder)]
    finished = processes.run(make, cwd=folder, env=clean_environment(), timeout_s=120)
    assert finished.status == 0, finished.output
    return str(folder / "data" / "model")


def drive(folder: Path, *arguments: str) -> Driven:
    environment = clean_environment(
        AUTOPROF="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        TORCH_COMPILE_DISABLE="1",
        OMP_NUM_THREADS="1",
    )
    finished = processes.run([sys.executable, str(SCRIPT), *arguments], cwd=folder, env=environment, timeout_s=240)
    assert finished.status == 0, finished.output[-4000:]
    (line,) = re.findall(r"^RESULT (.*)$", finished.output, re.MULTILINE)
    return Driven(folder, json.loads(line), finished.output)


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    return drive(tmp_path_factory.mktemp("plain"), model, "plain")


@pytest.fixture(scope="module")
def configured(model: str, tmp_path_factory: pytest.TempPathFactory) -> Driven:
    folder = tmp_path_factory.mktemp("configured")
    return drive(folder, model, "configured", str(folder / "users"))


@pytest.fixture(scope="module", params=["plain", "configured"])
def driven(request: pytest.FixtureRequest) -> Driven:
    found: Driven = request.getfixturevalue(request.param)
    return found


def test_each_capture_goes_to_its_steps_folder(driven: Driven) -> None:
    assert driven.said["start"] == driven.said["stop"] == {"problem": ""}
    assert driven.said["start 2"] == driven.said["stop 2"] == {"problem": ""}
    # 6 tokens; vLLM's asynchronous scheduling runs one pass more before it knows of the last.
    assert driven.passes(1) == driven.passes(2)
    assert driven.passes(1) in (6, 7)
    (meta,) = driven.step(1).glob("rollout.replica1.rank*.meta.json")
    found = json.loads(meta.read_text())
    assert (found["state"], found["rank"], found["replica"], found["step"]) == ("complete", 4, 1, 1)


def test_a_second_start_and_a_second_stop_are_refused(driven: Driven) -> None:
    assert driven.said["start again"] == {"problem": "it is recording already"}
    assert driven.said["stop again"] == driven.said["stop without start"] == {"problem": "it was not recording"}


def test_the_engine_generates_the_same_all_along(driven: Driven) -> None:
    assert len(driven.said["before"]) == 6
    assert driven.said["before"] == driven.said["recorded"] == driven.said["after"]


def test_a_capture_without_any_work_is_complete_and_empty(driven: Driven) -> None:
    assert driven.said["start 3"] == driven.said["stop 3"] == {"problem": ""}
    assert driven.passes(3) == 0


def test_the_users_own_calls_are_as_without_autoprof(plain: Driven, configured: Driven) -> None:
    assert plain.said["user before"] == plain.said["user after"] == "Exception"  # no profiler is configured
    assert configured.said["user before"] == configured.said["user after"] == "ok"
    theirs = configured.folder / "users"
    assert len(list(theirs.glob("*async_llm*.gz"))) == 4
    assert len(list(theirs.glob("*rank*.gz"))) == 4


def test_autoprof_yields_to_a_profiling_of_the_users(driven: Driven) -> None:
    assert driven.said["user during"] == driven.said["user after"]
    assert driven.said["stop 4"] == {"problem": "it was not recording"}
    (meta,) = driven.step(4).glob("rollout.replica1.rank*.meta.json")
    found = json.loads(meta.read_text())
    assert (found["state"], found["reason"]) == ("truncated", "somebody else started the engine's profiler")
    assert driven.passes(4) in (6, 7)


def test_autoprof_does_not_start_in_a_profiling_of_the_users(configured: Driven) -> None:
    assert configured.said["start during the user's"] == {"problem": "somebody else profiles the engine"}
    assert not configured.step(5).exists()


def test_nothing_is_left_half_written(driven: Driven) -> None:
    assert list(driven.folder.rglob("*.part")) == []
