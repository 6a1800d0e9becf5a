"""Recipe files: the structs of their tables, the checks of a file, the reader, and ranges of versions.

A table of a recipe is decoded into a struct. The errors of `load`, the JSON schema and the reference pages are derived
from the fields, the types and the docstrings of these structs.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
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
from autoprof.config import values
from autoprof.config.settings import MAX_BYTES, Settings
from autoprof.config.values import thread_safe
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks.behaviour import PARAMETER, Extent


def versions_problem(versions: Any) -> str:
    """If a range of versions is not valid, return the error. Otherwise return an empty string.

    Only a string is checked. For any other value, return an empty string.
    """
    try:
        SpecifierSet(versions if isinstance(versions, str) else "")
    except InvalidSpecifier:
        return f"got {versions!r}; use a range such as '>=0.7,<0.9'"
    return ""


def fits(version: str, versions: str) -> bool:
    """Return True if the version of a target is in a recipe's range of versions.

    Only the release part of the version is compared, because verl's git tags 0.7.0 and 0.8.0 report the versions
    `0.7.0.dev` and `0.8.0.dev`. Return True also for an unknown version. In that case, a hook is applied if its
    attribute exists.

    Args:
        version: The version of the target, or an empty string.
        versions: The range. An empty range contains all versions.
    """
    release = _release_part(version)
    return not versions or release is None or SpecifierSet(versions).contains(release)


def exceeds(version: str, versions: str) -> bool:
    """Return True if a target's version is newer than all versions of a range. The hooks are untested with it."""
    release = _release_part(version)
    if release is None or fits(version, versions):
        return False
    upper_ends = [
        Version(part.version.removesuffix(".*"))
        for part in SpecifierSet(versions)
        if part.operator in ("<", "<=", "==", "~=")
    ]
    return bool(upper_ends) and release >= max(upper_ends)


def outside(version: str, recipe: Recipe) -> str:
    """If a target's version is not in the recipe's range, return a message. Otherwise return an empty string."""
    return "" if fits(version, recipe.versions) else f"{version} is outside the recipe's range {recipe.versions}"


def _release_part(version: str) -> Version | None:
    """Return the release part of a version. Return None if the version is unknown or does not follow PEP 440."""
    try:
        return Version(".".join(str(part) for part in Version(version).release)) if version else None
    except InvalidVersion:
        return None


# If a hook's `module` has this suffix, it is the file of a script that runs as `__main__`.
SCRIPT = ".py"
# Key under which a file has several recipes.
SEVERAL = "recipe"
# Reason why a hook is not tried, if `AUTOPROF_DISABLE` names the hook.
DISABLED = "AUTOPROF_DISABLE names it"
# Regular expression for the name of a hook.
HOOK_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


# An error in a recipe: the table and the key with the error, which may be empty, and the text of the error.
Problem = tuple[str, str, str]


class RecipeError(ValueError):
    """A recipe file has errors.

    The message gives only the first error, in one line: the file, the table, the key, the problem and the remedy. The
    attribute `problems` has all errors.
    """

    def __init__(self, path: str, problems: list[Problem]) -> None:
        table, key, text = problems[0]
        super().__init__(": ".join(filter(None, [path, f"{table} {key}".strip(), text])))
        self.problems = problems


def ignored(problem: str) -> str:
    """Return the warning about a recipe with an error."""
    return f"{problem}; autoprof ignores this recipe"


