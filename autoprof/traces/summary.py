"""Sums of one trace: times of operators, activity of devices, forward passes of an engine, peaks of memory.

A trace is read once, in pieces. To compute own times, each thread's events must be in the order of their starts. But
Kineto writes the host's events in one block per source: operators, then Python functions, then driver calls. So each
event is kept as a row of 20 bytes (`event_rows.py`). If there are many rows, they go to a temporary file, and are read
back in order. The file takes 7 % of the size of the trace's JSON. Memory stays below 100 MB for any trace.

All times are in microseconds and are not rounded, as in the trace.
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

# Times from this one, in the year 2262, are invalid.
_MAX_NS = 1 << 63
# Names of the device types from c10/core/DeviceType.h, by number.
_DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 20: "npu"}


class MemoryPeak(Struct, frozen=True, kw_only=True):
    """Peak memory of torch's allocator on one device.

    The peaks are computed from the fields "Total Allocated" and "Total Reserved" of the trace's `[memory]` events.

    Attributes:
        device: `cpu`, `cuda:0`, `npu:0`, ... or, for an unknown device type, the number of the type, such as
            `type20:0`.
        allocated_bytes: Peak of the allocated bytes. On the host, only allocations during the capture count.
        reserved_bytes: Peak of the bytes that the allocator reserved from the device. 0 for the host.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int


class TraceSums(Struct, frozen=True, kw_only=True):
    """Sums of a trace.

    Attributes:
        path: The path of the trace.
        cut: The reason why the end of a truncated trace is missing; empty for a complete trace. The sums of a
            truncated trace cover its readable events.
        events: The number of events of all kinds.
        first_ns: Start of the first event with a duration, in ns since the epoch. None if the trace has no base.
        last_ns: End of the last event with a duration, in ns since the epoch. None if the trace has no base.
        span_us: Microseconds from the start of the first event to the last end of an event.
        operators: Sums of each operator in threads of the host, the longest own time first.
        kernels: Sums of each kernel and each copy on devices, the longest time first.
        threads: Sums of each thread of the host, the busiest thread first.
        devices: Activity of each device. Empty if no device was recorded.
        collectives_us: Microseconds in collectives, including the wait for other ranks. The time is measured from
            kernels on the device. For gloo and MPI, it is measured on the host. None if the trace has no collectives.
        engine: Sums of the forward passes that vLLM or SGLang annotated. None if the trace has no such annotations.
        memory: Memory peaks of each device. Empty if memory was not recorded.
        bound: The part that the capture waited for: `device` or `cpu`. None if it is unclear.
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
        TraceError: The file can't be read, or is not a Chrome trace. The message names the file.
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
    first_us, last_us = summing.first_us, summing.last_us
    base_ns = _base_ns(reader) or data.whole_us * 1000
    has_base = last_us > first_us and (base_ns > 0 or first_us > EPOCH_US)
    devices = summing.devices()
    engine = summing.engine()
    bound, reason = device_sums.bound(devices, serves=engine is not None)
    return TraceSums(
        path=str(path),
        cut=reader.cut,
        events=data.count,
        first_ns=base_ns + round(first_us * 1000) if has_base else None,
        last_ns=base_ns + round(last_us * 1000) if has_base else None,
        span_us=max(0.0, last_us - first_us),
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
    """Return the base of the trace's times, in ns since the epoch. Return 0 if the trace has no valid base."""
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
