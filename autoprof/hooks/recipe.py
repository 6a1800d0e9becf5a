"""Recipe files: their structs, their reader with its checks, and ranges of versions."""

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
    """Return the error in a range of versions, or an empty string. Only strings are checked."""
    try:
        SpecifierSet(versions if isinstance(versions, str) else "")
    except InvalidSpecifier:
        return f"got {versions!r}; use a range such as '>=0.7,<0.9'"
    return ""


def fits(version: str, versions: str) -> bool:
    """Return whether a target's version is in a recipe's range.

    Only the release part is compared: verl's git tags 0.7.0 and 0.8.0 report `0.7.0.dev` and `0.8.0.dev`.
    An unknown version fits: then a hook is applied if its attribute exists.
    """
    release = _release(version)
    return not versions or release is None or SpecifierSet(versions).contains(release)


def exceeds(version: str, versions: str) -> bool:
    """Return whether a target's version is newer than the range, so that the hooks are untested with it."""
    release = _release(version)
    if release is None or fits(version, versions):
        return False
    ends = [
        Version(part.version.removesuffix(".*"))
        for part in SpecifierSet(versions)
        if part.operator in ("<", "<=", "==", "~=")
    ]
    return bool(ends) and release >= max(ends)


def outside(version: str, recipe: Recipe) -> str:
    """Return a message if a target's version is not in the recipe's range, otherwise an empty string."""
    return "" if fits(version, recipe.versions) else f"{version} is outside the recipe's range {recipe.versions}"


def _release(version: str) -> Version | None:
    """Return the release part of a version, or None if it is unknown or does not follow PEP 440."""
    try:
        return Version(".".join(str(part) for part in Version(version).release)) if version else None
    except InvalidVersion:
        return None


# Suffix of a hook's `module` that names the file of a script, which runs as `__main__`.
SCRIPT = ".py"
# Key of a file with several recipes.
SEVERAL = "recipe"
# Pattern of a hook's name.
HOOK_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


class RecipeError(ValueError):
    """Error in a recipe. The message is one line: file, table, key, the problem and its remedy."""


