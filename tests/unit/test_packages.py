"""Absent packages: a test that needs one is skipped, and an import in autoprof's own code still fails."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import packages
from tests.support.helpers import ROOT


def traceback(file: object) -> str:
    return f"Traceback\n  File \"{file}\", line 3, in f\n    import torch\nModuleNotFoundError: No module named 'torch'"


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LACKING", ("torch",))


def test_a_program_that_imports_an_absent_package_skips_its_test() -> None:
    text = traceback("/tmp/lib/small.py")
    runpy = "No module named torch"
    ended = subprocess.CalledProcessError(1, ["python"], stderr=text)
    assert [packages.lacked(error) for error in (AssertionError(text), AssertionError(runpy), ended)] == ["torch"] * 3


def test_an_import_in_autoprof_is_a_failure() -> None:
    for text in (traceback(ROOT / "autoprof" / "run" / "end.py"), repr(traceback(ROOT / "autoprof" / "agent.py"))):
        assert packages.lacked(AssertionError(text)) == ""


def test_an_import_of_another_package_is_a_failure() -> None:
    assert packages.lacked(ModuleNotFoundError("no", name="msgspec")) == ""
    assert packages.lacked(ModuleNotFoundError("no", name="torch.cuda")) == "torch"


def test_an_absent_package_skips_the_test_that_uses_it() -> None:
    with pytest.raises(pytest.skip.Exception, match="needs torch"):
        packages.package("torch").ones(3)
