"""Places of recipe files: autoprof's own, installed distributions, and `AUTOPROF_RECIPES`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

import msgspec

from autoprof import _boot
from autoprof._boot import entry_points

OWN = "autoprof"
SETTING = "AUTOPROF_RECIPES"


class File(msgspec.Struct, frozen=True):
    """A recipe file and its origin: `autoprof`, `AUTOPROF_RECIPES`, or the name of a distribution."""

    path: str
    origin: str

    @property
    def name(self) -> str:
        """Return the recipe's name: its file's name without the ending."""
        return os.path.basename(self.path).removesuffix(".toml")

    @property
    def targets(self) -> list[str]:
        """Return the import names of the targets, with which the file's name begins."""
        return self.name.partition(".")[0].split("+")


def recipe_files(extra: Iterable[str] = ()) -> list[File]:
    """Return all recipe files in the order in which they are read: of two hooks with one key the later counts.

    Args:
        extra: Files or folders of `AUTOPROF_RECIPES`, or of `recipes` in the settings file.
    """
    found = [File(path, OWN) for path in toml_files(_boot.own_recipes())]
    for entry in entry_points.declared(sys.path):
        if folder := entry.folder():
            found += [File(path, entry.distribution) for path in toml_files(folder)]
    for place in extra:
        found += [File(path, SETTING) for path in toml_files(place)]
    return list({file.path: file for file in found}.values())


def place_problems() -> Iterator[str]:
    """Yield what is wrong with entry points of the group."""
    for entry in entry_points.declared(sys.path):
        said = f"{entry.distribution}: entry point {entry.name!r} of {entry_points.GROUP} names {entry.value!r}"
        folder = entry.folder()
        if not folder:
            yield f"{said}, and there is no such package here; it takes the import name of a package with *.toml files"
        elif not toml_files(folder):
            yield f"{said}, and {folder} holds no *.toml files"


def toml_files(place: str) -> list[str]:
    """Return the `*.toml` files in a folder, or the file itself; none where nothing is there, or can be read."""
    if os.path.isdir(place):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            return []
        return [os.path.join(place, name) for name in names if name.endswith(".toml")]
    return [place] if os.path.isfile(place) else []
