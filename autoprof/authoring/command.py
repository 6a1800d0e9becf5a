"""`autoprof recipes`: lists recipes, checks files, prints the schema."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from autoprof import settings, tables
from autoprof.authoring import catalog, form, places, schema, static
from autoprof.authoring.form import Finding
from autoprof.authoring.options import described, summary, takes
from autoprof.authoring.source import Sources


def add(commands: Any) -> None:
    """Add the command to those of the parser."""
    parser = commands.add_parser("recipes", help="list recipes and their hooks, or check a recipe file")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe, or a target: its hooks")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--check", nargs="+", metavar="FILE", help="say all that is wrong with recipe files or folders")
    asked.add_argument("--behaviours", action="store_true", help="list the behaviours and what each takes")
    asked.add_argument("--schema", action="store_true", help="print the JSON schema of recipes, for editors")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if parsed.name and (parsed.check or parsed.behaviours or parsed.schema):
        print("autoprof: recipes: NAME goes without --check, --behaviours and --schema", file=sys.stderr)
        return 2
    if parsed.schema:
        print(schema.text(), end="")
        return 0
    if parsed.behaviours:
        return _behaviours(parsed.json)
    if parsed.check:
        return _check(parsed.check, parsed.json)
    found = catalog.entries(settings.load(os.environ, Path.cwd()).recipes)
    if parsed.name:
        try:
            found = catalog.named(found, parsed.name)
        except LookupError as error:
            print(f"autoprof: {error}", file=sys.stderr)
            return 1
    if parsed.json:
        print(json.dumps(msgspec.to_builtins(found), indent=1))
    elif parsed.name:
        _show_hooks(found)
    else:
        _show(found)
    problems = [entry.problem for entry in found if entry.problem] + ([] if parsed.name else list(places.problems()))
    for problem in problems:
        print(f"autoprof: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _show(found: list[catalog.Entry]) -> None:
    rows = [
        [
            entry.name,
            entry.target,
            entry.versions or "all",
            str(len(entry.hooks)),
            entry.origin,
            entry.installed or "-",
            entry.fits,
        ]
        for entry in found
    ]
    tables.show(["recipe", "target", "versions", "hooks", "from", "installed", "fits"], rows)


def _show_hooks(found: list[catalog.Entry]) -> None:
    for place, entry in enumerate(found):
        if place:
            print()
        print(f"{entry.name}: {entry.path}")
        print(f"  from {entry.origin}, for {entry.target} {entry.versions or '(all versions)'}")
        print(f"  installed: {entry.installed or '-'}, fits: {entry.fits}")
        rows = [
            [hook.name, f"{hook.module}:{hook.attribute}", hook.behaviour, hook.versions or "-", _options(hook)]
            for hook in entry.hooks
        ]
        print()
        tables.show(["hook", "place", "behaviour", "versions", "options"], rows)


def _options(hook: catalog.HookEntry) -> str:
    said = hook.options | ({"rewrap": hook.rewrap} if hook.rewrap else {})
    return " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in said.items()) or "-"


def _check(asked: list[str], as_json: bool) -> int:
    findings: list[Finding] = []
    summaries = []
    sources = Sources()
    for place in asked:
        paths = places.toml_files(place)
        if not paths:
            text = (
                "there are no *.toml files in it that can be read" if os.path.isdir(place) else "there is no such file"
            )
            findings.append(Finding(file=place, table="", key="", text=text))
        for path in paths:
            hooks, wrong = form.check(path)
            if wrong:
                findings += wrong
                summaries.append(f"{path}: {len(wrong)} wrong; nothing more was checked")
                continue
            said, where = static.check(path, hooks, sources)
            findings += said
            errors = sum(finding.error for finding in said)
            state = f"{errors} wrong" if errors else "good"
            summaries.append(f"{path}: {state}, {len(hooks)} hook{'' if len(hooks) == 1 else 's'}; {where}")
    wrong_ones = [finding for finding in findings if finding.error]
    if as_json:
        print(json.dumps({"findings": msgspec.to_builtins(findings), "summaries": summaries}, indent=1))
    else:
        for line in [*(finding.line() for finding in findings), *summaries]:
            print(line)
    return 1 if wrong_ones else 0


def _behaviours(as_json: bool) -> int:
    known = {
        name: {
            "does": summary(kind),
            "options": {
                field.encode_name: {
                    "means": described(kind).get(field.encode_name, ""),
                    "takes": takes(field.type),
                    "required": field.required,
                }
                for field in msgspec.structs.fields(kind)
            },
        }
        for name, kind in schema.known_behaviours().items()
    }
    if as_json:
        print(json.dumps(known, indent=1))
        return 0
    for name, content in known.items():
        print(f"{name}: {content['does']}")
        options: Any = content["options"]
        for option, said in options.items():
            print(f"    {option}{' (required)' if said['required'] else ''}: {said['means']} Takes {said['takes']}.")
    return 0
