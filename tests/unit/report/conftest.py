"""Fixtures of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hung_runs import HungRun


@pytest.fixture
def hung(tmp_path: Path) -> HungRun:
    return HungRun(tmp_path / "20260101-000000-abcdef")


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without torch, on which flight records are compared in a moment."""
    (tmp_path / "nothing" / "torch").mkdir(parents=True)
    (tmp_path / "nothing" / "torch" / "__init__.py").write_text("raise ImportError('no torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "nothing"))
