"""Fixtures of the tests of autoprof/cli."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recipe_checks import BASE, TRAINER


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target on the path that ends the process when it is imported."""
    folder = tmp_path / "lib" / "mytrainer"
    folder.mkdir(parents=True)
    end = "raise SystemExit('the target was imported')\n"
    (folder / "__init__.py").write_text(end + "from .base import Base as Exported\n")
    (folder / "loop.py").write_text(end + TRAINER)
    (folder / "base.py").write_text(end + BASE)
    (folder / "star.py").write_text("from .loop import *\n")
    (folder / "broken.py").write_text("def (:\n")
    (folder / "compiled.so").touch()
    (folder / "sub").mkdir()
    (folder / "sub" / "deep.py").write_text("def run(): ...\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder
