"""Runs are read on first use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autoprof.cli import main
from autoprof.rundir import layout, runs
from autoprof.rundir.records import RunFile
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
