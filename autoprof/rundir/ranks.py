"""Ranks of a run that a launcher has started, each of which leaves a file when it joins and another when it ends.

The files stand for a process that starts the run and outlives it. The first rank that joins describes the run, the last
one that ends completes it. Each disk has files of its own, so nodes that share none each have a complete part of the
run. A program that finds the file of its rank taken is a later one of the same launch, and makes the next run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autoprof.base import files, identity, interrupts
from autoprof.base.originals import os, time
from autoprof.rundir import decoder
from autoprof.rundir.file_names import PART
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import RankFile

FOLDER = "ranks"
ENDED = ".ended"
_FIRST = "first"
_LAST = "last"
# All ranks of a launch join within this time where nothing but an address says that they are of one.
_JOIN_S = 3600.0


class Seat:
    """The place of a program among the ranks of a run.

    Attributes:
        run_id: The run.
        first: The rank that has joined first.
        leads: Whether it is this one.
    """

    def __init__(self, folder: Path, rank: int, run_id: str, own: RankFile) -> None:
        self.run_id = run_id
        self.first = own
        self._folder = folder
        self._rank = str(rank)
        self._own = own
        # Whether this process is the first of its program to join.
        self._holds = False

    @property
    def leads(self) -> bool:
        """Return whether this process describes the run."""
        return self.first == self._own

    def take(self) -> bool:
        """Take the place and find out who was first; return False where another program has it.

        Raises:
            OSError: The files can't be made.
        """
        self._holds = _publish(self._folder / self._rank, self._own)
        if not self._holds:
            there = decoder.read(self._folder / self._rank, RankFile)
            if there.program != self._own.program:
                return False
        # Where all others have ended before this one joins, the run ends again with it.
        (self._folder / _LAST).unlink(missing_ok=True)
        if not _publish(self._folder / _FIRST, self._own):
            self.first = decoder.read(self._folder / _FIRST, RankFile)
        return True

    def leave(self, error: str) -> bool:
        """Note that this rank ends, and return whether it is the last one of those that have joined.

        Args:
            error: The type of the exception that ended it, if one did.

        Raises:
            OSError: The file can't be written.
        """
        if not self._holds:
            return False
        files.write(self._folder / f"{self._rank}{ENDED}", error.encode(errors="replace"))
        return not any(_going_on(self._folder)) and files.claim(self._folder / _LAST)

    def errors(self) -> str:
        """Return the type of the first exception that has ended a rank, or an empty text."""
        for path in sorted(self._folder.glob(f"*{ENDED}")):
            with interrupts.suppress(OSError):
                if said := files.read(path, 1000).decode(errors="replace"):
                    return said
        return ""

    def clear(self) -> None:
        """Remove the folder of a run in which no rank had anything to leave."""
        for path in (*self._folder.glob("*"), self._folder, self._folder.parent, self._folder.parent.parent):
            with interrupts.suppress(OSError):
                path.rmdir() if files.is_folder(path) else path.unlink()


def join(runs: Path, run_id: str, launch: str, program: str, rank: int, *, again: bool) -> Seat:
    """Take the place of this rank in its run, which is made if it is not there yet.

    Args:
        runs: The folder of the runs.
        run_id: The run, where the user has named it; else the launch does.
        launch: The name that all ranks of the launch have for it.
        program: A number that no other program has.
        rank: The rank.
        again: Whether another launch may have the same name, later.

    Raises:
        OSError: The files can't be made.
    """
    pid = os.getpid()
    own = RankFile(
        program=program, host=identity.HOST, pid=pid, ticks=identity.start_ticks(pid) or 0, started=time.time()
    )
    for number in itertools.count(1):
        name = launch if number == 1 else f"{launch}-{number}"
        run = RunDir(runs / (run_id or name))
        folder = run.make(run.path / FOLDER / name)
        if again and _over(folder):
            continue
        seat = Seat(folder, rank, run_id or name, own)
        if seat.take():
            return seat
    raise AssertionError


def going_on(run: Path) -> bool:
    """Return whether a rank of the run is a process of this host that has not ended."""
    folders = [path for path in (run / FOLDER).glob("*") if files.is_folder(path)]
    return any(rank.host == identity.HOST for folder in folders for rank in _going_on(folder))


def _going_on(folder: Path) -> Iterator[RankFile]:
    """Yield the ranks that have not ended, and those of other hosts, of which nothing more is known."""
    names = set(os.listdir(folder))
    for name in names:
        if name.isdecimal() and f"{name}{ENDED}" not in names:
            there = decoder.read(folder / name, RankFile)
            if there.host != identity.HOST or identity.start_ticks(there.pid) == there.ticks:
                yield there


def _over(folder: Path) -> bool:
    """Return whether the launch in a folder can't be one that begins now."""
    try:
        first = (folder / _FIRST).stat().st_mtime
    except OSError as error:
        interrupts.pass_on(error)
        return False
    # By the clock of the disk: hosts' clocks may differ.
    mark = folder / f"now.{os.urandom(4).hex()}{PART}"
    files.write(mark, b"")
    try:
        now = mark.stat().st_mtime
    finally:
        mark.unlink()
    return now - first > _JOIN_S or any(path.stat().st_size for path in folder.glob(f"*{ENDED}"))


def _publish(path: Path, content: RankFile) -> bool:
    """Write a file that appears with its content, if there is none; return False where there is one."""
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}{PART}")
    files.write(part, msgspec.json.encode(content))
    try:
        os.link(part, path)
    except FileExistsError as error:
        interrupts.pass_on(error)
        return False
    except OSError as error:  # a file system without hard links
        interrupts.pass_on(error)
        if not files.claim(path):
            return False
        os.replace(part, path)
        return True
    finally:
        part.unlink(missing_ok=True)
    return True
