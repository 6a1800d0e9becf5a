"""Findings and captures: causes that a recording shows, and what recording costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprof.report import build, comparison, html
from autoprof.report.model import Finding
from autoprof.rundir import runs
from tests.support.report_runs import BASE_NS, START_NS, Script, capture, generation, training, write
from tests.support.timelines import span, step, timeline
from tests.support.traces import Event, kineto, load, save

STEP = 7


def captured(tmp_path: Path, make: Callable[[tuple[float, float]], list[Event]], **more: str) -> list[Finding]:
    script: Script = write(tmp_path / "run", captured=None)
    when = script.stages[4, "update_actor"]
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    capture(tmp_path / "run", 4, "actor.update_actor.rank0", who, ("n1", 200), when, make(when), **more)
    return build.figures(runs.read(tmp_path / "run")).findings


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


@pytest.mark.parametrize("on_device", [True, False], ids=["nccl", "gloo"])
def test_a_rank_that_others_wait_for_in_collectives_is_found(tmp_path: Path, on_device: bool) -> None:
    """The stage ends at the same time in all ranks, so only their traces show the slow one."""
    script: Script = write(tmp_path / "run", captured=None)
    begin, end = when = script.stages[4, "update_actor"]
    first, length = (START_NS - BASE_NS) / 1e3 + begin * 1e6, (end - begin) * 1e6
    for rank in range(4):
        waits = {2: 0.02}.get(rank, 0.55 + rank / 100)
        where: Event = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_gather", "pid": 1, "tid": 1}
        if on_device:
            where |= {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "pid": 0, "tid": 20}
        events = [{"ph": "X", "cat": "cpu_op", "name": "step", "pid": 1, "tid": 1, "ts": first, "dur": length}]
        computes = {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 0,
            "tid": 7,
            "ts": first,
            "dur": (0.9 - waits) * length,
        }
        events += [computes] if on_device else []
        # Two at a time, of which each second counts once.
        for part in range(2):
            at = first + (0.9 - waits) * length * (1 + part / 100)
            events.append(where | {"tid": part, "ts": at, "dur": waits * length})
        who = {"role": "actor", "stage": "update_actor", "rank": rank}
        capture(tmp_path / "run", 4, f"actor.update_actor.rank{rank}", who, ("n1", 200 + rank), when, events)
    figures = build.figures(runs.read(tmp_path / "run"))
    finding = figures.findings[0]
    assert [each.kind for each in figures.findings] == ["slow_rank"]
    assert "actor rank 2 was slow in update_actor" in finding.text
    assert finding.file == "global_step_000004/actor.update_actor.rank2.n1.pid202.pt.trace.json.gz"
    assert finding.seconds == pytest.approx(0.54 * (end - begin), rel=0.05)
    assert finding.evidence[0].startswith("actor rank 2: ")
    (step,) = [step for step in figures.details if step.number == 4]
    spent = {each.rank: each.collectives_s for each in step.captures}
    assert spent[0] == pytest.approx(0.55 * (end - begin), rel=0.05)


def test_a_capture_that_was_cut_off_is_found(tmp_path: Path) -> None:
    (finding,) = captured(tmp_path, training, state="truncated")
    assert (finding.kind, finding.seconds) == ("bad_capture", 0.0)
    assert "truncated" in finding.text


def test_a_full_device_is_found(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=5)
    (path,) = (tmp_path / "run").glob("global_step_000005/actor.update_actor.*.gz")
    gigabyte = 1 << 30
    args = {"Device Type": 1, "Device Id": 0, "Total Allocated": 70 * gigabyte, "Total Reserved": 76 * gigabyte}
    event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1.0, "args": args}
    content = kineto([*load(path)["traceEvents"], event], BASE_NS)
    total = b'"deviceProperties": [{"id": 0, "totalGlobalMem": %d}]' % (80 * gigabyte)
    save(path, content.replace(b'"deviceProperties": []', total))
    (finding,) = build.figures(runs.read(tmp_path / "run")).findings
    assert finding.kind == "memory"
    assert "95 % of the device's memory" in finding.text
    assert finding.file == f"global_step_000005/{path.name}"


def test_an_engine_that_waits_for_requests_does_not_wait_for_the_cpu(tmp_path: Path) -> None:
    def few_requests(when: tuple[float, float]) -> list[Event]:
        return [event | {"dur": event["dur"] / 4} if event["ph"] == "X" else event for event in generation(when)]

    (finding,) = captured(tmp_path, few_requests)
    assert finding.kind == "device_idle"
    assert "CPU" not in finding.text
    assert "waited for the host or for requests" in finding.evidence[2]


def costly(**cost: float) -> list[dict[str, Any]]:
    """A driver of eight steps of 10 s; step 5 is captured, which takes `start` and `stop` seconds more."""
    lines, at = [], 0.0
    for number in range(1, 9):
        start, stop = (cost.get("start", 0.0), cost.get("stop", 0.0)) if number == 5 else (0.0, 0.0)
        end = at + 10 + start + stop
        lines += [
            span("timer", "gen", at, at + 4, step=number),
            span("timer", "update_actor", at + 4, end, step=number),
            step(end, number, at, rank=0),
        ]
        if start:
            lines += [
                span("profiling", "profiler start", at + 4, at + 4 + start, step=5, role="actor", rank=0),
                span("profiling", "profiler stop", end - stop, end, step=5, role="actor", rank=0),
            ]
        at = end
    return lines


@pytest.mark.fault("a capture's profiler takes 4 s to start", "the report tells it as profiling", "nothing")
def test_what_a_capture_costs_is_no_finding(tmp_path: Path) -> None:
    run = timeline(tmp_path / "run", n1=costly(start=3.0, stop=1.0))
    figures = build.figures(runs.read(run), [5])
    assert figures.findings == []
    row = figures.steps[4]
    assert (row.slow, row.seconds, row.usual_s) == (False, 14, 10)
    assert row.stages == pytest.approx({"update_actor": 6, "gen": 4, "other": 0, "autoprof's own": 4})
    assert list(row.stages)[-2:] == ["other", "autoprof's own"]
    against = comparison.compare(*[comparison.side(figures, 5, False)] * 2)
    assert against.findings == []
    usual = build.figures(runs.read(run), [4, 5])
    against = comparison.compare(comparison.side(usual, 4, False), comparison.side(usual, 5, False))
    assert against.findings == []
    assert html.page(figures)


def test_the_real_cause_comes_without_what_the_capture_costs(tmp_path: Path) -> None:
    figures = build.figures(runs.read(timeline(tmp_path / "run", n1=slow_and(costly(start=1.5, stop=0.5)))))
    (finding,) = figures.findings
    assert (finding.text, finding.seconds) == ("step 5 took 15.0 s, usually 10.0 s: 5.00 s more in update_actor", 5)
    assert "autoprof's own: 2.00 s more" in finding.evidence


def slow_and(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make `update_actor` of step 5 take 5 s more."""
    for line in lines:
        if line["step"] == 5 and line["name"] in ("update_actor", "step"):
            start, end = line["at"]
            line["at"] = start, end + 5
        elif line["step"] > 5:
            line["at"] = tuple(moment + 5 for moment in line["at"])
    return lines


