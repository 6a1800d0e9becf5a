"""Generator of two reference pages: `files.md` from the structs of `autoprof/rundir/`, and `json.md` from the structs
that commands print."""

from __future__ import annotations

import inspect
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from autoprof.cli import documents, recipes, recipes_catalog, recipes_check, recipes_try
from autoprof.hooks.recipe import Hook, described
from autoprof.report import beside, model
from autoprof.rundir import records
from autoprof.traces.flame import FlameNode, FlameThread
from autoprof.traces.summary import EngineFigures, Operator, Phase

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "files.md"
# The text above this line is written by hand.
MARK = "<!-- make formats writes the rest, from autoprof/rundir/records.py -->\n"
JSON_PAGE = ROOT / "docs" / "reference" / "json.md"
JSON_MARK = "<!-- make formats writes the rest, from the structs that commands print -->\n"
# What the structs of these modules hold of other modules' is described there, or here with them.
JSON_MODULES = (documents, recipes, recipes_try, recipes_catalog, recipes_check, model, beside)


def page() -> str:
    """Return the text of the page, as it is there up to the mark."""
    return _page(PAGE, MARK, structs(records))


def json_page() -> str:
    """Return the text of `json.md`, with the hand-written text above the mark."""
    kinds = [kind for module in JSON_MODULES for kind in structs(module)]
    kinds += [Hook, Operator, Phase, EngineFigures, FlameThread, FlameNode]
    text = _page(JSON_PAGE, JSON_MARK, [kind for kind in kinds if kind is not documents.Document])
    for kind in structs(records):
        text = text.replace(f"](#{kind.__name__.lower()})", f"](files.md#{kind.__name__.lower()})")
    return text


def structs(module: types.ModuleType) -> list[type[Struct]]:
    """Return the structs of a module, in the order of its source."""
    kinds = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Struct)]
    kinds = [kind for kind in kinds if kind.__module__ == module.__name__]
    return sorted(kinds, key=lambda kind: inspect.getsourcelines(kind)[1])


def _page(path: Path, mark: str, kinds: list[type[Struct]]) -> str:
    head, mark, _ = path.read_text(encoding="utf-8").partition(mark)
    return "\n".join([head + mark, *(_section(kind) for kind in kinds)])


def _section(kind: type[Struct]) -> str:
    summary, _, more = inspect.getdoc(kind).partition("\n\n")  # type: ignore[union-attr]
    more = more.partition("Attributes:\n")[0].strip()
    rows = [f"| `{name}` | {what} | {text} |" for name, what, text in _fields(kind)]
    table = ["| field | type | |", "|---|---|---|", *rows]
    parts = [f"## {kind.__name__}", summary.replace("\n", " "), "\n".join(table), *([more] if more else [])]
    if kind is records.Line:
        spans = [f"| `{name}` | {text} |" for name, text in records.SPAN_KINDS.items()]
        parts.append("\n".join(["| kind | span of, with ids and counts |", "|---|---|", *spans]))
    return "\n\n".join(parts) + "\n"


def _fields(kind: type[Struct]) -> typing.Iterator[tuple[str, str, str]]:
    config = kind.__struct_config__
    if config.tag is not None:
        yield str(config.tag_field), "text", f"`{config.tag}`."
    said = comments(documents.Document) | described(kind)
    documented = said | {name: text for name, text in comments(kind).items() if text}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        optional = ", optional" if config.omit_defaults and not field.required else ""
        nullable = not optional and type(None) in typing.get_args(hints[field.name])
        yield (
            field.encode_name,
            f"{_words(hints[field.name])}{' or null' if nullable else ''}{optional}",
            documented.get(field.name, ""),
        )


def comments(kind: type[Struct]) -> dict[str, str]:
    """Return the comment of each field of a struct, from the field's own line or the lines above."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            above.append(comment[1])
        elif field := re.fullmatch(r"    (\w+): [^#]*(?:# (.*))?", line):
            found[field[1]] = field[2] or " ".join(above)
            above = []
    return found


def _words(hint: Any) -> str:
    """Return the name of a type in JSON's terms, without null."""
    origin, arguments = typing.get_origin(hint), [each for each in typing.get_args(hint) if each is not type(None)]
    if origin is Annotated:
        return _words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, arguments)))
    if origin is typing.Literal:
        return "text"
    if origin is list:
        return f"list of {_words(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}"
    if origin is not None:
        return f"object of {_words(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(hint, "any")
