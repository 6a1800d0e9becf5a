"""Corrections that put traces on one clock.

An event's time is `baseTimeNanoseconds` and its `ts`, in ns since the epoch. Kineto takes the base from the wall clock,
the same for all processes until it moves on after three months. torch before 2.4 knows no base; its times are since
the epoch as they are. Perfetto does not read the base, so traces of different bases are shifted when they are merged.

A wall clock that is set while a step is recorded moves the traces of one host against each other. The meta files hold
the wall clock and the monotonic clock, which nobody sets, of one moment: what lies between the two tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Raw

from autoprof.rundir.records import CaptureMeta
from autoprof.traces.reader import Reader, TraceError

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
