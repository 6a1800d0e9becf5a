"""The values that recipes accept: checks of TOML tables against structs, and descriptions of the structs' fields.

A table of a recipe is decoded into a struct. The errors of `recipe.load`, the JSON schema and the reference pages are
derived from the fields, the types and the docstrings of these structs.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from autoprof.base.units import did_you_mean
from autoprof.hooks.behaviour import PARAMETER

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
        table: The table.
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
