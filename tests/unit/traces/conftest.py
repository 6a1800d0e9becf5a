"""Fixtures of the tests of autoprof/traces."""

from __future__ import annotations

from tests.support.merges import run

__all__ = ["run"]
