"""Fixtures of the tests of autoprof/cli."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recipe_checks import BASE, TRAINER


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target on the path, also for child processes."""
    folder = tmp_path / "lib" / "mytrainer"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .base import Base as Exported\n")
    (folder / "loop.py").write_text(TRAINER)
    (folder / "base.py").write_text(BASE)
    (folder / "broken.py").write_text("def (:\n")
    (folder / "ending.py").write_text("raise SystemExit(3)\n")
    (folder / "needing.py").write_text("import no_such_package\n")
    (folder / "sub" / "deep.py").write_text("def run(): ...\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    return folder
