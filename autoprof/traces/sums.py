"""What took the time in one trace: sums by operator, the devices' shares, an engine's passes, peaks of memory.

A trace is read once, in pieces. Own times need each thread's events in the order of their starts, and Kineto writes
what the host did in one block for each source (operators, then Python's functions, then the driver's calls). So each
event leaves 20 bytes (`rows.py`), which go to a temporary file where there are many, and are read back in order.
Memory stays below 100 MB whatever the trace's size; the file takes 7 % of the trace's JSON.

Times are in microseconds, as they stand in the trace: a duration below one counts as what it is.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from autoprof.traces.device import DeviceSums
from autoprof.traces.passes import EngineSums


class OperatorSums(Struct, frozen=True, kw_only=True):
    """All calls of one name in one category.

    Attributes:
        name: As the trace has it.
        category: `cat` of the trace: `cpu_op`, `user_annotation`, `python_function`, `cuda_runtime`, ... for what a
            thread of the host did, `kernel`, `gpu_memcpy`, `gpu_memset` for a device; empty where the trace says none.
        calls: How often.
        total_us: From start to end, those inside of it included.
        self_us: Without what ran inside of it in the same thread. For a device the same as `total_us`.
    """

    name: str
    category: str
    calls: int
    total_us: float
    self_us: float


class ThreadSums(Struct, frozen=True, kw_only=True):
    """One thread of the host: `busy_us` is the time in which any event of it was open."""

    pid: int | float | str | None
    tid: int | float | str | None
    name: str
    events: int
    busy_us: float


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
    """What is in a trace.

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
    raise NotImplementedError
