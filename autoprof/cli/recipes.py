"""`autoprof recipes`: lists recipes; drafts, checks and tries recipe files; prints the schema."""

from __future__ import annotations

import argparse
import json
import os

import msgspec
from msgspec import Struct

from autoprof.cli import arguments, console, recipes_catalog, recipes_check, recipes_new
from autoprof.cli.console import complain
from autoprof.cli.documents import Document
from autoprof.cli.recipes_catalog import Entry, RecipeHook
from autoprof.cli.recipes_check import RecipeFinding
from autoprof.hooks.recipe import described, summary, takes


class Catalog(Document):
    """The output of `autoprof recipes --json` and of `autoprof recipes NAME --json`."""

    recipes: list[Entry]  # All recipes; if NAME is given, only the recipes with this name or target.


class Checked(Document):
    """The output of `autoprof recipes --check FILE --json`."""

    findings: list[RecipeFinding]  # The errors in the recipe files, and notes about them.
    summaries: list[str]  # One line per recipe file, with the result of its check.


class Option(Struct):
    """An option of a behaviour."""

    means: str  # The meaning of the option.
    takes: str  # The type of the option's value, in the terms of TOML.
    required: bool  # True if every hook with this behaviour must set it.


class KnownBehaviour(Struct):
    """A behaviour that a hook can name."""

    does: str  # The effect of the behaviour.
    options: dict[str, Option]  # The options of the behaviour, by name.


class Behaviours(Document):
    """The output of `autoprof recipes --behaviours --json`."""

    behaviours: dict[str, KnownBehaviour]  # All behaviours, by name.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show the hooks of a recipe or of a target")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="with --new and --try: the command, after --")
    arguments.add_json(parser)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", nargs="+", metavar="FILE", help="check recipe files or folders and list all errors")
    action.add_argument("--new", action="store_true", help="run COMMAND, measure it, and print a first recipe for it")
    action.add_argument(
        "--try", dest="attempt", metavar="RECIPE", help="run COMMAND and show which hooks of RECIPE fired"
    )
    action.add_argument("--behaviours", action="store_true", help="list the behaviours and their options")
    action.add_argument("--schema", action="store_true", help="print the JSON schema of recipes, for editors")
    parser.add_argument("-o", "--output", metavar="FILE", help="with --new: write the recipe to FILE")
    parser.add_argument(
        "--seconds",
        type=float,
        default=recipes_new.SECONDS,
        help=f"with --new: stop the command after so many seconds (default: {recipes_new.SECONDS})",
    )
    parser.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="NAME",
        help="with --new: measure this installed package, too",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    words = [word for word in (parsed.name, *parsed.command) if word is not None]
    command = words[1:] if words[:1] == ["--"] else words
    if parsed.attempt:
        from autoprof.cli import recipes_trial  # imported here, because only --try reads timelines

        return recipes_trial.run(parsed.attempt, command, parsed.json)
    if parsed.new:
        return recipes_new.run(command, parsed.output, parsed.seconds, parsed.package)
    if parsed.command:
        return complain(f"recipes: unexpected argument {parsed.command[0]!r}", 2)
    if parsed.name and (parsed.check or parsed.behaviours or parsed.schema):
        return complain("recipes: NAME can't be combined with --check, --behaviours or --schema", 2)
    if parsed.schema:
        print(recipes_check.schema_text(), end="")
        return 0
    if parsed.behaviours:
        return _behaviours(parsed.json)
    if parsed.check:
        return _check(parsed.check, parsed.json)
    entries = recipes_catalog.entries(arguments.setting("recipes"))
    if parsed.name:
        try:
            entries = recipes_catalog.named_entries(entries, parsed.name)
        except LookupError as error:
            return complain(str(error), 1)
    if parsed.json:
        console.print_json(Catalog(recipes=entries))
    elif parsed.name:
        _show_hooks(entries)
    else:
        _show(entries)
    problems = [entry.problem for entry in entries if entry.problem] + (
        [] if parsed.name else list(recipes_catalog.unreadable_places())
    )
    for problem in problems:
        complain(problem, 1)
    return 1 if problems else 0


def _show(entries: list[Entry]) -> None:
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
        for entry in entries
    ]
    drop = ("target", "hooks", "from", "versions")
    console.show(["recipe", "target", "versions", "hooks", "from", "installed", "fits"], rows, drop)


def _show_hooks(entries: list[Entry]) -> None:
    for index, entry in enumerate(entries):
        if index:
            print()
        print(f"{entry.name}: {entry.path}")
        print(f"  from {entry.origin}, for {entry.target} {entry.versions or '(all versions)'}")
        print(f"  installed: {entry.installed or '-'}, fits: {entry.fits}")
        rows = [
            [hook.name, f"{hook.module}:{hook.attribute}", hook.behaviour, hook.versions or "-", _options(hook)]
            for hook in entry.hooks
        ]
        print()
        console.show(["hook", "place", "behaviour", "versions", "options"], rows, drop=("versions", "options"))


def _options(hook: RecipeHook) -> str:
    options = hook.options | ({"rewrap": hook.rewrap} if hook.rewrap else {})
    return " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items()) or "-"


def _check(files_or_folders: list[str], as_json: bool) -> int:
    findings: list[RecipeFinding] = []
    paths: list[str] = []
    for place in files_or_folders:
        files = recipes_catalog.toml_files(place)
        if not files:
            if os.path.isdir(place):
                text = "the folder has no readable *.toml files"
            else:
                text = "it is not a readable file" if os.path.exists(place) else "there is no such file"
            findings.append(RecipeFinding(file=place, table="", key="", text=text))
        paths += files
    other_hooks = recipes_catalog.catalog_hooks(arguments.setting("recipes"), files_or_folders)
    file_findings, summaries = recipes_check.check_files(list(dict.fromkeys(paths)), other_hooks)
    findings += file_findings
    if as_json:
        console.print_json(Checked(findings=findings, summaries=summaries))
    else:
        for line in [*(finding.line() for finding in findings), *summaries]:
            print(line)
    return 1 if any(finding.error for finding in findings) else 0


def _behaviours(as_json: bool) -> int:
    behaviours = {
        name: KnownBehaviour(
            summary(kind),
            {
                field.encode_name: Option(described(kind).get(field.encode_name, ""), takes(field.type), field.required)
                for field in msgspec.structs.fields(kind)
            },
        )
        for name, kind in recipes_check.known_behaviours().items()
    }
    if as_json:
        console.print_json(Behaviours(behaviours=behaviours))
        return 0
    for name, content in behaviours.items():
        print(f"{name}: {content.does}")
        for name, option in content.options.items():
            print(f"    {name}{' (required)' if option.required else ''}: {option.means} Takes {option.takes}.")
    return 0
