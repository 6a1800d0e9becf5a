"""Sources of recipe files: autoprof itself, installed distributions, and `AUTOPROF_RECIPES`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

import msgspec

from autoprof import _boot
from autoprof._boot import entry_points

OWN = "autoprof"
SETTING = "AUTOPROF_RECIPES"


class RecipeFile(msgspec.Struct, frozen=True):
    """A recipe file and its origin: `autoprof`, `AUTOPROF_RECIPES`, or the name of a distribution."""

    path: str
    origin: str

    @property
    def name(self) -> str:
        """Return the recipe's name: the file's name without the ending."""
        return os.path.basename(self.path).removesuffix(".toml")

    @property
    def targets(self) -> list[str]:
        """Return the import names of the targets, from the beginning of the file's name."""
        return self.name.partition(".")[0].split("+")


def recipe_files(extra: Iterable[str] = ()) -> list[RecipeFile]:
    """Return all recipe files in reading order. If two hooks have the same key, the later one is used.

    Args:
        extra: Files or folders of `AUTOPROF_RECIPES`, or of `recipes` in the settings file.
    """
    files = [RecipeFile(path, OWN) for path in toml_files(_boot.own_recipes())]
    for entry in entry_points.declared(sys.path):
        if folder := entry.folder():
            files += [RecipeFile(path, entry.distribution) for path in toml_files(folder)]
    for place in extra:
        files += [RecipeFile(path, SETTING) for path in toml_files(place)]
    return list({file.path: file for file in files}.values())


def place_problems() -> Iterator[str]:
    """Yield the errors of the entry points that declare recipes."""
    for entry in entry_points.declared(sys.path):
        subject = f"{entry.distribution}: entry point {entry.name!r} of {entry_points.GROUP} names {entry.value!r}"
        folder = entry.folder()
        if not folder:
            yield f"{subject}, but there is no such package here; name a package that contains *.toml files"
        elif not toml_files(folder):
            yield f"{subject}, but {folder} contains no *.toml files"


def toml_files(place: str) -> list[str]:
    """Return the `*.toml` files of a folder, or the file itself; nothing if it is missing or unreadable."""
    if os.path.isdir(place):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            return []
        return [os.path.join(place, name) for name in names if name.endswith(".toml")]
    return [place] if os.path.isfile(place) else []
