"""The figures of a run: what a timeline says by stage, lane and sample, whatever else its files hold."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import START_NS, write
from test_cli import make_run

from autoprof import listing
from autoprof.report import build
from autoprof.report.figures import RunFigures, StepFigures
from autoprof.report.overview import Overview
from autoprof.report.reading import Reader, timelines

SECOND = 10**9


def figures(folder: Path, *steps: int) -> RunFigures:
    return build.figures(listing.read(folder), list(steps) or None)


def timeline(folder: Path, **processes: list[dict[str, Any]]) -> Path:
    """A run directory with the spans of some processes, in seconds from its start."""
    (folder / "timeline").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"id": folder.name}))
    for number, (name, spans) in enumerate(processes.items()):
        lines = []
        for span in spans:
            start, end = span.pop("at")
            ns = {"start_ns": START_NS + int(start * SECOND), "end_ns": START_NS + int(end * SECOND)}
            lines.append(json.dumps({"step": 1, "role": "trainer", "rank": None, **span, **ns}) + "\n")
        (folder / "timeline" / f"{name}-{number + 10}.jsonl").write_text("".join(lines))
    return folder


def span(kind: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "at": (start, end), **more}


def step(end: float, number: int = 1, start: float = 0.0, **more: Any) -> dict[str, Any]:
    return span("step", "step", start, end, step=number, **more)


def test_the_seconds_of_a_step_are_those_of_its_stages(tmp_path: Path) -> None:
    write(tmp_path / "run", steps=5)
    found = figures(tmp_path / "run")
    assert [row.number for row in found.steps] == [1, 2, 3, 4, 5]
    for row in found.steps:
        assert sum(row.stages.values()) == pytest.approx(row.seconds)
        assert list(row.stages)[-1] == "other"
        assert row.stages["update_actor"] == pytest.approx(12, rel=0.05)
        assert row.samples == 64
        assert row.tokens_per_s == pytest.approx(row.response_tokens / row.seconds if row.response_tokens else None)
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)
    assert found.stages[-1].name == "other"


def test_nested_timers_count_once_and_stages_fill_what_timers_leave(tmp_path: Path) -> None:
    driver = [
        span("timer", "gen", 1, 5),
        span("timer", "reward", 4, 5),
        span("timer", "step", -1, 9),
        # Of no step by its own words: of the one in which it lies.
        span("timer", "adv", 5, 6, step=None),
        span("timer", "adv", 12, 13, step=None),
        step(10),
    ]
    worker = [
        span("stage", "update_actor", 5.5, 8, role="actor", rank=0),
        span("stage", "update_actor", 7, 9, role="actor", rank=1),
        span("stage", "optimizer", 8.5, 9.5, role="actor", rank=0),
    ]
    (row,) = figures(timeline(tmp_path / "run", n1=driver, n2=worker)).steps
    assert row.stages == pytest.approx(
        {"gen": 3, "reward": 1, "adv": 1, "update_actor": 2.5, "optimizer": 1, "other": 1.5}
    )


def test_without_timers_the_stages_of_all_processes_count(tmp_path: Path) -> None:
    driver = [span("stage", "rollout", 0, 4, role="rollout"), step(10)]
    workers = [span("stage", "update_actor", 4 + rank, 8 + rank, role="actor", rank=rank) for rank in range(2)]
    (row,) = figures(timeline(tmp_path / "run", n1=driver, n2=workers)).steps
    assert row.stages == pytest.approx({"rollout": 4, "update_actor": 5, "other": 1})


def test_a_step_is_that_of_rank_0_of_the_trainer_as_it_ran_last(tmp_path: Path) -> None:
    run = timeline(
        tmp_path / "run",
        engine=[step(99, role="rollout", start=50)],
        one=[step(8, rank=1, start=1)],
        zero=[step(7, rank=0), step(47, rank=0, start=40)],
    )
    (row,) = figures(run).steps
    assert (row.start_ns, row.seconds) == (START_NS + 40 * SECOND, 7)


def test_slow_steps_are_those_slower_than_the_ones_around_them(tmp_path: Path) -> None:
    lengths = [10.0] * 30
    # Where a run gets slower for good, the first step that is slower is slow; what follows is usual.
    lengths += [20.0] * 30
    lengths[7], lengths[40], lengths[50] = 12.5, 24.5, 22.0
    at, spans = 0.0, []
    for number, length in enumerate(lengths, 1):
        spans.append(step(at + length, number, at))
        at += length
    found = figures(timeline(tmp_path / "run", n1=spans))
    assert [row.number for row in found.steps if row.slow] == [8, 31, 41]
    assert found.steps[40].usual_s == 20
    assert {finding.step for finding in found.findings} == {8, 31, 41}


def test_too_few_steps_have_no_slow_one(tmp_path: Path) -> None:
    run = timeline(tmp_path / "run", n1=[step(10), step(100, 2, 10), step(110, 3, 100)])
    assert not any(row.slow for row in figures(run).steps)


def test_what_is_cut_off_or_foreign_is_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "torn", torn=True)
    whole, torn = figures(tmp_path / "whole"), figures(tmp_path / "torn")
    assert torn.steps == whole.steps
    assert torn.details == whole.details
    assert len(torn.notes) == len(list((tmp_path / "torn" / "timeline").iterdir()))
    # "no json", a list, and what was cut off; a kind that a newer autoprof may write is nothing to tell of.
    assert torn.notes[0] == "timeline/n1-100.jsonl: 3 lines left out: cut off or no span"


@given(st.binary(max_size=400), st.integers(0, 30))
def test_no_content_of_a_file_is_too_much(tmp_path: Path, content: bytes, place: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path), "run")
    run = timeline(folder, n1=[span("timer", "gen", 0, 3), step(10), step(20, 2, 10)])
    path = run / "timeline" / "n1-10.jsonl"
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[: place % 4], content, b"\n", *lines[place % 4 :]]))
    assert [row.number for row in figures(run).steps] == [1, 2]


@given(st.integers(0, 2000))
def test_a_file_that_was_cut_anywhere_is_read_up_to_there(tmp_path: Path, length: int) -> None:
    steps = [step(10 * number, number) for number in range(1, 9)]
    run = timeline(Path(tempfile.mkdtemp(dir=tmp_path), "run"), n1=steps)
    path = run / "timeline" / "n1-10.jsonl"
    content = path.read_bytes()[:length]
    path.write_bytes(content)
    whole = content.count(b"}\n") + content.endswith(b"}")
    reader = Reader()
    assert len(list(reader.spans(timelines(run)[0][0]))) == whole
    assert sum(reader.left_out.values()) == (not content.endswith((b"}", b"}\n")) and bool(content))


def test_a_line_without_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprof.traces.lines._CHUNK_BYTES", 64)
    monkeypatch.setattr("autoprof.traces.lines._LINE_BYTES", 500)
    run = timeline(tmp_path / "run", n1=[step(10), step(20, 2, 10)])
    path = run / "timeline" / "n1-10.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"kind":"' + b"x" * 5000 + b'"}\n' + second)
    found = figures(run)
    assert [row.number for row in found.steps] == [1, 2]
    assert "timeline/n1-10.jsonl: 1 line left out: too long" in found.notes


def test_a_file_that_can_not_be_read_is_said(tmp_path: Path) -> None:
    run = timeline(tmp_path / "run", n1=[step(10)])
    (run / "timeline" / "n2-11.jsonl").mkdir()
    os.mkfifo(run / "timeline" / "n3-12.jsonl")
    found = figures(run)
    assert [row.number for row in found.steps] == [1]
    said = [note for note in found.notes if "it can't be read: " in note]
    assert [note.split(":")[0] for note in said] == ["timeline/n2-11.jsonl", "timeline/n3-12.jsonl"]


def test_old_runs_without_a_first_line_are_read(tmp_path: Path) -> None:
    make_run(tmp_path, "20261120-101010-aaaaaa")
    found = figures(tmp_path / "20261120-101010-aaaaaa")
    assert [row.number for row in found.steps] == [1, 2, 3, 4]
    (details,) = found.details
    assert [(capture.stage or capture.name.split(".")[1], capture.state) for capture in details.captures] == [
        ("a", "damaged"),
        ("b", "failed"),
        ("c", "unfinished"),
    ]
    assert {finding.kind for finding in found.findings} == {"bad_capture"}


def test_a_run_without_anything(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    found = figures(tmp_path / "run")
    assert (found.steps, found.details, found.findings, found.median_s) == ([], [], [], None)
    assert len(found.notes) == 1


def test_a_step_that_has_no_end_is_as_long_as_its_stages(tmp_path: Path) -> None:
    worker = [span("stage", "update_actor", 12, 19, role="actor", rank=0, step=2)]
    found = figures(timeline(tmp_path / "run", n1=[step(10)], n2=worker), 2)
    assert [row.number for row in found.steps] == [1]
    assert [(each.number, each.seconds) for each in found.details] == [(2, 7)]
    assert "step 2 has no end in the timeline: cut off, or going on" in found.notes


def test_a_step_that_is_not_there_is_said_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "run", steps=3, captured=2)
    with pytest.raises(listing.NotFound, match="has no step 9; in its timeline are 1 to 3, captured are 2"):
        figures(tmp_path / "run", 9)


def shown(tmp_path: Path, **plants: int) -> StepFigures:
    write(tmp_path / "run", **plants)
    (found,) = figures(tmp_path / "run", 5).details
    return found


def test_lanes_are_processes_under_their_roles(tmp_path: Path) -> None:
    found = shown(tmp_path)
    assert [lane.label for lane in found.lanes] == [
        "trainer",
        *(f"actor rank {rank}" for rank in range(8)),
        *(f"ref rank {rank}" for rank in range(8)),
        *("agent_loop 0", "agent_loop 1"),
        *(f"rollout replica {replica}" for replica in range(4)),
    ]
    for lane in found.lanes:
        assert lane.busy_s + lane.idle_s == pytest.approx(found.seconds)
        assert [span.start_s for span in lane.spans] == sorted(span.start_s for span in lane.spans)
    actor = found.lanes[3]
    assert (actor.host, actor.pid, actor.rank, actor.file) == ("n1", 202, 2, "timeline/n1-202.jsonl")
    assert [span.name for span in actor.spans] == ["compute_log_prob", "update_actor", "update_weights"]
    assert actor.busy_s == pytest.approx(sum(span.end_s - span.start_s for span in actor.spans))
    # Its captures are on the step's clock.
    update = next(capture for capture in found.captures if capture.stage == "update_actor")
    assert update.start_s == pytest.approx(found.lanes[1].spans[1].start_s, abs=0.01)


def test_a_long_lane_shows_its_longest_spans_and_counts_the_rest(tmp_path: Path) -> None:
    requests = [
        span("request", "generate", at / 100, at / 100 + (at + 1) / 1000, role="rollout", ids={"replica": 0}, step=None)
        for at in range(800)
    ]
    (found,) = figures(timeline(tmp_path / "run", n1=[step(10)], n2=requests), 1).details
    lane = found.lanes[-1]
    assert (lane.label, len(lane.spans), lane.left_out) == ("rollout replica 0", 500, 300)
    assert min(span.end_s - span.start_s for span in lane.spans) == pytest.approx(0.301)


def test_ranks_of_one_process_group_are_told_apart(tmp_path: Path) -> None:
    ranks = {f"rank{rank}": [step(10, rank=rank), span("stage", "forward", 1, 2, rank=rank)] for rank in range(3)}
    (found,) = figures(timeline(tmp_path / "run", **ranks), 1).details
    assert [lane.label for lane in found.lanes] == ["trainer rank 0", "trainer rank 1", "trainer rank 2"]


def test_samples(tmp_path: Path) -> None:
    samples = shown(tmp_path, slow_tool=5).samples
    assert samples is not None
    assert samples.count == samples.done[-1][1] == 64
    assert samples.quantiles_s["1"] == samples.longest[0].seconds
    assert samples.quantiles_s["0"] < samples.quantiles_s["0.5"] < samples.quantiles_s["0.95"]
    longest = samples.longest[0]
    assert (longest.label, longest.held_by, longest.lane) == ("prompt 9, rollout 2", "tool python", "agent_loop 1")
    assert sum(part.seconds for part in longest.parts) == pytest.approx(longest.seconds)
    assert [part.kind for part in longest.parts] == ["tool", "turn", "reward", "waiting"]
    assert [inside.kind for inside in longest.spans] == ["turn", "tool", "turn", "reward"]
    assert samples.tail is not None
    assert (samples.tail.count, samples.tail.samples) == (1, ["prompt 9, rollout 2"])
    assert [(tool.name, tool.calls) for tool in samples.tools] == [("python", 32), ("search", 32)]
    assert samples.tools[0].slowest == "prompt 9, rollout 2"
    assert sum(part.seconds for part in samples.parts) == pytest.approx(samples.mean_s * 64)


def test_tools_that_are_called_at_once_count_once(tmp_path: Path) -> None:
    """verl's tool_agent_loop gathers the calls of a turn."""
    ids = {"role": "agent_loop", "ids": {"sample": 1, "rollout": 0}}
    spans = [
        span("turn", "generate", 0, 2, **ids),
        *(span("tool", "search", 2, 2 + took, **ids) for took in (3, 6, 6)),
        span("tool", "python", 3, 4, **ids),
        # By another clock it ends after its sample.
        span("reward", "compute_score", 9, 11, **ids),
        span("sample", "tool_agent", 0, 10, **ids),
    ]
    (found,) = figures(timeline(tmp_path / "run", n1=[step(10)], n2=spans), 1).details
    assert found.samples is not None
    (sample,) = found.samples.longest
    assert {(part.kind, part.name): (part.seconds, part.count) for part in sample.parts} == {
        ("turn", ""): (2, 1),
        ("tool", "search"): (5, 3),
        ("tool", "python"): (1, 1),
        ("reward", ""): (1, 1),
        ("waiting", ""): (1, 1),
    }
    # The calls themselves took what they took.
    assert [(tool.name, tool.calls, tool.seconds) for tool in found.samples.tools] == [
        ("search", 3, 15),
        ("python", 1, 1),
    ]


