"""Index of a large timeline: the sums of its steps and the zones of its files. The first report of a run writes it.

Later reports use it instead of a first reading, unless a file has changed. If the index can't be written or read, the
whole timeline is read again.
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

# Size from which a timeline gets an index. Smaller ones are read within seconds.
WORTH_BYTES = 64 << 20
_MAX_INDEX_BYTES = 256 << 20
_VERSION = 3

# Name, size, time of change and clock shift of each file.
Stamp = list[tuple[str, int, int, int]]
_Piece = tuple[int, int]
_Timer = tuple[str, int, int, int]


class StepSpan(msgspec.Struct, frozen=True, gc=False):
    """A step, as its driver recorded it. `better_than` chooses between several drivers of the same step.

    Attributes:
        file: The number of the driver's file.
        since_ns: The start of the attempt that the step belongs to. Earlier lines with its number are not its own.
        until_ns: The end of that attempt.
    """

    number: int
    file: int
    start_ns: int
    end_ns: int
    role: str
    rank: int | None
    error: str | None

    since_ns: int = 0
    until_ns: int = EVER

    def better_than(self, other: StepSpan) -> bool:
        """Return True if this driver is the better one: a trainer, then rank 0, then the later run of the step."""
        return (self.role == "trainer", not self.rank, self.start_ns) > (
            other.role == "trainer",
            not other.rank,
            other.start_ns,
        )


class Sums(msgspec.Struct, array_like=True):
    """Sums of one step, as `overview` collects them."""

    timers: list[_Timer]
    stages: dict[str, list[_Piece]]
    profiling: list[_Piece]
    exports: list[_Piece]
    tokens: dict[str, tuple[float, float]]
    samples: int
    first_ns: int
    last_ns: int


class Index(msgspec.Struct):
    """Results of the first reading of a timeline."""

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

    def restore_notes(self, reader: Reader) -> None:
        """Copy the counts of left-out lines to a reader."""
        reader.left_out.update({(file, why): count for file, why, count in self.left_out})
        reader.beyond.update(self.beyond)


def stamp(timelines: Sequence[Timeline]) -> Stamp:
    """Return the state of the files, by which an index is recognized as current."""
    states = []
    for timeline in timelines:
        try:
            status = os.stat(timeline.path)
        except OSError:
            continue
        states.append((timeline.name, status.st_size, status.st_mtime_ns, timeline.shift_ns))
    return states


def large(stamp: Stamp) -> bool:
    """Return True if a timeline is large enough for an index."""
    return sum(size for _, size, _, _ in stamp) > WORTH_BYTES


def read(run: Path | None, stamp: Stamp) -> Index | None:
    """Return the index of a run's timeline if it matches the present state of the files, else None."""
    if run is None or not large(stamp):
        return None
    try:
        content = files.read(run / TIMELINE_INDEX, _MAX_INDEX_BYTES, (os.getuid(), os.stat(run).st_uid))
        index = msgspec.msgpack.decode(content, type=Index)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None
    whole = len(index.zones) == len(stamp) and index.version == _VERSION
    return index if whole and index.stamp == stamp else None


def write(run: Path | None, stamp: Stamp, make: Callable[[], Index]) -> None:
    """Write the index of a large timeline into the run's folder. Errors are ignored."""
    if run is None or not large(stamp):
        return
    try:
        files.open_as(run)
        files.write(run / TIMELINE_INDEX, msgspec.msgpack.encode(make()))
    except (OSError, msgspec.MsgspecError, ValueError, OverflowError):
        return
