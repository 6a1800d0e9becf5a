"""Recipe files: their structs, their reader with its checks, and ranges of versions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import metadata
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from autoprof.base import files, seam
from autoprof.base.originals import os
from autoprof.base.units import did_you_mean
from autoprof.config import kinds, structs
from autoprof.config.settings import MAX_BYTES, Settings
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks.behaviour import Extent
from autoprof.hooks.form import wrong


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
# Reason of a hook that the user leaves out.
DISABLED = "AUTOPROF_DISABLE names it"
# Pattern of a hook's name.
HOOK_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


# Table, key and text of an error in a recipe. The table and the key may be empty.
Problem = tuple[str, str, str]


class RecipeError(ValueError):
    """Errors in a recipe file. The message is one line with the first: file, table, key, the problem and its remedy."""

    def __init__(self, path: str, problems: list[Problem]) -> None:
        table, key, text = problems[0]
        super().__init__(": ".join(filter(None, [path, f"{table} {key}".strip(), text])))
        self.problems = problems


class Hook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One function or class of a target, and the behaviour put around it.

    Attributes:
        name: Name, unique among the hooks of the target. The timeline and `AUTOPROF_DISABLE` use it.
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


class BoundHook(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A hook with its recipe and its file.

    Attributes:
        key: Name as `target/hook`, in timelines, messages and `AUTOPROF_DISABLE`. If two hooks have the same key,
            the later one replaces the earlier one.
        file: Name of the recipe file, without its suffix.
    """

    key: str
    file: str
    recipe: Recipe
    hook: Hook

    @cached_property
    def behaviour(self) -> behaviours.Behaviour:
        """Return the behaviour with the hook's options. The first use imports its module."""
        return msgspec.convert(self.hook.options, behaviours.named(self.hook.behaviour))

    @property
    def passive(self) -> bool:
        """Return whether the hook alone does not make a process part of a run."""
        return self.recipe.passive

    def left_out(self, version: str, settings: Settings) -> str:
        """Return why the hook is not tried with this version of its target, or an empty string."""
        if any(settings.disabled(name, self.hook.name) for name in (self.recipe.target, self.file)):
            return DISABLED
        if not fits(version, self.hook.versions):
            return f"{self.recipe.target} is {version}, the hook is for {self.hook.versions}"
        return ""

    def described(self) -> dict[str, Any]:
        """Return the hook's description for the timeline."""
        return {"module": self.hook.module, "attribute": self.hook.attribute, "behaviour": self.hook.behaviour}


def load(path: str, options: bool = True) -> list[BoundHook]:
    """Return the hooks of one recipe file.

    Args:
        path: Path of the file.
        options: False to leave the hooks' options unchecked, as in autoprof's own recipes. A check imports behaviours.

    Raises:
        RecipeError: The file can't be read or has an error.
    """
    document = read(path)
    if problems := list(_problems(path, document, options)):
        raise RecipeError(path, problems)
    recipes = msgspec.convert(tables(document), list[Recipe])
    return [_bind(path, recipe, hook) for recipe in recipes for hook in recipe.hook]


def read(path: str) -> dict[str, Any]:
    """Return the TOML document of a recipe file.

    Raises:
        RecipeError: The file can't be read.
    """
    try:
        document: dict[str, Any] = msgspec.toml.decode(files.of_user(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        seam.pass_on(error)
        text = " ".join(str(error).split())[:300]
        raise RecipeError(path, [("", "", f"it can't be read as TOML ({text})")]) from None
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


def script(module: str) -> str:
    """Return the name of a script without its suffix (`train` for `jobs/train.py`), or "" if `module` is a module."""
    return os.path.basename(module).removesuffix(SCRIPT) if module.endswith(SCRIPT) else ""


def table(name: str | int) -> str:
    """Return the label of a hook's table in messages, from the hook's name, or from its index if it has no name."""
    return f"[[hook]] {name!r}" if isinstance(name, str) else f"[[hook]] number {name + 1}"


def _name(path: str) -> str:
    return os.path.basename(path).removesuffix(".toml")


def _bind(path: str, recipe: Recipe, hook: Hook) -> BoundHook:
    return BoundHook(
        key=f"{recipe.target}/{hook.name}",
        file=_name(path),
        recipe=recipe,
        hook=msgspec.structs.replace(hook, module=hook.module or recipe.target),
    )


def _problems(path: str, document: dict[str, Any], options: bool) -> Iterator[Problem]:
    """Yield the table, key and text of each error."""
    several = isinstance(document.get(SEVERAL), list)
    if several:
        yield from (("", key, text) for key, text in wrong(Recipes, document | {SEVERAL: []}))
    contents = tables(document)
    targets = [content.get("target") if isinstance(content, dict) else None for content in contents]
    named = [target for target in targets if isinstance(target, str)]
    if len(named) == len(contents) and (problem := misnamed(path, named)):
        yield "", "target", problem
    for index, (content, target) in enumerate(zip(contents, targets, strict=True)):
        where = f"[[recipe]] {repr(target) if isinstance(target, str) else f'number {index + 1}'}" if several else ""
        if isinstance(content, dict):
            yield from (
                (f"{where} {part}".strip(), key, text) for part, key, text in _recipe_problems(content, options)
            )
        else:
            yield where, "", f"got {content!r}; it takes a table"


def _recipe_problems(document: dict[str, Any], options: bool) -> Iterator[Problem]:
    hooks = document.get("hook")
    # The hooks are checked below, one table at a time.
    top = document | ({"hook": []} if isinstance(hooks, list) else {})
    for key, text in wrong(Recipe, top):
        hint = "; write [[hook]] with two brackets" if key == "hook" and isinstance(hooks, dict) else ""
        yield "", key, text + hint
    target = document.get("target")
    if problem := versions_problem(document.get("versions")):
        yield "", "versions", problem
    names: list[str] = []
    for index, hook in enumerate(hooks if isinstance(hooks, list) else []):
        name = hook.get("name") if isinstance(hook, dict) else None
        where = table(name if isinstance(name, str) and name else index)
        for key, text in _hook_problems(hook, target, options):
            yield where, key, text
        if isinstance(name, str):
            if names.count(name) == 1:
                yield where, "name", f"two [[hook]] tables are named {name!r}; give each its own name"
            names.append(name)


def _hook_problems(hook: Any, target: Any, options: bool) -> Iterator[tuple[str, str]]:
    yield from wrong(Hook, hook)
    if not isinstance(hook, dict):
        return
    texts = {key: value for key, value in hook.items() if isinstance(value, str)}
    yield from _string_problems(texts, target if isinstance(target, str) else None)
    name = texts.get("behaviour", "")
    if name not in behaviours.BEHAVIOURS:
        if "behaviour" in texts:
            near = did_you_mean(name, behaviours.BEHAVIOURS)
            known = ", ".join(sorted(behaviours.BEHAVIOURS))
            yield "behaviour", f"there is no {name!r}{near}; the behaviours are {known}"
    elif options:
        kind = behaviours.named(name)
        if isinstance(hook.get("options", {}), dict):
            yield from wrong(kind, hook.get("options", {}), "options")
        if hook.get("kind") and not kind.makes_stages:
            yield "kind", f"{name} makes no stage; leave it out"


def _string_problems(hook: Mapping[str, str], target: str | None) -> Iterator[tuple[str, str]]:
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


def installed_version(recipe: Recipe) -> str:
    """Return the version of the first installed distribution of a recipe, or an empty string."""
    for name in recipe.distributions or [recipe.target]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
