"""Check of a recipe file's keys and values, and the JSON schema of recipes.

The check reports all errors, while `recipe.load` stops at the first. Both the check and the schema are derived from the
structs that recipes are decoded into: their fields, types and docstrings.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes import catalog
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks import recipe
from autoprof.hooks.behaviour import PARAMETER
from autoprof.hooks.recipe import HOOK_NAME, SEVERAL, BoundHook, Hook, Recipe, RecipeError, Recipes, versions_problem

_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
# `A | B` is a `typing.Union`, not a `types.UnionType`, if A or B is a `Literal`.
_UNIONS = (types.UnionType, typing.Union)
_EXTRA = {
    "path": "a path that begins with a parameter of the function, such as 'self.state.global_step'",
    "name": "the name of a parameter",
    "place": "a path that begins at the call's result, such as 'token_ids'",
}


def summary(kind: type) -> str:
    """Return the first paragraph of a class's docstring, or of its base class's, in one line."""
    for base in kind.__mro__:
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        paragraph = text.partition("\n\n")[0]
        if paragraph and not paragraph.startswith("Attributes:"):
            return _one_line(paragraph)
    return ""


def described(kind: type) -> dict[str, str]:
    """Return the descriptions in the `Attributes:` sections of a class and its base classes, by field."""
    texts: dict[str, str] = {}
    for base in kind.__mro__:
        _, _, section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")
        for match in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            texts.setdefault(match[1], _one_line(match[2]))
    return texts


def takes(kind: Any) -> str:
    """Return a description of a type in the terms of TOML."""
    if meta := _meta(kind):
        return _EXTRA[meta["takes"]]
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in _UNIONS:
        table = next((argument for argument in arguments if typing.get_origin(argument) is dict), None)
        if table is not None and typing.get_args(table)[1] in arguments:
            others = ", or ".join(takes(argument) for argument in arguments if argument is not table)
            return f"{others}, or a table; each entry is {takes(typing.get_args(table)[0])} = one of these"
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
    """Yield those paths in a valid `value` that begin with a parameter of the hooked function, each with its key."""
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
    """Yield the errors of a table that is decoded into a struct: the key, and the value found and the type expected."""
    if not isinstance(table, dict):
        yield where, f"got {_short(table)}; it takes a table"
        return
    prefix = f"{where}." if where else ""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in table:
        if key not in fields:
            known = ", ".join(fields) or "none"
            yield f"{prefix}{key}", f"there is no such key{did_you_mean(str(key), fields)}; the keys are: {known}"
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
        choices = [
            choice
            for alternative in _alternatives(kind)
            if _is_choice(alternative)
            for choice in typing.get_args(alternative)
        ]
        near = did_you_mean(value, choices) if choices and isinstance(value, str) else ""
        yield where, f"got {_short(value)}; it takes {takes(kind)}{near}"


def _table_of(kind: Any, value: Any) -> type[msgspec.Struct] | None:
    """Return the struct for a table, if the option takes either a table or another type; else None."""
    if typing.get_origin(kind) not in _UNIONS or not isinstance(value, dict):
        return None
    structs = [part for part in typing.get_args(kind) if inspect.isclass(part) and issubclass(part, msgspec.Struct)]
    return structs[0] if structs else None


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)


def _is_choice(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Literal


def _meta(kind: Any) -> dict[str, Any]:
    """Return the `extra` with which `hooks/behaviour.py` annotates a type, else an empty table."""
    for note in getattr(kind, "__metadata__", ()):
        if isinstance(note, msgspec.Meta) and note.extra:
            return note.extra
    return {}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(value: Any) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


FILE = "recipe.schema.json"
# The newest draft that all TOML extensions of editors support. Newer drafts have the same keywords for this schema.
_DRAFT = "http://json-schema.org/draft-07/schema#"
_REFERENCE = "#/definitions/{name}"
_COMMENT = f"Generated by `autoprof recipes --schema > {FILE}`; change the structs in autoprof instead."


def schema_text() -> str:
    """Return the schema as the text of the shipped file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """Return the schema. In it, a hook's `behaviour` decides which `options` are valid."""
    kinds = known_behaviours()
    definitions = {"hook": _of_struct(Hook)}
    for name, kind in kinds.items():
        definitions[name] = _of_struct(kind)
        definitions |= {inner.__name__: _of_struct(inner) for inner in _structs_in(kind)}
    hook = definitions["hook"]["properties"]
    hook["name"]["pattern"] = f"^{HOOK_NAME}$"
    hook["behaviour"]["oneOf"] = [{"const": name, "description": summary(kind)} for name, kind in kinds.items()]
    # Editors complete options from `properties`. The conditions in `allOf` validate them, one per behaviour.
    hook["options"]["properties"] = _all_options(kinds)
    definitions["hook"]["allOf"] = [_condition(name, kind) for name, kind in kinds.items()]
    recipe = definitions[SEVERAL] = _of_struct(Recipe)
    recipe["properties"]["hook"]["items"] = {"$ref": _REFERENCE.format(name="hook")}
    several = _of_struct(Recipes)["properties"][SEVERAL]
    several["items"] = {"$ref": _REFERENCE.format(name=SEVERAL)}
    return {
        "$schema": _DRAFT,
        "$comment": _COMMENT,
        **{key: value for key, value in recipe.items() if key != "required"},
        "properties": recipe["properties"] | {SEVERAL: several},
        # A file is either one recipe, or a list of recipes without other keys.
        "oneOf": [
            {"required": recipe["required"], "not": {"required": [SEVERAL]}},
            {"required": [SEVERAL], "maxProperties": 1},
        ],
        "title": "A recipe of autoprof",
        "definitions": definitions,
    }


