"""Fake CUDA allocator that keeps a history."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.cuda.memory

REAL = inspect.signature(torch.cuda.memory._record_memory_history)


class Allocator:
    """Fake of the history of CUDA's allocator. As in torch, disabling the history empties it.

    Attributes:
        without: Names of parameters that this torch's `_record_memory_history` lacks.
    """

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        kept = [parameter for name, parameter in REAL.parameters.items() if name not in without]
        self.signature = inspect.Signature(kept)
        self.arguments: dict[str, Any] = {}
        self.events: list[str] = []
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.refuses = ""

    @property
    def enabled(self) -> bool:
        return bool(self.arguments)

    def record(self, *args: Any, **kwargs: Any) -> None:
        if self.refuses == "record":
            raise RuntimeError("cudaMallocAsync does not yet support recordHistory")
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.arguments = {} if bound.arguments["enabled"] is None else dict(bound.arguments)
        if not self.enabled:
            self.events.clear()

    def snapshot(self) -> dict[str, Any]:
        if self.refuses == "snapshot":
            raise RuntimeError("no")
        return {"segments": [], "device_traces": [list(self.events)]}

    def allocate(self, what: str) -> None:
        if self.enabled:
            self.events.append(what)

    def run_out(self) -> None:
        for observer in self.observers:
            observer(0, 1 << 30, 80 << 30, 5)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def install(monkeypatch: pytest.MonkeyPatch, allocator: Allocator) -> Allocator:
    """Make torch in this process report CUDA with this allocator, whose history is off."""

    def record(*args: Any, **kwargs: Any) -> None:
        allocator.record(*args, **kwargs)

    record.__signature__ = allocator.signature  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", allocator.snapshot)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: allocator.enabled, raising=False)
    attach = allocator.observers.append
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attach, raising=False)
    return allocator
