"""GRPO of AReaL: a driver, which starts a training worker, a generating worker, and vLLM's server."""

from __future__ import annotations

import sys
from typing import Any

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import Dataset


def reward(prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **rest: Any) -> float:
    """Return rewards that differ between answers, so that there is something to learn."""
    return float(sum(completion_ids) % 3)


def main() -> None:
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    asked = [f"What is {one} plus {one + 2}?" for one in range(16)]
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": text}], "answer": "0"} for text in asked])
    kwargs = {
        "reward_fn": "train.reward",
        "gconfig": config.gconfig,
        "tokenizer": config.tokenizer_path,
        "enable_thinking": False,
    }
    with PPOTrainer(config, train_dataset=rows, valid_dataset=None) as trainer:
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=kwargs)


if __name__ == "__main__":
    main()