class Hook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One function or class of a target, and the behaviour put around it.

    Attributes:
        name: Name, unique among the hooks of the target. `hooks/*.json` and `AUTOPROF_DISABLE` use it.
        attribute: Function, `Class.method` or class, depending on the behaviour.
        behaviour: Name of the behaviour, a key of `autoprof.hooks.behaviour.BEHAVIOURS`.
        module: Module that defines the attribute (default: the target itself), or the file of a script: `train.py`.
        versions: Releases of the target that have the attribute, as in PEP 440. Empty: all.
        kind: Kind of its stages, in terms common to all trainers: one kind, or a table from patterns of stage names to
            kinds. Without it, autoprof takes the kind from well-known stage names.
        rewrap: Decorator of the attribute (`package.module.function`). The hook wraps the function inside it, then
            applies the decorator again. For decorators that inspect their caller (verl's `auto_await`).
        around: Part that the behaviour wraps: the `call`; the `with` block of the context manager that the call
            returns; or each `next` of the generator, iterator or data loader that the call returns.
        options: Options of the behaviour.
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
    """Hooks of one target. A target may have several recipes.

    Attributes:
        target: Import name of the target. The recipe's file name begins with it.
        hook: Hooks of the target, each a `[[hook]]` table.
        distributions: Names of the packages that install the target, if they differ from `target`.
        versions: Releases that the recipe was written for, a hint. Empty: all.
        passive: True if the import of the target alone does not make a process part of a run (Ray).
    """

    target: str
    hook: list[Hook]
    distributions: list[str] = []
    versions: str = ""
    passive: bool = False


@structs.complete
class Recipes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file with recipes of several targets. Its name begins with all of them: `mytrainer+mylib.toml`.

    Attributes:
        recipe: Recipes, each a `[[recipe]]` table with the keys of a recipe, and `[[recipe.hook]]` tables.
    """

    recipe: list[Recipe]


class BoundHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook with its recipe, its file, and its behaviour created from the options.

    Attributes:
        key: Name as `target/hook`, in `hooks/*.json`, messages and `AUTOPROF_DISABLE`. If two hooks have the same key,
            the later one replaces the earlier one.
        file: Name of the recipe file, without its suffix.
    """

    key: str
    file: str
    recipe: Recipe
    hook: Hook
    behaviour: behaviours.Behaviour

    @property
    def passive(self) -> bool:
        """Return whether the hook alone does not make a process part of a run."""
        return self.recipe.passive

    def described(self) -> dict[str, Any]:
        """Return the hook's description in `hooks/*.json`."""
        return {"module": self.hook.module, "attribute": self.hook.attribute, "behaviour": self.hook.behaviour}


def load(path: str) -> list[BoundHook]:
    """Return the hooks of one recipe file.

    Raises:
        RecipeError: The file can't be read or has an error.
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
            name = key.split("/", 1)[1]
            raise RecipeError(f"{path}: two [[hook]] tables are named {name!r}; give each a different name")
    return bound


def read(path: str) -> dict[str, Any]:
    """Return the TOML document of a recipe file.

    Raises:
        RecipeError: The file can't be read.
    """
    try:
        document: dict[str, Any] = msgspec.toml.decode(files.of_user(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        interrupts.pass_on(error)
        raise RecipeError(f"{path}: it can't be read as TOML ({_one_line(error)})") from None
    return document


def tables(document: dict[str, Any]) -> list[Any]:
    """Return the recipes of a file: its `[[recipe]]` tables, or the document itself if it is one recipe."""
    several = document.get(SEVERAL)
    return several if isinstance(several, list) else [document]


def misnamed(path: str, targets: list[str]) -> str:
    """Return a message if the file's name does not begin with its targets, otherwise an empty string."""
    file_targets = _name(path).split(".", 1)[0]
    if Counter(file_targets.split("+")) == Counter(targets):
        return ""
    name = "+".join(dict.fromkeys(targets))
    if len(targets) > len(set(targets)):
        return f"two [[recipe]] tables are for one target; the targets are {', '.join(targets)}"
    return (
        f"it is {name!r}, but the file's name says {file_targets!r}; name the file {name}.toml or {name}.ANYTHING.toml"
    )


def hook_problems(hook: Mapping[str, str], target: str | None) -> Iterator[tuple[str, str]]:
    """Yield the errors in the strings of a hook's table, each as a key and a message.

    Keys that the table lacks are not checked, and `module` is not compared with a target of None.
    """
    if not re.fullmatch(HOOK_NAME, hook.get("name", "x")):
        yield "name", f"got {hook['name']!r}; use letters, digits, dots, dashes and underscores"
    module = hook.get("module") or target or ""
    if target is not None and (script(module) or module.split(".", 1)[0]) != target:
        yield "module", f"{hook['module']!r} is not in the target {target!r}"
    for key in ("module", "attribute", "rewrap"):
        if key == "module" and script(module):
            continue
        if (value := hook.get(key)) and not all(part.isidentifier() for part in value.split(".")):
            yield key, f"got {value!r}; use names separated by dots"
    if hook.get("behaviour") == "step.wrap" and hook.get("around") == "next":
        yield "around", "got 'next': the step would be the wait for an item; use step.tick to make each item a step"
    if hook.get("attribute") == "":
        yield "attribute", "got ''; use names separated by dots"
    if problem := versions_problem(hook.get("versions", "")):
        yield "versions", problem


def script(module: str) -> str:
    """Return the name of a script without its suffix (`train` for `jobs/train.py`), or "" if `module` is a module."""
    return os.path.basename(module).removesuffix(SCRIPT) if module.endswith(SCRIPT) else ""


def table(name: str | int) -> str:
    """Return the label of a hook's table in messages, from the hook's name, or from its index if it has no name."""
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
        raise RecipeError(f"{path}: {where} behaviour: there is no {hook.behaviour!r}; use one of {known}")
    try:
        behaviour = msgspec.convert(hook.options, kind)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{path}: {where} options: {_one_line(error)}") from None
    return BoundHook(
        key=f"{recipe.target}/{hook.name}", file=_name(path), recipe=recipe, hook=hook, behaviour=behaviour
    )


def _located(error: msgspec.ValidationError, document: Any) -> str:
    """Return msgspec's message, preceded by the TOML table and key of the error."""
    message, _, location = _one_line(error).partition(" - at `$")
    location = location.rstrip("`").lstrip(".")
    if match := re.match(r"recipe\[([0-9]+)\]\.(.*)", location):
        document, location = document[SEVERAL][int(match[1])], match[2]
    if match := re.match(r"hook\[([0-9]+)\]\.?(.*)", location):
        index = int(match[1])
        try:
            name = document["hook"][index]["name"]
        except (KeyError, IndexError, TypeError) as error:
            interrupts.pass_on(error)
            name = None
        label = table(name if isinstance(name, str) else index)
        location = f"{label} {match[2]}".strip()
    return f"{location}: {message}" if location else message


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def installed_version(recipe: Recipe) -> str:
    """Return the version of the first installed distribution of a recipe, or an empty string."""
    for name in recipe.distributions or [recipe.target]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
