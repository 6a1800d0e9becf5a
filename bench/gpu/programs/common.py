"""Arguments and helpers that programs share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.workbench import SAID


def arguments(**more: Any) -> argparse.Namespace:
    """Read the command line: `--device`, and one option for each name, with its default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, type=type(default))
    return parser.parse_args()


def say(**result: Any) -> None:
    """Print the result, and whether autoprof is imported."""
    result["autoprof"] = any(name.startswith("autoprof.") for name in sys.modules)
    print(SAID + json.dumps(result), flush=True)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def training(device: str, width: int = 512) -> Callable[[], float]:
    """Return a function that trains a small model for one step, with a copy of the data to the device."""
    torch.manual_seed(0)
    width = width if device != "cpu" else 32
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        batch = torch.randn(64, width).to(device, non_blocking=True)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step
