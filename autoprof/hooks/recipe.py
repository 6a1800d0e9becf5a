"""Versions of targets, and the ranges of them that recipes and hooks are for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from autoprof.base import files, interrupts
from autoprof.base.originals import os
from autoprof.config import kinds, structs
from autoprof.config.settings import MAX_BYTES
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks.behaviour import Extent


def versions_problem(versions: Any) -> str:
    """Return what is wrong with a range of versions, or an empty text. Other types than texts are not checked."""
    try:
        SpecifierSet(versions if isinstance(versions, str) else "")
    except InvalidSpecifier:
        return f"got {versions!r}; it takes a range such as '>=0.7,<0.9'"
    return ""


def fits(version: str, versions: str) -> bool:
    """Return whether a target's version is in a recipe's range.

    Only the release part is compared: verl's git tags 0.7.0 and 0.8.0 report `0.7.0.dev` and `0.8.0.dev`.
    An unknown version fits, since probes decide.
    """
    release = _release(version)
    return not versions or release is None or SpecifierSet(versions).contains(release)


def exceeds(version: str, versions: str) -> bool:
    """Return whether a target's version is newer than the end of a range, where the hooks are untested."""
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
    """Return the release part of a version, or None if it is unknown or not of PEP 440."""
    try:
        return Version(".".join(str(part) for part in Version(version).release)) if version else None
    except InvalidVersion:
        return None


# Ending of a hook's module that is the file of a script, which runs as `__main__`.
SCRIPT = ".py"
SEVERAL = "recipe"
HOOK_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


class RecipeError(ValueError):
    """An error in a recipe. The message is one line: file, table, key, what was found, what to do."""


