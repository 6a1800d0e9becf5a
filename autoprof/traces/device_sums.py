"""Sums by device: computing, communicating, copying and idle time, and an engine's forward passes."""

from __future__ import annotations

import re

from msgspec import Struct

# vllm/v1/worker/gpu_worker.py, annotate_profile. 0.12 to 0.32: requests with their tokens that take a prompt in, and
# that make the next token; with detailed_trace_annotation (0.26) more figures. 0.11.2: requests new and known.
_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\((?:sq)?(\d+)[^)]*\)_generation_(\d+)\((?:sq)?(\d+)")
_VLLM_OLD = re.compile(r"execute_new_(\d+)_cached_(\d+)$")
# sglang/srt/utils/profile_utils.py, build_step_span_name: step[EXTEND bs=2 toks=512], step[DECODE bs=8].
_SGLANG = re.compile(r"step\[(\w+)[^\]]*?\bbs=(\d+)(?: toks=(\d+))?")
_SGLANG_KINDS = {"EXTEND": "prefill", "SPLIT_PREFILL": "prefill", "DECODE": "decode"}


class PassSums(Struct, frozen=True, kw_only=True):
    """Passes of one kind.

    Attributes:
        passes: How many.
        host_us: In the engine's thread, from launch to return.
        device_us: On the device, where the trace has that (`gpu_user_annotation`); else 0.
        requests: Summed over the passes.
        tokens: Summed over the passes, where the annotation says; a request that is decoded counts as one token.
    """

    passes: int = 0
    host_us: float = 0.0
    device_us: float = 0.0
    requests: int = 0
    tokens: int = 0


class EngineSums(Struct, frozen=True, kw_only=True):
    """The passes of an engine.

    Attributes:
        engine: `vllm` or `sglang`.
        prefill: Passes that only took prompts in.
        decode: Passes that only made next tokens.
        mixed: Passes that did both.
        other: SGLang's passes of other kinds (IDLE, TARGET_VERIFY, DRAFT, ...), and vLLM's without requests.
    """

    engine: str
    prefill: PassSums
    decode: PassSums
    mixed: PassSums
    other: PassSums


class Pass(Struct, frozen=True):
    """The annotation of one pass. `kind` is a field of `EngineSums`."""

    engine: str
    kind: str
    requests: int
    tokens: int


def parsed(name: str) -> Pass | None:
    """Return the pass that an annotation of this name stands for, if any."""
    if name.startswith("execute_"):
        if found := _VLLM.match(name):
            context, context_tokens, generation, generation_tokens = map(int, found.groups())
            tokens = context_tokens + generation_tokens
        elif found := _VLLM_OLD.match(name):
            context, generation = map(int, found.groups())
            tokens = 0
        else:
            return None
        kind = {(1, 0): "prefill", (0, 1): "decode", (1, 1): "mixed"}.get((context > 0, generation > 0), "other")
        return Pass("vllm", kind, context + generation, tokens)
    if name.startswith("step[") and (found := _SGLANG.match(name)):
        mode, requests = found[1], int(found[2])
        kind = "mixed" if mode == "MIXED" else _SGLANG_KINDS.get(mode, "other")
        return Pass("sglang", kind, requests, int(found[3] or 0) or (requests if kind == "decode" else 0))
    return None


class Passes:
    """Adds passes up."""

    def __init__(self) -> None:
        self._engine = ""
        self._sums: dict[str, list[float]] = {}

    def add(self, found: Pass, calls: int, total_us: float, on_device: bool) -> None:
        """Add all passes of one annotation."""
        self._engine = found.engine
        sums = self._sums.setdefault(found.kind, [0, 0.0, 0.0, 0, 0])
        if on_device:
            sums[2] += total_us
            return
        sums[0] += calls
        sums[1] += total_us
        sums[3] += calls * found.requests
        sums[4] += calls * found.tokens

    def sums(self) -> EngineSums | None:
        """Return the sums, if there was any pass."""
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
# Categories of events on a device (pytorch/kineto, libkineto/src/ActivityType.cpp). Waiting for another stream is no
# work, and annotations of the host are shown on the device a second time.
COPIES = frozenset(("gpu_memcpy", "gpu_memset"))
KERNELS = frozenset(("kernel", "collective_comm"))
ANNOTATION = "gpu_user_annotation"
OTHERS = frozenset((ANNOTATION, "cuda_sync", "cuda_profiler_range"))
# NCCL and RCCL name their kernels nccl..., HCCL hcom_... and hccl..., oneCCL oneccl...; vLLM's and SGLang's own
# all-reduces are cross_device_reduce, one_shot/two_shot/multimem_all_reduce, FlashInfer's ...allreduce...; DeepEP has
# deep_ep::; NVSHMEM nvshmem.
_COMMUNICATION = re.compile(
    r"nccl|rccl|hccl|hcom|lccl|oneccl|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|deep_ep|nvshmem",
    re.IGNORECASE,
)
# What c10d shows of a collective on the host for as long as it goes on, for backends that work there: torch 2.13,
# ProcessGroupGloo.cpp and ProcessGroupMPI.cpp. NCCL's and the like ends as soon as the kernel is enqueued.
_HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
_COPY = re.compile(r"mem(cpy|set)|sdma", re.IGNORECASE)
# Processes of a trace_view.json that torch_npu's analysis makes, which gives no categories.
NPU_PROCESS = "Ascend Hardware"
# More than this share of the span, and a device is what the capture waited for; less than that, and the host is.
BUSY, IDLE = 0.8, 0.5


class DeviceSums(Struct, frozen=True, kw_only=True):
    """One device over the trace's span. Each time is that of a union of intervals: streams run at once.

    Attributes:
        device: The process id in the trace, which Kineto takes from the device's number.
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


def kind(category: str, name: str, process: str) -> int | None:
    """Return what an event on a device is, or None where it is not on a device."""
    if category in KERNELS or (not category and process == NPU_PROCESS):
        if _COMMUNICATION.search(name):
            return COMMUNICATION
        return COPY if not category and _COPY.search(name) else COMPUTE
    if category in COPIES:
        return COPY
    return UNCOUNTED if category in OTHERS else None


def host_collective(category: str, name: str) -> bool:
    """Return whether an event of the host is a collective that goes on there."""
    return category == "user_annotation" and _HOST_COLLECTIVE.match(name) is not None


class Unions:
    """Lengths of unions of one device's intervals, which come by their starts."""

    def __init__(self) -> None:
        self.events = 0
        # Computing, communication, copies; computing or communication; any.
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
        """Return the sums over a span of time."""
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
    """Return what a capture waited for, the device or the host's CPU, and why.

    Args:
        devices: What they did.
        serves: Whether it is of an engine, which has nothing to do while there are no requests.
    """
    if not devices:
        return None, "no device was recorded"
    busiest = max(devices, key=lambda each: each.busy_us)
    share = busiest.busy_us / busiest.span_us if busiest.span_us else 0.0
    text = f"{busiest.name or f'device {busiest.device}'} was busy {share:.0%} of the time"
    if share >= BUSY:
        return "device", text
    if share < IDLE and serves:
        return None, f"{text}; the rest it waited for the host or for requests"
    if share < IDLE:
        return "cpu", f"{text}; the rest it waited for the host"
    return None, f"{text}: neither clearly waits for the other"
