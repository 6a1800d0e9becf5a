"""verl's own tool agent: the timeline has each call of a tool, with its name and sample."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real.assets import tiny_model
from tests.support import processes
from tests.support.helpers import clean_environment, processes_of, spans

SCRIPT = Path(__file__).parent / "verl_scripts" / "tool_agent.py"
SLOW_NS = 0.5e9


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tools")
    environment = clean_environment(AUTOPROF="1", AUTOPROF_STEPS="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, str(SCRIPT), tiny_model()]
    finished = processes.run(command, cwd=folder, env=environment, timeout_s=240)
    assert finished.status == 0, finished.output[-4000:]
    assert "TURNS [2, 6, 6, 6]" in finished.output
    run = folder / "autoprof_runs" / "latest"
    assert [process["errors"] for process in processes_of(run)] == [{}]
    return spans(run)


def test_each_tool_call_is_within_its_sample(found: list[dict[str, Any]]) -> None:
    assert {span["step"] for span in found} == {5}
    for number in range(4):
        ids = {"sample": number, "rollout": 1, "agent": "tool_agent"}
        mine = [span for span in found if span["ids"]["sample"] == number]
        (sample,) = [span for span in mine if span["kind"] == "sample"]
        assert sample["ids"] == ids
        tools = [span for span in mine if span["kind"] == "tool"]
        first = sorted(["search", "crawl" if number == 2 else "search"])
        names = [span["name"] for span in tools]
        assert (sorted(names[:2]), names[2:]) == ((first, ["broken"]) if number else ([], []))
        for span in tools:
            assert (span["ids"], span["role"]) == (ids, "agent_loop")
        turns = [span for span in mine if span["kind"] == "turn"]
        assert len(turns) == (3 if number else 1)
        assert len({span["ids"]["request"] for span in turns}) == 1
        # The prompt grows with each turn.
        lengths = [span["counts"]["prompt_tokens"] for span in turns]
        assert lengths == sorted(set(lengths))
        for span in mine:
            assert sample["start_ns"] <= span["start_ns"] <= span["end_ns"] <= sample["end_ns"]


def test_the_slow_tool_is_on_the_timeline(found: list[dict[str, Any]]) -> None:
    slow = [span for span in found if span["kind"] == "tool" and span["end_ns"] - span["start_ns"] >= SLOW_NS]
    assert ("crawl", 2) in [(span["name"], span["ids"]["sample"]) for span in slow]


def test_the_text_of_questions_is_not_on_the_timeline(found: list[dict[str, Any]]) -> None:
    assert "secret" not in json.dumps(found)
