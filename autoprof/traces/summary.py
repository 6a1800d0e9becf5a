"""Sums of one trace: operators, shares of devices, passes of an engine, peaks of memory.

A trace is read once, in pieces. Own times need each thread's events in the order of their starts, but Kineto writes the
host's events in one block per source: operators, then Python functions, then driver calls. So each event is kept as a
row of 20 bytes (`event_rows.py`). Many rows go to a temporary file, which takes 7 % of the size of the trace's JSON,
and are read back in order. Memory stays below 100 MB for any trace.

Times are in microseconds, unrounded, as in the trace.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from autoprof.traces import device_sums
from autoprof.traces.clocks import BASE, EPOCH_US
from autoprof.traces.device_sums import DeviceSums, EngineSums, PassSums
from autoprof.traces.event_rows import EventData, Rows, decode
from autoprof.traces.reader import NO_JSON, Reader, TraceError
from autoprof.traces.thread_sums import OperatorSums, Summing, ThreadSums

__all__ = [
    "DeviceSums",
    "EngineSums",
    "MemoryPeak",
    "OperatorSums",
    "PassSums",
    "ThreadSums",
    "TraceSums",
    "summarize",
]

# The year 2262. Later times are invalid.
_MAX_NS = 1 << 63
# c10/core/DeviceType.h
_DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 20: "npu"}


class MemoryPeak(Struct, frozen=True, kw_only=True):
    """Peak memory of torch's allocator on one device, from `[memory]` events ("Total Allocated", "Total Reserved").

    Attributes:
        device: `cpu`, `cuda:0`, `npu:0`, ... or `type20:0` for an unknown device type.
        allocated_bytes: Peak of the allocated bytes. On the host, only allocations during the capture count.
        reserved_bytes: Peak of the bytes reserved from the device; 0 for the host.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int


class TraceSums(Struct, frozen=True, kw_only=True):
    """Sums of a trace.

    Attributes:
        path: The file.
        cut: A description of the missing end of a truncated trace; else empty. The sums cover the available events.
        events: The number of events of all kinds.
        first_ns: Start of the first event with a duration, in ns since the epoch; None if the trace has no base.
        last_ns: End of the last event with a duration.
        span_us: Microseconds from the first start to the last end.
        operators: Operators in threads of the host, by own time.
        kernels: Kernels and copies on devices, by time.
        threads: The host's threads, the busiest first.
        devices: Activity of each device; empty if no device was recorded.
        collectives_us: Microseconds in collectives, including the wait for other ranks: from the device's kernels, or
            from the host with gloo and MPI. None without collectives.
        engine: Forward passes that vLLM or SGLang annotated, or None.
        memory: Peaks by device; empty if memory was not recorded.
        bound: `device` or `cpu`, the part that the capture waited for; None if unclear.
        reason: A sentence with the reason for `bound`.
    """

    path: str
    cut: str
    events: int
    first_ns: int | None
    last_ns: int | None
    span_us: float
    operators: list[OperatorSums]
    kernels: list[OperatorSums]
    threads: list[ThreadSums]
    devices: list[DeviceSums]
    collectives_us: float | None
    engine: EngineSums | None
    memory: list[MemoryPeak]
    bound: str | None
    reason: str


def summarize(path: Path) -> TraceSums:
    """Sum up one trace of torch, vLLM, SGLang or another program, plain or gzip, complete or truncated.

    Raises:
        TraceError: The file can't be read, or is not a Chrome trace. The message has the file.
        OSError: The temporary file can't be written, for example because the disk is full.
    """
    with Rows() as rows, Reader(path, partial=True) as reader:
        data = EventData(rows)
        for events in reader.chunks(decode):
            try:
                data.events(events)
            except (ValueError, *NO_JSON) as error:
                raise TraceError(f"{path}: an event can't be read: {error}") from None
        return _sums(path, reader, data, Summing(data))


def _sums(path: Path, reader: Reader, data: EventData, summing: Summing) -> TraceSums:
    first, last = summing.first_us, summing.last_us
    base_ns = _base_ns(reader) or data.whole_us * 1000
    known = last > first and (base_ns > 0 or first > EPOCH_US)
    devices = summing.devices()
    engine = summing.engine()
    bound, reason = device_sums.bound(devices, serves=engine is not None)
    return TraceSums(
        path=str(path),
        cut=reader.cut,
        events=data.count,
        first_ns=base_ns + round(first * 1000) if known else None,
        last_ns=base_ns + round(last * 1000) if known else None,
        span_us=max(0.0, last - first),
        operators=summing.operators(on_device=False),
        kernels=summing.operators(on_device=True),
        threads=summing.threads(),
        devices=devices,
        collectives_us=summing.collectives_us(),
        engine=engine,
        memory=_memory(data),
        bound=bound,
        reason=reason,
    )


def _base_ns(reader: Reader) -> int:
    """Return the base of the times in ns since the epoch, or 0 if the trace has none."""
    with suppress(*NO_JSON):
        base_ns = msgspec.json.decode(reader.fields.get(BASE, b"0"), type=int, strict=False)
        return base_ns if 0 < base_ns < _MAX_NS else 0
    return 0


def _memory(data: EventData) -> list[MemoryPeak]:
    peaks = []
    for (kind, number), (allocated, reserved) in sorted(data.peaks.items()):
        name = _DEVICE_TYPES.get(kind, f"type{kind}")
        if name != "cpu" or number > 0:
            name = f"{name}:{number}"
        peaks.append(MemoryPeak(device=name, allocated_bytes=allocated, reserved_bytes=reserved))
    return peaks
