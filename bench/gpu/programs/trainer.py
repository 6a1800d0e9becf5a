"""transformers' Trainer: `--variant plain`, `mixed` (bf16 with gradient checkpointing) or `compiled`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from bench.gpu.programs import tiny
from bench.gpu.programs.common import arguments, say


def options(variant: str, device: str) -> dict[str, Any]:
    """Return the arguments of a variant."""
    if variant == "mixed":
        return {"bf16": True, "gradient_checkpointing": True}
    if variant == "compiled":
        # Without a GPU, the compiler's backend would compile C++ for a minute.
        return {"torch_compile": True, "torch_compile_backend": "inductor" if device != "cpu" else "aot_eager"}
    return {}


def weights(model: torch.nn.Module) -> str:
    """Return a digest of all weights."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parsed = arguments(variant="plain", steps=6)
    from transformers import Trainer, TrainingArguments

    torch.use_deterministic_algorithms(parsed.variant == "plain", warn_only=True)
    tokens = tiny.tokenizer()
    examples = [{"input_ids": torch.arange(n, n + 64), "labels": torch.arange(n, n + 64)} for n in range(64)]
    trainer = Trainer(
        model=tiny.model(tokens, parsed.device),
        args=TrainingArguments(**tiny.common(parsed.device, parsed.steps) | options(parsed.variant, parsed.device)),
        train_dataset=examples,
    )
    trainer.train()
    say(history=tiny.history(trainer), weights=weights(trainer.model), steps=trainer.state.global_step)


if __name__ == "__main__":
    main()
