"""Catalogue of recipes, with the fit of each to the installed targets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec

from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes import places
from autoprof.cli.recipes.source import Sources
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, Recipe, RecipeError, exceeds, fits, installed_version

# The fit of a recipe, in a word or two.
FITS, NEWER, OLDER, ABSENT, WRONG = "yes", "newer than its range", "not in its range", "not installed", "wrong"


class RecipeHook(msgspec.Struct, frozen=True, kw_only=True):
    """One hook of a recipe, as in its file."""

    name: str
    module: str
    attribute: str
    behaviour: str
    versions: str
    options: dict[str, Any]
    rewrap: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One recipe.

    Attributes:
        name: Its file's name without the ending.
        origin: `autoprof`, `AUTOPROF_RECIPES`, or the distribution whose entry point names it.
        versions: The releases of the target that it was made for; empty for all.
        installed: The version of the target here, empty where it has none or is not installed.
        fits: `yes`, or why it does not.
        problem: What is wrong with the file, if something is.
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
    """Return all recipes; `extra` are files and folders of `AUTOPROF_RECIPES`."""
    sources = Sources()
    return [entry for file in places.recipe_files(extra) for entry in _of_file(file, sources)]


def named_entries(found: list[Entry], name: str) -> list[Entry]:
    """Return the recipes called `name`, or all of a target.

    Raises:
        LookupError: There is none.
    """
    chosen = [entry for entry in found if entry.name == name] or [entry for entry in found if entry.target == name]
    if not chosen:
        names = sorted({entry.name for entry in found})
        hint = did_you_mean(name, {*names, *(entry.target for entry in found)})
        raise LookupError(f"there is no recipe {name!r}{hint}; there are {', '.join(names)}")
    return chosen


def catalog_hooks(extra: Iterable[str], more: Iterable[str]) -> list[BoundHook]:
    """Return the hooks of all recipes that are right, and of `more` files and folders."""
    found = []
    for path in [
        *(file.path for file in places.recipe_files(extra)),
        *(path for each in more for path in places.toml_files(each)),
    ]:
        with contextlib.suppress(RecipeError):
            found += recipe.load(path)
    return found


def by_recipe(hooks: Iterable[BoundHook]) -> list[tuple[Recipe, list[BoundHook]]]:
    """Return the recipes of a file, each with its hooks."""
    found: dict[str, list[BoundHook]] = {}
    for hook in hooks:
        found.setdefault(hook.recipe.target, []).append(hook)
    return [(hooks[0].recipe, hooks) for hooks in found.values()]


def _of_file(file: places.File, sources: Sources) -> list[Entry]:
    known: dict[str, Any] = {"name": file.name, "path": file.path, "origin": file.origin}
    target = ", ".join(file.targets)
    try:
        bound = recipe.load(file.path)
    except RecipeError as error:
        return [Entry(**known, target=target, problem=str(error))]
    if not bound:
        return [Entry(**known, target=target, fits="it has no hooks")]
    return [_entry(known, made, hooks, sources) for made, hooks in by_recipe(bound)]


def _entry(known: dict[str, Any], made: Recipe, bound: list[BoundHook], sources: Sources) -> Entry:
    version = installed_version(made)
    if not version and not sources.installed(made.target):
        state = ABSENT
    elif fits(version, made.versions):
        state = FITS
    else:
        state = NEWER if exceeds(version, made.versions) else OLDER
    hooks = [msgspec.convert(hook.hook, RecipeHook, from_attributes=True) for hook in bound]
    return Entry(**known, target=made.target, versions=made.versions, installed=version, fits=state, hooks=hooks)
