"""What is planted in a run is found, named, and the first of the findings; nothing else is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import PLANTS, Script, capture, training, write
from traces import Event

from autoprof import listing
from autoprof.report import build
from autoprof.report.figures import Finding, RunFigures
from autoprof.report.findings import KINDS

STEP = 7
# Of each cause: the finding's kind, what its text and its evidence name, and the file it is seen in.
NAMED = {
    "slow_tool": ("slow_tool", ["1 of 64 samples", "tool python took 15.0 s", "prompt 9, rollout 2"], "n2-401"),
    "long_answer": ("sample_tail", ["1 of 64 samples", "prompt 9, rollout 2", "turn"], "n2-401"),
    "slow_sample_reward": ("slow_reward", ["1 of 64 samples", "the reward took 16.0 s", "prompt 9"], "n2-401"),
    "slow_replica": ("slow_replica", ["rollout replica 2", "generate"], "n2-302"),
    "slow_rank": ("slow_rank", ["actor rank 5", "update_actor"], "n2-205"),
    "long_weight_sync": ("weight_sync", ["weight sync took 17.", "usually 2.0", "update_weights"], "n1-100"),
    "slow_step": ("slow_step", ["usually 37.", "more in update_actor"], "n1-100"),
    "gap": ("idle_gap", ["between generation and training", "compute_log_prob of actor rank"], "n1-100"),
    "slow_reward": ("slow_reward", ["the driver waited 1", "for rewards"], "n1-100"),
    "checkpoint": ("checkpoint", ["more in save_checkpoint"], "n1-100"),
    "validation": ("validation", ["more in testing"], "n1-100"),
}


def found(folder: Path, step: int | None = None, **more: int) -> RunFigures:
    write(folder, **more)
    return build.figures(listing.read(folder), None if step is None else [step])


def test_every_cause_that_can_be_planted_is_looked_for() -> None:
    assert set(NAMED) == set(PLANTS)


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("cause", PLANTS)
def test_what_is_planted_is_found_and_nothing_else(tmp_path: Path, cause: str, seed: int) -> None:
    figures = found(tmp_path / "run", seed=seed, **{cause: STEP})
    kind, words, file = NAMED[cause]
    assert [finding.kind for finding in figures.findings] == [kind]
    first = figures.findings[0]
    said = "\n".join([first.text, *first.evidence])
    assert [word for word in words if word not in said] == []
    assert first.file == f"timeline/{file}.jsonl"
    assert first.step == STEP
    # What it costs is what the step took longer, but for what varies anyway.
    row = next(row for row in figures.steps if row.number == STEP)
    assert first.seconds == pytest.approx(row.seconds - row.usual_s, abs=3.5)
    assert [row.number for row in figures.steps if row.slow] == [STEP]
    assert STEP in [step.number for step in figures.details]
    assert [step.findings for step in figures.details if step.number == STEP] == [figures.findings]


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_has_no_findings(tmp_path: Path, seed: int) -> None:
    write(tmp_path / "run", seed=seed)
    figures = build.figures(listing.read(tmp_path / "run"), list(range(1, 13)))
    assert figures.findings == []
    assert [step.findings for step in figures.details] == [[]] * 12
    assert figures.notes == []


def test_the_costliest_of_several_is_first(tmp_path: Path) -> None:
    figures = found(tmp_path / "run", slow_rank=3, long_weight_sync=5, slow_tool=9)
    assert [(finding.kind, finding.step) for finding in figures.findings] == [
        ("weight_sync", 5),
        ("slow_tool", 9),
        ("slow_rank", 3),
    ]


def test_two_causes_in_one_step_are_both_found(tmp_path: Path) -> None:
    figures = found(tmp_path / "run", slow_rank=6, slow_tool=6)
    assert {finding.kind for finding in figures.findings} == {"slow_rank", "slow_tool"}


def captured(tmp_path: Path, make: Callable[[tuple[float, float]], list[Event]], **more: str) -> list[Finding]:
    script: Script = write(tmp_path / "run", captured=None)
    when = script.stages[4, "update_actor"]
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    capture(tmp_path / "run", 4, "actor.update_actor.rank0", who, ("n1", 200), when, make(when), **more)
    return build.figures(listing.read(tmp_path / "run")).findings


def test_a_device_that_waits_for_the_cpu_is_found(tmp_path: Path) -> None:
    def slow_host(when: tuple[float, float]) -> list[Event]:
        events = training(when, busy=0.3)
        for event in events:
            if event.get("cat") == "cpu_op":
                event["dur"] *= 19
        return events

    (finding,) = captured(tmp_path, slow_host)
    assert finding.kind == "cpu_bound"
    assert "GPU 0 did nothing for" in finding.text
    assert "actor.update_actor rank 0" in finding.text
    assert finding.file == "global_step_000004/actor.update_actor.rank0.n1.pid200.pt.trace.json.gz"
    assert 12 * 0.4 <= finding.seconds <= 12


def test_communication_beside_which_nothing_is_computed_is_found(tmp_path: Path) -> None:
    (finding,) = captured(tmp_path, lambda when: training(when, busy=0.75, overlapped=0.0))
    assert finding.kind == "communication"
    assert any("ncclDevKernel_AllReduce" in line for line in finding.evidence)
    assert finding.seconds == pytest.approx(12 * 0.75 * 0.2, rel=0.05)


def test_a_capture_that_was_cut_off_is_found(tmp_path: Path) -> None:
    (finding,) = captured(tmp_path, training, state="truncated")
    assert (finding.kind, finding.seconds) == ("bad_capture", 0.0)
    assert "truncated" in finding.text


def test_of_many_alike_the_costliest_are_told(tmp_path: Path) -> None:
    script = write(tmp_path / "run", captured=None)
    for rank in range(9):
        who = {"role": "actor", "stage": "update_actor", "rank": rank}
        when = script.stages[4, "update_actor"]
        capture(tmp_path / "run", 4, f"actor.update_actor.rank{rank}", who, ("n1", 200 + rank), when, [], "failed")
    found = build.figures(listing.read(tmp_path / "run")).findings
    assert [finding.kind for finding in found] == ["bad_capture"] * 3
    assert found[0].evidence[-1].startswith("also in 6 other captures: global_step_000004/actor.update_actor.rank3.")


def test_weight_sync_that_is_long_in_every_step_is_a_finding_of_the_run(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=None, weight_sync_s=15.0)
    figures = build.figures(listing.read(tmp_path / "run"))
    (finding,) = figures.findings
    assert (finding.kind, finding.step) == ("weight_sync_share", None)
    assert finding.seconds == pytest.approx(15, rel=0.1)


def test_the_documentation_has_every_kind() -> None:
    text = (Path(__file__).parent.parent / "docs" / "report.md").read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []
