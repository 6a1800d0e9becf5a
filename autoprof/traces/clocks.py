"""Clocks of traces, hosts and attempts.

Kineto's times count from a base in the trace; torch before 2.4 has none. The offsets between hosts were measured during
the run. An attempt is one start of a run: if it is killed and resumed, it repeats steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from autoprof.rundir.jsonl import lines
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import PROCESS, CaptureMeta, Line, Offset
from autoprof.traces.reader import NO_JSON, Reader, TraceError

BASE = "baseTimeNanoseconds"
# The two clocks are read one after the other; less than this between two readings is no step of the wall clock.
_STEP_NS = 1_000_000
# From when on a time can be one since the epoch: September 2001.
EPOCH_US = 1e15


class Timed(msgspec.Struct):
    ph: str = ""
    ts: float | str = 0.0


def base_ns(path: Path) -> int:
    """Return what the times of a trace count from, in ns since the epoch.

    Kineto writes it before the events, for some time after torch 2.4 behind them (pytorch/kineto #1054).

    Raises:
        TraceError: The trace does not say, or can't be read; it may be cut off.
    """
    with Reader(path, partial=True) as reader:
        if BASE not in reader.fields:
            first_us = None
            for events in reader.chunks(msgspec.json.Decoder(list[Timed]).decode):
                if first_us is None:
                    first_us = next((event.ts for event in events if event.ph != "M"), None)
            if BASE not in reader.fields:
                if first_us is None or _microseconds(path, first_us) > EPOCH_US:
                    return 0
                raise TraceError(f"{path}: it does not say what its times count from ({BASE})")
        return _number(path, reader.fields[BASE])


def first_us(path: Path) -> float | None:
    """Return the time of the first event that has one, which is not always the earliest; None where there is none."""
    with Reader(path, partial=True) as reader:
        for events in reader.chunks(msgspec.json.Decoder(list[Timed]).decode):
            for event in events:
                if event.ph != "M" and event.ts:
                    return _microseconds(path, event.ts)
    return None


def _microseconds(path: Path, ts: float | str) -> float:
    try:
        return float(ts)
    except ValueError:
        raise TraceError(f"{path}: an event has the time {ts!r}") from None


def _number(path: Path, raw: Raw) -> int:
    try:
        return int(msgspec.json.decode(raw))
    except (msgspec.DecodeError, TypeError, ValueError):
        raise TraceError(f"{path}: {BASE} is no number: {bytes(raw)[:80]!r}") from None


def corrections_ns(metas: Sequence[CaptureMeta]) -> list[int]:
    """Return what to add to the times of each capture so that those of one host agree, by the captures' meta files.

    The last reading of a host is taken to be right: clocks are set to the better.
    """
    readings: dict[str, list[tuple[int, int]]] = {}
    for meta in metas:
        if reading := _reading(meta):
            readings.setdefault(meta.host, []).append(reading)
    last = {host: max(of_host)[1] for host, of_host in readings.items()}
    found = []
    for meta in metas:
        reading = _reading(meta)
        behind = last[meta.host] - reading[1] if reading else 0
        found.append(behind if abs(behind) > _STEP_NS else 0)
    return found


def _reading(meta: CaptureMeta) -> tuple[int, int] | None:
    """Return a capture's start on the monotonic clock, and by how much the wall clock was ahead of it."""
    start = meta.clock.start
    return (start.monotonic_ns, start.unix_ns - start.monotonic_ns) if start.monotonic_ns and start.unix_ns else None


MEASURED, AS_SET = "measured", "as-set"
# Stages take milliseconds and more. What is known worse than this does not tell which of two came first.
MOST_ERROR_NS = 5_000_000
# Two clocks of quartz drift apart by 50 parts in a million each.
_DRIFT = 100e-6
_INSTEAD = f"merge with --clocks {AS_SET} to take them as they are set"


class Clocks(Struct, frozen=True):
    """The offsets that were measured in a run.

    Attributes:
        driver: The host that the offsets are against; empty where nothing was measured.
        offsets: By host, in the order of their times.
    """

    driver: str
    offsets: dict[str, list[Offset]]


def read_offsets(run: Path) -> Clocks:
    """Return what was measured in a run; lines that are cut off are left out.

    Raises:
        TraceError: Several hosts measured, so that it is not known against which.
        OSError: A file can't be read, or is none.
    """
    found: dict[str, list[Offset]] = {}
    drivers = set()
    for path in RunDir(run).lines("clocks"):
        drivers.add(path.stem.rpartition("-")[0])
        for line in lines(path):
            try:
                offset = msgspec.json.decode(line or b"", type=Offset)
            except NO_JSON:
                continue
            found.setdefault(offset.host, []).append(offset)
    if len(drivers) > 1:
        raise TraceError(f"{run / 'clocks'}: clocks were measured from several hosts ({_list(drivers)}); {_INSTEAD}")
    for offsets in found.values():
        offsets.sort(key=lambda each: each.unix_ns)
    return Clocks(next(iter(drivers), ""), found)


def offset_ns(clocks: Clocks, host: str, unix_ns: int) -> int:
    """Return what to take from a host's times to have them on the clock of the driver's host.

    Args:
        clocks: What was measured.
        host: The host.
        unix_ns: When, by either's clock.

    Raises:
        TraceError: It is not known, or not well enough.
    """
    if host == clocks.driver:
        return 0
    measured = clocks.offsets.get(host)
    if not measured:
        what = f"none was measured for {host}" if clocks.driver else "none was measured in this run"
        raise TraceError(f"traces of several hosts need the offsets of their clocks, and {what}; {_INSTEAD}")
    nearest = min(measured, key=lambda each: abs(each.unix_ns - unix_ns))
    if nearest.error_ns > MOST_ERROR_NS:
        raise TraceError(
            f"the clock of {host} is known to {nearest.error_ns / 1e6:.1f} ms only, and more than "
            f"{MOST_ERROR_NS / 1e6:.0f} ms is too much; {_INSTEAD}"
        )
    place = measured.index(nearest)
    for other in measured[max(0, place - 1) : place + 2]:
        # Between two measurements that agree the clock was not set; the trace may lie on either side of this one.
        passed = abs(other.unix_ns - nearest.unix_ns)
        between = min(other.unix_ns, nearest.unix_ns) <= unix_ns <= max(other.unix_ns, nearest.unix_ns)
        apart = abs(other.offset_ns - nearest.offset_ns)
        if between and apart > other.error_ns + nearest.error_ns + _DRIFT * passed:
            raise TraceError(
                f"the clock of {host} was set while the step ran: {other.offset_ns / 1e6:.1f} ms and "
                f"{nearest.offset_ns / 1e6:.1f} ms were measured around it; {_INSTEAD}"
            )
    return nearest.offset_ns


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


EVER = 1 << 63
_DRIVES = ("step", "timer", "stage")


def is_of(line: Line, since_ns: int, until_ns: int) -> bool:
    """Return whether a line is of the attempt that lies between two moments."""
    return line.end_ns > since_ns and line.start_ns < until_ns


class Attempts:
    """The times from which on a run's trainers were at work, each until all of them had ended.

    Attributes:
        starts: When each attempt began, once all lines are there.
        first_steps: The start of the first step that each start of a process ended.
    """

    def __init__(self) -> None:
        # By file and how many processes have begun it, since pids come again: first start and last end.
        self._lives: dict[tuple[int, int], tuple[int, int]] = {}
        self._begun: Counter[int] = Counter()
        self._stepped: set[tuple[int, int]] = set()
        self.starts: list[int] = []
        self.first_steps: set[int] = set()

    def add(self, file: int, line: Line) -> None:
        """Take a line; those of a file come in their order."""
        if line.kind == PROCESS:
            self._begun[file] += 1
            return
        if line.kind == "step" and (life := (file, self._begun[file])) not in self._stepped:
            self._stepped.add(life)
            self.first_steps.add(line.start_ns)
        if line.role == "trainer" and line.kind in _DRIVES:
            life = file, self._begun[file]
            start, end = self._lives.get(life, (line.start_ns, line.end_ns))
            self._lives[life] = min(start, line.start_ns), max(end, line.end_ns)

    def finish(self) -> None:
        """Note that all lines are there."""
        last = -1
        for start, end in sorted(self._lives.values()):
            # The ranks of one attempt are at work at once.
            if start >= last:
                self.starts.append(start)
            last = max(last, end)
        self._lives.clear()

    @property
    def count(self) -> int:
        return len(self.starts)

    def around(self, at_ns: int) -> tuple[int, int]:
        """Return the begin and end of the attempt that went on at a moment. The first began ever since."""
        place = bisect_right(self.starts, at_ns)
        since = self.starts[place - 1] if place > 1 else 0
        return since, self.starts[place] if 0 < place < len(self.starts) else EVER
