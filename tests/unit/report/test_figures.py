"""Figures of a run by stage, lane and sample, also from damaged timelines."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.rundir.journal import SpanReader, journals
from tests.support.made_runs import make_run
from tests.support.report_runs import START_NS, write
from tests.support.timelines import SECOND, figures, span, step, timeline


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
        # A timer without a step number belongs to the step that contains it.
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
    # If all later steps are slower, only the first of them is slow; the others are usual.
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


def test_a_step_that_is_less_than_a_second_longer_is_not_slow(tmp_path: Path) -> None:
    steps = [step(number / 10, number, (number - 1) / 10) for number in range(1, 8)] + [step(1.6, 8, 0.7)]
    assert not any(row.slow for row in figures(timeline(tmp_path / "run", n1=steps)).steps)


def test_what_is_cut_off_or_foreign_is_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "torn", torn=True)
    whole, torn = figures(tmp_path / "whole"), figures(tmp_path / "torn")
    assert torn.steps == whole.steps
    assert torn.details == whole.details
    assert len(torn.notes) == len(list((tmp_path / "torn" / "journal").iterdir()))
    # "no json", a list, and a truncated line. A kind of line from a newer autoprof gives no note.
    assert torn.notes[0] == "journal/n1-100.jsonl: 3 lines left out: truncated, or not a span"


@given(st.binary(max_size=400), st.integers(0, 30))
def test_no_content_of_a_file_is_too_much(tmp_path: Path, content: bytes, place: int) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path), "run")
    run = timeline(folder, n1=[span("timer", "gen", 0, 3), step(10), step(20, 2, 10)])
    path = run / "journal" / "n1-10.jsonl"
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[: place % 4], content, b"\n", *lines[place % 4 :]]))
    assert [row.number for row in figures(run).steps] == [1, 2]


@given(st.integers(0, 2000))
def test_a_file_that_was_cut_anywhere_is_read_up_to_there(tmp_path: Path, length: int) -> None:
    steps = [step(10 * number, number) for number in range(1, 9)]
    run = timeline(Path(tempfile.mkdtemp(dir=tmp_path), "run"), n1=steps)
    path = run / "journal" / "n1-10.jsonl"
    content = path.read_bytes()[:length]
    path.write_bytes(content)
    whole = content.count(b"}\n") + content.endswith(b"}")
    reader = SpanReader()
    assert len(list(reader.spans(journals(run)[0]))) == whole
    assert sum(reader.left_out.values()) == (not content.endswith((b"}", b"}\n")) and bool(content))


def test_a_line_without_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprof.rundir.journal._CHUNK_BYTES", 64)
    monkeypatch.setattr("autoprof.rundir.journal._MAX_LINE_BYTES", 500)
    run = timeline(tmp_path / "run", n1=[step(10), step(20, 2, 10)])
    path = run / "journal" / "n1-10.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"kind":"' + b"x" * 5000 + b'"}\n' + second)
    found = figures(run)
    assert [row.number for row in found.steps] == [1, 2]
    assert "journal/n1-10.jsonl: 1 line left out: too long" in found.notes


def test_a_file_that_can_not_be_read_is_said(tmp_path: Path) -> None:
    run = timeline(tmp_path / "run", n1=[step(10)])
    (run / "journal" / "n2-11.jsonl").mkdir()
    os.mkfifo(run / "journal" / "n3-12.jsonl")
    found = figures(run)
    assert [row.number for row in found.steps] == [1]
    said = [note for note in found.notes if "it can't be read: " in note]
    assert [note.split(":")[0] for note in said] == ["journal/n2-11.jsonl", "journal/n3-12.jsonl"]


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
    (note,) = found.notes
    assert note.startswith("no timeline: the run was recorded by an autoprof without timelines, or its folder")


def test_a_step_that_has_no_end_is_as_long_as_its_stages(tmp_path: Path) -> None:
    worker = [span("stage", "update_actor", 12, 19, role="actor", rank=0, step=2)]
    found = figures(timeline(tmp_path / "run", n1=[step(10)], n2=worker), 2)
    assert [row.number for row in found.steps] == [1]
    assert [(each.number, each.seconds) for each in found.details] == [(2, 7)]
    assert "step 2 has no end in the timeline: interrupted, or still running" in found.notes