def test_samples_that_can_not_be_told_apart_hold_nothing(tmp_path: Path) -> None:
    ids = {"role": "agent_loop", "ids": {"sample": 0, "rollout": 0}}
    spans = [span("sample", "loop", at, at + 5, **ids) for at in (0, 1, 2, 7)]
    spans += [span("turn", "generate", at + 1, at + 2, **ids) for at in (0, 1, 2, 7)]
    # A prompt that comes again when its first sample is done is one that can be told apart.
    again = {"role": "agent_loop", "ids": {"sample": 1, "rollout": 0}}
    spans += [span("sample", "loop", at, at + 3, **again) for at in (0, 4)]
    spans += [span("turn", "generate", at, at + 1, **again) for at in (0, 4)]
    (found,) = figures(timeline(tmp_path / "run", n1=[step(20)], n2=spans), 1).details
    assert found.samples is not None
    longest = found.samples.longest
    assert [(row.sample, row.held_by != "", len(row.spans)) for row in longest] == [
        *[("0", False, 0)] * 4,
        *[("1", True, 1)] * 2,
    ]


def test_samples_of_validation_are_no_samples_of_the_step(tmp_path: Path) -> None:
    found = shown(tmp_path, validation=5)
    assert found.samples is not None
    assert found.samples.count == 64


