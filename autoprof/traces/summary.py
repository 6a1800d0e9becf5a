"""Sums of one trace: times of operators, activity of devices, forward passes of an engine, peaks of memory.

A trace is read once, in pieces. To compute own times, each thread's events must be in the order of their starts. But
Kineto writes the host's events in one block per source: operators, then Python functions, then driver calls. So each
event is kept as a row of 20 bytes (`event_rows.py`). If there are many rows, they go to a temporary file, and are read
back in order. The file takes 7 % of the size of the trace's JSON. Memory stays below 100 MB for any trace.

All times are in microseconds and are not rounded, as in the trace.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from autoprof.traces.clocks import BASE, EPOCH_US
from autoprof.traces.event_rows import EventData, Id, Key, Rows, decode
from autoprof.traces.flame import FUNCTION, OWN_FRAME, OWN_WORK, REST, CallTrees, FlameThread, tidy, waits
from autoprof.traces.reader import NO_JSON, Reader, TraceError

# Names of annotations from vllm/v1/worker/gpu_worker.py, annotate_profile. In 0.12 to 0.32, a name has the requests
# and tokens in prefill, then the requests and tokens in decode; with detailed_trace_annotation (0.26), it contains more
# numbers. In 0.11.2, a name contains the new and the cached requests.
_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^)]*\)_generation_(\d+)\((?:sq)?(\d+)")
_VLLM_OLD = re.compile(r"execute_new_(\d+)_cached_(\d+)$")
# sglang/srt/utils/profile_utils.py, build_step_span_name: step[EXTEND bs=2 toks=512], step[DECODE bs=8].
_SGLANG = re.compile(r"step\[(\w+)[^\]]*?\bbs=(\d+)(?: toks=(\d+))?")
_SGLANG_KINDS = {"EXTEND": "prefill", "SPLIT_PREFILL": "prefill", "DECODE": "decode"}


class Phase(Struct, frozen=True, kw_only=True):
    """Sums over an engine's forward passes of one kind, such as prefill."""

    passes: int  # The number of passes.
    seconds: float  # Seconds of the passes on the device. If the trace lacks this time, their seconds on the host.
    tokens: int | None = None  # The number of tokens that the engine scheduled for the passes. None if unknown.


class EngineFigures(Struct, frozen=True, kw_only=True):
    """Forward passes of an engine in a capture. A pass with both prefill and decode counts as `mixed`."""

    engine: str
    passes: int
    prefill: Phase
    decode: Phase
    mixed: Phase
    other: Phase


class PassAnnotation(NamedTuple):
    """Content of the annotation of one forward pass.

    Attributes:
        engine: `vllm` or `sglang`.
        kind: `prefill` if the pass only read prompts, `decode` if it only generated next tokens, `mixed` if it did
            both. `other` for SGLang's other passes (IDLE, TARGET_VERIFY, DRAFT, ...), and for vLLM's passes without
            requests.
        tokens: The number of tokens in the pass. If SGLang's annotation of a decode pass has no number, each request
            counts as one token. 0 if the annotation has no number of tokens.
    """

    engine: str
    kind: str
    tokens: int


def parsed(name: str) -> PassAnnotation | None:
    """Return the content of an annotation with this name. Return None if it is no annotation of a forward pass."""
    if match := _VLLM.match(name):
        context, context_tokens, generation, generation_tokens = map(int, match.groups())
        return PassAnnotation("vllm", _vllm_kind(context, generation), context_tokens + generation_tokens)
    if match := _VLLM_OLD.match(name):
        return PassAnnotation("vllm", _vllm_kind(*map(int, match.groups())), 0)
    if match := _SGLANG.match(name):
        kind = "mixed" if match[1] == "MIXED" else _SGLANG_KINDS.get(match[1], "other")
        return PassAnnotation("sglang", kind, int(match[3] or 0) or (int(match[2]) if kind == "decode" else 0))
    return None


