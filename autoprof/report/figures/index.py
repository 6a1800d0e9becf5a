"""Index of a large timeline: the sums of its steps and the zones of its files, made by the first report of the run.

It stands for that reading as long as no file has changed since. Where it can't be written or read, all is read again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from autoprof.base import files
from autoprof.report.figures.reading import Reader, Timeline
from autoprof.report.figures.zones import Zone
from autoprof.rundir.file_names import TIMELINE_INDEX
from autoprof.traces.clocks import EVER

# Smaller timelines are read within seconds.
WORTH_BYTES = 64 << 20
_MOST_BYTES = 256 << 20
_VERSION = 3

# Of each file its name, size, time of change, and shift.
Stamp = list[tuple[str, int, int, int]]
_Piece = tuple[int, int]
_Timer = tuple[str, int, int, int]


class StepSpan(msgspec.Struct, frozen=True, gc=False):
    """A step as its driver had it. Of several that say they are the step's driver the best one counts."""

    number: int
    file: int
    start_ns: int
    end_ns: int
    role: str
    rank: int | None
    error: str | None
    # What carries its number counts as far as it lies between these: the rest is of another attempt.
    since_ns: int = 0
    until_ns: int = EVER

    def better_than(self, other: StepSpan) -> bool:
        """Compare two drivers: a trainer before an engine, rank 0 before others, the last run before earlier ones."""
        return (self.role == "trainer", not self.rank, self.start_ns) > (
            other.role == "trainer",
            not other.rank,
            other.start_ns,
        )


class Sums(msgspec.Struct, array_like=True):
    """Sums of one step, as `overview` keeps them while it reads."""

    timers: list[_Timer]
    stages: dict[str, list[_Piece]]
    profiling: list[_Piece]
    exports: list[_Piece]
    tokens: dict[str, tuple[float, float]]
    samples: int
    first_ns: int
    last_ns: int


class Index(msgspec.Struct):
    """All that the first reading of a timeline comes to."""

    stamp: Stamp
    zones: list[list[Zone]]
    spans: list[StepSpan]
    steps: dict[int, Sums]
    unnumbered: list[_Timer]
    before: dict[int, list[int]]
    attempts: list[int]
    first_steps: list[int]
    left_out: list[tuple[str, str, int]]
    beyond: dict[str, int]
    kinds: dict[str, str]
    version: int = _VERSION

    def tell(self, reader: Reader) -> None:
        """Have a reader know what was left out."""
        reader.left_out.update({(file, why): count for file, why, count in self.left_out})
        reader.beyond.update(self.beyond)


def stamp(timelines: Sequence[Timeline]) -> Stamp:
    """Return what tells the state of the files that an index is of."""
    found = []
    for timeline in timelines:
        try:
            status = os.stat(timeline.path)
        except OSError:
            continue
        found.append((timeline.name, status.st_size, status.st_mtime_ns, timeline.shift_ns))
    return found


def large(stamp: Stamp) -> bool:
    """Return whether a timeline is worth an index."""
    return sum(size for _, size, _, _ in stamp) > WORTH_BYTES


def read(run: Path | None, stamp: Stamp) -> Index | None:
    """Return the index of a run's timeline, if there is one of these files as they are now."""
    if run is None or not large(stamp):
        return None
    try:
        content = files.read(run / TIMELINE_INDEX, _MOST_BYTES, (os.getuid(), os.stat(run).st_uid))
        found = msgspec.msgpack.decode(content, type=Index)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    whole = len(found.zones) == len(stamp) and found.version == _VERSION
    return found if whole and found.stamp == stamp else None


def write(run: Path | None, stamp: Stamp, make: Callable[[], Index]) -> None:
    """Leave the index of a large timeline in the run's folder, where that can be written."""
    if run is None or not large(stamp):
        return
    try:
        files.open_as(run)
        files.write(run / TIMELINE_INDEX, msgspec.msgpack.encode(make()))
    except (OSError, msgspec.MsgspecError, ValueError, OverflowError):
        return
