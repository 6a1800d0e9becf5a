"""TRL's GRPO, which generates with transformers."""

from __future__ import annotations

from typing import Any

from bench.gpu.programs import tiny
from bench.gpu.programs.common import arguments, say


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the number of different characters of each completion."""
    return [float(len(set(completion))) for completion in completions]


def main() -> None:
    parsed = arguments(steps=6)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokens = tiny.tokenizer()
    length = 8 if parsed.device == "cpu" else 32
    generates = {"num_generations": 4, "max_completion_length": length, "beta": 0.0}
    trainer = GRPOTrainer(
        model=tiny.model(tokens, parsed.device),
        processing_class=tokens,
        reward_funcs=reward,
        args=GRPOConfig(**tiny.common(parsed.device, parsed.steps) | generates),
        train_dataset=Dataset.from_list([{"prompt": f"say {number}"} for number in range(64)]),
    )
    trainer.train()
    say(history=tiny.history(trainer), steps=trainer.state.global_step)


if __name__ == "__main__":
    main()
