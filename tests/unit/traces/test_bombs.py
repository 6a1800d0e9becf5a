"""Files that are small and cost much: what is beyond the bounds is left out and said. Counted, not timed."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprof.cli import main
from autoprof.report import build
from autoprof.report import timeline as figures_timeline
from autoprof.rundir import runs
from autoprof.rundir.layout import RunDir
from autoprof.traces import event_rows, reader, rewrite, summary, timeline
from autoprof.traces.reader import Reader
from tests.support.helpers import clean_environment
from tests.support.report_runs import START_NS, write
from tests.support.traces import kineto, process, save

MB = 1 << 20


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many bytes each reading of compressed data gave."""
    read, given = reader.Gunzip.read, list[int]()

    def counting(self: reader.Gunzip, size: int) -> bytes:
        given.append(len(piece := read(self, size)))
        return piece

    monkeypatch.setattr(reader.Gunzip, "read", counting)
    return given


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many bytes each scan went through."""
    scan, given = reader._scan, list[int]()

    def counting(buffer: bytes) -> Any:
        given.append(len(buffer))
        return scan(buffer)

    monkeypatch.setattr(reader, "_scan", counting)
    return given


def whole_then(more: bytes) -> bytes:
    """Return a trace whose last event is invalid."""
    return kineto(process(1, "a", count=5)).rpartition(b"\n  ],")[0] + b",\n" + more


@pytest.mark.fault("200 MB of nested brackets in a trace", "merge and report go on", "the events after them, said")
@pytest.mark.parametrize("bracket", [b"[", b'{"a":', b'{"ph":"X","args":['], ids=["lists", "objects", "arguments"])
def test_brackets_in_brackets(
    tmp_path: Path, unpacked: list[int], bracket: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write(run, steps=2, captured=2)
    path = next(RunDir(run).step(2).glob("*.gz"))
    with gzip.open(path, "wb", 1) as file:
        file.write(whole_then(b""))
        for _ in range(40):
            file.write(bracket * (MB // len(bracket)))
    assert main.main(["merge", str(run), "--step", "2"]) == 0
    deep = "an event has more than 100 nested lists or objects"
    assert f"truncated, merged up to its end: {path.name}: {deep}" in capsys.readouterr().out
    assert main.main(["report", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (capture,) = [each for step in told["details"] for each in step["captures"] if each["file"].endswith(path.name)]
    assert (capture["state"], deep in capture["reason"]) == ("truncated", True)
    assert capture["events"] > 5
    # Each pass over the trace ends where they begin.
    assert sum(unpacked) < 20 * MB


def test_an_event_that_never_ends_is_gone_through_twice(
    tmp_path: Path, scanned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_LIMIT_BYTES", 4 * MB)
    path = save(tmp_path / "x.json", whole_then(b'{"ph":"X","args":[' + b"[]," * (3 * MB)))
    with Reader(path, chunk_bytes=64 << 10, accept_truncated=True) as found:
        assert sum(map(len, found.chunks(event_rows.decode))) > 5
    assert found.cut == "an event has more than 4 MB"
    assert sum(scanned) < 16 * MB


def test_nothing_unpacks_to_hundreds_of_times_its_size(
    tmp_path: Path, unpacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_FREE_BYTES", 4 * MB)
    monkeypatch.setattr(reader, "_MAX_RATIO", 20)
    one = json.dumps(process(1, "a")[4]).encode() + b","
    path = save(tmp_path / "x.json.gz", whole_then(one * (40 * MB // len(one))))
    found = summary.summarize(path)
    assert "it unpacks to more than 20 times its size" in found.cut
    assert found.events > 5
    assert sum(unpacked) < 20 * MB


def test_processes_names_and_descriptions_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_rows, "MAX_NAMES", 50)
    monkeypatch.setattr(event_rows, "_MAX_DEVICES", 50)
    kept: list[event_rows.EventData] = []
    monkeypatch.setattr(summary, "EventData", lambda rows: kept.append(event_rows.EventData(rows)) or kept[0])
    many = [event for number in range(2000) for event in process(number, f"p{number}", count=1)]
    memory = {"Device Type": 1, "Total Allocated": 1, "Total Reserved": 1}
    many += [
        {"ph": "i", "name": "[memory]", "ts": 1.0, "args": {**memory, "Device Id": number}} for number in range(2000)
    ]
    path = save(tmp_path / "x.json.gz", kineto(many))
    found = summary.summarize(path)
    assert found.events == len(many)
    (taken,) = kept
    assert max(map(len, (taken.keys, taken.descriptions, taken.peaks))) <= 101
    monkeypatch.setattr(rewrite, "_MAX_PROCESSES", 50)
    with pytest.raises(reader.TraceError, match="more than 50 processes"):
        rewrite.rewrite(rewrite.Input(path=path, label="x"), 0, 1, lambda piece: None)


def more_lines(run: Path, file: str, line: Callable[[int], dict[str, Any]], count: int) -> None:
    lines = ({"kind": "stage", "role": "actor", "rank": 0} | line(n) for n in range(count))
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    with (run / "journal" / file).open("a") as timeline:
        timeline.write(text)


def at(number: int) -> dict[str, int]:
    return {"start_ns": START_NS + number * 10**6, "end_ns": START_NS + number * 10**6 + 500_000}


@pytest.mark.fault("700,000 names in a timeline", "a report is made, of 1,000 of them", "the others' names, said")
@pytest.mark.parametrize(("kind", "file"), [("stage", "n1-200.jsonl"), ("timer", "n1-100.jsonl")])
def test_names_of_spans_are_counted(tmp_path: Path, kind: str, file: str) -> None:
    write(tmp_path / "run", steps=6, captured=None)
    more_lines(tmp_path / "run", file, lambda n: {"kind": kind, "name": f"n{n}", "step": n % 6 + 1, **at(n * 20)}, 9000)
    figures = build.figures(runs.read(tmp_path / "run"))
    assert len(figures.stages) <= figures_timeline.MAX_DISTINCT["name"] + 2
    assert {"gen", "update_actor", "(other names)"} <= {stage.name for stage in figures.stages}
    assert figures.notes[0].endswith("merged into one name: only the first 1000 names are distinguished")


def test_roles_and_steps_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    write(run, steps=6, captured=None)
    more_lines(run, "n1-200.jsonl", lambda n: {"name": "x", "role": f"r{n}", "step": 2, **at(40_000 + n)}, 2000)
    figures = build.figures(runs.read(run), [2])
    assert len({lane.role for lane in figures.details[0].lanes}) <= figures_timeline.MAX_DISTINCT["role"] + 1
    monkeypatch.setitem(figures_timeline.MAX_DISTINCT, "step", 50)
    more_lines(run, "n9-1.jsonl", lambda n: {"kind": "step", "name": "step", "step": n + 100, **at(n)}, 2000)
    figures = build.figures(runs.read(run))
    assert len(figures.steps) <= 50
    assert any("left out: only the first 50 steps are distinguished" in note for note in figures.notes)


def test_spans_of_a_merged_step_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 100)
    write(tmp_path / "run", steps=2, captured=None)
    assert main.main(["merge", str(tmp_path / "run"), "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert " 100 of them spans of the timeline" in said
    assert "spans of the timeline left out: the step has more than 100" in said


@pytest.mark.fault("a line of 1 GB in a timeline", "doctor, report and merge leave it out", "the line, said")
@pytest.mark.parametrize("command", ["doctor", "report", "merge"])
def test_a_line_takes_no_memory(tmp_path: Path, command: str) -> None:
    """In 1 GB of address space, of which the interpreter and its libraries take half."""
    run = tmp_path / "run"
    write(run, steps=2, captured=None)
    os.truncate(run / "journal" / "n1-200.jsonl", 1024 * MB)
    done = subprocess.run(
        [sys.executable, "-m", "autoprof", command, str(run), *(["--step", "2"] if command == "merge" else [])],
        env=clean_environment(OMP_NUM_THREADS="1"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    # Doctor and merge decode only the lines that they need.
    assert ("journal/n1-200.jsonl: 1 line left out: too long" in done.stdout) == (command == "report")
