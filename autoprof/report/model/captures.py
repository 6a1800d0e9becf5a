"""Captures of a step, and the sums of their traces."""

from __future__ import annotations

import msgspec


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator, a kernel or a function in a capture, all its calls together.

    Attributes:
        category: The trace's `cat`: cpu_op, kernel, gpu_memcpy, user_annotation, python_function ...
        total_us: With what it called.
        self_us: Without.
    """

    name: str
    category: str
    calls: int
    total_us: float
    self_us: float


class DeviceShares(msgspec.Struct, frozen=True, kw_only=True):
    """A device's activity while it was recorded, as shares of `seconds`.

    Attributes:
        device: As the trace names it.
        compute: Kernels other than communication.
        communication: NCCL's, HCCL's and the like, whether or not something else ran beside them.
        copy: Copies and memsets.
        idle: Nothing.
        overlap: Of the communication's time, the share in which compute ran, too; None without communication.
    """

    device: str
    seconds: float
    compute: float
    communication: float
    copy: float
    idle: float
    overlap: float | None = None


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of an engine of one kind. `tokens` are those that were scheduled, where the trace says."""

    passes: int
    seconds: float
    tokens: int | None = None


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The forward passes of an engine in a capture. A pass with both prefill and decode is `mixed`."""

    engine: str
    passes: int
    prefill: Phase
    decode: Phase
    mixed: Phase
    other: Phase


class CaptureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One capture.

    Attributes:
        stage_kind: The stage's kind in the vocabulary of all trainers, where it has one.
        state: `complete`, `truncated`, `failed`, `unfinished`, or `damaged` where the file can't be read.
        part: Of a replica's engine: `frontend`, or a worker by its ranks.
        tool: `torch`, `npu`, `nsys`, `memory` or `none`.
        opens_with: What opens the file, where it is not Perfetto.
        seconds: From the first to the last event.
        collectives_s: Of that, in collectives, waiting for other ranks included; None where the trace shows none.
        operators: Of the host, by own time, at most 50.
        kernels: Of the devices, by own time, at most 50.
        memory_peak_bytes: By the device or, without one, the host.
        bound: `cpu` or `device`: which of the two the other waits for; None where the trace does not tell.
        reason: Why it is in this state, or why there are no figures.
        window: Why the step was captured, as its meta file says.
        slowest: Why this rank was, where the slowest were asked for.
    """

    name: str
    step: int
    role: str
    stage: str
    file: str
    state: str
    tool: str
    bytes: int
    rank: int | None = None
    replica: int | None = None
    host: str | None = None
    pid: int | None = None
    part: str = ""
    opens_with: str = ""
    start_s: float | None = None
    seconds: float | None = None
    collectives_s: float | None = None
    events: int | None = None
    operators: list[Operator] = []
    kernels: list[Operator] = []
    devices: list[DeviceShares] = []
    engine: EngineFigures | None = None
    memory_peak_bytes: int | None = None
    memory_total_bytes: int | None = None
    bound: str | None = None
    reason: str = ""
    window: str = ""
    slowest: str = ""
    stage_kind: str = ""
