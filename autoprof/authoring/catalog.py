"""The recipes there are, and whether each fits what is installed here."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import msgspec

from autoprof import recipe
from autoprof.authoring import places
from autoprof.authoring.source import Sources
from autoprof.hooklog import installed_version
from autoprof.recipe import RecipeError

# What is said of a recipe in a word or two.
FITS, NEWER, OLDER, ABSENT, WRONG = "yes", "newer than its range", "not in its range", "not installed", "wrong"


class HookEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One hook of a recipe, as its file says."""

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
    hooks: list[HookEntry] = []
    problem: str = ""


def entries(extra: Iterable[str]) -> list[Entry]:
    """All recipes; `extra` are files and folders of `AUTOPROF_RECIPES`."""
    sources = Sources()
    return [_entry(file, sources) for file in places.files(extra)]


def named(found: list[Entry], name: str) -> list[Entry]:
    """The recipes called `name`, or all of a target.

    Raises:
        LookupError: There is none.
    """
    chosen = [entry for entry in found if entry.name == name] or [entry for entry in found if entry.target == name]
    if not chosen:
        names = sorted({entry.name for entry in found})
        near = get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise LookupError(f"there is no recipe {name!r}{hint}; there are {', '.join(names)}")
    return chosen


def _entry(file: places.File, sources: Sources) -> Entry:
    known: dict[str, Any] = {"name": file.name, "target": file.target, "path": file.path, "origin": file.origin}
    try:
        bound = recipe.load(file.path)
    except RecipeError as error:
        return Entry(**known, problem=str(error))
    if not bound:
        return Entry(**known, fits="it has no hooks")
    made = bound[0].recipe
    version = installed_version(made)
    if not version and not sources.installed(made.target):
        fits = ABSENT
    elif recipe.fits(version, made.versions):
        fits = FITS
    else:
        fits = NEWER if recipe.exceeds(version, made.versions) else OLDER
    hooks = [msgspec.convert(hook.hook, HookEntry, from_attributes=True) for hook in bound]
    return Entry(**known, versions=made.versions, installed=version, fits=fits, hooks=hooks)
