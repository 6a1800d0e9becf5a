"""Fixtures of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hung_runs import HungRun


@pytest.fixture
def hung(tmp_path: Path) -> HungRun:
    return HungRun(tmp_path / "20260101-000000-abcdef")
