"""Places of ranks in the directory of their run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoprof.base import identity, originals
from autoprof.rundir import ranks
from autoprof.rundir.ranks import Seat
from autoprof.rundir.records import RankFile, RunFile
from autoprof.rundir.runs import state

HOUR = 3600


def leads(seat: Seat) -> bool:
    """Return True if this rank joined first."""
    return seat.first == seat._own


def join(
    runs: Path, rank: int, program: str, *, run_id: str = "", launch: str = "slurm-1.0-ab", again: bool = False
) -> Seat:
    return ranks.join(runs, run_id, launch, program, rank, name_may_repeat=again)


def test_the_first_to_join_leads_and_the_last_to_leave_ends_the_run(tmp_path: Path) -> None:
    one, zero = join(tmp_path, 1, "b"), join(tmp_path, 0, "a")
    assert one.run_id == zero.run_id == "slurm-1.0-ab"
    assert (leads(one), leads(zero)) == (True, False)
    assert zero.first.program == "b"
    assert [one.leave(""), zero.leave("")] == [False, True]


def test_of_two_that_leave_at_once_one_ends_the_run(tmp_path: Path) -> None:
    one, zero = join(tmp_path, 1, "b"), join(tmp_path, 0, "a")
    for rank in "01":
        (tmp_path / "slurm-1.0-ab" / "ranks" / "slurm-1.0-ab" / f"{rank}.ended").touch()
    assert [one.leave(""), zero.leave("")] == [True, False]


def test_programs_of_a_launch_one_after_the_other_are_runs_of_their_own(tmp_path: Path) -> None:
    first = [join(tmp_path, rank, f"first{rank}") for rank in range(2)]
    # Rank 1 starts the next program while rank 0 is still in this one.
    second = [join(tmp_path, 1, "second1")]
    first[0].leave("")
    second.append(join(tmp_path, 0, "second0"))
    assert {seat.run_id for seat in first} == {"slurm-1.0-ab"}
    assert {seat.run_id for seat in second} == {"slurm-1.0-ab-2"}
    assert [leads(seat) for seat in second] == [True, False]


def test_a_process_of_the_same_program_takes_no_second_place_and_ends_nothing(tmp_path: Path) -> None:
    parent, child = join(tmp_path, 0, "a"), join(tmp_path, 0, "a")
    assert child.run_id == parent.run_id
    assert child.leave("") is False
    assert parent.leave("") is True


def test_attempts_at_a_run_with_a_given_id_stay_in_it(tmp_path: Path) -> None:
    first = join(tmp_path, 0, "a", run_id="mine")
    first.leave("")
    second = join(tmp_path, 0, "b", run_id="mine", launch="slurm-2.0-cd")
    assert second.run_id == "mine"
    assert leads(second)
    assert second.leave("") is True


def test_where_only_an_address_names_the_launch_a_failed_or_old_one_takes_no_more_ranks(tmp_path: Path) -> None:
    failed = join(tmp_path, 0, "a", launch="ranks-ab", again=True)
    failed.leave("ValueError")
    assert failed.errors() == "ValueError"
    later = [join(tmp_path, rank, f"b{rank}", launch="ranks-ab", again=True) for rank in (1, 0)]
    assert {seat.run_id for seat in later} == {"ranks-ab-2"}
    first = tmp_path / "ranks-ab-2" / "ranks" / "ranks-ab-2" / "first"
    old = first.stat().st_mtime - 2 * HOUR
    os.utime(first, (old, old))
    assert join(tmp_path, 2, "c2", launch="ranks-ab", again=True).run_id == "ranks-ab-3"


def test_a_failed_rank_of_a_step_of_slurms_keeps_none_of_the_others_out(tmp_path: Path) -> None:
    join(tmp_path, 0, "a").leave("ValueError")
    assert join(tmp_path, 1, "b").run_id == "slurm-1.0-ab"


def test_a_rank_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    seat = join(tmp_path, 0, "a")
    gone = RankFile(program="b", host=identity.HOST, pid=os.getpid(), ticks=1)
    killed = Seat(tmp_path / "slurm-1.0-ab" / "ranks" / "slurm-1.0-ab", 1, seat.run_id, gone)
    assert killed.take()
    assert seat.leave("") is True


def test_a_rank_of_another_host_is_waited_for(tmp_path: Path) -> None:
    seat = join(tmp_path, 0, "a")
    far = Seat(tmp_path / "slurm-1.0-ab" / "ranks" / "slurm-1.0-ab", 1, seat.run_id, RankFile(program="b", host="far"))
    assert far.take()
    assert seat.leave("") is False
    assert far.leave("") is True


def test_a_run_goes_on_while_one_of_its_ranks_does(tmp_path: Path) -> None:
    join(tmp_path, 0, "a")
    gone = RunFile(
        **dict.fromkeys(("id", "command", "cwd", "python", "autoprof"), ""),
        **{"host": identity.HOST, "pid": os.getpid(), "ticks": 1, "started": 1.0, "settings": {}},
        **{"hosts": [], "versions": {}, "recipes": [], "state": "running"},
    )
    assert state(gone, tmp_path / "slurm-1.0-ab") == "running"
    assert state(gone, tmp_path / "none") == "unfinished"


def test_a_disk_without_hard_links_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(originals.os, "link", refuse)
    seats = [join(tmp_path, 0, "a"), join(tmp_path, 1, "b"), join(tmp_path, 0, "c")]
    assert [seat.run_id for seat in seats] == ["slurm-1.0-ab", "slurm-1.0-ab", "slurm-1.0-ab-2"]
    assert not list(tmp_path.glob("**/*.part"))


def test_a_run_that_nobody_left_anything_in_leaves_no_folder(tmp_path: Path) -> None:
    seat = join(tmp_path, 0, "a")
    seat.leave("")
    seat.clear()
    assert list(tmp_path.iterdir()) == []
