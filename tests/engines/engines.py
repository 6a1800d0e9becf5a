"""The environments of other engine releases, which `make test-engines` makes from `requirements/`."""

from __future__ import annotations

from pathlib import Path

from helpers import ROOT

NAMES = sorted(path.stem for path in (Path(__file__).parent / "requirements").glob("*.txt"))


def python_of(name: str) -> str:
    """The interpreter of the environment `name`.

    Raises:
        AssertionError: It was not made.
    """
    folder = ROOT / ".venvs" / name
    assert (folder / ".ready").exists(), f"{folder} is not there; run make test-engines"
    return str(folder / "bin" / "python")
