"""Generator of parts of `docs/reference/` from the code: `make formats`.

Each part is between `<!-- make formats: NAME -->` and `<!-- end -->`; the text around it is written by hand.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from autoprof.cli.main import COMMANDS
from autoprof.cli.recipes_check import known_behaviours
from autoprof.config import settings, values
from autoprof.config.values import OPTIONS
from autoprof.hooks.recipe import Hook, Recipe, described, summary, takes
from tests.support import formats

FOLDER = formats.ROOT / "docs" / "reference"
COMMAND_LINE = FOLDER / "command-line.md"
SETTINGS = FOLDER / "settings.md"
_PART = re.compile(r"(<!-- make formats: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
# Options of all behaviours.
_COMMON = ("when", "unless")
# Behaviours for a user's own trainer, in the order of the page. The others are on the page of the internals.
_OWN = ("step.wrap", "step.begin", "step.end", "step.tick", "step.counter", "step.loop", "stage", "span")
# Options of these behaviours that only trainers with engines, or loops inside other trainers, need.
_OF_ENGINES = ("replicas", "workers", "engines", "inner", "outermost", "passes", "mini_batches")
_LINK = "[path](recipes.md#paths)"
_PATHS = {
    "a path that begins with a parameter of the function, such as 'self.state.global_step'": f"a {_LINK}",
    "a path that begins at the call's result, such as 'token_ids'": f"a {_LINK} from the result",
}


def pages() -> dict[Path, str]:
    """Return the up-to-date text of each page with generated parts."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
    texts[formats.PAGE], texts[formats.JSON_PAGE] = formats.page(), formats.json_page()
    there = {name for _, name, _ in _PART.findall(texts[COMMAND_LINE])}
    for name in COMMANDS:
        if name not in there:
            texts[COMMAND_LINE] += f"\n## autoprof {name}\n\n<!-- make formats: {name} -->\n<!-- end -->\n"
    return {path: _PART.sub(_filled, text) for path, text in texts.items()}


def _filled(part: re.Match[str]) -> str:
    name = part[2]
    made = _PARTS[name]() if name in _PARTS else _command(name)
    return f"{part[1]}\n{made}\n\n{part[3]}"


def _command(name: str) -> str:
    text, _ = COMMANDS[name]
    parser = argparse.ArgumentParser(f"autoprof {name}", add_help=False)
    importlib.import_module(f"autoprof.cli.{name}").add_arguments(parser)
    formatter = parser._get_formatter()
    rows, positionals = [], []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
        if not action.option_strings:
            value = formatter._format_args(action, formatter._get_default_metavar_for_positional(action))
            positionals.append(value)
        shown = " ".join(filter(None, [", ".join(action.option_strings), value]))
        rows.append([_code(shown), formatter._expand_help(action) if action.help else ""])
    usage = parser.usage or " ".join([f"autoprof {name}", *(["[options]"] if parser._optionals else []), *positionals])
    return f"`{usage}`: {text}.\n\n{_table(['argument', 'meaning'], rows)}"


def _fields(kind: type[Struct]) -> str:
    texts = described(kind)
    rows = [
        [f"`{field.encode_name}`", takes(field.type), "required" if field.required else "", texts[field.encode_name]]
        for field in msgspec.structs.fields(kind)
    ]
    return _table(["key", "takes", "", "meaning"], rows)


def _behaviours(own: bool) -> str:
    rows = [
        [
            f"`{name}`",
            summary(kind),
            ", ".join(f"`{field}`" for field in kind.__struct_encode_fields__ if _is_shown(name, field, own)),
        ]
        for name, kind in _by_use(own).items()
    ]
    return _table(["behaviour", "the hook's attribute", "options"], rows)


def _options(own: bool) -> str:
    users: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, kind in known_behaviours().items():
        texts = described(kind)
        for field in msgspec.structs.fields(kind):
            if _is_shown(name, field.encode_name, own) or (own and field.encode_name in _COMMON):
                users[field.encode_name, takes(field.type), texts.get(field.encode_name, "")].append(name)
    rows = [
        [f"`{option}`", "all" if option in _COMMON else ", ".join(f"`{name}`" for name in names), _short(what), text]
        for (option, what, text), names in sorted(users.items())
    ]
    return _table(["option", "of", "takes", "meaning"], rows)


def _by_use(own: bool) -> dict[str, type[Struct]]:
    """Return the behaviours for a user's own trainer in the order of `_OWN`, or all others."""
    kinds = known_behaviours()
    return {name: kinds[name] for name in (_OWN if own else kinds) if own or name not in _OWN}


def _is_shown(behaviour: str, option: str, own: bool) -> bool:
    """Return True if the table for own trainers, or the table of all others, has the option of a behaviour."""
    return option not in _COMMON and (behaviour in _OWN and option not in _OF_ENGINES) == own


def _short(what: str) -> str:
    for text, link in _PATHS.items():
        what = what.replace(text, link)
    return what


def _kinds() -> str:
    rows = [
        [f"`{kind}`", ", ".join(f"`{name}`" for name in names.split())] for kind, names in values.NAMES_BY_KIND.items()
    ]
    return _table(["kind", "its own name, and"], rows)


def _settings() -> str:
    texts = formats.comments(settings.Settings)
    rows = []
    for name in settings.FIELDS:
        scopes = [("role", settings.ROLE_FIELDS), ("window", settings.WINDOW_FIELDS)]
        more = f" [More](#{_MORE[name]})." if name in _MORE else ""
        rows.append(
            [
                f"`{values.PREFIX}{name.upper()}`",
                texts[name] + more,
                settings.FIELDS[name][1].replace("*", r"\*"),
                _default(getattr(settings.Settings(), name)),
                ", ".join(["run", *(scope for scope, names in scopes if name in names)]),
            ]
        )
    return _table(["variable", "meaning", "takes", "default", "scope"], rows)


def _tool(name: str) -> str:
    kind = OPTIONS[name]
    texts = described(kind)
    rows = [
        [f"`{field.name}`", texts[field.name], takes(field.type), _default(field.default)]
        for field in msgspec.structs.fields(kind)
    ]
    return _table(["option", "meaning", "takes", "default"], rows)


def _default(value: object) -> str:
    if isinstance(value, tuple):
        value = ",".join(value)
    if isinstance(value, (bool, int, float)):
        value = f"{value:g}" if isinstance(value, float) else str(value).lower()
    return f"`{value}`" if value and isinstance(value, str) else ""


# Setting -> section of the page with more about it.
_MORE = {
    "steps": "steps",
    "when": "windows-that-open-by-themselves",
    "tool": "nsight-systems",
    "mode": "whole-steps",
    "ranks": "slowest-ranks",
    "contents": "contents",
    "max_trace_mb": "limits",
    "npu": "npus",
    "nsys": "nsight-systems",
    "memory": "cuda-memory",
    "collect": "several-nodes",
}
_PARTS: dict[str, Callable[[], str]] = {
    "settings": _settings,
    **{f"options of {name}": partial(_tool, name) for name in OPTIONS},
    "recipe keys": lambda: _fields(Recipe),
    "hook keys": lambda: _fields(Hook),
    "own behaviours": partial(_behaviours, True),
    "behaviours": partial(_behaviours, False),
    "own options": partial(_options, True),
    "options": partial(_options, False),
    "kinds": _kinds,
}


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows])


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
