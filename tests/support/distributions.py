"""Distributions that ship recipes, created and installed in a folder."""

from __future__ import annotations

from pathlib import Path

from autoprof._boot import entry_points
from tests.support.recipe_texts import recipe


def install(site: Path, name: str, declared: str, *targets: str, package: str | None = None) -> Path:
    """Install a distribution: its dist-info, and a package that raises SystemExit on import. Return the package."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(declared)
    folder = site / (package or f"{name.replace('-', '_')}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text("raise SystemExit('a package of recipes was imported')\n")
    for target in targets:
        (folder / f"{target}.toml").write_text(
            recipe(target, ("work", "work", "span", 'stage = "work", role = "trainer"'))
        )
    return folder


def declare(value: str, group: str = entry_points.GROUP, name: str = "mine") -> str:
    return f"[console_scripts]\nmine = other:main\n\n[{group}]\n# a comment\n{name} = {value}\n[x.y]\na = b\n"
