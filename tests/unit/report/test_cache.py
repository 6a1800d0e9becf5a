"""The cache of a large run: what is read with it, and when it is made anew. Counts, not times."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.cli.main import main
from autoprof.report import build, details
from autoprof.rundir import journal, layout, processes, runs
from tests.support import large_timelines, report_runs

STEPS, SAMPLES = 40, 256


@pytest.fixture(autouse=True)
def _worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "WORTH_BYTES", 1 << 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A timeline of some 7 MB."""
    return large_timelines.write(tmp_path_factory.mktemp("runs") / "run", STEPS, SAMPLES, workers=1)


@pytest.fixture
def run(made: Path) -> Path:
    """The same without a cache."""
    (made / ".cache.msgpack").unlink(missing_ok=True)
    return made


@pytest.fixture
def decoded(mocker: Any) -> Any:
    """Counts the batches of 128 lines that are decoded."""
    return mocker.patch.object(journal, "_decode_batch", side_effect=journal._decode_batch)


def figures(run: Path, *steps: int) -> bytes:
    return msgspec.json.encode(build.figures(runs.read(run), list(steps)))


def test_a_step_is_the_same_with_the_cache_and_reads_little(run: Path, decoded: Any) -> None:
    first = figures(run, 30)
    whole = sum(path.read_bytes().count(b"\n") for path in run.glob("journal/*.jsonl")) / 128
    assert whole <= decoded.call_count < 1.5 * whole
    decoded.reset_mock()
    assert figures(run, 30) == first
    assert 0 < decoded.call_count < 0.1 * whole


def test_a_file_that_has_grown_makes_the_cache_void(tmp_path: Path) -> None:
    run = large_timelines.write(tmp_path / "run", 4, SAMPLES * 4, workers=0)
    before = figures(run, 3)
    (made_at,) = (path.stat().st_mtime_ns for path in run.glob(".cache.msgpack"))
    other = large_timelines.write(tmp_path / "other", 5, 1, workers=0) / "journal" / "n1-100.jsonl"
    with (run / "journal" / "n1-100.jsonl").open("ab") as file:
        file.write(b"".join(line for line in other.open("rb") if b'"step":5,' in line))
    assert figures(run, 3) != before
    assert (run / ".cache.msgpack").stat().st_mtime_ns > made_at
    assert [row.number for row in build.figures(runs.read(run)).steps] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("content", [b"", b"\x93no cache", b"{}", os.urandom(1000)], ids=range(4))
def test_a_cache_that_is_damaged_is_made_anew(run: Path, content: bytes) -> None:
    first = figures(run, 30)
    path = run / ".cache.msgpack"
    whole = path.read_bytes()
    path.write_bytes(content)
    assert figures(run, 30) == first
    assert path.read_bytes() == whole


def test_doctor_decodes_the_lines_of_steps_and_the_ends_of_files(
    run: Path, decoded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(run)]) == 0
    assert f"steps executed: 1-{STEPS}\n" in capsys.readouterr().out
    # Each of the parts at the end of a file is one batch.
    assert decoded.call_count <= len(processes._TAIL_BYTES) * len(list(run.glob("journal/*.jsonl")))


def test_ls_reads_no_timeline(run: Path, mocker: Any) -> None:
    read = mocker.patch("autoprof.rundir.journal._groups")
    assert main(["ls", str(run)]) == 0
    assert read.call_count == 0


def test_a_resumed_run_is_the_same_with_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "WORTH_BYTES", 1000)
    run = tmp_path / "run"
    report_runs.write(run, 6, torn=True, slow_tool=4)
    again = report_runs.Script({}, seed=8)
    again._now = 1000.0
    again._step = 3
    for _ in range(3):
        again.step()
    for (host, pid), lines in again.lines.items():
        text = "".join(msgspec.json.encode(line).decode() + "\n" for _, line in lines)
        (run / "journal" / f"{host}-{pid}.2.jsonl").write_text(text)
    first = figures(run)
    assert (run / ".cache.msgpack").exists()
    assert figures(run) == first


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with captures, of which everything is cached."""
    monkeypatch.setattr(layout, "WORTH_BYTES", 1000)
    monkeypatch.setattr(runs, "_MANY_CAPTURES", 1)
    monkeypatch.setattr(runs, "_SETTLED_NS", 0)
    report_runs.write(tmp_path / "run", 6, slow_tool=4, captured=3)
    return tmp_path / "run"


COMMANDS = (
    ["ls"],
    ["doctor", "--all"],
    ["report"],
    ["report", "--md", "-"],
    ["report", "--json"],
    ["report", "--step", "3"],
)


def outputs(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the output of the commands, and the pages."""
    for command in COMMANDS:
        main([command[0], str(run), *command[1:]])
    return [capsys.readouterr().out, *(path.read_text() for path in sorted(run.glob("*.html")))]


def test_commands_print_the_same_with_and_without_the_cache(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = outputs(large, capsys)
    parts = msgspec.msgpack.decode((large / ".cache.msgpack").read_bytes())["parts"]
    assert parts.keys() == {"captures", "processes", "report", "timeline"}
    assert outputs(large, capsys) == first
    (large / ".cache.msgpack").unlink()
    assert outputs(large, capsys) == first


def test_a_finished_run_is_read_from_the_cache(
    large: Path, mocker: Any, decoded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(large, capsys)
    folded, metas = mocker.spy(processes, "fold"), mocker.spy(layout, "_read")
    decoded.reset_mock()
    for command in (["ls"], ["doctor"], ["report"]):
        main([*command, str(large)])
    assert (folded.call_count, decoded.call_count) == (0, 0)
    assert {Path(call.args[0]).name for call in metas.call_args_list} <= {"run.json", "collected.json"}


@pytest.mark.parametrize("changed", ["journal/*-*.jsonl", "global_step_000003/*.meta.json"])
def test_what_has_changed_is_read_again(large: Path, changed: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs(large, capsys)
    path = sorted(large.glob(changed))[0]
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        path.write_bytes(content + content.splitlines(keepends=True)[-1])
    else:
        part = path.with_suffix(".new")
        part.write_bytes(content.replace(b'"complete"', b'"truncated"'))
        part.replace(path)
    with_cache = outputs(large, capsys)
    (large / ".cache.msgpack").unlink()
    assert outputs(large, capsys) == with_cache


def test_a_damaged_meta_file_is_named_by_each_command(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (large / "global_step_000003" / "merged.meta.json").write_text('{"state": 3}')
    for _ in range(2):
        assert main(["ls", str(large)]) == 0
        assert "merged.meta.json: state is left out" in capsys.readouterr().err


def test_the_captures_of_a_small_run_are_read_once(
    tmp_path: Path, mocker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    report_runs.write(run, captured=5, slow_rank=7)
    monkeypatch.setattr(layout, "WORTH_BYTES", 1 << 30)
    build.figures(runs.read(run))
    assert not (run / ".cache.msgpack").exists()
    monkeypatch.setattr(build, "WORTH_BYTES_OF_TRACES", 1)
    first = figures(run)
    summed, read = mocker.spy(details, "summarize"), mocker.spy(build, "RunTimeline")
    assert figures(run) == first
    of_step = build.figures(runs.read(run), [5])
    assert [len(step.captures) > 0 for step in of_step.details] == [True]
    assert (summed.call_count, read.call_count) == (0, 0)
    assert build.figures(runs.read(run), [3]).findings == of_step.findings
    assert (summed.call_count, read.call_count) == (0, 1)