def test_where_the_workers_are_silent_there_is_no_gap(tmp_path: Path) -> None:
    """An engine without hooks leaves no spans: that nobody did anything can't be said."""
    driver = [span("timer", "gen", 0, 6), span("timer", "update_actor", 6.5, 9), step(10)]
    worker = [span("stage", "sync", 0, 1, role="actor", rank=0), span("stage", "x", 6.6, 9, role="actor", rank=0)]
    (found,) = figures(timeline(tmp_path / "run", n1=driver, n2=worker), 1).details
    assert [(gap.start_s, gap.end_s) for gap in found.gaps] == [(6.0, 6.6)]


def test_of_very_many_gaps_the_longest_are_told(tmp_path: Path) -> None:
    worker = [span("stage", "x", at, at + (0.9 if at % 7 else 0.5), role="actor", rank=0) for at in range(300)]
    (found,) = figures(timeline(tmp_path / "run", n1=[step(300)], n2=worker), 1).details
    assert len(found.gaps) == 100
    assert sum(gap.end_s - gap.start_s > 0.4 for gap in found.gaps) == 43
    assert [gap.start_s for gap in found.gaps] == sorted(gap.start_s for gap in found.gaps)


def test_a_timer_that_is_called_other_is_not_lost(tmp_path: Path) -> None:
    driver = [span("timer", "gen", 0, 5), span("timer", "other", 5, 7), step(10)]
    (row,) = figures(timeline(tmp_path / "run", n1=driver)).steps
    assert row.stages == {"gen": 5, "other": 5}


