"""Recorded work: small matrix products, forward and backward."""

from __future__ import annotations

from typing import Any

# Bytes in a trace for each round of work (torch 2.13).
BYTES_A_ROUND = 7050


def work(torch: Any, rounds: int) -> None:
    """Run `rounds` rounds of work."""
    x = torch.randn(32, 32, requires_grad=True)
    for begin in range(0, rounds, 500):
        y = x
        for _ in range(min(500, rounds - begin)):
            y = (y @ x).tanh()
        y.sum().backward()
