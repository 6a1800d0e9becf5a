"""Sums by device: computing, communicating, copying and idle time, and an engine's forward passes."""

from __future__ import annotations

import re

from msgspec import Struct

# vllm/v1/worker/gpu_worker.py, annotate_profile. 0.12 to 0.32: requests and tokens in prefill, and in decode; with
# detailed_trace_annotation (0.26) more figures. 0.11.2: new and cached requests.
_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^)]*\)_generation_(\d+)\((?:sq)?(\d+)")
_VLLM_OLD = re.compile(r"execute_new_(\d+)_cached_(\d+)$")
# sglang/srt/utils/profile_utils.py, build_step_span_name: step[EXTEND bs=2 toks=512], step[DECODE bs=8].
_SGLANG = re.compile(r"step\[(\w+)[^\]]*?\bbs=(\d+)(?: toks=(\d+))?")
_SGLANG_KINDS = {"EXTEND": "prefill", "SPLIT_PREFILL": "prefill", "DECODE": "decode"}


class PassSums(Struct, frozen=True, kw_only=True):
    """Sums of an engine's forward passes of one kind.

    Attributes:
        passes: The number of passes.
        host_us: Microseconds in the engine's thread, from launch to return.
        device_us: Microseconds on the device (`gpu_user_annotation`); 0 if the trace lacks them.
        requests: Requests, summed over the passes.
        tokens: Tokens, summed over the passes, if the annotation has them. A decoded request counts as one token.
    """

    passes: int = 0
    host_us: float = 0.0
    device_us: float = 0.0
    requests: int = 0
    tokens: int = 0


class EngineSums(Struct, frozen=True, kw_only=True):
    """Sums of an engine's forward passes.

    Attributes:
        engine: `vllm` or `sglang`.
        prefill: Passes that only read prompts.
        decode: Passes that only generated next tokens.
        mixed: Passes that did both.
        other: SGLang's passes of other kinds (IDLE, TARGET_VERIFY, DRAFT, ...), and vLLM's without requests.
    """

    engine: str
    prefill: PassSums
    decode: PassSums
    mixed: PassSums
    other: PassSums


class PassAnnotation(Struct, frozen=True):
    """Annotation of one forward pass. `kind` is a field of `EngineSums`."""

    engine: str
    kind: str
    requests: int
    tokens: int


def parsed(name: str) -> PassAnnotation | None:
    """Return the pass that an annotation with this name describes, or None."""
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
    """Sum of passes."""

    def __init__(self) -> None:
        self._engine = ""
        self._sums: dict[str, list[float]] = {}

    def add(self, annotation: PassAnnotation, calls: int, total_us: float, on_device: bool) -> None:
        """Add all passes with one annotation."""
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
        """Return the sums, or None without passes."""
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
# Not work: waits for another stream, and copies of the host's annotations.
NO_WORK = frozenset((ANNOTATION, "cuda_sync", "cuda_profiler_range"))
# NCCL and RCCL name their kernels nccl..., HCCL hcom_... and hccl..., oneCCL oneccl...; vLLM's and SGLang's own
# all-reduces are cross_device_reduce, one_shot/two_shot/multimem_all_reduce, FlashInfer's ...allreduce...; DeepEP has
# deep_ep::; NVSHMEM nvshmem.
_COMMUNICATION = re.compile(
    r"nccl|rccl|hccl|hcom|lccl|oneccl|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|deep_ep|nvshmem",
    re.IGNORECASE,
)
# Annotations of c10d that last as long as a collective on the host (torch 2.13, ProcessGroupGloo.cpp and
# ProcessGroupMPI.cpp). NCCL's and similar annotations end once the kernel is enqueued.
_HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
_COPY = re.compile(r"mem(cpy|set)|sdma", re.IGNORECASE)
# Process of the devices in a trace_view.json of torch_npu's analysis, whose events have no category.
NPU_PROCESS = "Ascend Hardware"
# Busy share of a device from which the capture is bound by the device, and below which it is bound by the host.
BUSY, IDLE = 0.8, 0.5


class DeviceSums(Struct, frozen=True, kw_only=True):
    """Activity of one device over the trace. Streams run in parallel, so each time is the union of intervals.

    Attributes:
        device: The process id in the trace. Kineto uses the device's number.
        name: Its name in the trace ("GPU 0"), or empty.
        events: The number of kernels, copies and memsets.
        busy_us: Microseconds in which any of them ran.
        compute_us: Microseconds in which a kernel other than communication ran.
        communication_us: Microseconds in which a kernel of NCCL, RCCL, HCCL or similar ran.
        copy_us: Microseconds in which a copy or a memset ran.
        overlap_us: Microseconds in which compute and communication ran at the same time.
        idle_us: The other microseconds of `span_us`.
        span_us: Microseconds from the first event of the trace to the last. Shares refer to it.
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
    """Return COMPUTE, COMMUNICATION, COPY or UNCOUNTED for an event on a device, None for other events."""
    if category in KERNELS or (not category and process == NPU_PROCESS):
        if _COMMUNICATION.search(name):
            return COMMUNICATION
        return COPY if not category and _COPY.search(name) else COMPUTE
    if category in COPIES:
        return COPY
    return UNCOUNTED if category in NO_WORK else None


def host_collective(category: str, name: str) -> bool:
    """Return True if an event of the host is a collective that runs on the host."""
    return category == "user_annotation" and _HOST_COLLECTIVE.match(name) is not None


class Unions:
    """Lengths of unions of one device's intervals. Intervals must be added in the order of their starts."""

    def __init__(self) -> None:
        self.events = 0
        # By index: compute, communication, copies, compute or communication, any.
        self._lengths = [0.0] * 5
        self._ends = [float("-inf")] * 5

    def add(self, start: float, end: float, what: int) -> None:
        """Add an interval, in µs."""
        self.events += 1
        ends, lengths = self._ends, self._lengths
        for union in (what, 3, 4) if what != COPY else (COPY, 4):
            before = ends[union]
            if end > before:
                lengths[union] += end - (start if start > before else before)
                ends[union] = end

    @property
    def communication_us(self) -> float:
        return self._lengths[COMMUNICATION]

    def sums(self, device: int | float | str | None, name: str, span_us: float) -> DeviceSums:
        """Return the sums for a trace with this length."""
        compute, communication, copy, either, busy = self._lengths
        return DeviceSums(
            device=device,
            name=name,
            events=self.events,
            busy_us=busy,
            compute_us=compute,
            communication_us=communication,
            copy_us=copy,
            overlap_us=max(0.0, compute + communication - either),
            idle_us=max(0.0, span_us - busy),
            span_us=span_us,
        )


def bound(devices: list[DeviceSums], serves: bool) -> tuple[str | None, str]:
    """Return `device` or `cpu`, the part that the capture waited for, or None; and a sentence with the reason.

    Args:
        devices: The activity of the devices.
        serves: True for an engine. An engine may be idle because it has no requests.
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
