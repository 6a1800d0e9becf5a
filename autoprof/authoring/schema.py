"""The JSON schema of a recipe file, for editors: made from the structs that recipes become."""

from __future__ import annotations

import inspect
import json
import typing
from typing import Any

import msgspec

from autoprof import behaviours
from autoprof.authoring.options import described, summary
from autoprof.recipe import HOOK_NAME, Hook, Recipe

FILE = "recipe.schema.json"
# The newest that TOML extensions of editors are sure to know; newer ones are like it in all that stands here.
_DRAFT = "http://json-schema.org/draft-07/schema#"
_REFERENCE = "#/definitions/{name}"


def text() -> str:
    """The schema as it is shipped."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def schema() -> dict[str, Any]:
    """The schema. What a hook's `options` take depends on its `behaviour`."""
    kinds = known_behaviours()
    definitions = {"hook": _of_struct(Hook)}
    for name, kind in kinds.items():
        definitions[name] = _of_struct(kind)
        definitions |= {inner.__name__: _of_struct(inner) for inner in _structs_in(kind)}
    hook = definitions["hook"]["properties"]
    hook["name"]["pattern"] = f"^{HOOK_NAME}$"
    hook["behaviour"]["oneOf"] = [{"const": name, "description": summary(kind)} for name, kind in kinds.items()]
    # Editors complete from `properties`; what is allowed there and what it takes is said behaviour by behaviour.
    hook["options"]["properties"] = _all_options(kinds)
    definitions["hook"]["allOf"] = [_condition(name, kind) for name, kind in kinds.items()]
    recipe = _of_struct(Recipe)
    recipe["properties"]["hook"]["items"] = {"$ref": _REFERENCE.format(name="hook")}
    return {"$schema": _DRAFT, **recipe, "title": "A recipe of autoprof", "definitions": definitions}


def known_behaviours() -> dict[str, type[behaviours.Behaviour]]:
    """All behaviours by the names that recipes use."""
    return {name: kind for name in sorted(behaviours.BEHAVIOURS) if (kind := behaviours.find(name))}


def _of_struct(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A struct's schema, described by its docstring."""
    _, found = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    content: dict[str, Any] = found[kind.__name__]
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
    """Every option of every behaviour, with what it means in each."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for name, kind in kinds.items():
        texts = described(kind)
        for field in msgspec.structs.fields(kind):
            meanings.setdefault(field.encode_name, {}).setdefault(texts.get(field.encode_name, ""), []).append(name)
    return {
        option: {"description": "\n".join(f"{', '.join(names)}: {meaning}" for meaning, names in found.items())}
        for option, found in sorted(meanings.items())
    }


def _structs_in(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """The structs that the fields of a struct hold in arrays."""
    inner = [part for field in msgspec.structs.fields(kind) for part in typing.get_args(field.type)]
    return [part for part in inner if inspect.isclass(part) and issubclass(part, msgspec.Struct)]
