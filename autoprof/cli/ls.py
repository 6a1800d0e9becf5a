"""`autoprof ls`: lists runs, or the captures of one."""

from __future__ import annotations

import argparse
import time

import msgspec

from autoprof.base import units
from autoprof.cli import arguments, console
from autoprof.cli.documents import Listed, ListedRun
from autoprof.rundir import death_words, deaths, runs

# Who died is told of the last runs: it takes a look at their timelines.
_MOST_READ = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    text = "a run: its folder, its id, the beginning of it, or latest"
    parser.add_argument("name", nargs="?", metavar="RUN", help=text)
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if parsed.name:
        return _show([arguments.find_run(parsed)], parsed.json, captures=True)
    parent = arguments.parent(parsed)
    found = runs.runs(parent)
    if not found:
        raise runs.NotFound(f"there are no runs in {parent}; {runs.NONE_LEFT}")
    return _show(found, parsed.json, captures=False)


def _show(found: list[runs.Run], as_json: bool, captures: bool) -> int:
    if as_json:
        listed = [run.described() | {"state": run.state, "bytes": run.bytes} for run in found]
        console.print_json(Listed(runs=msgspec.convert(listed, list[ListedRun])))
        return 0
    rows = [
        [
            run.id,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.info.started)),
            run.outcome,
            units.ranges([step.number for step in run.steps]),
            str(len(run.captures)),
            units.size(run.bytes),
        ]
        for run in found
    ]
    drop = ("started", "size", "captures", "steps")
    console.show(["run", "started", "state", "steps", "captures", "size"], rows, drop)
    for run in found:
        if run.info.no_hooks:
            console.complain(f"ls: {run.id} has no profile, for no hook was applied: {run.info.no_hooks}", 0)
    for run in found[-_MOST_READ:]:
        if not run.state.startswith(runs.ENDED) and (died := deaths.of_run(run)):
            console.complain(f"ls: {run.id}: {death_words.text(died[0], len(run.info.hosts))}", 0)
    if captures:
        rows = [
            [f"{step.number}", capture.name, capture.state, units.size(capture.bytes)]
            for run in found
            for step in run.steps
            for capture in [*step.captures, *step.merged]
        ]
        print()
        console.show(["step", "capture", "state", "size"], rows, drop=("size", "step"))
        for line in [line for run in found for line in run.left_out]:
            console.complain(f"ls: {line}", 0)
    return 0