def _vllm_kind(context: int, generation: int) -> str:
    """Return the kind of a pass with these numbers of requests in prefill and in decode."""
    return {(1, 0): "prefill", (0, 1): "decode", (1, 1): "mixed"}.get((context > 0, generation > 0), "other")


COMPUTE, COMMUNICATION, COPY, UNCOUNTED = range(4)
# Categories of events on a device (pytorch/kineto, libkineto/src/ActivityType.cpp).
COPIES = frozenset(("gpu_memcpy", "gpu_memset"))
KERNELS = frozenset(("kernel", "collective_comm"))
ANNOTATION = "gpu_user_annotation"
# Categories of events on a device that are no work: waits for another stream, and copies of the host's annotations.
NO_WORK = frozenset((ANNOTATION, "cuda_sync", "cuda_profiler_range"))
# Names of communication kernels. NCCL and RCCL: nccl...; HCCL: hcom_... and hccl...; oneCCL: oneccl...; the all-reduces
# of vLLM and SGLang: cross_device_reduce, one_shot/two_shot/multimem_all_reduce; FlashInfer: ...allreduce...;
# DeepEP: deep_ep::; NVSHMEM: nvshmem.
_COMMUNICATION = re.compile(
    r"nccl|rccl|hccl|hcom|lccl|oneccl|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|deep_ep|nvshmem",
    re.IGNORECASE,
)
# Names of annotations of c10d that last as long as a collective on the host (torch 2.13, ProcessGroupGloo.cpp and
# ProcessGroupMPI.cpp). Annotations of NCCL and similar libraries end once the kernel is enqueued.
_HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
_COPY = re.compile(r"mem(cpy|set)|sdma", re.IGNORECASE)
# Name of the process that contains the devices' events in a trace_view.json of torch_npu's analysis. These events have
# no category.
NPU_PROCESS = "Ascend Hardware"
# Share of the time in which a device was busy. From BUSY, the capture is bound by the device. Below IDLE, it is bound
# by the host.
BUSY, IDLE = 0.8, 0.5