def test_agent_loops_that_hand_off_do_not_tell_of_generation(tmp_path: Path) -> None:
    loop = [span("stage", "generate_sequences", 0, 0.01, role="agent_loop", rank=0)]
    worker = [span("stage", "compute_log_prob", 6, 7, role="actor", rank=0)]
    (found,) = figures(timeline(tmp_path / "run", n1=[step(10)], n2=loop, n3=worker), 1).details
    assert found.gaps == []


def test_the_first_step_is_not_compared(tmp_path: Path) -> None:
    steps = [step(90), *(step(80 + 10 * number, number, 70 + 10 * number) for number in range(2, 9))]
    found = figures(timeline(tmp_path / "run", n1=steps))
    assert not any(row.slow for row in found.steps)
    assert found.findings == []
    assert found.steps[1].usual_s == 10


def test_a_rank_that_comes_first_into_a_stage_is_not_slow(tmp_path: Path) -> None:
    """The others are late, and all wait for one another inside."""
    ranks = {f"n{rank}": [span("stage", "update", 2 * rank, 9, role="actor", rank=rank)] for rank in range(4)}
    (found,) = figures(timeline(tmp_path / "run", n9=[step(10)], **ranks), 1).details
    (skew,) = found.skews
    assert (skew.slowest, skew.slowest_s, skew.median_s, skew.waited_s) == ("actor rank 0", 9, 5, 0)


