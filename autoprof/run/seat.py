"""Place of this process among the ranks that a launcher started."""

from __future__ import annotations

from pathlib import Path

from autoprof._boot import launch
from autoprof.base import files, process, seam
from autoprof.base.originals import os
from autoprof.config.settings import Settings
from autoprof.config.values import GROUP
from autoprof.rundir import ranks
from autoprof.rundir.ranks import Seat


class _SeatState(process.State):
    """The place; None in processes that no launcher started, and in children of a rank."""

    def begin(self) -> None:
        self.own: Seat | None = None

    def in_child(self) -> None:
        self.own = None


_state = _SeatState()


def own_seat() -> Seat | None:
    """Return the place of this process, or None."""
    return _state.own


def join_launch(settings: Settings) -> Seat | None:
    """Take the place of this process in the run of its launch, which the boot has detected. None without a launch."""
    name, _, program = os.environ.get(launch.LAUNCH, "").partition(":")
    rank = os.environ.get(launch.LAUNCH_RANK, "").partition("/")[0]
    if not program or not rank.isdecimal():
        return None
    run_id = os.environ.get(launch.LAUNCH_RUN_ID, "")
    return take_seat(settings, "" if run_id == name else run_id, name, program, int(rank))


def take_seat(settings: Settings, run_id: str, name: str, program: str, rank: int) -> Seat | None:
    """Take a place with `ranks.join`. Return None if the folder of the runs can't be written."""
    again = name.startswith(launch.LAUNCH_AGAIN)
    files.open_to_group(settings.access == GROUP)
    try:
        _state.own = ranks.join(Path(settings.dir), run_id, name, program, rank, again=again)
    except OSError as error:  # the first applied hook reports it
        seam.pass_on(error)
        _state.own = None
    return _state.own