class Hook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One function or class of a target, and the behaviour that autoprof runs around it.

    Attributes:
        name: Name, unique among the hooks of the target. The timeline and `AUTOPROF_DISABLE` use the name.
        attribute: The hooked function, `Class.method` or class. The behaviour decides which of these is possible.
        behaviour: Name of the behaviour, a key of `autoprof.hooks.behaviour.BEHAVIOURS`.
        module: Module that defines the attribute, or the file of a script, such as `train.py`. Empty: the target.
        versions: Releases of the target that have the attribute, as a range of PEP 440. Empty: all.
        kind: Kind of the stages that the hook makes, in terms common to all trainers: one kind, or a table from
            patterns of stage names to kinds. If it is not set, autoprof takes the kind from well-known stage names.
        rewrap: Decorator of the attribute (`package.module.function`). The hook wraps the function inside the
            decorator, then applies the decorator again. For decorators that inspect their caller (verl's `auto_await`).
        around: The code that the behaviour surrounds. `call`: the call. `with`: the `with` block of the context manager
            that the call returns. `next`: each `next` of the generator, iterator or data loader that the call returns.
        options: Options of the behaviour.
    """

    name: str
    attribute: str
    behaviour: str
    module: str = ""
    versions: str = ""
    kind: values.Kind | dict[str, values.Kind] = {}
    rewrap: str = ""
    around: Extent = "call"
    options: dict[str, Any] = {}


@thread_safe
class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hooks of one target. A target may have several recipes.

    Attributes:
        target: Import name of the target. The name of the recipe file begins with this name.
        hook: Hooks of the target. Each hook is a `[[hook]]` table.
        distributions: Names of the packages that install the target, if they differ from `target`.
        versions: Releases of the target for which the recipe was written. This is only a hint. Empty: all.
        passive: True if the import of the target alone does not make a process part of a run (Ray).
    """

    target: str
    hook: list[Hook]
    distributions: list[str] = []
    versions: str = ""
    passive: bool = False


@thread_safe
class Recipes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file with recipes of several targets. Its name begins with all of them: `mytrainer+mylib.toml`.

    Attributes:
        recipe: Recipes. Each one is a `[[recipe]]` table with the keys of a recipe, and has `[[recipe.hook]]` tables.
    """

    recipe: list[Recipe]


class BoundHook(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A hook, together with the recipe that contains it and the name of the recipe's file.

    Attributes:
        key: The hook's name in timelines, messages and `AUTOPROF_DISABLE`: `target/hook`. If two hooks have the same
            key, the hook that was read later replaces the other hook.
        file: Name of the recipe file, without its suffix.
    """

    key: str
    file: str
    recipe: Recipe
    hook: Hook

    @cached_property
    def behaviour(self) -> behaviours.Behaviour:
        """Return the behaviour with the hook's options. The first use imports the behaviour's module."""
        return msgspec.convert(self.hook.options, behaviours.named(self.hook.behaviour))

    @property
    def passive(self) -> bool:
        """Return True if the hook alone does not make a process part of a run."""
        return self.recipe.passive

    def left_out(self, version: str, settings: Settings) -> str:
        """If the hook must not be tried, return the reason. Otherwise return an empty string.

        Args:
            version: Version of the target.
            settings: The settings of the run.
        """
        if any(settings.disabled(name, self.hook.name) for name in (self.recipe.target, self.file)):
            return DISABLED
        if not fits(version, self.hook.versions):
            return f"{self.recipe.target} is {version}, the hook is for {self.hook.versions}"
        return ""

    def described(self) -> dict[str, Any]:
        """Return the fields that describe the hook on the timeline."""
        return {"module": self.hook.module, "attribute": self.hook.attribute, "behaviour": self.hook.behaviour}


def load(path: str, check_options: bool = True) -> list[BoundHook]:
    """Return the hooks of one recipe file.

    Args:
        path: Path of the file.
        check_options: True to check the options of the hooks. For autoprof's own recipes it is False, because this
            check imports the behaviours.

    Raises:
        RecipeError: The file can't be read or has an error.
    """
    document = read(path)
    if problems := list(_document_problems(path, document, check_options)):
        raise RecipeError(path, problems)
    recipes = msgspec.convert(tables(document), list[Recipe])
    return [_bind(path, recipe, hook) for recipe in recipes for hook in recipe.hook]


def read(path: str) -> dict[str, Any]:
    """Return the TOML document of a recipe file.

    Raises:
        RecipeError: The file can't be read.
    """
    try:
        document: dict[str, Any] = msgspec.toml.decode(files.read_user_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        seam.pass_on(error)
        text = " ".join(str(error).split())[:300]
        raise RecipeError(path, [("", "", f"it can't be read as TOML ({text})")]) from None
    return document


def tables(document: dict[str, Any]) -> list[Any]:
    """Return the recipes of a file. If the file has `[[recipe]]` tables, return these tables.

    Otherwise the file is one recipe, so return a list with the document itself.
    """
    recipe_tables = document.get(SEVERAL)
    return recipe_tables if isinstance(recipe_tables, list) else [document]


def misnamed(path: str, targets: list[str]) -> str:
    """If the file's name does not begin with the targets of the file, return a message. Else return an empty string."""
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
    """If `module` is the file of a script, return the script's name without the suffix: `train` for `jobs/train.py`.

    Otherwise return an empty string.
    """
    return os.path.basename(module).removesuffix(SCRIPT) if module.endswith(SCRIPT) else ""


def table(name: str | int) -> str:
    """Return the label of a hook's table in messages.

    Args:
        name: The name of the hook. If the hook has no name, its index.
    """
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


def _document_problems(path: str, document: dict[str, Any], check_options: bool) -> Iterator[Problem]:
    """Yield the errors of a recipe file.

    Args:
        path: Path of the file.
        document: The TOML document.
        check_options: True to check the options of the hooks.
    """
    has_several = isinstance(document.get(SEVERAL), list)
    if has_several:
        yield from (("", key, text) for key, text in wrong(Recipes, document | {SEVERAL: []}))
    contents = tables(document)
    targets = [content.get("target") if isinstance(content, dict) else None for content in contents]
    target_names = [target for target in targets if isinstance(target, str)]
    if len(target_names) == len(contents) and (problem := misnamed(path, target_names)):
        yield "", "target", problem
    for index, (content, target) in enumerate(zip(contents, targets, strict=True)):
        where = (
            f"[[recipe]] {repr(target) if isinstance(target, str) else f'number {index + 1}'}" if has_several else ""
        )
        if isinstance(content, dict):
            yield from (
                (f"{where} {part}".strip(), key, text) for part, key, text in _recipe_problems(content, check_options)
            )
        else:
            yield where, "", f"got {content!r}; it takes a table"


def _recipe_problems(document: dict[str, Any], check_options: bool) -> Iterator[Problem]:
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
        for key, text in _hook_problems(hook, target, check_options):
            yield where, key, text
        if isinstance(name, str):
            if names.count(name) == 1:
                yield where, "name", f"two [[hook]] tables are named {name!r}; give each its own name"
            names.append(name)


def _hook_problems(hook: Any, target: Any, check_options: bool) -> Iterator[tuple[str, str]]:
    yield from wrong(Hook, hook)
    if not isinstance(hook, dict):
        return
    texts = {key: value for key, value in hook.items() if isinstance(value, str)}
    yield from _string_problems(texts, target if isinstance(target, str) else None)
    name = texts.get("behaviour", "")
    if name not in behaviours.BEHAVIOURS:
        if "behaviour" in texts:
            near = did_you_mean(name, behaviours.BEHAVIOURS)
            known_names = ", ".join(sorted(behaviours.BEHAVIOURS))
            yield "behaviour", f"there is no {name!r}{near}; the behaviours are {known_names}"
    elif check_options:
        kind = behaviours.named(name)
        if isinstance(hook.get("options", {}), dict):
            yield from wrong(kind, hook.get("options", {}), "options")
        if hook.get("kind") and not kind.makes_stages:
            yield "kind", f"{name} makes no stage; leave it out"


def _string_problems(hook: Mapping[str, str], target: str | None) -> Iterator[tuple[str, str]]:
    """Yield the errors in the strings of a hook's table, each as a key and a message.

    Args:
        hook: The strings of the table. Keys that the table does not have are not checked.
        target: The target of the recipe. If it is None, `module` is not compared with the target.
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
    """Return the version of the recipe's first distribution that is installed. If none is, return an empty string."""
    for name in recipe.distributions or [recipe.target]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
# `A | B` is a `types.UnionType`. If A or B is a `Literal`, it is a `typing.Union`.
_UNIONS = (types.UnionType, typing.Union)
_EXTRA = {
    "path": "a path that begins with a parameter of the function, such as 'self.state.global_step'",
    "name": "the name of a parameter",
    "place": "a path that begins at the call's result, such as 'token_ids'",
}


def summary(kind: type) -> str:
    """Return the first paragraph of a class's docstring, without line breaks.

    If the class has no such paragraph, return the one of its nearest base class. If no class has one, return an empty
    string.
    """
    for base in kind.__mro__:
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        paragraph = text.partition("\n\n")[0]
        if paragraph and not paragraph.startswith("Attributes:"):
            return _one_line(paragraph)
    return ""


def described(kind: type) -> dict[str, str]:
    """Return the descriptions of a struct's fields, as a dict from field to description.

    They come from the `Attributes:` sections of the docstrings of the class and its base classes.
    """
    texts: dict[str, str] = {}
    for base in kind.__mro__:
        _, _, section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")
        for match in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            texts.setdefault(match[1], _one_line(match[2]))
    return texts


def takes(kind: Any) -> str:
    """Return a text that says which TOML values a type accepts, such as "an array; each item is a text"."""
    if meta := _meta(kind):
        return _EXTRA[meta["takes"]]
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in _UNIONS:
        table = next((argument for argument in arguments if typing.get_origin(argument) is dict), None)
        if table is not None and typing.get_args(table)[1] in arguments:
            other_types = ", or ".join(takes(argument) for argument in arguments if argument is not table)
            return f"{other_types}, or a table; each entry is {takes(typing.get_args(table)[0])} = one of these"
        return ", or ".join(takes(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(repr(value) for value in arguments)
    if origin is list:
        return f"an array; each item is {takes(arguments[0])}"
    if origin is dict and arguments[1] is not Any:
        return f"a table; each entry is {takes(arguments[0])} = {takes(arguments[1])}"
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        return f"a table with {', '.join(kind.__struct_encode_fields__)}"
    return _NAMES.get(origin or kind, str(kind))


def parameters(kind: Any, value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths in a valid value that begin with a parameter of the hooked function.

    Args:
        kind: The type of the value.
        value: The value, for example the options of a hook.
        where: Key of the value in the recipe.

    Yields:
        The key at which the path was found, and the path.
    """
    if meta := _meta(kind):
        if meta.get(PARAMETER):
            yield where, value
    elif table := _table_of(kind, value):
        yield from parameters(table, value, where)
    elif typing.get_origin(kind) is list:
        for index, item in enumerate(value):
            yield from parameters(typing.get_args(kind)[0], item, f"{where}[{index}]")
    elif typing.get_origin(kind) is dict:
        keys, values = typing.get_args(kind)
        for key, item in value.items():
            yield from parameters(keys, key, where)
            yield from parameters(values, item, f"{where}.{key}")
    elif inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            if field.encode_name in value:
                inner = f"{where}.{field.encode_name}" if where else field.encode_name
                yield from parameters(field.type, value[field.encode_name], inner)


def wrong(kind: type[msgspec.Struct], table: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the errors of a table that is to be decoded into a struct.

    Args:
        kind: The class of the struct.
        table: The table, as read from the TOML file.
        where: Key of the table in the recipe, or an empty string.

    Yields:
        The key with the error, and a text that names the found value and the expected type.
    """
    if not isinstance(table, dict):
        yield where, f"got {_short(table)}; it takes a table"
        return
    try:
        msgspec.convert(table, kind)
        return
    except msgspec.ValidationError:
        prefix = f"{where}." if where else ""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in table:
        if key not in fields:
            known_keys = ", ".join(fields) or "none"
            yield f"{prefix}{key}", f"there is no such key{did_you_mean(str(key), fields)}; the keys are: {known_keys}"
    texts = described(kind)
    for name, field in fields.items():
        if name in table:
            yield from _wrong_value(field.type, table[name], f"{prefix}{name}")
        elif field.required:
            yield f"{prefix}{name}", f"it is missing; it takes {takes(field.type)}: {texts.get(name, '')}".rstrip(": ")


def _wrong_value(kind: Any, value: Any, where: str) -> Iterator[tuple[str, str]]:
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        yield from wrong(kind, value, where)
        return
    if table := _table_of(kind, value):
        yield from wrong(table, value, where)
        return
    if typing.get_origin(kind) is list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _wrong_value(typing.get_args(kind)[0], item, f"{where}[{index}]")
        return
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        alternatives = typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)
        literals = [part for part in alternatives if typing.get_origin(part) is typing.Literal]
        choices = [choice for literal in literals for choice in typing.get_args(literal)]
        near = did_you_mean(value, choices) if choices and isinstance(value, str) else ""
        yield where, f"got {_short(value)}; it takes {takes(kind)}{near}"


def _table_of(kind: Any, value: Any) -> type[msgspec.Struct] | None:
    """If the value is a table, and the type is a union that contains a struct, return the struct. Else return None."""
    if typing.get_origin(kind) not in _UNIONS or not isinstance(value, dict):
        return None
    structs = [part for part in typing.get_args(kind) if inspect.isclass(part) and issubclass(part, msgspec.Struct)]
    return structs[0] if structs else None


def _meta(kind: Any) -> dict[str, Any]:
    """Return the dict `extra` of a type that `hooks/behaviour.py` annotates. For other types, return an empty dict."""
    for note in getattr(kind, "__metadata__", ()):
        if isinstance(note, msgspec.Meta) and note.extra:
            return note.extra
    return {}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(value: Any) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."
