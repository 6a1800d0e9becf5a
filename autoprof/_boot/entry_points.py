"""Recipes of installed distributions: entry points of the group `autoprof.recipes`, found without `importlib.metadata`.

An entry point names a package by its import name: the recipes are the `*.toml` files in its folder. Nothing of it is
imported. `importlib.metadata` costs more than a whole interpreter start, and this runs in the user's process, so the
standard library's cheap parts do: one listing per folder of `sys.path` and one `open` per distribution.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator


GROUP = "autoprof.recipes"
_FILE = "entry_points.txt"
# What installers leave beside packages (PyPA, "Recording installed projects"; setuptools' egg-info before that).
_FOLDERS = (".dist-info", ".egg-info")
# Finders that have targets patched, which must not begin while somebody only asks where a package is.
_OUR_FINDERS = ("autoprof", "wrapt")


def _pass_on(error: BaseException) -> None:
    """`interrupts.pass_on`, which is not imported for a file that is not there: a handler would have a frame there."""
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        from autoprof.base import interrupts

        interrupts.pass_on(error)


class EntryPoint:
    """One entry point of the group: `name = "value"`, and the distribution that declares it."""

    __slots__ = ("distribution", "name", "value")

    def __init__(self, distribution: str, name: str, value: str) -> None:
        self.distribution = distribution
        self.name = name
        self.value = value

    def folder(self) -> str:
        """The folder that `value` names, `package.folder` or `package:folder`; an empty text where there is none.

        Only the finders are asked, which run no code of the package.
        """
        top, *inner = self.value.replace(":", ".").split(".")
        for place in _places(top):
            folder = os.path.join(place, *inner)
            if os.path.isdir(folder):
                return folder
        return ""


def look(places: "Iterable[str]", known: "Container[str]") -> "list[str]":
    """Return the folders that distributions in `places` declare, without those that are known."""
    folders = dict.fromkeys(entry.folder() for entry in declared(places))
    return [folder for folder in folders if folder and folder not in known]


def declared(places: "Iterable[str]") -> "Iterator[EntryPoint]":
    """The entry points of the group in the distributions that are installed in `places`, folders of `sys.path`.

    What can't be read is no distribution of ours.
    """
    for place in places:
        try:
            names = sorted(os.listdir(place or "."))
        except OSError as error:
            _pass_on(error)
            continue
        for name in names:
            if name.endswith(_FOLDERS):
                yield from _of_distribution(os.path.join(place, name))


def _of_distribution(folder: str) -> "Iterator[EntryPoint]":
    try:
        with open(os.path.join(folder, _FILE), "rb") as file:
            content = file.read()
    except OSError as error:
        _pass_on(error)
        return
    if GROUP.encode() not in content:
        return
    distribution = os.path.basename(folder).rpartition(".")[0].partition("-")[0].replace("_", "-")
    inside = False
    for line in content.decode(errors="replace").splitlines():
        line = line.strip()
        if line.startswith("["):
            inside = line == f"[{GROUP}]"
        elif inside and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield EntryPoint(distribution, name.strip(), value.strip())


def _places(package: str) -> "list[str]":
    """The folders of a top-level package, those of an editable install too; none where it is a single module."""
    for finder in sys.meta_path:
        if type(finder).__module__.partition(".")[0] in _OUR_FINDERS:
            continue
        try:
            spec = finder.find_spec(package, None)
        except Exception as error:  # somebody else's finder
            _pass_on(error)
            continue
        if spec is not None:
            return list(spec.submodule_search_locations or ())
    return []
