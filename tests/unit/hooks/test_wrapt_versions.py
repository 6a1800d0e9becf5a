"""The oldest supported wrapt. All other tests use the newest one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import helpers
from tests.support.helpers import IN_FRONT, ROOT, Python

VERSIONS = sorted(path.stem.removeprefix("wrapt-") for path in (ROOT / "tests" / "wrapt").glob("*.txt"))
# Tests of code that uses wrapt: paths of decorators, and the wrappers of torch's own functions.
TESTS = [
    "hooks/test_patching.py::test_functions_methods_and_decorated_ones",
    "behaviours/test_native_profiler.py",
    "capture/test_memory.py::test_a_history_of_the_users_is_left_alone",
    "capture/test_memory.py::test_a_history_that_the_user_switches_meanwhile",
    "capture/test_memory.py::test_a_run_watches_where_it_is_asked_to",
    "capture/test_recorder.py::test_autoprof_yields_to_a_profiler_that_was_first",
    "capture/test_recorder.py::test_autoprof_yields_to_a_profiler_that_comes_later",
    "capture/test_npu_analysis.py::test_autoprof_yields_to_another_profiler_of_torch_npus",
    "hooks/test_wrapt_versions.py::test_the_older_wrapt_is_imported",
]
SHOW = "import wrapt, wrapt.importer; print(wrapt.__version__, wrapt.importer.__file__)"


def pinned(path: Path) -> str:
    found = re.search(r"^wrapt==(\S+)$", path.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_older_wrapt_is_imported(python: Python) -> None:
    version, place = python(SHOW).stdout.split()
    front = os.environ.get(IN_FRONT)
    if front is None:
        assert version == pinned(ROOT / "examples" / "verl_cpu" / "requirements.txt")
    else:
        assert place.startswith(front)
        assert version == Path(front).name.removeprefix("wrapt-")
        import wrapt

        assert wrapt.__version__ == version


def test_the_oldest_wrapt_is_that_of_the_metadata() -> None:
    found = re.search(r'"wrapt>=([0-9.]+),<3"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    assert VERSIONS[0].startswith(found[1])


@pytest.mark.skipif(IN_FRONT in os.environ, reason="it is running")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.needs("torch")
def test_another_wrapt(version: str) -> None:
    front = ROOT / ".venvs" / f"wrapt-{version}"
    if not front.is_dir():
        pytest.skip("make test makes it")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    in_front = {IN_FRONT: str(front), "PYTHONPATH": str(front)}
    result = helpers.run([*command, *(f"tests/unit/{name}" for name in TESTS)], cwd=ROOT, timeout_s=600, **in_front)
    assert result.returncode == 0, result.stdout
    assert re.search(r"^\d+ passed in ", result.stdout, re.MULTILINE), result.stdout
