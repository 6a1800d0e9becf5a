"""Sums of one trace: operators, the devices' shares, an engine's passes, peaks of memory.

A trace is read once, in pieces. Own times need each thread's events in the order of their starts, and Kineto writes
what the host did in one block for each source (operators, then Python's functions, then the driver's calls). So each
event leaves 20 bytes (`sorted_rows.py`), which go to a temporary file where there are many, and are read back in order.
Memory stays below 100 MB whatever the trace's size; the file takes 7 % of the trace's JSON.

Times are in microseconds, as they stand in the trace: a duration below one counts as what it is.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from autoprof.traces import device_sums
from autoprof.traces.clocks import BASE, EPOCH_US
from autoprof.traces.device_sums import DeviceSums, EngineSums, PassSums
from autoprof.traces.event_rows import Rows, Taken, decode
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

# The year 2262: what is later is no time.
_MOST_NS = 1 << 63
# c10/core/DeviceType.h
_DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 20: "npu"}


class MemoryPeak(Struct, frozen=True, kw_only=True):
    """The most that torch's allocator held of one device, by its own count ("Total Allocated" of `[memory]` events).

    Attributes:
        device: `cpu`, `cuda:0`, `npu:0`, ... or `type20:0` for a device type that is not known here.
        allocated_bytes: The peak of what was allocated. On the host only what was allocated during the capture.
        reserved_bytes: The peak of what was reserved from the device; 0 for the host.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int


class TraceSums(Struct, frozen=True, kw_only=True):
    """The content of a trace.

    Attributes:
        path: The file.
        cut: Empty, or in words where the trace was cut off; the sums are of what was there.
        events: All events, whatever their kind.
        first_ns: Start of the first event with a duration, in ns since the epoch; None where the trace does not say.
        last_ns: End of the last one.
        span_us: From the first to the last.
        operators: What threads of the host did, the most own time first.
        kernels: What devices did, the most time first.
        threads: The host's threads, the busiest first.
        devices: Busy times and shares of each device; empty where none was recorded.
        collectives_us: For how long collectives went on, which is also how long this rank waited for others in them: by
            the device's kernels or else, with gloo and MPI, on the host. None without any.
        engine: Forward passes that vLLM or SGLang marked; None where there are none.
        memory: Peaks by device; empty where memory was not recorded.
        bound: `device` or `cpu`: what the capture waited for; None where that can't be said.
        reason: Why, in words with figures.
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
    """Sum up one trace: torch's, vLLM's, SGLang's or another Chrome trace, plain or gzip, whole or cut off.

    Raises:
        TraceError: It can't be read, or is no Chrome trace. The message names the file.
        OSError: There is no room for the temporary file.
    """
    with Rows() as rows, Reader(path, partial=True) as reader:
        taken = Taken(rows)
        for events in reader.chunks(decode):
            try:
                taken.events(events)
            except (ValueError, *NO_JSON) as error:
                raise TraceError(f"{path}: an event can't be read: {error}") from None
        return _sums(path, reader, taken, Summing(taken))


def _sums(path: Path, reader: Reader, taken: Taken, summing: Summing) -> TraceSums:
    first, last = summing.first_us, summing.last_us
    base_ns = _base_ns(reader) or taken.whole_us * 1000
    known = last > first and (base_ns > 0 or first > EPOCH_US)
    devices = summing.devices()
    engine = summing.engine()
    bound, reason = device_sums.bound(devices, serves=engine is not None)
    return TraceSums(
        path=str(path),
        cut=reader.cut,
        events=taken.count,
        first_ns=base_ns + round(first * 1000) if known else None,
        last_ns=base_ns + round(last * 1000) if known else None,
        span_us=max(0.0, last - first),
        operators=summing.operators(on_device=False),
        kernels=summing.operators(on_device=True),
        threads=summing.threads(),
        devices=devices,
        collectives_us=summing.collectives_us(),
        engine=engine,
        memory=_memory(taken),
        bound=bound,
        reason=reason,
    )


def _base_ns(reader: Reader) -> int:
    """Return what the times count from, 0 where the trace does not say."""
    with suppress(*NO_JSON):
        said = msgspec.json.decode(reader.fields.get(BASE, b"0"), type=int, strict=False)
        return said if 0 < said < _MOST_NS else 0
    return 0


def _memory(taken: Taken) -> list[MemoryPeak]:
    found = []
    for (kind, number), (allocated, reserved) in sorted(taken.peaks.items()):
        name = _DEVICE_TYPES.get(kind, f"type{kind}")
        if name != "cpu" or number > 0:
            name = f"{name}:{number}"
        found.append(MemoryPeak(device=name, allocated_bytes=allocated, reserved_bytes=reserved))
    return found
