"""Packages that an environment may lack: `make test-pythons` tests most Pythons without torch, vLLM and verl."""

from __future__ import annotations

import importlib
import os
import re
import sysconfig
from typing import Any

import pytest

# Names of packages that this environment lacks, set by pythons.sh. Any other absent package is an error.
LACKING = tuple(filter(None, os.environ.get("TESTS_LACK", "").split(",")))


# Folder of autoprof. It imports torch only in its profilers, which tests of captures call.
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "autoprof") + os.sep
# Error of a failed import, after the last frame of its traceback if any; also in the `repr` of a text.
_IMPORT = re.compile(
    r"""(?:File "([^"]+)", line \d+, in (?:(?!File ")[^'])*?)?No module named '([\w.]+)'|No module named ([\w.]+)"""
)


class Absent:
    """Stand-in for an absent package; a test that uses it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        pytest.skip(reason(self._name))


def package(name: str) -> Any:
    """Return a package, or its stand-in if this environment lacks it."""
    if name in LACKING:
        return Absent(name)
    return importlib.import_module(name)


def need(*names: str) -> None:
    """Skip the test if this environment lacks one of these packages."""
    for name in names:
        if name in LACKING:
            pytest.skip(reason(name))


def reason(name: str) -> str:
    """Return the reason why a test is skipped."""
    return f"needs {name}, which this environment lacks"


def lacked(error: BaseException | None) -> str:
    """Return the absent package whose import outside autoprof caused the error, or an empty text."""
    if isinstance(error, ModuleNotFoundError):
        return _lacked(error.name or "", _raised_in(error))
    streams = [getattr(error, name, None) for name in ("stderr", "stdout")]
    texts = [str(error), *(each.decode() if isinstance(each, bytes) else str(each) for each in streams if each)]
    found = [_lacked(name or other, file) for text in texts for file, name, other in _IMPORT.findall(text)]
    return next(filter(None, found), "")


def _lacked(module: str, file: str) -> str:
    name = module.partition(".")[0]
    records = f"{_OWN}capture{os.sep}profilers{os.sep}"
    return name if name in LACKING and (file.startswith(records) or not file.startswith(_OWN)) else ""


def _raised_in(error: BaseException) -> str:
    """Return the file of the failed import, without frames of the standard library."""
    traceback, file = error.__traceback__, ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        file = name if not name.startswith(("<", sysconfig.get_path("stdlib"))) else file
        traceback = traceback.tb_next
    return file
