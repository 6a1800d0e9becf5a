"""Environments with other engine releases, which `make test-engines` creates from `requirements/`."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.helpers import ROOT

ALL = sorted(path.stem for path in (ROOT / "tests" / "engines" / "requirements").glob("*.txt"))
# Names of the environments to test.
NAMES = sorted(os.environ.get("ENGINES", "").split()) or ALL


def python_of(name: str) -> str:
    """Return the path of the interpreter of the environment `name`.

    Raises:
        AssertionError: The environment does not exist.
    """
    folder = ROOT / ".venvs" / name
    assert (folder / ".ready").exists(), f"{folder} does not exist; run make test-engines"
    return str(folder / "bin" / "python")


def one_package(name: str, package: str, folder: Path) -> str:
    """Make a folder for PYTHONPATH with one package of the environment `name`, and return its path.

    An interpreter of another environment imports the package from there. TRL can't be installed beside verl, because
    verl 0.9.1 does not start with TRL 1.13 or later.
    """
    (packages,) = (ROOT / ".venvs" / name).glob("lib/python3*/site-packages")
    folder.mkdir()
    for path in [packages / package, *packages.glob(f"{package}-*.dist-info")]:
        (folder / path.name).symlink_to(path)
    return str(folder)
