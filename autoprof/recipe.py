"""Recipes: TOML files that say which places in one target are wrapped, for which versions, and how."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from autoprof import behaviours


class RecipeError(ValueError):
    """A recipe is wrong. The message is one line: file, table, key, what was found, what to do."""


class Hook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One place in a target: a module, an attribute path in it, and the behaviour put around it.

    Attributes:
        name: Unique in the recipe; `hooks/*.json` and `AUTOPROF_DISABLE` use it.
        module: The module to wait for.
        attribute: A function, `Class.method`, or a class, as the behaviour needs it.
        behaviour: A name in `autoprof.behaviours.BEHAVIOURS`.
        versions: For which releases of the target, as in PEP 440; empty for all.
        rewrap: A decorator (`package.module.function`) whose inner function is wrapped and which is applied again,
            for decorators that look at their caller (verl's `auto_await`).
        options: What the behaviour takes.
    """

    name: str
    module: str
    attribute: str
    behaviour: str
    versions: str = ""
    rewrap: str = ""
    options: dict[str, Any] = {}


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All hooks of one target.

    Attributes:
        target: Its import name; the recipe's file name begins with it.
        distributions: The names under which it is installed, where they differ from `target`.
        versions: The releases that the recipe was made for, a hint; empty for all.
        passive: True where importing the target alone does not make a process part of a run (Ray).
    """

    target: str
    hook: list[Hook]
    distributions: list[str] = []
    versions: str = ""
    passive: bool = False


class BoundHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook with its behaviour made from its options, and where it comes from."""

    key: str
    recipe: Recipe
    hook: Hook
    behaviour: behaviours.Behaviour


def load(path: str) -> list[BoundHook]:
    """Read one recipe file.

    Raises:
        RecipeError: It can't be read, or something in it is wrong.
    """
    try:
        with open(path, "rb") as file:
            document = msgspec.toml.decode(file.read())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: it can't be read as TOML ({_one_line(error)})") from None
    try:
        recipe = msgspec.convert(document, Recipe)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{path}: {_located(error, document)}") from None
    name = os.path.basename(path).removesuffix(".toml")
    if name.split(".", 1)[0] != recipe.target:
        raise RecipeError(
            f"{path}: target is {recipe.target!r}, but the file's name says {name.split('.', 1)[0]!r}; "
            f"name the file {recipe.target}.toml or {recipe.target}.ANYTHING.toml"
        )
    _check_versions(path, "versions", recipe.versions)
    bound = [_bind(path, name, recipe, hook, index) for index, hook in enumerate(recipe.hook)]
    keys = [hook.key for hook in bound]
    for key in keys:
        if keys.count(key) > 1:
            raise RecipeError(f"{path}: two [[hook]] tables are named {key.split('/', 1)[1]!r}; give each its own name")
    return bound


def fits(version: str, versions: str) -> bool:
    """Whether a target's version is in a recipe's range.

    Only the release part is compared: verl's git tags 0.7.0 and 0.8.0 report `0.7.0.dev` and `0.8.0.dev`.
    An unknown version fits, since probes decide.
    """
    release = _release(version)
    return not versions or release is None or SpecifierSet(versions).contains(release)


def exceeds(version: str, versions: str) -> bool:
    """Whether a target's version is newer than a range ends, so that nobody has seen yet what its hooks do there."""
    release = _release(version)
    if release is None or fits(version, versions):
        return False
    ends = [
        Version(part.version.removesuffix(".*"))
        for part in SpecifierSet(versions)
        if part.operator in ("<", "<=", "==", "~=")
    ]
    return bool(ends) and release >= max(ends)


def _release(version: str) -> Version | None:
    """The release part of a version, or None where it is unknown or none of PEP 440."""
    try:
        return Version(".".join(str(part) for part in Version(version).release)) if version else None
    except InvalidVersion:
        return None


def _bind(path: str, name: str, recipe: Recipe, hook: Hook, index: int) -> BoundHook:
    table = _table(hook.name or index)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", hook.name):
        raise RecipeError(f"{path}: {table} name: got {hook.name!r}; it takes letters, digits, dots and dashes")
    if hook.module.split(".", 1)[0] != recipe.target:
        raise RecipeError(f"{path}: {table} module: {hook.module!r} is not in the target {recipe.target!r}")
    for key, value in (("module", hook.module), ("attribute", hook.attribute)):
        if not all(part.isidentifier() for part in value.split(".")):
            raise RecipeError(f"{path}: {table} {key}: got {value!r}; it takes names divided by dots")
    _check_versions(path, f"{table} versions", hook.versions)
    kind = behaviours.find(hook.behaviour)
    if kind is None:
        known = ", ".join(sorted(behaviours.BEHAVIOURS))
        raise RecipeError(f"{path}: {table} behaviour: there is no {hook.behaviour!r}; there are {known}")
    try:
        behaviour = msgspec.convert(hook.options, kind)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{path}: {table} options: {_one_line(error)}") from None
    return BoundHook(key=f"{name}/{hook.name}", recipe=recipe, hook=hook, behaviour=behaviour)


def _check_versions(path: str, where: str, versions: str) -> None:
    try:
        SpecifierSet(versions)
    except InvalidSpecifier:
        raise RecipeError(f"{path}: {where}: got {versions!r}; it takes a range such as '>=0.7,<0.9'") from None


def _located(error: msgspec.ValidationError, document: Any) -> str:
    """msgspec's message with the place put first, in the words of TOML."""
    message, _, place = _one_line(error).partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    if match := re.match(r"hook\[([0-9]+)\]\.?(.*)", place):
        index = int(match[1])
        try:
            table = _table(document["hook"][index]["name"])
        except (KeyError, IndexError, TypeError):
            table = _table(index)
        place = f"{table} {match[2]}".strip()
    return f"{place}: {message}" if place else message


def _table(name: str | int) -> str:
    return f"[[hook]] {name!r}" if isinstance(name, str) else f"[[hook]] number {name + 1}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
