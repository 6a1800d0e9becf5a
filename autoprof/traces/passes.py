"""Forward passes of an engine, by the annotations that vLLM and SGLang put around each."""

from __future__ import annotations

from msgspec import Struct


class PassSums(Struct, frozen=True, kw_only=True):
    """Passes of one kind.

    Attributes:
        passes: How many.
        host_us: In the engine's thread, from launch to return.
        device_us: On the device, where the trace has that (`gpu_user_annotation`); else 0.
        requests: Summed over the passes.
        tokens: Summed over the passes, where the annotation says; a decoded request counts as one token.
    """

    passes: int
    host_us: float
    device_us: float
    requests: int
    tokens: int


class EngineSums(Struct, frozen=True, kw_only=True):
    """The passes of an engine.

    Attributes:
        engine: `vllm` or `sglang`.
        prefill: Passes that only took prompts in.
        decode: Passes that only made the next tokens.
        mixed: Passes that did both.
        other: SGLang's passes of other kinds (IDLE, VERIFY, DRAFT, ...).
    """

    engine: str
    prefill: PassSums
    decode: PassSums
    mixed: PassSums
    other: PassSums
