"""Findings and autoprof's own time: no rule blames the training for the profiler, in any process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoprof.report.model import Finding
from tests.support.report_runs import START_NS, Script, capture, training, write
from tests.support.timelines import SECOND, figures, span, step, timeline

Spans = list[dict[str, Any]]


def kinds(findings: list[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


@pytest.mark.parametrize("name", ["profiler start", "profiler stop", "export", "writing", ""])
def test_a_rank_that_waits_for_the_profiler_of_another_rank_is_not_slow(tmp_path: Path, name: str) -> None:
    """Rank 0 waits for rank 1, whose profiler stops or exports."""
    ranks: dict[str, Spans] = {
        f"n{rank}": [span("stage", "collect", 1, end, role="rollout", rank=rank)]
        for rank, end in ((0, 6.6), (1, 3), (2, 3.2))
    }
    ranks["n0"] += [step(0.9, 0, rank=0), step(6.6, start=1, rank=0)]
    ranks["n1"] += [span("profiling", name, 3, 6.4, role="rollout", rank=1)] if name else []
    found = figures(timeline(tmp_path / "run", **ranks), 1)
    assert kinds(found.findings) == ([] if name else ["slow_rank"])


def test_a_slow_rank_is_found_beside_the_profiler_of_another_rank(tmp_path: Path) -> None:
    ranks: dict[str, Spans] = {
        f"n{rank}": [span("stage", "collect", 1, 9 if rank == 0 else 5, role="rollout", rank=rank)] for rank in range(4)
    }
    ranks["n1"].append(span("profiling", "profiler stop", 5, 6, role="rollout", rank=1))
    ranks["n0"] += [step(0.9, 0, rank=0), step(9, start=1, rank=0)]
    (finding,) = figures(timeline(tmp_path / "run", **ranks), 1).findings
    assert finding.text == "step 1: rollout rank 0 was slow in collect: 7.00 s, the others 4.00 s in the median"
    assert finding.seconds == 3


def samples(last: float, *costs: dict[str, Any]) -> dict[str, Spans]:
    """Return the spans of a step of 20 s: 30 samples end after 8 s, one after `last` seconds."""
    turns: Spans = []
    for number in range(31):
        end = last if number == 30 else 8
        of = {"role": "agent_loop", "ids": {"sample": number, "rollout": 0}}
        turns += [span("turn", "generate", 0.1, end, **of), span("sample", "loop", 0.1, end, **of)]
    driver = [span("timer", "gen", 0, last), span("timer", "update_actor", last, 20), step(20, rank=0)]
    return {"driver": driver, "agents": turns, "worker": list(costs)}


ENGINE = {"role": "rollout", "rank": 0, "ids": {"replica": 0}}


@pytest.mark.parametrize(("end", "found"), [(None, ["sample_tail"]), (9.9, []), (9.0, []), (8.5, ["sample_tail"])])
def test_samples_that_wait_for_the_profiler_are_no_tail(tmp_path: Path, end: float | None, found: list[str]) -> None:
    costs = [] if end is None else [span("profiling", "profiler stop", 8, end, **ENGINE)]
    findings = figures(timeline(tmp_path / "run", **samples(9.99, *costs)), 1).findings
    assert kinds(findings) == found
    waited_s = 1.99 if end is None else 1.49
    assert [finding.seconds for finding in findings] == [pytest.approx(waited_s)] * len(found)


def test_samples_are_not_judged_if_a_fifth_of_their_time_is_autoprofs(tmp_path: Path) -> None:
    costs = span("profiling", "profiler stop", 1, 5, **ENGINE)
    assert figures(timeline(tmp_path / "run", **samples(12, costs)), 1).findings == []


@pytest.mark.parametrize(("end", "found"), [(0.0, ["cpu_bound"]), (0.5, ["cpu_bound"]), (2.2, []), (4.0, [])])
def test_a_device_that_waits_for_another_process_s_profiler_is_not_idle(
    tmp_path: Path, end: float, found: list[str]
) -> None:
    script: Script = write(tmp_path / "run", captured=None)
    begin, stop = when = script.stages[4, "update_actor"]
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    events = training(when, busy=0.45)
    for event in events:
        if event.get("cat") == "cpu_op":
            event["dur"] *= 11
    capture(tmp_path / "run", 4, "actor.update_actor.rank0", who, ("n1", 200), when, events)
    if end:
        start_ns = START_NS + round(begin * SECOND)
        line = {"kind": "profiling", "name": "profiler start", "step": 4, "role": "critic", "rank": 1, "error": None}
        line |= {"start_ns": start_ns, "end_ns": start_ns + round(end / 12 * (stop - begin) * SECOND)}
        (tmp_path / "run" / "journal" / "n9-999.jsonl").write_text(json.dumps(line, separators=(",", ":")) + "\n")
    assert kinds(figures(tmp_path / "run", 4).findings) == found


def test_a_reward_that_recording_made_longer_is_no_finding(tmp_path: Path) -> None:
    lines: Spans = []
    for number in range(1, 9):
        at = 20.0 * number
        stages = [
            span("timer", "gen", at, at + 17, step=number),
            span("timer", "reward", at + 17, at + 20, step=number),
        ]
        lines += [*stages, step(at + 20, number, at, rank=0)]
    cost = span("profiling", "profiler stop", 117.5, 120, step=5)
    found = figures(timeline(tmp_path / "run", n1=lines, n2=[cost]), 5)
    assert [finding.kind for finding in found.findings if finding.step == 5] == []
    (tmp_path / "run" / "journal" / "n2-11.jsonl").unlink()
    assert kinds(figures(tmp_path / "run", 5).findings) == ["slow_reward"]


def test_a_recorded_step_is_not_compared_with_steps_that_only_export(tmp_path: Path) -> None:
    """Steps 4 and 7 are recorded, and take 10 s instead of 5 s. Each trace is exported in the next step."""
    lines: Spans = []
    at = 0.0
    for number in range(1, 12):
        took = 10.0 if number in (4, 7, 10) else 5.0
        lines += [span("stage", "update", at, at + took, step=number), step(at + took, number, at, rank=0)]
        if number in (4, 7):
            lines.append(span("profiling", "export", at + took, at + took + 1, step=number))
            clock = {
                side: {"unix_ns": START_NS + round(moment * SECOND), "monotonic_ns": 1}
                for side, moment in (("start", at), ("stop", at + took))
            }
            who = {"step": number, "role": "actor", "stage": "update", "rank": 0, "host": "h", "pid": 1}
            folder = tmp_path / "run" / f"global_step_00000{number}"
            folder.mkdir(parents=True)
            meta = {"state": "complete", "tool": "torch", "clock": clock} | who
            (folder / "actor.update.rank0.h.pid1.meta.json").write_text(json.dumps(meta))
        at += took
    found = figures(timeline(tmp_path / "run", n1=lines))
    assert [row.number for row in found.steps if row.kind == "captured"] == [4, 7]
    assert [row.number for row in found.steps if row.kind == "writing traces"] == [5, 8]
    assert [finding.step for finding in found.findings if finding.kind == "slow_step"] == [10]


def long_sixth_step() -> Spans:
    """Return nine steps of 5 s, of which step 6 takes 8 s."""
    lines, at = [], 0.0
    for number in range(1, 10):
        took = 8.0 if number == 6 else 5.0
        lines += [span("stage", "update", at, at + took, step=number), step(at + took, number, at, rank=0)]
        at += took
    return lines


def test_a_long_export_delays_the_next_step_which_is_no_slow_step(tmp_path: Path) -> None:
    assert kinds(figures(timeline(tmp_path / "slow", n1=long_sixth_step())).findings) == ["slow_step"]
    costs = [span("profiling", "profiler stop", 24, 25, step=5), span("profiling", "export", 25, 28, step=5)]
    found = figures(timeline(tmp_path / "run", n1=[*long_sixth_step(), *costs]))
    assert found.findings == []
    assert [row.kind for row in found.steps] == [
        *("warm-up", "regular", "regular", "regular", "captured", "writing traces", "regular", "regular", "regular")
    ]
