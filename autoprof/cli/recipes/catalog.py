"""The recipes of autoprof, of installed distributions and of `AUTOPROF_RECIPES`, and their fit to installed targets."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from autoprof import _boot
from autoprof._boot import entry_points
from autoprof.base.units import did_you_mean
from autoprof.cli.recipes.lookup import Sources
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, Recipe, RecipeError, exceeds, fits, installed_version

OWN = "autoprof"
SETTING = "AUTOPROF_RECIPES"


class RecipeFile(NamedTuple):
    """A recipe file and its origin: `autoprof`, `AUTOPROF_RECIPES`, or the name of a distribution."""

    path: str
    origin: str

    @property
    def name(self) -> str:
        """Return the recipe's name: the file's name without the ending."""
        return os.path.basename(self.path).removesuffix(".toml")

    @property
    def targets(self) -> list[str]:
        """Return the import names of the targets: `trl` and `swift` for a file called `trl+swift.toml`."""
        return self.name.partition(".")[0].split("+")


def recipe_files(extra: Iterable[str] = ()) -> list[RecipeFile]:
    """Return all recipe files in the order in which autoprof reads them.

    If two hooks have the same key, the hook that is read later is used.

    Args:
        extra: The files and folders that `AUTOPROF_RECIPES`, or `recipes` in the settings file, names.
    """
    files = [RecipeFile(path, OWN) for path in toml_files(_boot.own_recipes())]
    for entry in entry_points.declared(sys.path):
        if folder := entry.folder():
            files += [RecipeFile(path, entry.distribution) for path in toml_files(folder)]
    for place in extra:
        files += [RecipeFile(path, SETTING) for path in toml_files(place)]
    return list({file.path: file for file in files}.values())


def unreadable_places() -> Iterator[str]:
    """Yield a message for each entry point that declares recipes, but names no package with recipe files."""
    for entry in entry_points.declared(sys.path):
        subject = f"{entry.distribution}: entry point {entry.name!r} of {entry_points.GROUP} names {entry.value!r}"
        folder = entry.folder()
        if not folder:
            yield f"{subject}, but there is no such package here; name a package that contains *.toml files"
        elif not toml_files(folder):
            yield f"{subject}, but {folder} contains no *.toml files"


def toml_files(place: str) -> list[str]:
    """Return the `*.toml` files in the folder `place`, or `[place]` if it is a file.

    Return an empty list if the folder or file is missing or unreadable.
    """
    if os.path.isdir(place):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            return []
        return [os.path.join(place, name) for name in names if name.endswith(".toml")]
    return [place] if os.path.isfile(place) else []


# Values of `Entry.fits`.
FITS, NEWER, OLDER, ABSENT, WRONG = "yes", "newer than its range", "not in its range", "not installed", "wrong"


class RecipeHook(msgspec.Struct, frozen=True, kw_only=True):
    """One hook of a recipe, with the values in the recipe file."""

    name: str
    module: str
    attribute: str
    behaviour: str
    versions: str
    options: dict[str, Any]
    rewrap: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One recipe, and its fit to the target that is installed here.

    Attributes:
        name: The name of the recipe file without the ending.
        origin: `autoprof`, `AUTOPROF_RECIPES`, or the distribution whose entry point names the recipe.
        versions: The releases of the target for which the recipe was made; empty for all releases.
        installed: The installed version of the target; empty if the target has no version or is not installed.
        fits: `yes`, or the reason why the recipe does not fit the installed target.
        problem: The error in the recipe file; empty if the file has no error.
    """

    name: str
    target: str
    path: str
    origin: str
    versions: str = ""
    installed: str = ""
    fits: str = WRONG
    hooks: list[RecipeHook] = []
    problem: str = ""


def entries(extra: Iterable[str]) -> list[Entry]:
    """Return an entry for each recipe. `extra` lists the files and folders that `AUTOPROF_RECIPES` names."""
    sources = Sources()
    return [entry for file in recipe_files(extra) for entry in _entries_of_file(file, sources)]


def named_entries(recipes: list[Entry], name: str) -> list[Entry]:
    """Return the entries of the recipes called `name`, or else of the recipes for the target `name`.

    Raises:
        LookupError: Neither a recipe nor a target has this name.
    """
    named = [entry for entry in recipes if entry.name == name] or [entry for entry in recipes if entry.target == name]
    if not named:
        names = sorted({entry.name for entry in recipes})
        hint = did_you_mean(name, {*names, *(entry.target for entry in recipes)})
        raise LookupError(f"there is no recipe {name!r}{hint}; the recipes are {', '.join(names)}")
    return named


def catalog_hooks(extra: Iterable[str], more: Iterable[str]) -> list[BoundHook]:
    """Return the hooks of all recipes without errors, including the recipes in the files and folders `more`."""
    hooks = []
    for path in [
        *(file.path for file in recipe_files(extra)),
        *(path for place in more for path in toml_files(place)),
    ]:
        with contextlib.suppress(RecipeError):
            hooks += recipe.load(path)
    return hooks


def own_hooks() -> list[BoundHook]:
    """Return the hooks of autoprof's own recipes."""
    return [hook for path in toml_files(_boot.own_recipes()) for hook in recipe.load(path)]


def by_recipe(hooks: Iterable[BoundHook]) -> list[tuple[Recipe, list[BoundHook]]]:
    """Return the recipes to which the hooks of a recipe file belong, each with its hooks."""
    by_target: dict[str, list[BoundHook]] = {}
    for hook in hooks:
        by_target.setdefault(hook.recipe.target, []).append(hook)
    return [(hooks[0].recipe, hooks) for hooks in by_target.values()]


def _entries_of_file(file: RecipeFile, sources: Sources) -> list[Entry]:
    fields: dict[str, Any] = {"name": file.name, "path": file.path, "origin": file.origin}
    target = ", ".join(file.targets)
    try:
        bound = recipe.load(file.path)
    except RecipeError as error:
        return [Entry(**fields, target=target, problem=str(error))]
    if not bound:
        return [Entry(**fields, target=target, fits="it has no hooks")]
    return [_entry(fields, content, hooks, sources) for content, hooks in by_recipe(bound)]


def _entry(fields: dict[str, Any], content: Recipe, bound: list[BoundHook], sources: Sources) -> Entry:
    version = installed_version(content)
    if not version and not sources.installed(content.target):
        state = ABSENT
    elif fits(version, content.versions):
        state = FITS
    else:
        state = NEWER if exceeds(version, content.versions) else OLDER
    hooks = [msgspec.convert(hook.hook, RecipeHook, from_attributes=True) for hook in bound]
    return Entry(**fields, target=content.target, versions=content.versions, installed=version, fits=state, hooks=hooks)
