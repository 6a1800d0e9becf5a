"""The reward function of the runs, which OpenRLHF loads by its path."""

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_: object) -> dict[str, object]:
    """Reward even lengths."""
    scores = torch.tensor([float(len(query) % 2) for query in queries])
    return {"rewards": scores, "scores": scores, "extra_logs": {}}
