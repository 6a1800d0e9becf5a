"""Test suites of CPython and other projects have the same results in a captured stage as without autoprof."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.differential.running import HERE, LIBRARY, TOOLS, captures, hooks_called
from tests.support.helpers import clean_environment

pytestmark = pytest.mark.usefixtures("thorough")
SUITES = HERE / "suites"
CPYTHON = (
    *("contextlib", "contextlib_async", "import", "importlib", "inspect", "pickle", "signal", "subprocess"),
    *("threading", *(f"asyncio.test_{part}" for part in ("tasks", "taskgroups", "timeouts", "queues", "locks"))),
    *(f"asyncio.test_{part}" for part in ("runners", "futures", "waitfor", "pep492", "context", "protocols")),
)
# Source distributions that `make differential` downloads -> test files that need no network and no GPU, and take only
# minutes.
OTHERS = {
    "wrapt": ("core",),
    "accelerate": (*("test_hooks.py", "test_optimizer.py", "test_scheduler.py", "test_logging.py", "test_offload.py"),),
}
_CPYTHONS = re.compile(r"(test\.\S+) (passed|failed|skipped|error|failed as expected|failed in a sub-test)\b.*")
_PYTESTS = re.compile(r"(\S+::.+) (setup|call|teardown) (passed|failed|skipped)")


@pytest.mark.skipif(importlib.util.find_spec("test.test_contextlib") is None, reason="Python was built without tests")
@pytest.mark.parametrize("name", CPYTHON)
def test_cpythons_own_tests_have_the_same_results(name: str, tmp_path: Path) -> None:
    _ends_alike([SUITES / "cpython.py", f"test.test_{name}"], _CPYTHONS, tmp_path)


@pytest.mark.parametrize("name", OTHERS)
def test_tests_of_a_source_distribution_have_the_same_results(name: str, tmp_path: Path) -> None:
    archives = [path for place in TOOLS for path in Path(place).glob(f"sources/{name}-*.tar.gz")]
    if not archives:
        pytest.skip(f"{name} is not downloaded; run make differential")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob(f"{name}-*/tests")
    _ends_alike([SUITES / "others.py", folder, *OTHERS[name]], _PYTESTS, tmp_path)


def _ends_alike(command: Sequence[Path | str], line: re.Pattern[str], folder: Path) -> None:
    recipes = os.pathsep.join([str(LIBRARY / "tinyrl.toml"), str(SUITES / "recipes")])
    on = {"AUTOPROF": "1", "AUTOPROF_STEPS": "::1", "AUTOPROF_DIR": str(folder / "runs"), "AUTOPROF_RECIPES": recipes}
    ended = []
    for variables in ({}, on):
        cwd = folder / ("on" if variables else "off")
        cwd.mkdir()
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env=clean_environment(PYTHONPATH=os.pathsep.join([str(LIBRARY), *TOOLS]), **variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=1800,
            check=False,
        )
        tests = {found[0] for found in map(line.fullmatch, done.stdout.splitlines()) if found}
        assert tests, done.stderr[-3000:]
        ended.append(tests)
    off, on_ = ended
    print(len(off), "tests")
    assert on_ - off == off - on_ == set()
    assert hooks_called(folder / "runs") > 2
    assert captures(folder / "runs")
