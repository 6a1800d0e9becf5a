"""Catalogue of recipes: each with its hooks, and whether it fits the installed target."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes import places
from autoprof.cli.recipes.source import Sources
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, Recipe, RecipeError, exceeds, fits, installed_version

# Values of `Entry.fits`.
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
        name: The file's name without the ending.
        origin: `autoprof`, `AUTOPROF_RECIPES`, or the distribution whose entry point names it.
        versions: The releases of the target that it was made for; empty for all.
        installed: The installed version of the target; empty if it has no version or is not installed.
        fits: `yes`, or the reason why it does not fit.
        problem: The error in the file, if any.
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
    """Return all recipes. `extra` lists the files and folders of `AUTOPROF_RECIPES`."""
    sources = Sources()
    return [entry for file in places.recipe_files(extra) for entry in _entries_of_file(file, sources)]


def named_entries(recipes: list[Entry], name: str) -> list[Entry]:
    """Return the recipes called `name`, or else the recipes for the target `name`.

    Raises:
        LookupError: Neither a recipe nor a target has this name.
    """
    chosen = [entry for entry in recipes if entry.name == name] or [entry for entry in recipes if entry.target == name]
    if not chosen:
        names = sorted({entry.name for entry in recipes})
        hint = did_you_mean(name, {*names, *(entry.target for entry in recipes)})
        raise LookupError(f"there is no recipe {name!r}{hint}; the recipes are {', '.join(names)}")
    return chosen


def catalog_hooks(extra: Iterable[str], more: Iterable[str]) -> list[BoundHook]:
    """Return the hooks of all valid recipes, those in the files and folders `more` included."""
    hooks = []
    for path in [
        *(file.path for file in places.recipe_files(extra)),
        *(path for place in more for path in places.toml_files(place)),
    ]:
        with contextlib.suppress(RecipeError):
            hooks += recipe.load(path)
    return hooks


def own_hooks() -> list[BoundHook]:
    """Return the hooks of autoprof's own recipes."""
    return [hook for path in places.toml_files(_boot.own_recipes()) for hook in recipe.load(path)]


def by_recipe(hooks: Iterable[BoundHook]) -> list[tuple[Recipe, list[BoundHook]]]:
    """Return the recipes of a file, each with its hooks."""
    by_target: dict[str, list[BoundHook]] = {}
    for hook in hooks:
        by_target.setdefault(hook.recipe.target, []).append(hook)
    return [(hooks[0].recipe, hooks) for hooks in by_target.values()]


def _entries_of_file(file: places.RecipeFile, sources: Sources) -> list[Entry]:
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