class Hook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One place in a target: a module, an attribute path in it, and the behaviour put around it.

    Attributes:
        name: Unique among the hooks of the target; `hooks/*.json` and `AUTOPROF_DISABLE` use it.
        attribute: A function, `Class.method`, or a class, as the behaviour needs it.
        behaviour: A name in `autoprof.hooks.behaviour.BEHAVIOURS`.
        module: The module to wait for; without it the target itself. Or the file of a script: `train.py`.
        versions: For which releases of the target, as in PEP 440; empty for all.
        kind: What its stages are in the vocabulary of all trainers: one of the list, or a table of patterns for names
            of stages; without it a well-known name tells.
        rewrap: A decorator (`package.module.function`) whose inner function is wrapped and which is applied again,
            for decorators that look at their caller (verl's `auto_await`).
        around: What the behaviour goes around: the `call`; from enter to exit of the context manager that the call
            returns (`with`); each `next` of the generator, iterator or data loader that it returns (`next`).
        options: What the behaviour takes.
    """

    name: str
    attribute: str
    behaviour: str
    module: str = ""
    versions: str = ""
    kind: kinds.Kind | dict[str, kinds.Kind] = {}
    rewrap: str = ""
    around: Extent = "call"
    options: dict[str, Any] = {}


@structs.complete
class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hooks of one target, which may have several recipes.

    Attributes:
        target: Its import name; the recipe's file name begins with it.
        hook: Its hooks, each a `[[hook]]`.
        distributions: The names under which it is installed, where they differ from `target`.
        versions: The releases that the recipe was made for, a hint; empty for all.
        passive: True where importing the target alone does not make a process part of a run (Ray).
    """

    target: str
    hook: list[Hook]
    distributions: list[str] = []
    versions: str = ""
    passive: bool = False


@structs.complete
class Recipes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file with recipes of several targets; its name begins with all of them: `mytrainer+mylib.toml`.

    Attributes:
        recipe: The recipes, each a `[[recipe]]` with the keys of a recipe, and `[[recipe.hook]]` tables.
    """

    recipe: list[Recipe]


class BoundHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook with its behaviour made from its options, and where it comes from.

    Attributes:
        key: `target/hook`, in `hooks/*.json`, messages and `AUTOPROF_DISABLE`. Of two hooks with one key the later
            counts.
        file: The recipe file's name without the ending.
    """

    key: str
    file: str
    recipe: Recipe
    hook: Hook
    behaviour: behaviours.Behaviour

    @property
    def passive(self) -> bool:
        """Return whether it makes no process part of a run by itself."""
        return self.recipe.passive

    def described(self) -> dict[str, Any]:
        """Return its description in `hooks/*.json`."""
        return {"module": self.hook.module, "attribute": self.hook.attribute, "behaviour": self.hook.behaviour}


def load(path: str) -> list[BoundHook]:
    """Read one recipe file.

    Raises:
        RecipeError: It can't be read, or something in it is wrong.
    """
    document = read(path)
    try:
        recipes = (
            msgspec.convert(document, Recipes).recipe if SEVERAL in document else [msgspec.convert(document, Recipe)]
        )
    except msgspec.ValidationError as error:
        raise RecipeError(f"{path}: {_located(error, document)}") from None
    if problem := misnamed(path, [recipe.target for recipe in recipes]):
        raise RecipeError(f"{path}: target: {problem}")
    for recipe in recipes:
        if problem := versions_problem(recipe.versions):
            raise RecipeError(f"{path}: versions: {problem}")
    bound = [_bind(path, recipe, hook, index) for recipe in recipes for index, hook in enumerate(recipe.hook)]
    for key, count in Counter(hook.key for hook in bound).items():
        if count > 1:
            raise RecipeError(f"{path}: two [[hook]] tables are named {key.split('/', 1)[1]!r}; give each its own name")
    return bound


def read(path: str) -> dict[str, Any]:
    """Return the TOML document of a recipe file.

    Raises:
        RecipeError: It can't be read.
    """
    try:
        document: dict[str, Any] = msgspec.toml.decode(files.of_user(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        interrupts.pass_on(error)
        raise RecipeError(f"{path}: it can't be read as TOML ({_one_line(error)})") from None
    return document


def tables(document: dict[str, Any]) -> list[Any]:
    """Return the recipes of a file: it is one, or has several as `[[recipe]]` tables."""
    several = document.get(SEVERAL)
    return several if isinstance(several, list) else [document]


def misnamed(path: str, targets: list[str]) -> str:
    """Return the complaint about a file whose name does not begin with its targets, or an empty text."""
    said = _name(path).split(".", 1)[0]
    if Counter(said.split("+")) == Counter(targets):
        return ""
    name = "+".join(dict.fromkeys(targets))
    if len(targets) > len(set(targets)):
        return f"two [[recipe]] tables are for one target; there are {', '.join(targets)}"
    return f"it is {name!r}, but the file's name says {said!r}; name the file {name}.toml or {name}.ANYTHING.toml"


def hook_problems(hook: Mapping[str, str], target: str | None) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the texts of a hook's table, as far as they and the target are there.

    Each is a key and its problem.
    """
    if not re.fullmatch(HOOK_NAME, hook.get("name", "x")):
        yield "name", f"got {hook['name']!r}; it takes letters, digits, dots and dashes"
    module = hook.get("module") or target or ""
    if target is not None and (script(module) or module.split(".", 1)[0]) != target:
        yield "module", f"{hook['module']!r} is not in the target {target!r}"
    for key in ("module", "attribute", "rewrap"):
        if key == "module" and script(module):
            continue
        if (value := hook.get(key)) and not all(part.isidentifier() for part in value.split(".")):
            yield key, f"got {value!r}; it takes names divided by dots"
    if hook.get("behaviour") == "step.wrap" and hook.get("around") == "next":
        yield "around", "got 'next': the step would be the wait for an item; step.tick makes a step of each item"
    if hook.get("attribute") == "":
        yield "attribute", "got ''; it takes names divided by dots"
    if problem := versions_problem(hook.get("versions", "")):
        yield "versions", problem


def script(module: str) -> str:
    """Return the name of a script without its ending, where a hook's module is one: `train` of `jobs/train.py`."""
    return os.path.basename(module).removesuffix(SCRIPT) if module.endswith(SCRIPT) else ""


def table(name: str | int) -> str:
    """Return the name of a hook's table in messages: the hook's name, or its place if it has none."""
    return f"[[hook]] {name!r}" if isinstance(name, str) else f"[[hook]] number {name + 1}"


def _name(path: str) -> str:
    return os.path.basename(path).removesuffix(".toml")


def _bind(path: str, recipe: Recipe, hook: Hook, index: int) -> BoundHook:
    where = table(hook.name or index)
    for key, problem in hook_problems(msgspec.structs.asdict(hook), recipe.target):
        raise RecipeError(f"{path}: {where} {key}: {problem}")
    hook = msgspec.structs.replace(hook, module=hook.module or recipe.target)
    kind = behaviours.find(hook.behaviour)
    if kind is None:
        known = ", ".join(sorted(behaviours.BEHAVIOURS))
        raise RecipeError(f"{path}: {where} behaviour: there is no {hook.behaviour!r}; there are {known}")
    try:
        behaviour = msgspec.convert(hook.options, kind)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{path}: {where} options: {_one_line(error)}") from None
    return BoundHook(
        key=f"{recipe.target}/{hook.name}", file=_name(path), recipe=recipe, hook=hook, behaviour=behaviour
    )


def _located(error: msgspec.ValidationError, document: Any) -> str:
    """Return msgspec's message with the place put first, in the words of TOML."""
    message, _, place = _one_line(error).partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    if match := re.match(r"recipe\[([0-9]+)\]\.(.*)", place):
        document, place = document[SEVERAL][int(match[1])], match[2]
    if match := re.match(r"hook\[([0-9]+)\]\.?(.*)", place):
        index = int(match[1])
        try:
            name = document["hook"][index]["name"]
        except (KeyError, IndexError, TypeError) as error:
            interrupts.pass_on(error)
            name = None
        found = table(name if isinstance(name, str) else index)
        place = f"{found} {match[2]}".strip()
    return f"{place}: {message}" if place else message


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def installed_version(recipe: Recipe) -> str:
    """Return the version of the first of a recipe's distributions that is installed, or an empty text."""
    for name in recipe.distributions or [recipe.target]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
