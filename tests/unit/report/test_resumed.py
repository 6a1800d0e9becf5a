"""Runs that were killed and resumed, and steps that have no end: of a step that ran again the last run is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autoprof.report.model import StepFigures
from autoprof.traces import timeline as timeline_reader
from tests.support.report_runs import write
from tests.support.timelines import figures, span, step, timeline

Spans = list[dict[str, Any]]


def driver(number: int, at: float, whole: bool = True) -> Spans:
    found = [span("timer", "gen", at, at + 5, step=number)]
    return [*found, step(at + 10, number, at, rank=0)] if whole else found


def agents(number: int, at: float) -> Spans:
    found = []
    for answer in range(10):
        ids = {"role": "agent_loop", "ids": {"sample": "p", "rollout": answer}, "step": number}
        counts = {"prompt_tokens": 10, "response_tokens": 100}
        found += [
            span("turn", "generate", at, at + 4, counts=counts, **ids),
            span("sample", "loop", at, at + 4.5, **ids),
        ]
    return found


def actor(rank: int) -> Callable[[int, float], Spans]:
    return lambda number, at: [
        span("stage", "update_actor", at + 6, at + 9 + rank, role="actor", rank=rank, step=number)
    ]


NAMES = ("driver", "agents", "actor0", "actor1")


def attempt(*steps: tuple[int, float], killed: tuple[int, float] | None = None) -> list[Spans]:
    """Return the lines of the driver, the agent loop and two actors of one attempt. `steps` are numbers and starts."""
    whole = [[each for number, at in steps for each in of(number, at)] for of in (driver, agents, actor(0), actor(1))]
    if killed is not None:
        number, at = killed
        whole[0] += driver(number, at, whole=False)
        whole[1] += agents(number, at)
    return whole


def alone(details: StepFigures) -> StepFigures:
    """Return the details without file names."""
    samples = details.samples
    assert samples is not None
    samples = msgspec.structs.replace(
        samples, longest=[msgspec.structs.replace(each, file="") for each in samples.longest]
    )
    lanes = [msgspec.structs.replace(lane, host="", pid=0, file="", label=lane.role) for lane in details.lanes]
    skews = [
        msgspec.structs.replace(
            skew, slowest="", rows=[msgspec.structs.replace(row, label="", file="") for row in skew.rows]
        )
        for skew in details.skews
    ]
    path = [msgspec.structs.replace(part, held_by=None) for part in details.path]
    found = [msgspec.structs.replace(finding, file=None) for finding in details.findings]
    return msgspec.structs.replace(details, samples=samples, lanes=lanes, skews=skews, path=path, findings=found)


def test_steps_that_ran_again_are_reported_as_they_ran_last(tmp_path: Path) -> None:
    first = attempt((1, 0), (2, 10), (3, 20), killed=(4, 30))
    last = ((2, 100), (3, 110), (4, 120))
    again = {f"{name}2": lines for name, lines in zip(NAMES, attempt(*last), strict=True)}
    run = timeline(tmp_path / "run", **dict(zip(NAMES, first, strict=True)), **again)
    found = figures(run, 2, 3, 4)
    expected = figures(timeline(tmp_path / "alone", **dict(zip(NAMES, attempt(*last), strict=True))), 2, 3, 4)
    assert [(row.number, row.samples, row.response_tokens) for row in found.steps] == [
        (number, 10, 1000) for number in (1, 2, 3, 4)
    ]
    assert found.steps[1:] == [msgspec.structs.replace(row, usual_s=10) for row in expected.steps]
    assert [alone(details) for details in found.details] == [alone(details) for details in expected.details]
    assert "the run was started 2 times; for a step that ran again, its last run is shown" in found.notes


def test_a_trainer_that_trains_again_repeats_its_steps(tmp_path: Path) -> None:
    both = [a + b for a, b in zip(attempt((1, 0), (2, 10)), attempt((1, 50), (2, 60)), strict=True)]
    found = figures(timeline(tmp_path / "run", **dict(zip(NAMES, both, strict=True))), 2)
    assert [(row.samples, row.response_tokens) for row in found.steps] == [(10, 1000)] * 2
    assert found.details[0].samples is not None
    assert found.details[0].samples.count == 10
    assert [skew.rows[0].calls for skew in found.details[0].skews] == [1]


def test_what_a_later_attempt_did_not_end_is_told_as_it_ran_whole(tmp_path: Path) -> None:
    parts = dict(zip("abcd", attempt((1, 0), (2, 10)), strict=True))
    later = dict(zip("efgh", attempt(killed=(2, 100)), strict=True))
    found = figures(timeline(tmp_path / "run", **parts, **later), 2)
    assert [(row.number, row.seconds, row.samples) for row in found.steps] == [(1, 10, 10), (2, 10, 10)]


def test_a_step_that_was_cut_off_twice_is_as_long_as_the_last_time(tmp_path: Path) -> None:
    parts = dict(zip("abcd", attempt((1, 0), killed=(2, 10)), strict=True))
    later = dict(zip("efgh", attempt(killed=(2, 5000)), strict=True))
    (details,) = figures(timeline(tmp_path / "run", **parts, **later), 2).details
    assert (details.seconds, details.stages) == (5, {"gen": 5, "other": 0})
    assert details.samples is not None
    assert details.samples.count == 10
    # Work of the driver before it was killed is reported too.
    assert [lane.label for lane in details.lanes] == ["trainer", "agent_loop"]
    assert [part.stage for part in details.path] == ["gen"]


def test_a_captured_step_that_was_cut_off_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "run", steps=6, captured=6)
    for path in (tmp_path / "run" / "journal").iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"kind":"step","name":"step","step":6' not in line))
    found = figures(tmp_path / "run")
    assert [row.number for row in found.steps] == [1, 2, 3, 4, 5]
    assert [(details.number, len(details.captures)) for details in found.details] == [(6, 4)]


def test_many_steps_without_an_end_are_one_note(tmp_path: Path) -> None:
    found = [each for number in range(1, 200) for each in actor(0)(number, 10 * number)]
    notes = figures(timeline(tmp_path / "run", n1=found), 5).notes
    assert (
        "steps 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 189 more have no end in the timeline: interrupted, or still running"
        in notes
    )


def test_a_merged_step_that_ran_again_is_the_last_one(tmp_path: Path) -> None:
    parts = dict(zip("abcd", attempt((1, 0), (2, 10)), strict=True))
    between = [span("request", "generate", 30, 40, role="rollout", step=None)]
    later = dict(zip("efgh", attempt((2, 100)), strict=True))
    run = timeline(tmp_path / "run", **parts, between=between, **later)
    assert {process.host for process in timeline_reader.spans_of_step(run, 2)} == set("efgh")
