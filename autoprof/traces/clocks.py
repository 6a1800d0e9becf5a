"""Clocks of traces and hosts, and attempts of a run.

Kineto's times are relative to a base in the trace; torch before 2.4 has no base. The run measures the offsets between
the clocks of its hosts. An attempt is one start of a run. A run that is killed and resumed repeats steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from autoprof.rundir import file_names
from autoprof.rundir.journal import EVER, lines
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CaptureMeta, Line, Offset
from autoprof.traces.reader import NO_JSON, Reader, TraceError

BASE = "baseTimeNanoseconds"
# Smallest change of the wall clock that counts as a set clock. The two clocks are not read at the same moment, so
# smaller differences are noise.
_CLOCK_SET_NS = 1_000_000
# Times above this count from the epoch: it is September 2001.
EPOCH_US = 1e15


class Timed(msgspec.Struct):
    ph: str = ""
    ts: float | str = 0.0


def beginning(path: Path) -> tuple[int, float | None]:
    """Return the base of a trace's times in ns since the epoch, and the time of its first event in µs, if it has one.

    The first event in the file is not always the earliest one. Kineto writes the base before the events; some releases
    after torch 2.4 write it behind them (pytorch/kineto #1054).

    Raises:
        TraceError: The trace has no base, for example because it is truncated, or can't be read.
    """
    with Reader(path, _HEAD_BYTES, partial=True) as reader:
        if BASE in reader.fields:
            return _number(path, reader.fields[BASE]), _first_us(reader)
    first = timed = None
    with Reader(path, partial=True) as reader:
        for events in reader.chunks(_decode_times):
            for event in events:
                if event.ph != "M":
                    first = event.ts if first is None else first
                    timed = timed or event.ts
        if BASE in reader.fields:
            return _number(path, reader.fields[BASE]), _microseconds(timed)
    if first is None or (_microseconds(first) or 0) > EPOCH_US:
        return 0, _microseconds(timed)
    raise TraceError(f"{path}: the base of its times is missing ({BASE})")


# Bytes that usually have the base and the first event.
_HEAD_BYTES = 16 << 10
_decode_times = msgspec.json.Decoder(list[Timed]).decode


def _first_us(reader: Reader) -> float | None:
    try:
        for events in reader.chunks(_decode_times):
            for event in events:
                if event.ph != "M" and event.ts:
                    return _microseconds(event.ts)
    except TraceError:
        pass  # `rewrite` reports it
    return None


def _microseconds(ts: float | str | None) -> float | None:
    """Return a time as a number; None if it is invalid, which `rewrite` reports."""
    try:
        return None if ts is None else float(ts)
    except ValueError:
        return None


def _number(path: Path, raw: Raw) -> int:
    try:
        return int(msgspec.json.decode(raw))
    except (msgspec.DecodeError, TypeError, ValueError):
        raise TraceError(f"{path}: {BASE} is not a number: {bytes(raw)[:80]!r}") from None


def corrections_ns(metas: Sequence[CaptureMeta]) -> list[int]:
    """Return nanoseconds to add to the times of each capture, so that captures of one host agree.

    They come from the clocks in the meta files. The last reading of a host counts as correct, because clocks are set
    to become more accurate.
    """
    readings: dict[str, list[tuple[int, int]]] = {}
    for meta in metas:
        if reading := _reading(meta):
            readings.setdefault(meta.host, []).append(reading)
    last = {host: max(of_host)[1] for host, of_host in readings.items()}
    corrections = []
    for meta in metas:
        reading = _reading(meta)
        behind = last[meta.host] - reading[1] if reading else 0
        corrections.append(behind if abs(behind) > _CLOCK_SET_NS else 0)
    return corrections


def _reading(meta: CaptureMeta) -> tuple[int, int] | None:
    """Return a capture's start on the monotonic clock, and the lead of the wall clock over it, in ns."""
    start = meta.clock.start
    return (start.monotonic_ns, start.unix_ns - start.monotonic_ns) if start.monotonic_ns and start.unix_ns else None


MEASURED, AS_SET = "measured", "as-set"
# Largest error of a measured offset. Stages take milliseconds, so a larger error could reverse their order.
MAX_ERROR_NS = 5_000_000
# Relative drift of two quartz clocks, 50 parts per million each.
_DRIFT = 100e-6
_INSTEAD = f"use --clocks {AS_SET} to merge with uncorrected clocks"


class Clocks(Struct, frozen=True):
    """Measured clock offsets of a run.

    Attributes:
        driver: The host that the offsets are relative to; empty if nothing was measured.
        offsets: The offsets of each host, by time.
    """

    driver: str
    offsets: dict[str, list[Offset]]


def read_offsets(run: Path) -> Clocks:
    """Return the measured offsets of a run, without truncated lines.

    Raises:
        TraceError: Several hosts measured, so the reference host is unknown.
        OSError: A file can't be read, or is not a regular file.
    """
    offsets_by_host: dict[str, list[Offset]] = {}
    drivers = set()
    for path in RunDir(run).lines("clocks"):
        drivers.add(file_names.process_of(path.name)[0])
        for line in lines(path):
            try:
                offset = msgspec.json.decode(line, type=Offset)
            except NO_JSON:
                continue
            offsets_by_host.setdefault(offset.host, []).append(offset)
    if len(drivers) > 1:
        raise TraceError(f"{run / 'clocks'}: clocks were measured from several hosts ({_list(drivers)}); {_INSTEAD}")
    for offsets in offsets_by_host.values():
        offsets.sort(key=lambda each: each.unix_ns)
    return Clocks(next(iter(drivers), ""), offsets_by_host)


def offset_ns(clocks: Clocks, host: str, unix_ns: int) -> int:
    """Return nanoseconds to subtract from a host's times, to get the clock of the driver's host.

    Args:
        clocks: The measured offsets.
        host: The host.
        unix_ns: The time of the trace, on either clock.

    Raises:
        TraceError: The offset is unknown, or not known precisely enough.
    """
    if host == clocks.driver:
        return 0
    measured = clocks.offsets.get(host)
    if not measured:
        missing = f"the clock of {host} was not measured" if clocks.driver else "this run measured no clocks"
        raise TraceError(f"traces of several hosts need measured clocks, but {missing}; {_INSTEAD}")
    nearest = min(measured, key=lambda each: abs(each.unix_ns - unix_ns))
    if nearest.error_ns > MAX_ERROR_NS:
        raise TraceError(
            f"the offset of {host}'s clock is too uncertain: {nearest.error_ns / 1e6:.1f} ms, more than "
            f"{MAX_ERROR_NS / 1e6:.0f} ms; {_INSTEAD}"
        )
    place = measured.index(nearest)
    for other in measured[max(0, place - 1) : place + 2]:
        # If two measurements around the trace agree, the clock was not set between them.
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


_DRIVES = ("step", "timer", "stage")


def is_of(line: Line, since_ns: int, until_ns: int) -> bool:
    """Return True if a line belongs to the attempt between two moments."""
    return line.end_ns > since_ns and line.start_ns < until_ns


class Attempts:
    """Attempts of a run, found from the spans of its trainers.

    Attributes:
        starts: The start of each attempt. It is filled by `finish`.
        trainers: The numbers of the journals with spans of a trainer.
        first_steps: The start of the first step that ended, for each process.
    """

    def __init__(self) -> None:
        # First start and last end of the trainers, by journal.
        self._lives: dict[int, tuple[int, int]] = {}
        self._stepped: set[int] = set()
        self.starts: list[int] = []
        self.trainers: set[int] = set()
        self.first_steps: set[int] = set()

    def add(self, file: int, span: Line, start_ns: int, end_ns: int) -> None:
        """Add a span of the journal with the number `file`. The spans of a journal must come in their order."""
        if span.kind == "step" and file not in self._stepped:
            self._stepped.add(file)
            self.first_steps.add(start_ns)
        if span.role == "trainer" and span.kind in _DRIVES:
            start, end = self._lives.get(file, (start_ns, end_ns))
            self._lives[file] = min(start, start_ns), max(end, end_ns)
            self.trainers.add(file)

    def finish(self) -> None:
        """Compute the attempts, after all lines were added."""
        last = -1
        for start, end in sorted(self._lives.values()):
            # The ranks of one attempt run at the same time.
            if start >= last:
                self.starts.append(start)
            last = max(last, end)
        self._lives.clear()

    @property
    def count(self) -> int:
        return len(self.starts)

    def around(self, at_ns: int) -> tuple[int, int]:
        """Return the start and the end of the attempt at a moment. The first attempt starts at 0."""
        place = bisect_right(self.starts, at_ns)
        since = self.starts[place - 1] if place > 1 else 0
        return since, self.starts[place] if 0 < place < len(self.starts) else EVER
