"""Reward function of the runs, which OpenRLHF loads by path."""

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_: object) -> dict[str, object]:
    """Return a reward of 1 for odd lengths, and 0 for even lengths."""
    scores = torch.tensor([float(len(query) % 2) for query in queries])
    return {"rewards": scores, "scores": scores, "extra_logs": {}}
