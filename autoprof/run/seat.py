"""This process's place among the ranks that a launcher has started."""

from __future__ import annotations

from pathlib import Path

from autoprof._boot import command
from autoprof.base import files, interrupts, process
from autoprof.base.originals import os
from autoprof.config.settings import Settings
from autoprof.config.values import GROUP
from autoprof.rundir import ranks
from autoprof.rundir.ranks import Seat


class _State(process.State):
    """The place; None in processes that no launcher has started, or that belong to a rank."""

    def begin(self) -> None:
        self.own: Seat | None = None

    def in_child(self) -> None:
        self.own = None


_state = _State()


def own_seat() -> Seat | None:
    """Return the place of this process, if it has one."""
    return _state.own


def join_launch(settings: Settings) -> Seat | None:
    """Take the place of this process in the run of its launch, which the boot has found; None where there is none."""
    name, _, program = os.environ.get(command.LAUNCH, "").partition(":")
    rank = os.environ.get(command.LAUNCH_RANK, "").partition("/")[0]
    if not program or not rank.isdecimal():
        return None
    named = os.environ.get(command.LAUNCH_RUN_ID, "")
    return take_seat(settings, "" if named == name else named, name, program, int(rank))


def take_seat(settings: Settings, run_id: str, name: str, program: str, rank: int) -> Seat | None:
    """Take a place, as in `ranks.join`; None where the folder of the runs can't be written."""
    again = name.startswith(command.LAUNCH_AGAIN)
    files.open_to_group(settings.access == GROUP)
    try:
        _state.own = ranks.join(Path(settings.dir), run_id, name, program, rank, again=again)
    except OSError as error:  # said by the first hook that is applied
        interrupts.pass_on(error)
        _state.own = None
    return _state.own
