"""Runs are read on first use. For a name that matches none, the message lists the contents of the folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.base import identity
from autoprof.base.identity import HOST
from autoprof.cli import main
from autoprof.rundir import layout, processes, runs
from autoprof.rundir.records import Moment, ProcessLine, RunFile
from autoprof.rundir.runs import NotFound
from tests.support.made_runs import make_run

NAMES = ("20261120-101010-aaaaaa", "20261120-111111-bbbbbb")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the decoded files."""
    names: set[str] = set()
    fields = layout.fields

    def noting(path: str | Path, *more: Any) -> dict[str, Any]:
        names.add(os.path.basename(path))
        return fields(path, *more)

    monkeypatch.setattr(layout, "fields", noting)
    return names


def test_a_list_of_runs_reads_no_capture(tmp_path: Path, read: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        make_run(tmp_path, name)
    assert main.main(["ls", "--dir", str(tmp_path)]) == 0
    assert "3         2.0 kB" in " ".join(capsys.readouterr().out.splitlines()[1:])
    assert read == {"run.json"}
    assert main.main(["ls", NAMES[0], "--dir", str(tmp_path)]) == 0
    assert "actor.a.rank0.h.pid1.meta.json" in read


def test_the_beginning_of_an_id_finds_a_run_without_reading_the_others(tmp_path: Path, read: set[str]) -> None:
    for name in NAMES:
        make_run(tmp_path, name)
    assert runs.find(tmp_path, "20261120-11").id == NAMES[1]
    assert read == set()


def test_a_trace_that_is_gone_by_now_is_named(tmp_path: Path) -> None:
    run = runs.read(make_run(tmp_path, NAMES[0]))
    (trace,) = tmp_path.glob("*/*/*.gz")
    assert run.captures[0].name == "actor.a.rank0.h.pid1"
    trace.unlink()
    assert run.bytes == 0
    assert run.left_out == [f"{trace.name}: it can't be read: No such file or directory"]


def test_a_file_that_is_whole_is_read_at_once(tmp_path: Path) -> None:
    """The fast path and the check of each field return the same fields."""
    content = b'{"id": "x", "pid": 5, "started": 5.5, "hosts": ["n1"], "new": {"a": [1]}}'
    (tmp_path / "run.json").write_bytes(content)
    slow = layout.fields(tmp_path / "run.json", RunFile)
    whole = content.replace(
        b'"hosts"',
        b'"command": "", "cwd": "", "host": "", "ticks": 0, "python": "", '
        b'"autoprof": "", "settings": {}, "versions": {}, "recipes": [], "state": "", "hosts"',
    )
    (tmp_path / "run.json").write_bytes(whole)
    quick = layout.fields(tmp_path / "run.json", RunFile)
    assert layout._valid_fields(whole, RunFile) == quick
    assert slow.items() <= {**quick}.items()


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    for number in range(3):
        make_run(tmp_path / "runs", f"20261120-10101{number}-aaaaa{number}")
    (tmp_path / "pictures").mkdir()
    for name in ("a.png", "b.png", "notes"):
        (tmp_path / "pictures" / name).touch()
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "x.pt.trace.json.gz").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".gitignore").touch()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs", "{0}/runs is not a run: it has no run.json; it holds 3 runs: 20261120-101010-aaaaa0, "),
        ("runs", "; use --dir {0}/runs"),
        ("", "; its folder runs holds 3 runs: 20261120-101010-aaaaa0, "),
        ("pictures", "it has no run.json; it has 2 PNG files, 1 file"),
        ("pictures/a.png", "is not a run but a file; a run is a folder with a run.json"),
        ("traces", "it has 1 JSON.GZ file; autoprof merge {0}/traces takes traces without a run"),
        ("empty", "it has no run.json; it is empty"),
        ("runs/20261120-101010-aaaaa0/global_step_000002", "give {0}/runs/20261120-101010-aaaaa0 --step 2"),
        (
            "runs/20261120-101010-aaaaa0/run.json",
            "is not a run but a part of one; give {0}/runs/20261120-101010-aaaaa0",
        ),
    ],
)
def test_what_is_no_run_is_described(parent: Path, tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(NotFound) as raised:
        runs.find(parent, str(tmp_path / name))
    assert said.format(tmp_path) in str(raised.value)


def test_an_id_that_is_near_is_named(parent: Path) -> None:
    with pytest.raises(NotFound, match="did you mean '20261120-101011-aaaaa1'"):
        runs.find(parent, "aaaaa1")
    with pytest.raises(NotFound, match=r"did you mean '20261120-10101[0-2]-aaaaa[0-2]'"):
        runs.find(parent, "20261119-101012-aaaaa2")


def test_the_last_run_is_found_without_a_link(parent: Path) -> None:
    assert runs.find(parent, "latest").id == "20261120-101012-aaaaa2"


def test_a_step_that_is_near_is_named(parent: Path) -> None:
    assert runs.no_step(9, [2, 4, 5, 6, 7, 30]) == "there are 2,4-7,30; the nearest is 7"
    with pytest.raises(NotFound, match=r"has no step 9; there are 2$"):
        runs.step(runs.find(parent, "latest"), 9)


def test_a_living_process_has_the_title_that_it_has_now(tmp_path: Path) -> None:
    command = ["bash", "-c", "exec -a ray::Scorer.score cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        ticks = identity.start_ticks(process.pid) or 0
        line = ProcessLine(host=HOST, pid=process.pid, clock=Moment(), version="0", process="ray::IDLE", ticks=ticks)
        (tmp_path / "journal").mkdir()
        (tmp_path / "journal" / f"{HOST}-{process.pid}.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert [state.process for state in processes.read(tmp_path)] == ["ray::Scorer.score"]
    assert [state.process for state in processes.read(tmp_path)] == ["ray::IDLE"]
