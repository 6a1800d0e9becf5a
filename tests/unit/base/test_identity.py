"""Rank of a process, from its launcher or from torch.distributed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from autoprof.base import identity


@pytest.mark.parametrize(
    ("variable", "distributed", "rank"),
    [
        ("3", {"is_initialized": lambda: True, "get_rank": lambda: 5}, 3),
        (None, {"is_initialized": lambda: True, "get_rank": lambda: 5}, 5),
        (None, {"is_initialized": lambda: False}, 0),
        (None, {}, 0),  # torch was built without it, or is being imported
    ],
)
def test_the_launchers_rank_counts_and_else_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, distributed: dict[str, object], rank: int
) -> None:
    if variable is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", variable)
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(**distributed))  # type: ignore[arg-type]
    assert identity.own_rank() == rank


def test_without_torch_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert identity.own_rank() == 0
