"""Files by which the ranks of a launcher agree on one run: each rank writes a file when it joins and when it ends.

In such a run, no process starts before all ranks and ends after all ranks. So the first rank that joins writes
`run.json`, and the last rank that ends completes it. Nodes without a shared disk each have these files, so each node
has a complete part of the run. If the file of a rank already exists, the launcher has started another program. The
ranks of that program make the next run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autoprof.base import files, identity, seam
from autoprof.base.originals import os, time
from autoprof.rundir import layout
from autoprof.rundir.file_names import PART
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import RankFile

FOLDER = "ranks"
ENDED = ".ended"
_FIRST = "first"
_LAST = "last"
# Maximum time between the joining of the first and of the last rank of a launch, if the launch is only known by an
# address, which a later launch may also have.
_JOIN_S = 3600.0


class Seat:
    """The place of this process among the ranks of a run.

    Attributes:
        run_id: The id of the run.
        first: The content of the file `first`: the rank that joined first.
    """

    def __init__(self, folder: Path, rank: int, run_id: str, own: RankFile) -> None:
        self.run_id = run_id
        self.first = own
        self._folder = folder
        self._rank = str(rank)
        self._own = own
        # True if this process made the file of the rank. Another process of the same program may have the same rank.
        self._holds = False

    def take(self) -> bool:
        """Take the place, and read which rank joined first. Return False if another program has the place.

        Raises:
            OSError: The files can't be written.
        """
        self._holds = _write_complete(self._folder / self._rank, self._own)
        if not self._holds:
            holder = layout.read_json(self._folder / self._rank, RankFile)
            if holder.program != self._own.program:
                return False
        # If all other ranks have already ended, the run has ended. It then ends a second time, with this rank.
        (self._folder / _LAST).unlink(missing_ok=True)
        if not _write_complete(self._folder / _FIRST, self._own):
            self.first = layout.read_json(self._folder / _FIRST, RankFile)
        return True

    def leave(self, error: str) -> bool:
        """Record that this rank ends. Return True if all other ranks that have joined have already ended.

        Args:
            error: The type of the exception that ended this rank, or an empty text.

        Raises:
            OSError: The file can't be written.
        """
        if not self._holds:
            return False
        files.write(self._folder / f"{self._rank}{ENDED}", error.encode(errors="replace"))
        return not any(_running(self._folder)) and files.claim(self._folder / _LAST)

    def errors(self) -> str:
        """Return the type of the exception of a failed rank, or an empty text if no rank failed.

        If several ranks failed, use the rank whose file name comes first.
        """
        contents = (files.try_read(path, 1000) for path in sorted(self._folder.glob(f"*{ENDED}")))
        return next((content.decode(errors="replace") for content in contents if content), "")

    def clear(self) -> None:
        """Remove the rank files, and the run directory if it has no other files."""
        for path in (*self._folder.glob("*"), self._folder, self._folder.parent, self._folder.parent.parent):
            with seam.suppress(OSError):
                path.rmdir() if files.is_folder(path) else path.unlink()


def join(runs: Path, run_id: str, launch: str, program: str, rank: int, *, name_may_repeat: bool) -> Seat:
    """Take the place of this rank in its run. Make the run if it does not exist.

    Args:
        runs: The folder of the runs.
        run_id: The id of the run if the user chose an id. If it is empty, the id is the name of the launch.
        launch: The name of the launch, which is the same for all ranks of the launch.
        program: The random id of the program that the launcher started as this rank.
        rank: The rank of this process.
        name_may_repeat: True if a later launch may have the same name.

    Raises:
        OSError: The files can't be written.
    """
    pid = os.getpid()
    own_file = RankFile(
        program=program, host=identity.HOST, pid=pid, ticks=identity.start_ticks(pid) or 0, started=time.time()
    )
    for number in itertools.count(1):
        name = launch if number == 1 else f"{launch}-{number}"
        run = RunDir(runs / (run_id or name))
        folder = run.make(run.path / FOLDER / name)
        if name_may_repeat and _is_over(folder):
            continue
        seat = Seat(folder, rank, run_id or name, own_file)
        if seat.take():
            return seat
    raise AssertionError


def is_running(run: Path) -> bool:
    """Return True if a rank of the run is running on this host."""
    launches = (run / FOLDER / name for name in files.folders_in(run / FOLDER))
    return any(rank.host == identity.HOST for folder in launches for rank in _running(folder))


def _running(folder: Path) -> Iterator[RankFile]:
    """Yield the ranks that have no `.ended` file. Omit ranks whose process died on this host."""
    names = set(files.names_in(folder))
    for name in names:
        if name.isdecimal() and f"{name}{ENDED}" not in names:
            rank = layout.read_json(folder / name, RankFile)
            if rank.host != identity.HOST or identity.start_ticks(rank.pid) == rank.ticks:
                yield rank


def _is_over(folder: Path) -> bool:
    """Return True if a folder of `ranks/` belongs to an earlier launch.

    This is the case if its first rank joined over an hour ago, or if one of its ranks failed.
    """
    if (first_status := files.status(folder / _FIRST)) is None:
        return False
    # Get the current time from a new file on the same disk, because the clocks of hosts may differ.
    mark = folder / f"now.{os.urandom(4).hex()}{PART}"
    files.write(mark, b"")
    try:
        now_s = mark.stat().st_mtime
    finally:
        mark.unlink()
    return now_s - first_status.st_mtime > _JOIN_S or any(path.stat().st_size for path in folder.glob(f"*{ENDED}"))


def _write_complete(path: Path, content: RankFile) -> bool:
    """Write a file that appears only with its whole content. Return False if the file already exists."""
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}{PART}")
    files.write(part, msgspec.json.encode(content))
    try:
        with seam.suppress(OSError):
            os.link(part, path)
            return True
        # The file exists, or the file system has no hard links.
        if is_new := files.claim(path):
            os.replace(part, path)
        return is_new
    finally:
        part.unlink(missing_ok=True)
