"""`autoprof doctor`: checks an environment or a run, and prints a report."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

import msgspec

from autoprof.base.redact import hidden_in, plain
from autoprof.cli import arguments, console
from autoprof.cli.doctor import Report
from autoprof.config import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", metavar="RUN", help="a run, as for ls; without it, this environment")
    parser.add_argument("--all", action="store_true", help="list all hooks, problems and notes")
    parser.add_argument("--deep", action="store_true", help="import the targets to check that each hook applies")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    # Imported here, because a check of a run needs no hooks, and a check of the environment needs no figures of runs.
    if parsed.name:
        from autoprof.cli.doctor.run import examine_run

        report = examine_run(arguments.find_run(parsed))
    else:
        from autoprof.cli.doctor.environment import examine_environment

        report = examine_environment(settings.load(os.environ, Path.cwd()), parsed.deep)
    report = _without_secrets(report)
    if parsed.json:
        console.print_json(report)
    else:
        show(report, parsed.all)
    return 1 if report.problems else 0


def _without_secrets(report: Report) -> Report:
    """Return a copy of a report in which secrets are masked.

    Files that older releases wrote, and the errors of recipes, may contain secrets.
    """
    texts = {name: hidden_in(getattr(report, name)) for name in ("facts", "hooks", "problems", "notes")}
    return msgspec.structs.replace(report, **texts)


# Maximum numbers of problems and of notes that are printed without `--all`.
_MAX_PROBLEMS, _MAX_NOTES = 40, 20


def show(report: Report, hooks: bool = False) -> None:
    """Print a report as text: facts, problems, notes, and the verdict.

    If `hooks` is true, also print a table of the hooks, and print all problems and notes. Otherwise, print only the
    first problems and notes.
    """
    print(plain(report.subject))
    counts = _counts(report.hooks)
    for name, value in report.facts.items():
        print(*console.wrapped(plain(f"{name}: {'; '.join(filter(None, [value, counts.get(name)]))}"), 2), sep="\n")
    if hooks and report.hooks:
        print()
        console.show(["hook", "state", "reason"], _grouped(report.hooks))
    for title, lines, max_lines in (
        ("does not work", report.problems, _MAX_PROBLEMS),
        ("notes", report.notes, _MAX_NOTES),
    ):
        if lines:
            print(f"\n{title}:")
        for line in lines if hooks else lines[:max_lines]:
            first_line, *more_lines = console.wrapped(plain(line), 4)
            print(f"  - {first_line[4:]}", *more_lines, sep="\n")
        if len(lines) > max_lines and not hooks:
            print(f"  - and {len(lines) - max_lines} more, which --all lists")
    print(f"\n{plain(report.verdict)}")


def _counts(hooks: list[tuple[str, str, str]]) -> dict[str, str]:
    """Return a text with the number of hooks in each state, such as `5 hooks applied, 2 skipped`, for each target."""
    states: dict[str, Counter[str]] = {}
    for key, state, reason in hooks:
        for_other_release = state == "skipped" and " the hook is for " in reason
        label = "for other releases" if for_other_release else state
        states.setdefault(key.partition("/")[0], Counter())[label] += 1
    return {
        target: f"{', '.join(f'{count} {label}' for label, count in counts.items())}".replace(" ", " hooks ", 1)
        for target, counts in states.items()
    }


def _grouped(hooks: list[tuple[str, str, str]]) -> list[list[str]]:
    """Return the rows of the table of hooks.

    The hooks of one target that were skipped for the same reason share a row.
    """
    keys_by_row: dict[tuple[str, str, str], list[str]] = {}
    for key, state, reason in hooks:
        name = key.partition("/")[0] if state == "skipped" else key
        keys_by_row.setdefault((name, state, reason), []).append(key)
    return [
        [keys[0] if len(keys) == 1 else f"{name}: {len(keys)} hooks", state, reason]
        for (name, state, reason), keys in keys_by_row.items()
    ]
