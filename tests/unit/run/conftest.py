"""Fixtures of the tests of autoprof/run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.collected_nodes import META, TRACE, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path, "n1", "n2")
    made.put("n1", TRACE, os.urandom(1000))
    made.put("n1", META, '{"state": "complete"}')
    made.put("n1", "run.json", "{}")
    made.put("n2", "run.json", "{}")
    made.put("n2", "clocks/n2-7.jsonl", "{}")
    made.put("n2", "journal/n2-7.jsonl", '{"kind": "process"}\n')
    return made
