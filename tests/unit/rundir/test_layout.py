"""Files in the folder of the runs: the link `latest` and `.gitignore`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from ray._private.runtime_env import packaging

from autoprof.base import files
from autoprof.rundir.layout import RunDir
from tests.support.made_runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Make a run in a folder of runs."""
    run = RunDir(tmp_path / "runs" / "20261124-080000-abcdef")
    run.make(run.control)
    return run


def test_latest_moves_from_run_to_run(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    link = run.path.with_name("latest")
    for name in ("mine", "20261124-080001-abcdef"):
        newer = RunDir(make_run(run.path.parent, name))
        newer.point_latest()
        assert os.readlink(link) == name
    run.point_latest()
    assert os.readlink(link) == run.path.name
    assert sorted(path.name for path in run.path.parent.iterdir() if "latest" in path.name) == ["latest"]
    assert caplog.text == ""


@pytest.mark.parametrize(
    "removed", ["20261123-080000-abcdef", "slurm-12.0-abcdef01", "mpi-abcdef01", "ranks-abcdef01-2"]
)
def test_a_link_to_a_run_that_was_removed_is_replaced(run: RunDir, removed: str) -> None:
    run.path.with_name("latest").symlink_to(removed)
    run.point_latest()
    assert os.readlink(run.path.with_name("latest")) == run.path.name


@pytest.mark.parametrize("target", ["checkpoint", "not-there", "..", ".", "../runs/other", "{0}/other"])
def test_a_link_of_the_user_stays(run: RunDir, target: str, caplog: pytest.LogCaptureFixture) -> None:
    (run.path.parent / "checkpoint").mkdir()
    make_run(run.path.parent, "other")
    link = run.path.with_name("latest")
    link.symlink_to(target.format(run.path.parent))
    run.point_latest()
    run.point_latest()
    assert os.readlink(link) == target.format(run.path.parent)
    assert caplog.text.count("is not a link to a run") == 1


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_file_or_folder_of_the_user_stays(run: RunDir, make: object, caplog: pytest.LogCaptureFixture) -> None:
    assert callable(make)
    link = run.path.with_name("latest")
    make(link)
    before = link.lstat()
    run.point_latest()
    assert link.lstat() == before
    assert "is not a link to a run" in caplog.text


def uploaded(folder: Path) -> list[str]:
    """Return the files of a working directory that Ray uploads."""
    found: list[str] = []
    packaging._dir_travel(folder, [], lambda path: found.append(path.name), include_gitignore=True)
    return sorted(found)


def test_ray_uploads_no_runs(run: RunDir, tmp_path: Path) -> None:
    run.point_latest()
    (run.control / "large").touch()
    (tmp_path / "train.py").touch()
    assert set(uploaded(tmp_path)) - {tmp_path.name, "runs"} == {"train.py"}


def test_the_folder_of_runs_of_an_older_version_is_not_uploaded(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "autoprof_runs", "old"))
    assert "run.json" in uploaded(tmp_path)
    run.make(run.control)
    assert "run.json" not in uploaded(tmp_path)


def test_a_folder_of_the_user_gets_no_gitignore(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    run = RunDir(tmp_path / "own" / "run")
    run.make(run.control)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["run"]


def test_a_gitignore_of_the_user_stays(tmp_path: Path) -> None:
    own = tmp_path / "autoprof_runs" / ".gitignore"
    own.parent.mkdir()
    own.write_text("!*.html")
    run = RunDir(own.with_name("run"))
    run.make(run.control)
    assert own.read_text() == "!*.html"


def test_the_gitignore_is_for_the_group_where_the_runs_are(tmp_path: Path) -> None:
    files.open_to_group(True)
    run = RunDir(tmp_path / "runs" / "run")
    run.make(run.control)
    assert stat.S_IMODE((tmp_path / "runs" / ".gitignore").stat().st_mode) == 0o640