def test_a_stage_with_over_a_fifth_of_autoprofs_own_time_is_not_judged(tmp_path: Path) -> None:
    figures = build.figures(runs.read(timeline(tmp_path / "run", n1=slow_and(costly(start=3.0, stop=1.0)))), [5])
    assert figures.findings == []
    assert figures.steps[4].own_shares == figures.details[0].own_shares == {"update_actor": pytest.approx(4 / 15)}
    said = "step 5: 27 % of update_actor was autoprof's own time, so findings don't use the seconds of this stage"
    assert said in figures.notes
    both = build.figures(runs.read(tmp_path / "run"), [4, 5])
    against = comparison.compare(comparison.side(both, 4, False), comparison.side(both, 5, False))
    assert against.findings == []


def test_a_rank_whose_profiler_starts_inside_of_a_stage_is_not_slow(tmp_path: Path) -> None:
    ranks = {
        f"n{rank}": [span("stage", "update_actor", 1, 9 if rank == 1 else 5, role="actor", rank=rank)]
        for rank in range(4)
    }
    ranks["n1"].append(span("profiling", "profiler start", 2, 6, role="actor", rank=1))
    figures = build.figures(
        runs.read(timeline(tmp_path / "run", d=[step(10), span("timer", "update", 0, 10)], **ranks)), [1]
    )
    assert [finding.kind for finding in figures.findings] == []


