"""Recipes of installed distributions: entry points of the group `autoprof.recipes`, found without `importlib.metadata`.

An entry point names a package by its import name. The recipes are the `*.toml` files in the package's folder. The
package is not imported. This code runs in the user's process, and `importlib.metadata` takes longer than a whole
interpreter start. So this code only lists each folder of `sys.path` and opens one file per distribution.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator


GROUP = "autoprof.recipes"
_FILE = "entry_points.txt"
# Folders that installers make beside packages (PyPA, "Recording installed projects"; earlier setuptools' egg-info).
_FOLDERS = (".dist-info", ".egg-info")
# Top-level modules of finders that patch the modules they find. The search for a package's folder skips these finders.
_OUR_FINDERS = ("autoprof", "wrapt")


def _reraise_if_from_handler(error: BaseException) -> None:
    """If a signal handler raised `error`, raise it again, as `seam.pass_on` does. Otherwise return.

    An error whose traceback has only one frame, such as the error for a missing file, can't come from a signal handler.
    Then `seam` is not imported.
    """
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        from autoprof.base import seam

        seam.pass_on(error)


class EntryPoint:
    """An entry point `name = "value"` of the group `autoprof.recipes`, and the distribution that declares it."""

    __slots__ = ("distribution", "name", "value")

    def __init__(self, distribution: str, name: str, value: str) -> None:
        self.distribution = distribution
        self.name = name
        self.value = value

    def folder(self) -> str:
        """Return the folder that `value` names, or an empty text if the folder does not exist.

        `value` is `package.folder` or `package:folder`. The package is found by import finders, so none of its code
        runs.
        """
        top, *inner = self.value.replace(":", ".").split(".")
        for package in _package_folders(top):
            folder = os.path.join(package, *inner)
            if os.path.isdir(folder):
                return folder
        return ""


def new_folders(search_path: "Iterable[str]", known: "Container[str]") -> "list[str]":
    """Return the recipe folders that distributions in `search_path` declare, except the folders in `known`."""
    folders = dict.fromkeys(entry.folder() for entry in declared(search_path))
    return [folder for folder in folders if folder and folder not in known]


def declared(search_path: "Iterable[str]") -> "Iterator[EntryPoint]":
    """Yield the entry points of the group `autoprof.recipes`, one distribution after the other.

    Folders and files that can't be read are skipped.

    Args:
        search_path: Folders, as in `sys.path`.
    """
    for folder in search_path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError as error:
            _reraise_if_from_handler(error)
            continue
        for name in names:
            if name.endswith(_FOLDERS):
                yield from _entry_points(os.path.join(folder, name))


def _entry_points(folder: str) -> "Iterator[EntryPoint]":
    """Yield the entry points of the group `autoprof.recipes` in a `.dist-info` or `.egg-info` folder."""
    try:
        with open(os.path.join(folder, _FILE), "rb") as file:
            content = file.read()
    except OSError as error:
        _reraise_if_from_handler(error)
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


def _package_folders(package: str) -> "list[str]":
    """Return the folders of a top-level package, which may be an editable install. For a single module, return []."""
    for finder in sys.meta_path:
        if type(finder).__module__.partition(".")[0] in _OUR_FINDERS:
            continue
        try:
            spec = finder.find_spec(package, None)
        except Exception as error:  # foreign finders may raise anything
            _reraise_if_from_handler(error)
            continue
        if spec is not None:
            return list(spec.submodule_search_locations or ())
    return []
