"""Sums for each device (computing, communicating, copying and idle time), and for the forward passes of an engine."""

from __future__ import annotations

import re

from msgspec import Struct

# Names of annotations from vllm/v1/worker/gpu_worker.py, annotate_profile. In 0.12 to 0.32, a name has the requests
# and tokens in prefill, then the requests and tokens in decode; with detailed_trace_annotation (0.26), it contains more
# numbers. In 0.11.2, a name contains the new and the cached requests.
_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^)]*\)_generation_(\d+)\((?:sq)?(\d+)")
_VLLM_OLD = re.compile(r"execute_new_(\d+)_cached_(\d+)$")
# sglang/srt/utils/profile_utils.py, build_step_span_name: step[EXTEND bs=2 toks=512], step[DECODE bs=8].
_SGLANG = re.compile(r"step\[(\w+)[^\]]*?\bbs=(\d+)(?: toks=(\d+))?")
_SGLANG_KINDS = {"EXTEND": "prefill", "SPLIT_PREFILL": "prefill", "DECODE": "decode"}


class PassSums(Struct, frozen=True, kw_only=True):
    """Sums of an engine's forward passes of one kind.

    Attributes:
        passes: The number of passes.
        host_us: Microseconds of the passes in the engine's thread, from launch to return.
        device_us: Microseconds of the passes on the device (`gpu_user_annotation`). 0 if the trace has no such events.
        requests: The number of requests in each pass, summed over the passes.
        tokens: The number of tokens in each pass, summed over the passes. If SGLang's annotation of a decode pass has
            no number, each request counts as one token. 0 if the annotations have no numbers of tokens.
    """

    passes: int = 0
    host_us: float = 0.0
    device_us: float = 0.0
    requests: int = 0
    tokens: int = 0


class EngineSums(Struct, frozen=True, kw_only=True):
    """Sums of an engine's forward passes, separately for each kind of pass.

    Attributes:
        engine: `vllm` or `sglang`.
        prefill: Sums of the passes that only read prompts.
        decode: Sums of the passes that only generated next tokens.
        mixed: Sums of the passes that read prompts and generated next tokens.
        other: Sums of SGLang's passes of other kinds (IDLE, TARGET_VERIFY, DRAFT, ...), and of vLLM's passes without
            requests.
    """

    engine: str
    prefill: PassSums
    decode: PassSums
    mixed: PassSums
    other: PassSums


class PassAnnotation(Struct, frozen=True):
    """Content of the annotation of one forward pass. `kind` is the name of a field of `EngineSums`."""

    engine: str
    kind: str
    requests: int
    tokens: int


def parsed(name: str) -> PassAnnotation | None:
    """Return the content of an annotation with this name. Return None if it is no annotation of a forward pass."""
    if name.startswith("execute_"):
        if match := _VLLM.match(name):
            context, context_tokens, generation, generation_tokens = map(int, match.groups())
            tokens = context_tokens + generation_tokens
        elif match := _VLLM_OLD.match(name):
            context, generation = map(int, match.groups())
            tokens = 0
        else:
            return None
        kind = {(1, 0): "prefill", (0, 1): "decode", (1, 1): "mixed"}.get((context > 0, generation > 0), "other")
        return PassAnnotation("vllm", kind, context + generation, tokens)
    if name.startswith("step[") and (match := _SGLANG.match(name)):
        mode, requests = match[1], int(match[2])
        kind = "mixed" if mode == "MIXED" else _SGLANG_KINDS.get(mode, "other")
        return PassAnnotation("sglang", kind, requests, int(match[3] or 0) or (requests if kind == "decode" else 0))
    return None


class Passes:
    """Accumulator for the sums of an engine's forward passes."""

    def __init__(self) -> None:
        self._engine = ""
        self._sums: dict[str, list[float]] = {}

    def add(self, annotation: PassAnnotation, calls: int, total_us: float, on_device: bool) -> None:
        """Add all passes whose annotations have the same name.

        Args:
            annotation: The content of the annotations.
            calls: The number of the annotations.
            total_us: The sum of their durations, in microseconds.
            on_device: True for annotations on the device, False for annotations in a thread of the host.
        """
        self._engine = annotation.engine
        sums = self._sums.setdefault(annotation.kind, [0, 0.0, 0.0, 0, 0])
        if on_device:
            sums[2] += total_us
            return
        sums[0] += calls
        sums[1] += total_us
        sums[3] += calls * annotation.requests
        sums[4] += calls * annotation.tokens

    def sums(self) -> EngineSums | None:
        """Return the sums. Return None if no passes were added."""
        if not self._engine:
            return None

        def of(kind: str) -> PassSums:
            passes, host, device, requests, tokens = self._sums.get(kind, [0, 0.0, 0.0, 0, 0])
            return PassSums(
                passes=int(passes), host_us=host, device_us=device, requests=int(requests), tokens=int(tokens)
            )

        return EngineSums(
            engine=self._engine, prefill=of("prefill"), decode=of("decode"), mixed=of("mixed"), other=of("other")
        )


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


def kind(category: str, name: str, process: str) -> int | None:
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


def host_collective(category: str, name: str) -> bool:
    """Return True if a host's event is a collective that runs on the host, such as a collective of gloo."""
    return category == "user_annotation" and _HOST_COLLECTIVE.match(name) is not None


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


def bound(devices: list[DeviceSums], serves: bool) -> tuple[str | None, str]:
    """Return the part that the capture waited for, and a sentence with the reason.

    The part is `device` or `cpu`. It is None if the sums don't clearly show the part.

    Args:
        devices: The activity of the devices.
        serves: True for an engine. An engine may also be idle because it has no requests.
    """
    if not devices:
        return None, "no device was recorded"
    busiest = max(devices, key=lambda each: each.busy_us)
    share = busiest.busy_us / busiest.span_us if busiest.span_us else 0.0
    text = f"{busiest.name or f'device {busiest.device}'} was busy {share:.0%} of the time"
    if share >= BUSY:
        return "device", text
    if share < IDLE and serves:
        return None, f"{text}; otherwise it waited for the host or for requests"
    if share < IDLE:
        return "cpu", f"{text}; otherwise it waited for the host"
    return None, f"{text}: neither device nor host clearly waits for the other"
