"""What devices did: how long they computed, communicated, copied and idled."""

from __future__ import annotations

from msgspec import Struct


class DeviceSums(Struct, frozen=True, kw_only=True):
    """One device over the trace's span. Each time is that of a union of intervals: streams run at once.

    Attributes:
        device: The process id of the trace, which Kineto takes from the device's number.
        name: What the trace calls it ("GPU 0"), or empty.
        events: Kernels, copies and sets.
        busy_us: Any of them ran.
        compute_us: A kernel ran that is not for communication.
        communication_us: A kernel of NCCL, RCCL, HCCL or the like ran.
        copy_us: A copy or a set ran.
        overlap_us: Computing and communication ran at once.
        idle_us: Nothing ran, from the first event of the trace to the last.
        span_us: From the first event of the trace to the last. Shares are of this.
    """

    device: int | float | str | None
    name: str
    events: int
    busy_us: float
    compute_us: float
    communication_us: float
    copy_us: float
    overlap_us: float
    idle_us: float
    span_us: float
