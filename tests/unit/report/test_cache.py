"""The index of a large timeline: what is read with it, and when it is made anew. Counts, not times."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.cli.main import main
from autoprof.report import build
from autoprof.report.figures import timeline
from autoprof.rundir import journal, runs
from tests.support import large_timelines, report_runs

STEPS, SAMPLES = 40, 256


@pytest.fixture(autouse=True)
def _worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "WORTH_BYTES", 1 << 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A timeline of some 7 MB."""
    return large_timelines.write(tmp_path_factory.mktemp("runs") / "run", STEPS, SAMPLES, workers=1)


@pytest.fixture
def run(made: Path) -> Path:
    """The same without an index."""
    (made / "timeline" / "index.msgpack").unlink(missing_ok=True)
    return made


@pytest.fixture
def decoded(mocker: Any) -> Any:
    """Counts the batches of 128 lines that are decoded."""
    return mocker.patch.object(journal, "_decode_batch", side_effect=journal._decode_batch)


def figures(run: Path, *steps: int) -> bytes:
    return msgspec.json.encode(build.figures(runs.read(run), list(steps)))


def test_a_step_is_the_same_with_the_index_and_reads_little(run: Path, decoded: Any) -> None:
    first = figures(run, 30)
    whole = sum(path.read_bytes().count(b"\n") for path in run.glob("timeline/*.jsonl")) / 128
    assert whole <= decoded.call_count < 1.5 * whole
    decoded.reset_mock()
    assert figures(run, 30) == first
    assert 0 < decoded.call_count < 0.1 * whole


def test_a_file_that_has_grown_makes_the_index_void(tmp_path: Path) -> None:
    run = large_timelines.write(tmp_path / "run", 4, SAMPLES * 4, workers=0)
    before = figures(run, 3)
    (made_at,) = (path.stat().st_mtime_ns for path in run.glob("timeline/index.msgpack"))
    other = large_timelines.write(tmp_path / "other", 5, 1, workers=0) / "timeline" / "n1-100.jsonl"
    with (run / "timeline" / "n1-100.jsonl").open("ab") as file:
        file.write(b"".join(line for line in other.open("rb") if b'"step":5,' in line))
    assert figures(run, 3) != before
    assert (run / "timeline" / "index.msgpack").stat().st_mtime_ns > made_at
    assert [row.number for row in build.figures(runs.read(run)).steps] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("content", [b"", b"\x93no index", b"{}", os.urandom(1000)], ids=range(4))
def test_an_index_that_is_damaged_is_made_anew(run: Path, content: bytes) -> None:
    first = figures(run, 30)
    path = run / "timeline" / "index.msgpack"
    whole = path.read_bytes()
    path.write_bytes(content)
    assert figures(run, 30) == first
    assert path.read_bytes() == whole


def test_doctor_decodes_the_lines_of_steps_and_the_ends_of_files(
    run: Path, decoded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(run)]) == 0
    assert f"steps executed: 1-{STEPS}\n" in capsys.readouterr().out
    assert decoded.call_count == 0


def test_ls_reads_no_timeline(run: Path, mocker: Any) -> None:
    read = mocker.patch("autoprof.rundir.journal._groups")
    assert main(["ls", str(run)]) == 0
    assert read.call_count == 0


def test_a_resumed_run_is_the_same_with_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "WORTH_BYTES", 1000)
    run = tmp_path / "run"
    report_runs.write(run, 6, torn=True, slow_tool=4)
    again = report_runs.Script({}, seed=8)
    again._now = 1000.0
    again._step = 3
    for _ in range(3):
        again.step()
    for (host, pid), lines in again.lines.items():
        text = "".join(msgspec.json.encode(line).decode() + "\n" for _, line in lines)
        (run / "timeline" / f"{host}-{pid}.2.jsonl").write_text(text)
    first = figures(run)
    assert (run / "timeline" / "index.msgpack").exists()
    assert figures(run) == first
