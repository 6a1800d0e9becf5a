"""Fixtures of the tests of autoprof/behaviours."""

from __future__ import annotations

from tests.support.sglang_schedulers import run
from tests.support.vllm_workers import start

__all__ = ["run", "start"]
