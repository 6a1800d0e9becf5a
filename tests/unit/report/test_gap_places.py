"""Places of the driver in the times without a stage, from journals that the tests write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoprof.report import html, markdown
from autoprof.report.model import Finding, RunFigures
from tests.support.report_runs import START_NS
from tests.support.timelines import figures, span, step, timeline

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
    found = figures(run(tmp_path / "run", (9, 15, 2), (15, 19, 0), (19, 19.1, 3), (19.1, 20.1, 2), (25, 30, 1)), 2)
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


def test_a_held_lock_has_no_stack_but_the_next_sample(tmp_path: Path) -> None:
    finding = gap(figures(run(tmp_path / "run", (12, 22, -1), (22, 22, 3))))
    assert finding.text.endswith(
        ": about 10.0 s without a sample, because the interpreter's lock was held; then it was at train.py:50 fit"
    )


@pytest.mark.parametrize("stacks", [[], [[77]], [[]]])
def test_damaged_samples_name_no_wrong_place(tmp_path: Path, stacks: list[list[int]]) -> None:
    finding = gap(figures(run(tmp_path / "run", (12, 21, 0), (12, 21, 5), stacks=stacks)))
    assert ".py" not in finding.text