def test_the_calls_of_a_stage_add_up(tmp_path: Path) -> None:
    ranks = {
        f"n{rank}": [
            span("stage", "update", at, at + (4 if rank == 2 else 1), role="actor", rank=rank) for at in (0, 10, 20)
        ]
        for rank in range(4)
    }
    (found,) = figures(timeline(tmp_path / "run", n9=[step(30)], **ranks), 1).details
    (skew,) = found.skews
    assert (skew.slowest, skew.slowest_s, skew.waited_s) == ("actor rank 2", 12, 9)


def test_a_rank_that_was_started_anew_is_one(tmp_path: Path) -> None:
    two = [[span("stage", "update", at, at + 1 + at, role="actor", rank=0)] for at in (1, 4)]
    (found,) = figures(timeline(tmp_path / "run", n9=[step(10)], n1=two[0], n2=two[1]), 1).details
    assert found.skews == []
    assert [lane.label for lane in found.lanes] == ["actor rank 0 on n1, pid 11", "actor rank 0 on n2, pid 12"]


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Of a step's spans the overview keeps sums, and of a stage in a thousand ranks one piece."""
    spans = [
        span("stage", "update_actor", 100 * number + rank / 1e3, 100 * number + 9, step=number, role="actor", rank=rank)
        for number in range(1, 4)
        for rank in range(1000)
    ]
    run = timeline(tmp_path / "run", n1=[step(100 * n + 10, n, 100 * n) for n in range(1, 4)], n2=spans)
    reader = Reader()
    overview = Overview([], reader)
    for number, file in enumerate(timelines(run)[0]):
        for line in reader.spans(file):
            overview._add(number, line)
    assert [len(each.stages["update_actor"].pieces()) for each in overview._steps.values()] == [1, 1, 1]


def test_hosts_are_brought_onto_the_drivers_clock(tmp_path: Path) -> None:
    driver = [span("timer", "gen", 0, 5), span("timer", "update_actor", 5, 9), step(10)]
    # Its clock is 3 s ahead: it says that it generates while the driver trains.
    worker = [
        span("stage", "generate", 3, 7.9, role="rollout", rank=0),
        span("stage", "x", 8, 12, role="actor", rank=0),
    ]
    run = timeline(tmp_path / "run", n1=driver, n2=worker)
    before = figures(run, 1)
    assert before.notes[-1] == "nobody measured the clocks of n1, n2: they are taken as they are set"
    measured = {"host": "n2", "offset_ns": 3 * SECOND, "error_ns": 200_000, "unix_ns": START_NS}
    (run / "clocks").mkdir()
    (run / "clocks" / "n1-10.jsonl").write_text(json.dumps(measured) + "\n")
    found = figures(run, 1)
    assert not any("clock" in note for note in found.notes)
    lanes = {lane.label: lane.spans[0] for lane in found.details[0].lanes}
    assert (lanes["rollout rank 0"].start_s, lanes["actor rank 0"].end_s) == (0, 9)


def test_notes_of_very_many_files_are_few(tmp_path: Path) -> None:
    ranks = {f"n{rank}": [span("stage", "x", 0, 1, role="actor", rank=rank)] for rank in range(100)}
    run = timeline(tmp_path / "run", **ranks, driver=[step(10)])
    for path in (run / "timeline").glob("n*"):
        path.write_text(path.read_text() + "torn")
    (run / "clocks").mkdir()
    (run / "clocks" / "driver-1.jsonl").write_text("")
    found = figures(run)
    assert len(found.notes) < 25
    assert (
        "nobody measured the clocks of n0, n1, n10, n11, n12 and 95 more: they are taken as they are set" in found.notes
    )
    assert found.notes[-1] == "and 80 more such notes of other files"
