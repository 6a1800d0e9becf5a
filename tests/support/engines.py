"""The environments of other engine releases, which `make test-engines` makes from `requirements/`."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.helpers import ROOT

ALL = sorted(path.stem for path in (ROOT / "tests" / "engines" / "requirements").glob("*.txt"))
# Those that are tested.
NAMES = sorted(os.environ.get("ENGINES", "").split()) or ALL


def python_of(name: str) -> str:
    """The interpreter of the environment `name`.

    Raises:
        AssertionError: It was not made.
    """
    folder = ROOT / ".venvs" / name
    assert (folder / ".ready").exists(), f"{folder} is not there; run make test-engines"
    return str(folder / "bin" / "python")


def one_package(name: str, package: str, folder: Path) -> str:
    """A folder for PYTHONPATH that has one package of the environment `name`, for another environment's interpreter.

    TRL is not installed beside verl: verl 0.9.1 does not start with TRL from 1.13 on.
    """
    (packages,) = (ROOT / ".venvs" / name).glob("lib/python3*/site-packages")
    folder.mkdir()
    for path in [packages / package, *packages.glob(f"{package}-*.dist-info")]:
        (folder / path.name).symlink_to(path)
    return str(folder)
