"""Names that match no run: the message lists the contents of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprof.rundir import runs
from autoprof.rundir.runs import NotFound
from tests.support.made_runs import make_run


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