class DeviceSums(Struct, frozen=True, kw_only=True):
    """Activity of one device during the trace.

    The streams of a device run in parallel. So each time is the length of a union of intervals, not a sum of durations.

    Attributes:
        device: The process id that the device has in the trace. Kineto uses the device's number.
        name: The name of the device in the trace ("GPU 0"). Empty if the trace has no name.
        events: The number of kernels, copies and memsets.
        busy_us: Microseconds in which at least one kernel, copy or memset ran.
        compute_us: Microseconds in which a kernel other than communication ran.
        communication_us: Microseconds in which a kernel of NCCL, RCCL, HCCL or similar ran.
        copy_us: Microseconds in which a copy or a memset ran.
        overlap_us: Microseconds in which compute and communication ran at the same time.
        idle_us: Microseconds of `span_us` in which the device was not busy.
        span_us: Microseconds from the first event of the trace to the last event. Shares are computed from this time.
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


def device_work(category: str, name: str, process: str) -> int | None:
    """Return COMPUTE, COMMUNICATION, COPY or UNCOUNTED for an event on a device. Return None for an event of the host.

    Args:
        category: The `cat` of the event.
        name: The name of the event.
        process: The name of the process that the event belongs to.
    """
    if category in KERNELS or (not category and process == NPU_PROCESS):
        if _COMMUNICATION.search(name):
            return COMMUNICATION
        return COPY if not category and _COPY.search(name) else COMPUTE
    if category in COPIES:
        return COPY
    return UNCOUNTED if category in NO_WORK else None


class Unions:
    """Accumulator for the time in which the events of one device ran. Overlapping events count once.

    Intervals must be added in the order of their starts.
    """

    def __init__(self) -> None:
        self.events = 0
        # The lengths of five unions of intervals: compute; communication; copies; compute or communication; all.
        self._lengths = [0.0] * 5
        self._ends = [float("-inf")] * 5

    def add(self, start: float, end: float, what: int) -> None:
        """Add the interval of an event. `start` and `end` are in µs; `what` is COMPUTE, COMMUNICATION or COPY."""
        self.events += 1
        ends, lengths = self._ends, self._lengths
        for union in (what, 3, 4) if what != COPY else (COPY, 4):
            previous_end = ends[union]
            if end > previous_end:
                lengths[union] += end - (start if start > previous_end else previous_end)
                ends[union] = end

    @property
    def communication_us(self) -> float:
        return self._lengths[COMMUNICATION]

    def sums(self, device: int | float | str | None, name: str, span_us: float) -> DeviceSums:
        """Return the sums of the device for a trace that takes `span_us` microseconds."""
        compute, communication, copy, compute_or_communication, busy = self._lengths
        return DeviceSums(
            device=device,
            name=name,
            events=self.events,
            busy_us=busy,
            compute_us=compute,
            communication_us=communication,
            copy_us=copy,
            overlap_us=max(0.0, compute + communication - compute_or_communication),
            idle_us=max(0.0, span_us - busy),
            span_us=span_us,
        )


def bound_by(devices: list[DeviceSums], is_engine: bool) -> tuple[str | None, str]:
    """Return the part that the capture waited for, and a sentence with the reason.

    The part is `device` or `cpu`. It is None if the sums don't clearly show the part.

    Args:
        devices: The activity of the devices.
        is_engine: True for an engine. An engine may also be idle because it has no requests.
    """
    if not devices:
        return None, "no device was recorded"
    busiest = max(devices, key=lambda each: each.busy_us)
    share = busiest.busy_us / busiest.span_us if busiest.span_us else 0.0
    text = f"{busiest.name or f'device {busiest.device}'} was busy {share:.0%} of the time"
    if share >= BUSY:
        return "device", text
    if share < IDLE and is_engine:
        return None, f"{text}; otherwise it waited for the host or for requests"
    if share < IDLE:
        return "cpu", f"{text}; otherwise it waited for the host"
    return None, f"{text}: neither device nor host clearly waits for the other"


# Categories of events that are not summed. Kineto's own track has one such event, which covers the whole capture.
_NOT_SUMMED = frozenset(("Trace",))
# Tolerance when two times are compared. As floats, microseconds since Kineto's base are exact to within one nanosecond.
_ROUNDING_US = 0.0005
_ANNOTATION = "user_annotation"
# The number of the operator OWN_WORK.
_OWN_WORK_NUMBER = 0
_Slot = tuple[int, "_Thread | None", "Unions | None", int]


class Operator(Struct, frozen=True, kw_only=True):
    """Sums over all calls of an operator, a kernel or a function in a capture."""

    name: str  # The name of the operator in the trace.
    category: str  # The `cat` of its events: cpu_op, kernel, gpu_memcpy, user_annotation, python_function ...
    calls: int  # The number of calls.
    total_us: float  # Microseconds of all calls, including the functions that they called.
    self_us: float  # Microseconds of all calls, excluding the functions that they called.
    waits: bool = False  # True if the function only waits: for a lock, a queue, a socket, another process or a time.
    # True if it ran in a thread that ran only Python functions, beside the threads of the stage. Such a thread often
    # waits.
    aside: bool = False

    @property
    def remark(self) -> str:
        """Return the text that follows the category in tables."""
        return f"{', waits' if self.waits else ''}{', beside the stage' if self.aside else ''}"


class _Thread:
    """The open events of a thread, outermost first.

    Attributes:
        ends: The ends of the events.
        operators: The numbers of their operators.
        nodes: Their nodes in the call trees. The first node is the root of the thread.
    """

    def __init__(self, root: int) -> None:
        self.ends: list[float] = []
        self.operators: list[int] = []
        self.nodes: list[int] = [root]


def _take(inner_us: list[float], thread: _Thread, start: float, end: float) -> None:
    """Count the time of an event as inner time of the open events, although the event ends after some of these events.

    A `record_function` can be such an event: it begins within the Python call that enters the `record_function`, and
    ends after this call. Each moment counts as own time of the event that began last.

    Args:
        inner_us: The inner time of each operator, in microseconds. It is changed.
        thread: The thread of the event.
        start: The start of the event.
        end: The end of the event.
    """
    for open_end, operator in zip(reversed(thread.ends), reversed(thread.operators), strict=True):
        if open_end > start:
            inner_us[operator] += min(end, open_end) - start
            start = open_end
        if open_end >= end:
            return


def _device_order(device: Id) -> tuple[int, float, str]:
    """Return a sort key for ids of devices. It puts numbers first, then None, then texts."""
    if isinstance(device, str):
        return 2, 0.0, device
    return (0, device, "") if device is not None else (1, 0.0, "")


class Summing:
    """Sums over all rows of a trace.

    Attributes:
        first_us: The start of the first event, in microseconds.
        last_us: The last end of an event, in microseconds.
    """

    def __init__(self, data: EventData, stage_ranges: Collection[str] = ()) -> None:
        """Sum up the rows.

        Args:
            data: The rows.
            stage_ranges: The names of the ranges that autoprof puts around the recorded stage.
        """
        self._data = data
        self._stage_ranges = stage_ranges
        # Threads that ran more than Python functions. Threads of Ray and of queues run only these.
        self._busy_threads = {key[2:] for key in data.keys if key[0] not in (FUNCTION, *_NOT_SUMMED)}
        # Dict from (True if on a device, category, name, True if in a thread beside the stage) to the number.
        self._operators: dict[tuple[bool, str, str, bool], int] = {(False, FUNCTION, OWN_WORK, False): 0}
        self._threads: dict[tuple[Id, Id], _Thread] = {}
        self._devices: dict[Id, Unions] = {}
        self._collectives = Unions()
        self._trees = CallTrees()
        slots = [self._slot(key) for key in data.keys]
        # These lists have an element for each operator, and a last element for the rows that are not summed.
        # `_inner_us` is the time of inner calls.
        self._calls = [0] * (len(self._operators) + 1)
        self._total_us, self._inner_us = [0.0] * len(self._calls), [0.0] * len(self._calls)
        self.first_us, self.last_us = float("inf"), float("-inf")
        self._run(slots)

    def _slot(self, key: Key) -> _Slot:
        """Return where the rows with a key are added.

        Returns:
            Four values: the number of the operator; the thread, or None; the union of intervals, or None; and the kind
            of interval for this union. The number is -1 if the rows are not summed.
        """
        category, name, pid, tid = key
        if category in _NOT_SUMMED:
            return -1, None, None, 0
        kind = device_work(category, name, self._description("process_name.name", pid))
        if kind is None and category == _ANNOTATION and name in self._stage_ranges:
            name = REST
        name = tidy(category, name)
        is_aside = category == FUNCTION and name != OWN_WORK and (pid, tid) not in self._busy_threads
        operator = self._operators.setdefault((kind is not None, category, name, is_aside), len(self._operators))
        if kind is None:
            if (thread := self._threads.get((pid, tid))) is None:
                thread = self._threads[pid, tid] = _Thread(self._trees.root(f"thread {tid}"))
            is_collective = category == _ANNOTATION and _HOST_COLLECTIVE.match(name) is not None
            return operator, thread, self._collectives if is_collective else None, COMMUNICATION
        if kind == UNCOUNTED:
            return operator, None, None, kind
        return operator, None, self._devices.setdefault(pid, Unions()), kind

    def _description(self, what: str, pid: Id) -> str:
        return self._data.descriptions.get((what, pid), "")

    def _run(self, slots: list[_Slot]) -> None:
        total_us, inner_us = self._total_us, self._inner_us
        counts = [0] * len(slots)
        node_us, node_of, new_child = self._trees.us, self._trees.children.get, self._trees.child
        first_us, last_us = self.first_us, self.last_us
        for start, negative_length, number in self._data.rows:
            counts[number] += 1
            operator, thread, unions, kind = slots[number]
            if operator < 0:
                continue
            end = start - negative_length
            if end > last_us:
                last_us = end
                first_us = min(first_us, start)
            if unions is not None:
                unions.add(start, end, kind)
            if thread is None:
                total_us[operator] -= negative_length
                continue
            ends, operators, nodes = thread.ends, thread.operators, thread.nodes
            last_passed_end = start + _ROUNDING_US
            while ends and ends[-1] <= last_passed_end:
                ends.pop()
                operators.pop()
                nodes.pop()
            if operators and operators[-1] == _OWN_WORK_NUMBER and operator != _OWN_WORK_NUMBER:
                counts[number] -= 1
                operator = _OWN_WORK_NUMBER
            total_us[operator] -= negative_length
            caller = nodes[-1]
            node = node_of((caller, operator)) or new_child(caller, operator)
            if node != caller:
                # In a flame graph, a call is not longer than its caller.
                node_us[node] += ends[-1] - start if ends and ends[-1] < end else -negative_length
            if ends and end <= ends[-1] + _ROUNDING_US:
                inner_us[operators[-1]] -= negative_length
            else:
                _take(inner_us, thread, start, end)
            ends.append(end)
            operators.append(operator)
            nodes.append(node)
        self.first_us, self.last_us = first_us, last_us
        for count, (operator, thread, *_) in zip(counts, slots, strict=True):
            self._calls[operator] += count
            if thread is not None:
                self._trees.calls[thread.nodes[0]] += count

    def operators(self, on_device: bool) -> list[Operator]:
        """Return the sums of each operator on the devices or in threads of the host, the longest own time first.

        Threads beside the stage come last. autoprof's own frames are left out.
        """
        sums = [
            Operator(
                name=name,
                category=category,
                calls=self._calls[number],
                total_us=self._total_us[number],
                self_us=max(0.0, self._total_us[number] - self._inner_us[number]),
                waits=waits(category, name),
                aside=is_aside,
            )
            for (of_device, category, name, is_aside), number in self._operators.items()
            if of_device is on_device
            and self._calls[number] > 0
            and category not in NO_WORK
            and name not in (OWN_FRAME, OWN_WORK)
        ]
        return sorted(sums, key=lambda each: (each.aside, -each.self_us, each.name))

    def flame(self) -> list[FlameThread]:
        """Return the flame graphs of the threads of the host that have the most events."""
        names = [(category, "the stage" if name == REST else name) for _, category, name, _ in self._operators]
        return self._trees.threads(names)

    def devices(self) -> list[DeviceSums]:
        """Return the sums of the devices, ordered by the ids of the devices."""
        span = max(0.0, self.last_us - self.first_us)
        sums = []
        for pid, unions in self._devices.items():
            name = self._description("process_labels.labels", pid) or self._description("process_name.name", pid)
            sums.append(unions.sums(pid, name, span))
        return sorted(sums, key=lambda each: _device_order(each.device))

    def collectives_us(self) -> float | None:
        """Return the microseconds in collectives on the device that has most of them.

        If no device ran collectives, return the microseconds in collectives on the host. Return None if the host ran
        none either.
        """
        by_device = [unions.communication_us for unions in self._devices.values()]
        return max(by_device, default=0.0) or self._collectives.communication_us or None

    def engine(self) -> EngineFigures | None:
        """Return the sums of an engine's forward passes. Return None if the trace has no annotations of such passes."""
        engine = ""
        # For each kind: the number of passes, their microseconds on the host and on the device, and their tokens.
        sums = {kind: [0, 0.0, 0.0, 0] for kind in ("prefill", "decode", "mixed", "other")}
        for (_, category, name, _), number in self._operators.items():
            if category not in (_ANNOTATION, ANNOTATION) or (annotation := parsed(name)) is None:
                continue
            engine, of_kind = annotation.engine, sums[annotation.kind]
            if category == ANNOTATION:
                of_kind[2] += self._total_us[number]
            else:
                of_kind[0] += self._calls[number]
                of_kind[1] += self._total_us[number]
                of_kind[3] += self._calls[number] * annotation.tokens
        phases = {
            kind: Phase(passes=int(passes), seconds=(device_us or host_us) / 1e6, tokens=int(tokens) or None)
            for kind, (passes, host_us, device_us, tokens) in sums.items()
        }
        passes = sum(phase.passes for phase in phases.values())
        return EngineFigures(engine=engine, passes=passes, **phases) if engine else None


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
        cut: The reason why the end of a truncated trace is missing; empty for a complete trace. The sums of a
            truncated trace cover its readable events.
        events: The number of events of all kinds.
        first_ns: Start of the first event with a duration, in ns since the epoch. None if the trace has no base.
        span_us: Microseconds from the start of the first event to the last end of an event.
        operators: Sums of each operator in threads of the host, the longest own time first. Threads beside the stage
            come last.
        kernels: Sums of each kernel and each copy on devices, the longest time first.
        devices: Activity of each device. Empty if no device was recorded.
        collectives_us: Microseconds in collectives, including the wait for other ranks. The time is measured from
            kernels on the device. For gloo and MPI, it is measured on the host. None if the trace has no collectives.
        engine: Sums of the forward passes that vLLM or SGLang annotated. None if the trace has no such annotations.
        memory: Memory peaks of each device. Empty if memory was not recorded.
        flame: Flame graphs of the threads of the host that have the most events.
        bound: The part that the capture waited for: `device` or `cpu`. None if it is unclear.
        reason: A sentence with the reason for `bound`.
    """

    cut: str
    events: int
    first_ns: int | None
    span_us: float
    operators: list[Operator]
    kernels: list[Operator]
    devices: list[DeviceSums]
    collectives_us: float | None
    engine: EngineFigures | None
    memory: list[MemoryPeak]
    bound: str | None
    reason: str
    flame: list[FlameThread]


def summarize(path: Path, stage_ranges: Collection[str] = ()) -> TraceSums:
    """Sum up one trace of torch, vLLM, SGLang or another program, plain or gzip, complete or truncated.

    Args:
        path: The trace.
        stage_ranges: The names of the ranges that autoprof puts around the recorded stage.

    Raises:
        TraceError: The file can't be read, or is not a Chrome trace. The message names the file.
        OSError: The temporary file can't be written, for example because the disk is full.
    """
    with Rows() as rows, Reader(path, accept_truncated=True) as reader:
        data = EventData(rows)
        for events in reader.chunks(decode):
            try:
                data.events(events)
            except (ValueError, *NO_JSON) as error:
                raise TraceError(f"{path}: an event can't be read: {error}") from None
        return _sums(reader, data, Summing(data, stage_ranges))


def _sums(reader: Reader, data: EventData, summing: Summing) -> TraceSums:
    first_us, last_us = summing.first_us, summing.last_us
    base_ns = _base_ns(reader) or data.whole_us * 1000
    has_base = last_us > first_us and (base_ns > 0 or first_us > EPOCH_US)
    devices = summing.devices()
    engine = summing.engine()
    bound, reason = bound_by(devices, is_engine=engine is not None)
    return TraceSums(
        cut=reader.cut,
        events=data.count,
        first_ns=base_ns + round(first_us * 1000) if has_base else None,
        span_us=max(0.0, last_us - first_us),
        operators=summing.operators(on_device=False),
        kernels=summing.operators(on_device=True),
        devices=devices,
        collectives_us=summing.collectives_us(),
        engine=engine,
        memory=_memory(data),
        bound=bound,
        reason=reason,
        flame=summing.flame(),
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
