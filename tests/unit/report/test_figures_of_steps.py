"""Figures of a step: lanes, samples, gaps and the driver's places in them, hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoprof.report import html, markdown
from autoprof.report.lanes import MAX_LANES
from autoprof.report.model import Finding, RunFigures
from autoprof.report.timeline import RunTimeline
from autoprof.rundir.journal import journals
from tests.support.report_runs import START_NS
from tests.support.timelines import SECOND, figures, shown, span, step, timeline


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
    assert (actor.host, actor.pid, actor.rank, actor.file) == ("n1", 202, 2, "journal/n1-202.jsonl")
    assert [span.name for span in actor.spans] == ["compute_log_prob", "update_actor", "update_weights"]
    assert actor.busy_s == pytest.approx(sum(span.end_s - span.start_s for span in actor.spans))
    # Its captures are on the step's clock.
    update = next(capture for capture in found.captures if capture.stage == "update_actor")
    assert update.start_s == pytest.approx(found.lanes[1].spans[1].start_s, abs=0.01)


def test_the_table_of_a_torchrun_loop_has_the_stages_of_rank_0(tmp_path: Path) -> None:
    ranks = {
        f"n{rank}": [
            span("stage", "collect", 0, collected, role="rollout", rank=rank),
            span("stage", "update_actor", collected + 1, 20, role="actor", rank=rank),
            step(20, rank=rank),
        ]
        for rank, collected in enumerate((12, 4))
    }
    (row,) = figures(timeline(tmp_path / "run", **ranks)).steps
    assert row.stages == {"collect": 12, "update_actor": 7, "other": 1}


def test_a_stage_of_workers_lasts_until_its_slowest_rank_has_ended(tmp_path: Path) -> None:
    workers = {
        f"n{rank}": [span("stage", "update_actor", 2, end, role="actor", rank=rank)] for rank, end in enumerate((9, 15))
    }
    driver = [span("stage", "update_weights", 15, 18), step(20)]
    (row,) = figures(timeline(tmp_path / "run", driver=driver, **workers)).steps
    assert row.stages == {"update_actor": 13, "update_weights": 3, "other": 4}


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
    # The figures of tools have the full duration of each call.
    assert [(tool.name, tool.calls, tool.seconds) for tool in found.samples.tools] == [
        ("search", 3, 15),
        ("python", 1, 1),
    ]


def test_samples_that_can_not_be_told_apart_hold_nothing(tmp_path: Path) -> None:
    ids = {"role": "agent_loop", "ids": {"sample": 0, "rollout": 0}}
    spans = [span("sample", "loop", at, at + 5, **ids) for at in (0, 1, 2, 7)]
    spans += [span("turn", "generate", at + 1, at + 2, **ids) for at in (0, 1, 2, 7)]
    # Two samples with the same ids are distinguished by time if the first ends before the second begins.
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
    """An engine without hooks records no spans, so its time is not reported as a gap."""
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
    """The overview keeps only sums of a step, and one interval for a stage in a thousand ranks."""
    spans = [
        span("stage", "update_actor", 100 * number + rank / 1e3, 100 * number + 9, step=number, role="actor", rank=rank)
        for number in range(1, 4)
        for rank in range(1000)
    ]
    run = timeline(tmp_path / "run", n1=[step(100 * n + 10, n, 100 * n) for n in range(1, 4)], n2=spans)
    steps = RunTimeline(journals(run)).steps
    assert [len(sums.stages["update_actor"].pieces()) for sums in steps.values()] == [1, 1, 1]


def test_hosts_are_brought_onto_the_drivers_clock(tmp_path: Path) -> None:
    driver = [span("timer", "gen", 0, 5), span("timer", "update_actor", 5, 9), step(10)]
    # Its clock is 3 s ahead, so its generation seems to overlap the driver's training.
    worker = [
        span("stage", "generate", 3, 7.9, role="rollout", rank=0),
        span("stage", "x", 8, 12, role="actor", rank=0),
    ]
    run = timeline(tmp_path / "run", n1=driver, n2=worker)
    before = figures(run, 1)
    assert before.notes[-1] == "clocks of n1, n2 were not measured; their own settings are used"
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
    for path in (run / "journal").glob("n*"):
        path.write_text(path.read_text() + "torn")
    (run / "clocks").mkdir()
    (run / "clocks" / "driver-1.jsonl").write_text("")
    found = figures(run)
    assert len(found.notes) < 25
    assert "clocks of n0, n1, n10, n11, n12 and 95 more were not measured; their own settings are used" in found.notes
    assert found.notes[-1] == "and 80 more such notes of other files"


def test_of_very_many_lanes_the_busiest_and_idlest_are_shown(tmp_path: Path) -> None:
    ranks = {
        f"n{rank}": [span("stage", "x", 0, 1 + rank / 100, role="actor", rank=rank)]
        for rank in range(2, MAX_LANES + 12)
    }
    run = timeline(tmp_path / "run", n1=[step(10)], **ranks)
    (found,) = figures(run, 1).details
    assert (len(found.lanes), found.lanes_left_out) == (MAX_LANES, len(ranks) - MAX_LANES)
    assert {"actor rank 2", f"actor rank {MAX_LANES + 11}"} <= {lane.label for lane in found.lanes}


def two_ranks(folder: Path, slow: int) -> RunFigures:
    """Make a run of two ranks under torchrun. Rank 0 drives the steps, and a rank collects for 6 s instead of 2 s."""
    ranks = []
    for rank in (0, 1):
        ids = {"role": "trainer", "rank": rank}
        collected = 6 if rank == slow else 2
        # The update ends in both ranks at the same time, because it has a collective.
        ranks.append(
            [span("stage", "collect", 0, collected, **ids), span("stage", "update_actor", collected, 8, **ids)]
        )
        ranks[rank] += [step(-1, 0, -2, **ids), step(8, **ids)]
    return figures(timeline(folder, n1=ranks[0], n2=ranks[1]), 1)


@pytest.mark.parametrize(("slow", "held"), [(0, {"collect": 0, "update_actor": None}), (1, {"update_actor": 1})])
def test_a_driver_that_is_a_rank_can_hold_up_the_others(tmp_path: Path, slow: int, held: dict[str, int | None]) -> None:
    run = two_ranks(tmp_path / "run", slow)
    expected = {"collect": None, "update_actor": None} | {
        stage: None if rank is None else f"collect of trainer rank {rank}" for stage, rank in held.items()
    }
    assert {part.stage: part.held_by for part in run.details[0].path} == expected
    (finding,) = run.findings
    assert (finding.kind, finding.seconds) == ("slow_rank", 4)
    assert finding.text.startswith(f"step 1: trainer rank {slow} was slow in collect: 6.00 s")


def test_work_of_a_driver_that_is_a_rank_is_no_gap(tmp_path: Path) -> None:
    ids = {"role": "trainer", "rank": 0}
    driver = [span("stage", "collect", 0, 2, **ids), span("stage", "save", 2, 6, **ids)]
    driver += [span("stage", "update_actor", 6, 8, **ids), span("step", "step", 0, 8, **ids)]
    ids = {"role": "trainer", "rank": 1}
    other = [span("stage", "collect", 0, 2, **ids), span("stage", "update_actor", 6, 8, **ids)]
    run = figures(timeline(tmp_path / "run", n1=driver, n2=other), 1)
    assert (run.details[0].gaps, run.findings) == ([], [])
    assert {part.stage: part.held_by for part in run.details[0].path}["save"] == "save of trainer rank 0"


LIBRARY = "/v/lib/python3.11/site-packages"


FRAMES = [
    {"function": "<module>", "file": "/w/train.py", "line": 90},
    {"function": "Trainer.fit", "file": "/w/train.py", "line": 50},
    {"function": "wait", "file": "/w/replay_buffer.py", "line": 88},
    {"function": "get", "file": f"{LIBRARY}/ray/_private/worker.py", "line": 2772},
    {"function": "<module>", "file": f"{LIBRARY}/pandas/__init__.py", "line": 3},
    {"function": "Queue.get", "file": "/usr/lib/python3.11/queue.py", "line": 171},
]


RAY, IMPORT, QUEUE, OWN = [0, 1, 2, 3], [0, 1, 4], [0, 1, 5], [0, 1]


def run(folder: Path, *periods: tuple[float, float, int], stacks: Any = (RAY, IMPORT, QUEUE, OWN)) -> Path:
    """Write a run whose step 2, from 10 s to 30 s, has no stage from 12 s to 22 s. Periods are in seconds."""
    lines = [span("timer", "gen", 0, 9, step=1), step(10, 1, rank=0)]
    lines += [span("timer", "gen", 10, 12, step=2), span("timer", "update", 22, 30, step=2), step(30, 2, 10, rank=0)]
    made = timeline(folder, n1=lines)
    in_ms = [(round(start * 1000), round(end * 1000), index) for start, end, index in periods]
    samples = {"kind": "stacks", "unix_ns": START_NS, "frames": FRAMES, "stacks": stacks, "periods": in_ms}
    with (made / "journal" / "n1-10.jsonl").open("a") as file:
        file.write(json.dumps(samples, separators=(",", ":")) + "\n")
    return made


def gap(found: RunFigures) -> Finding:
    return next(finding for finding in found.findings if (finding.kind, finding.step) == ("no_stage", 2))


@pytest.mark.parametrize(
    ("index", "place"),
    [
        (0, "in ray.get at replay_buffer.py:88 wait"),
        (1, "in import pandas at train.py:50 fit"),
        (2, "in queue.get at train.py:50 fit"),
        (3, "at train.py:50 fit"),
    ],
)
def test_a_place_is_the_users_function_and_what_it_calls(tmp_path: Path, index: int, place: str) -> None:
    finding = gap(figures(run(tmp_path / "run", (11, 23, index))))
    assert finding.text == (
        f"step 2: no stage ran for 10.0 s, 50 % of the step, between gen and update: about 10.0 s {place}"
    )


def test_places_share_the_time_without_a_stage_and_the_rest_is_unknown(tmp_path: Path) -> None:
    found = figures(run(tmp_path / "run", (10, 15, 2), (15, 19, 0), (19, 19.1, 3), (19.1, 20.1, 2), (25, 30, 1)), 2)
    finding = gap(found)
    assert finding.text.endswith(
        ": about 4.00 s in queue.get at train.py:50 fit, 4.00 s in ray.get at replay_buffer.py:88 wait, "
        "1.90 s without a sample of its stack"
    )
    assert finding.evidence[:2] == [
        "queue.py:171 get, called by train.py:50 fit, train.py:90 <module>",
        "the longest part: from 2.00 s to 12.0 s after the step's start",
    ]
    row = found.steps[1].no_stage
    assert row is not None
    assert sum(place.seconds for place in row.places) == pytest.approx(row.seconds, rel=0.02)
    shown = found.details[0].no_stage
    assert shown == row
    assert "| in queue.get at train.py:50 fit | 4.00 s |" in markdown.text(found)
    assert "in ray.get at replay_buffer.py:88 wait" in html.page(found)


def test_the_last_sample_of_a_step_is_no_place_of_the_next_step(tmp_path: Path) -> None:
    finding = gap(figures(run(tmp_path / "run", (9, 14, 2))))
    assert finding.text == "step 2: no stage ran for 10.0 s, 50 % of the step, between gen and update"


def test_a_held_lock_has_no_stack_but_the_next_sample(tmp_path: Path) -> None:
    finding = gap(figures(run(tmp_path / "run", (12, 22, -1), (22, 22, 3))))
    assert finding.text.endswith(
        ": about 10.0 s without a sample, because the interpreter's lock was held; then it was at train.py:50 fit"
    )


@pytest.mark.parametrize("stacks", [[], [[77]], [[]]])
def test_damaged_samples_name_no_wrong_place(tmp_path: Path, stacks: list[list[int]]) -> None:
    finding = gap(figures(run(tmp_path / "run", (12, 21, 0), (12, 21, 5), stacks=stacks)))
    assert ".py" not in finding.text