def known_behaviours() -> dict[str, type[behaviours.Behaviour]]:
    """Return all behaviours by the names that recipes use."""
    return {name: kind for name in sorted(behaviours.BEHAVIOURS) if (kind := behaviours.find(name))}


def _of_struct(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a struct's schema, described by its docstring."""
    _, components = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    content: dict[str, Any] = components[kind.__name__]
    content |= {"title": kind.__name__, "description": summary(kind)}
    texts = described(kind)
    for name, property_ in content["properties"].items():
        property_["description"] = texts.get(name, "")
        if property_.get("default") in ("", [], {}):
            del property_["default"]
    return content


def _condition(name: str, kind: type[behaviours.Behaviour]) -> dict[str, Any]:
    needed = any(field.required for field in msgspec.structs.fields(kind))
    then: dict[str, Any] = {"properties": {"options": {"$ref": _REFERENCE.format(name=name)}}}
    return {
        "if": {"properties": {"behaviour": {"const": name}}, "required": ["behaviour"]},
        "then": then | ({"required": ["options"]} if needed else {}),
    }


def _all_options(kinds: dict[str, type[behaviours.Behaviour]]) -> dict[str, Any]:
    """Return the options of all behaviours, each with its description per behaviour."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for name, kind in kinds.items():
        texts = described(kind)
        for field in msgspec.structs.fields(kind):
            meanings.setdefault(field.encode_name, {}).setdefault(texts.get(field.encode_name, ""), []).append(name)
    return {
        option: {"description": "\n".join(f"{', '.join(names)}: {meaning}" for meaning, names in by_meaning.items())}
        for option, by_meaning in sorted(meanings.items())
    }


def _structs_in(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Return the structs that are type arguments of a struct's fields, such as the items of an array."""
    inner = [part for field in msgspec.structs.fields(kind) for part in typing.get_args(field.type)]
    return [part for part in inner if inspect.isclass(part) and issubclass(part, msgspec.Struct)]


# Behaviours that begin something, with the behaviour that ends it.
_ENDS = {
    "aside.start": "aside.stop",
    "span.begin": "stage.end",
    "stage.begin": "stage.end",
    "timer.start": "timer.stop",
}


class RecipeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One error or note about a recipe.

    Attributes:
        file: The recipe's file.
        table: `[[hook]] 'name'`; empty for the top level of the file.
        key: The key in the table; empty for the whole table.
        text: The problem, and what to do about it.
        error: True for an error, false for a note.
    """

    file: str
    table: str
    key: str
    text: str
    error: bool = True

    def line(self) -> str:
        """Return the finding in one line."""
        place = " ".join(filter(None, [self.table, self.key]))
        return ": ".join(filter(None, [self.file, "" if self.error else "note", place, self.text]))


def check_form(path: str) -> tuple[list[BoundHook], list[RecipeFinding]]:
    """Read a recipe file and check its keys and values.

    Returns:
        The hooks, empty if there are errors, and the errors.
    """
    try:
        document = recipe.read(path)
    except RecipeError as error:
        return [], [RecipeFinding(file=path, table="", key="", text=_without_path(path, error))]
    findings = [
        RecipeFinding(file=path, table=table, key=key, text=text) for table, key, text in _errors(path, document)
    ]
    if findings:
        return [], findings
    try:
        return recipe.load(path), []
    except RecipeError as error:
        return [], [RecipeFinding(file=path, table="", key="", text=_without_path(path, error))]


def replacements(path: str, hooks: list[BoundHook]) -> list[RecipeFinding]:
    """Return a note for each hook of a recipe file that replaces one of autoprof's own hooks."""
    if not hooks or os.path.dirname(os.path.realpath(path)) == os.path.realpath(_boot.own_recipes()):
        return []
    known = {hook.key: hook.file for hook in catalog.own_hooks()}
    return [
        RecipeFinding(
            file=path,
            table=recipe.table(hook.hook.name),
            key="name",
            text=f"it replaces autoprof's own hook of this name, in {known[hook.key]}.toml",
            error=False,
        )
        for hook in hooks
        if hook.key in known
    ]


def without_end(path: str, hooks: list[BoundHook], others: Iterable[BoundHook]) -> list[RecipeFinding]:
    """Return an error for each hook that begins something that no hook ends, neither in this file nor in `others`."""
    known = [*hooks, *others]
    return [
        RecipeFinding(
            file=path,
            table=recipe.table(hook.hook.name),
            key="behaviour",
            text=f"no {end} hook of {hook.recipe.target} ends what this one begins; "
            "add one to the function that ends it"
            + (", with the same options.of" if getattr(hook.behaviour, "of", "") else ""),
        )
        for hook in hooks
        if (end := _ENDS.get(hook.hook.behaviour)) is not None
        and not any(
            other.recipe.target == hook.recipe.target
            and other.hook.behaviour == end
            and _can_end(other.behaviour, hook.behaviour)
            for other in known
        )
    ]


def _can_end(end: behaviours.Behaviour, begin: behaviours.Behaviour) -> bool:
    """Return whether a hook can end a span of the hook `begin`: both or neither have `of`; stage and role match."""
    if bool(getattr(end, "of", "")) != bool(getattr(begin, "of", "")):
        return False
    pairs = [(getattr(end, name, ""), getattr(begin, name, "")) for name in ("stage", "role")]
    return all(not ended or not isinstance(begun, str) or ended == begun for ended, begun in pairs)


def _errors(path: str, document: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the table, key and text of each error."""
    several = isinstance(document.get(recipe.SEVERAL), list)
    if several:
        yield from (("", key, text) for key, text in wrong(Recipes, document | {recipe.SEVERAL: []}))
    targets = []
    for index, table in enumerate(recipe.tables(document)):
        target = table.get("target") if isinstance(table, dict) else None
        where = f"[[recipe]] {repr(target) if isinstance(target, str) else f'number {index + 1}'}" if several else ""
        if isinstance(table, dict):
            yield from ((f"{where} {part}".strip(), key, text) for part, key, text in _recipe_errors(table))
        else:
            yield where, "", f"got {table!r}; it takes a table"
        targets += [target] if isinstance(target, str) else []
    if len(targets) == len(recipe.tables(document)) and (problem := recipe.misnamed(path, targets)):
        yield "", "target", problem


def _recipe_errors(document: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
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
    for index, table in enumerate(hooks if isinstance(hooks, list) else []):
        name = table.get("name") if isinstance(table, dict) else None
        where = recipe.table(name if isinstance(name, str) and name else index)
        for key, text in _hook_errors(table, target):
            yield where, key, text
        if isinstance(name, str):
            if names.count(name) == 1:
                yield where, "name", f"two [[hook]] tables are named {name!r}; give each its own name"
            names.append(name)


def _hook_errors(table: Any, target: Any) -> Iterator[tuple[str, str]]:
    yield from wrong(Hook, table)
    if not isinstance(table, dict):
        return
    texts = {key: value for key, value in table.items() if isinstance(value, str)}
    yield from recipe.hook_problems(texts, target if isinstance(target, str) else None)
    kind = behaviours.find(texts.get("behaviour", ""))
    options = table.get("options", {})
    if kind is None:
        if "behaviour" in texts:
            near = did_you_mean(texts["behaviour"], behaviours.BEHAVIOURS)
            known = ", ".join(sorted(behaviours.BEHAVIOURS))
            yield "behaviour", f"there is no {texts['behaviour']!r}{near}; the behaviours are {known}"
        return
    if isinstance(options, dict):
        yield from wrong(kind, options, "options")
    if table.get("kind") and not kind.makes_stages:
        yield "kind", f"{texts['behaviour']} makes no stage; leave it out"


def _without_path(path: str, error: RecipeError) -> str:
    return str(error).removeprefix(f"{path}: ")
