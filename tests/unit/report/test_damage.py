"""Reports of runs with damaged files: invalid figures are left out, and invalid text is shown as text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.cli import report
from autoprof.report import build, html, markdown
from autoprof.report.build import ReportRequest
from autoprof.report.model import RunFigures
from autoprof.rundir import runs
from autoprof.traces import timeline
from tests.support.report_runs import START_NS, write

HUGE = 10**400
SURROGATE = "a\udcff"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run", steps=4, captured=2)
    return tmp_path / "run"


def told(run: Path, capsys: pytest.CaptureFixture[str]) -> RunFigures:
    """The figures, after all forms of them were made."""
    figures = build.report_figures(ReportRequest(run=runs.read(run)))
    assert msgspec.json.decode(msgspec.json.encode(figures), type=RunFigures) == figures
    html.page(figures).encode()
    markdown.text(figures).encode()
    report.show(figures)
    capsys.readouterr().out.encode()
    return figures


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "values",
    [
        *({"started": value} for value in (float("nan"), float("inf"), 1e300, HUGE, -1e300, "soon", [])),
        {"command": SURROGATE, "hosts": [SURROGATE, 5], "versions": {SURROGATE: SURROGATE}, "state": SURROGATE},
        {"versions": [1], "hosts": "n1", "state": {}},
    ],
    ids=str,
)
def test_what_is_said_of_the_run(run: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]) -> None:
    change(run / "run.json", **values)
    assert len(told(run, capsys).steps) == 4


@pytest.mark.parametrize(
    "values",
    [
        {"rank": HUGE, "replica": -HUGE, "pid": 10**30},
        dict.fromkeys(("stage", "reason", "state", "tool", "host", "part"), SURROGATE),
        *(
            {"clock": clock}
            for clock in ([], {"start": 5}, {"start": {"unix_ns": HUGE}, "stop": {"unix_ns": 10 * HUGE}})
        ),
        {"clock": {"start": {"unix_ns": float("inf")}, "stop": {"unix_ns": float("nan")}}},
        {"clock": {"start": {"unix_ns": START_NS}, "stop": {"unix_ns": 5}}},
    ],
    ids=lambda values: str(values)[:40],
)
@pytest.mark.parametrize("timeline", [True, False])
def test_what_is_said_of_captures(
    run: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], timeline: bool
) -> None:
    for meta in run.glob("global_step_*/*.meta.json"):
        change(meta, **values)
    if not timeline:
        for file in run.glob("journal/*"):
            file.unlink()
    figures = told(run, capsys)
    assert len(figures.details[0].captures) == 4
    assert all(step.seconds >= 0 for step in figures.details)


SPAN = {
    "kind": "stage",
    "name": "x",
    "step": 2,
    "role": "rollout",
    "rank": 0,
    "start_ns": START_NS + 10**9,
    "end_ns": START_NS + 2 * 10**9,
    "ids": {"replica": 9, "sample": "p", "rollout": 1},
    "counts": {"prompt_tokens": 5, "response_tokens": 5},
}


KINDS = ("step", "stage", "timer", "sample", "turn", "tool", "reward", "request", "window")


@pytest.mark.parametrize(
    "values",
    [
        {"end_ns": HUGE},
        {"end_ns": START_NS + 10**9},
        {"step": HUGE},
        {"step": -HUGE},
        {"rank": HUGE},
        {"ids": {"replica": HUGE, "sample": HUGE, "rollout": HUGE}},
        *({"counts": {"prompt_tokens": count, "response_tokens": count}} for count in (HUGE, 1e308, -1e308, 5e-324)),
    ],
    ids=lambda values: str(values)[:40],
)
def test_what_spans_say(run: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]) -> None:
    for number, kind in enumerate(KINDS):
        content = json.dumps(SPAN | {"kind": kind} | values) + "\n"
        (run / "journal" / f"n1-99{number}.jsonl").write_text(content * 3)
    figures = told(run, capsys)
    assert [row.number for row in figures.steps] == [1, 2, 3, 4]
    assert all(0 <= (row.response_tokens or 0) < 10**6 for row in figures.steps)


@pytest.mark.parametrize(
    "values",
    [{"offset_ns": HUGE}, {"error_ns": HUGE}, {"unix_ns": HUGE}, {"offset_ns": 2**63}, {"host": 5}],
    ids=lambda values: str(values)[:40],
)
def test_what_clocks_say(run: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]) -> None:
    (path,) = run.glob("clocks/*")
    change(path, **values)
    notes = [note for note in told(run, capsys).notes if "clock" in note]
    assert notes == ["the clock of n2 was not measured; its own setting is used"]


def test_names_of_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lines,) = run.glob("journal/n1-200.jsonl")
    odd = [b"weird", b"-", b"a-\xc2\xb2", b"\xff\xfe-7", b"a b-<i>-9"]
    for name in odd:
        Path(os.fsdecode(os.fsencode(lines.parent) + b"/" + name + b".jsonl")).write_bytes(lines.read_bytes())
    labels = [lane.label for lane in told(run, capsys).details[0].lanes if lane.role == "actor"]
    assert len(set(labels)) == len(labels) == 8 + len(odd)
    assert "" not in labels


@pytest.mark.parametrize("folder", ["journal", "clocks"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file(
    run: Path, capsys: pytest.CaptureFixture[str], folder: str, make: Callable[[Path], None]
) -> None:
    """A FIFO in a run does not block the reader."""
    make(run / folder / "n1-77.jsonl")
    assert len(told(run, capsys).steps) == 4
    # `autoprof merge` reads them, too.
    assert len(timeline.spans_of_step(run, 2)) == 15
