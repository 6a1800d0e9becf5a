"""Forward passes of an engine, by the annotations that vLLM and SGLang put around each."""

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
