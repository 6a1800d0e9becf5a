"""Fixtures of the tests of autoprof/capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autoprof.run.runtime import Runtime
from tests.support import npu_stand_in
from tests.support.nsys_runs import actor, cuda, installed, own_process, under_nsys

__all__ = ["actor", "cuda", "installed", "own_process", "under_nsys"]


@pytest.fixture
def make(made: Callable[..., Runtime]) -> Iterator[Callable[..., Runtime]]:
    """Return a function that makes a run with these settings. torch_npu is removed afterwards."""
    yield made
    npu_stand_in.remove()


@pytest.fixture
def torch_npu(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the newest stored release."""
    return npu_stand_in.install(monkeypatch)