def captured_engine(*costs: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return a step of 12 s as verl records it: the driver waits in gen for an engine, whose worker has `costs`."""
    of = {"role": "rollout", "ids": {"replica": 0}}
    sample = {"role": "agent_loop", "ids": {"sample": "p", "rollout": 0}}
    return {
        "driver": [span("timer", "gen", 0, 6), span("timer", "update_actor", 6, 12), step(12, rank=0)],
        "agents": [span("turn", "generate", 0.2, 2, **sample), span("sample", "loop", 0.2, 2, **sample)],
        "server": [span("window", "rollout", 0.1, 5.9, **of), span("request", "generate", 0.2, 2, step=None, **of)],
        "actor": [span("stage", "update_actor", 6, 12, role="actor", rank=0)],
        "worker": list(costs),
    }


ENGINE = {"role": "rollout", "rank": 0, "ids": {"replica": 0}}


@pytest.mark.parametrize("process", ["worker", "actor", "driver"])
def test_the_profilers_time_in_any_process_is_no_idle_time(tmp_path: Path, process: str) -> None:
    # torch's export holds the interpreter's lock: `writing` begins when it ends.
    costs = [
        span("profiling", name, start, end, **ENGINE)
        for name, start, end in (("profiler stop", 2, 2.5), ("export", 2.5, 4), ("writing", 4, 6))
    ]
    processes = captured_engine()
    processes[process] += costs
    figures = build.figures(runs.read(timeline(tmp_path / "run", **processes)), [1])
    assert [finding.kind for finding in figures.findings] == []
    assert figures.details[0].gaps == []


def test_idle_time_beside_the_profilers_is_found(tmp_path: Path) -> None:
    costs = [span("profiling", "writing", 2, 2.5, **ENGINE), span("profiling", "export", 3, 3.5, **ENGINE)]
    figures = build.figures(runs.read(timeline(tmp_path / "run", **captured_engine(*costs))), [1])
    (finding,) = figures.findings
    said = "step 1: between generation and training no worker did anything for 2.50 s; the driver was in gen"
    assert finding.text == said
    gaps = figures.details[0].gaps
    assert [(gap.start_s, gap.end_s) for gap in gaps] == [(2.5, 3), (3.5, 6)]
    assert [gap.before for gap in gaps] == ["update_actor of actor rank 0"] * 2


def test_an_export_takes_nothing_from_a_later_stage_of_another_process(tmp_path: Path) -> None:
    processes = captured_engine(span("profiling", "export", 5, 9, **ENGINE))
    (row,) = build.figures(runs.read(timeline(tmp_path / "run", **processes))).steps
    # Until 6 s nothing else runs, and the driver may wait for the exporting process.
    assert row.stages == pytest.approx({"gen": 5, "update_actor": 6, "other": 0, "autoprof's own": 1})


@pytest.mark.fault("recorded work takes longer", "a note of the report says by how much", "nothing: it is no finding")
def test_a_step_that_is_slower_for_being_recorded_is_no_finding(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=STEP, slow_step=STEP, slow_rank=9)
    figures = build.figures(runs.read(tmp_path / "run"))
    row = figures.steps[STEP - 1]
    assert (row.slow, row.slowed["update_actor"]) == (False, pytest.approx(18, abs=1))
    assert row.recorded["gen"] == pytest.approx(14.9, abs=0.1)
    # The real cause comes first, and alone.
    assert [(finding.kind, finding.step) for finding in figures.findings] == [("slow_rank", 9)]
    (note,) = figures.notes
    assert note.startswith(f"step {STEP}: recorded work took 18.")
    assert note.endswith("perhaps because of the recording: update_actor 18.1 s") or "update_actor 18." in note
    against = comparison.compare(comparison.side(figures, 9, False), comparison.side(figures, STEP, False))
    assert [finding.kind for finding in against.findings] == []


def test_a_note_blames_no_recording_for_time_that_a_finding_explains(tmp_path: Path) -> None:
    write(tmp_path / "run", captured=STEP, slow_rank=STEP)
    figures = build.figures(runs.read(tmp_path / "run"))
    assert sum(figures.steps[STEP - 1].slowed.values()) > 2
    assert ("slow_rank", STEP) in [(finding.kind, finding.step) for finding in figures.findings]
    assert not [note for note in figures.notes if "because of the recording" in note]


def test_a_recorded_step_is_slow_where_others_were_recorded_and_it_alone_is(tmp_path: Path) -> None:
    script: Script = write(tmp_path / "run", captured=None, slow_step=STEP)
    who = {"role": "actor", "stage": "update_actor", "rank": 0}
    for number in range(3, 11):
        when = script.stages[number, "update_actor"]
        capture(tmp_path / "run", number, "actor.update_actor.rank0", who, ("n1", 200), when, training(when))
    figures = build.figures(runs.read(tmp_path / "run"))
    assert [(finding.kind, finding.step) for finding in figures.findings] == [("slow_step", STEP)]


def test_a_rank_that_is_slower_for_being_recorded_is_no_finding(tmp_path: Path) -> None:
    """Rank 5 of 8 is slow in two steps, in one of which it alone is recorded."""
    script: Script = write(tmp_path / "run", captured=None, slow_rank=STEP)
    begin, end = when = script.stages[STEP, "update_actor"]
    who = {"role": "actor", "stage": "update_actor", "rank": 5}
    capture(tmp_path / "run", STEP, "actor.update_actor.rank5", who, ("n2", 205), (begin, end + 10), training(when))
    figures = build.figures(runs.read(tmp_path / "run"))
    assert figures.findings == []
    (step,) = [step for step in figures.details if step.number == STEP]
    (skew,) = [skew for skew in step.skews if skew.stage == "update_actor"]
    assert (skew.rows[0].label, skew.rows[0].recorded) == ("actor rank 5", True)
    assert skew.slowest != "actor rank 5"
