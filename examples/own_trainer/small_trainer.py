"""A user's own trainer: REINFORCE on a policy that learns to write even tokens."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, LENGTH, BATCH = 32, 12, 64
# The policy is evaluated after this number of steps, on this number of sequences.
EVALUATE_EVERY, EVALUATED = 6, 32768


class Policy(nn.Module):
    """Model of the next token's logits, given the tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.recurrent = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.head(hidden)


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """Return the share of even tokens in each sequence, without its first token."""
    return (tokens[:, 1:] % 2 == 0).float().mean(dim=1)


class Trainer:
    """Trainer of a policy; `global_step` is the number of the current step, from 1."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        self.global_step = 0

    def fit(self, steps: int) -> None:
        """Train for `steps` steps."""
        for self.global_step in range(1, steps + 1):
            print(f"step {self.global_step}: mean reward {self.train_step():.3f}", flush=True)

    def train_step(self) -> float:
        """Run one step and return the mean reward."""
        tokens = self.generate()
        rewards = reward(tokens)
        self.update(tokens, rewards)
        if self.global_step % EVALUATE_EVERY == 0:
            print(f"evaluation: mean reward {self.evaluate():.3f}", flush=True)
        return float(rewards.mean())

    @torch.no_grad()
    def generate(self) -> torch.Tensor:
        """Sample a batch of sequences, token by token."""
        tokens = torch.zeros(BATCH, 1, dtype=torch.long)
        for _ in range(LENGTH):
            probabilities = self.policy(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
        return tokens

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean reward of many sequences with the most probable tokens."""
        tokens, state = torch.randint(VOCABULARY, (EVALUATED, 1)), None
        for _ in range(LENGTH):
            hidden, state = self.policy.recurrent(self.policy.embedding(tokens[:, -1:]), state)
            tokens = torch.cat([tokens, self.policy.head(hidden).argmax(-1)], dim=1)
        return float(reward(tokens).mean())

    def update(self, tokens: torch.Tensor, rewards: torch.Tensor) -> None:
        """Take one step of the optimizer towards sequences with rewards above the mean."""
        log_probs = self.policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(log_probs.sum(dim=1) * (rewards - rewards.mean())).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
