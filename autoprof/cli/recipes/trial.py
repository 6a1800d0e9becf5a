"""`autoprof recipes --try`: runs a command with a recipe, and says what each of its hooks did."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from autoprof import _boot
from autoprof.base import units
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.cli.recipes import catalog, check
from autoprof.cli.recipes.documents import Tried, TriedHook, TriedProcess, TriedStage
from autoprof.cli.run import not_run, switch_on
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.recipe import BoundHook
from autoprof.report.figures.reading import Reader, timelines
from autoprof.run import call_counts
from autoprof.rundir import decoder
from autoprof.rundir.layout import RunDir
from autoprof.rundir.processes import WAITING
from autoprof.rundir.records import HooksFile

FIRED, LEFT_ALONE, NOT_CALLED, NOT_IMPORTED, INSTALLED, FAILED = (
    "fired",
    "left alone",
    "not called",
    "not imported",
    "installed",
    "failed",
)
# Processes that are told of a hook.
_MOST_PROCESSES = 4
# Of a process's calls of a hook: the step, whether the hook was for them, and how many there were.
_Count = tuple[int | None, bool, int]


def run(place: str, argv: list[str], as_json: bool) -> int:
    """Run a command with a recipe, print what its hooks did, and return the exit status of the command."""
    if not argv:
        return complain("recipes: --try: there is no command; write autoprof recipes --try RECIPE -- COMMAND", 2)
    path = place
    if not os.path.isfile(place):
        try:
            path = catalog.named_entries(catalog.entries(arguments.setting("recipes")), place)[0].path
        except LookupError as error:
            return complain(f"recipes: --try {place}: it is no file, and {error}", 1)
    hooks, wrong = check.check_form(path)
    if wrong:
        print(*(finding.line() for finding in wrong), sep="\n", file=sys.stderr)
        return 1
    folder = tempfile.mkdtemp(prefix="autoprof-try-")
    try:
        status = _run(argv, _environment(os.path.abspath(path), folder), as_json)
        if status is None:
            return 127
        found = _found(path, status, hooks, Path(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        console.print_json(found)
    else:
        _show(found)
    return status


def _environment(path: str, folder: str) -> dict[str, str]:
    """Return the environment of the command: a run of its own, of which nothing is kept or sent anywhere."""
    environ = dict(os.environ)
    switch_on(environ)
    for name in (_boot.RUN_ID, _boot.RUN_INFO, _boot.STARTER):
        environ.pop(name, None)
    recipes = [each for each in arguments.setting("recipes") if os.path.abspath(each) != path]
    environ[_boot.RECIPES] = os.pathsep.join([*recipes, path])
    return environ | {
        "AUTOPROF_DIR": folder,
        "AUTOPROF_COLLECT": "0",
        "AUTOPROF_ON_FINISH": "true",
        call_counts.VARIABLE: "1",
    }


def _run(command: list[str], environ: dict[str, str], as_json: bool) -> int | None:
    """Return the exit status of the command as shells have it, or None where it can't be run."""
    try:
        # With --json the document alone goes to standard output.
        process = subprocess.Popen(command, env=environ, stdout=sys.stderr if as_json else None)
    except OSError as error:
        not_run("recipes: --try", command[0], error)
        return None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the command has got it, too
            continue
        return status if status >= 0 else 128 - status


def _found(path: str, status: int, hooks: list[BoundHook], folder: Path) -> Tried:
    processes: list[tuple[HooksFile, dict[str, list[_Count]]]] = []
    stages: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    steps: set[int] = set()
    for directory in sorted(each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()):
        counts = _counts(directory)
        for file in RunDir(directory).hooks_files():
            record = decoder.read(file, HooksFile)
            processes.append((record, counts.get(f"{record.host}-{record.pid}", {})))
        reader = Reader()
        for timeline in timelines(directory)[0]:
            for line in reader.spans(timeline):
                if line.kind == "step" and line.step is not None:
                    steps.add(line.step)
                elif line.kind == "stage":
                    stages[line.role, line.name, line.stage_kind].append(-1 if line.step is None else line.step)
    known = {hook.key for hook in hooks}
    errors = dict.fromkeys(
        f"{where}: {error.last}"
        for record, _ in processes
        for where, error in record.errors.items()
        if where not in known
    )
    return Tried(
        recipe=path,
        status=status,
        hooks=[_hook(hook, processes) for hook in hooks],
        steps=sorted(steps),
        stages=[
            TriedStage(role, stage, kind, len(seen), sorted({step for step in seen if step >= 0}))
            for (role, stage, kind), seen in stages.items()
        ],
        errors=list(errors),
    )


def _counts(directory: Path) -> dict[str, dict[str, list[_Count]]]:
    """Return the counts of each process, `<host>-<pid>`, by hook. A pid that came again has several files."""
    found: dict[str, dict[str, list[_Count]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((directory / call_counts.FOLDER).glob("*.txt")):
        who = path.name.removesuffix(".txt").rpartition(".")[0]
        for line in path.read_text(encoding="utf-8").splitlines():
            which, _, count = line.rpartition(" ")
            try:
                key, step, fired = json.loads(which)
                found[who][key].append((step, fired, int(count)))
            except ValueError:  # the machine went down while it was written
                continue
    return found


def _hook(hook: BoundHook, processes: Iterable[tuple[HooksFile, dict[str, list[_Count]]]]) -> TriedHook:
    entries = [
        (record, record.hooks[hook.key], counts.get(hook.key, []))
        for record, counts in processes
        if hook.key in record.hooks
    ]
    fired = []
    for record, _, counts in entries:
        if calls := sum(count for _, did, count in counts if did):
            steps = sorted({step for step, did, _ in counts if did and step is not None})
            fired.append(TriedProcess(record.process, record.host, record.pid, calls, steps))
    found = TriedHook(
        name=hook.hook.name,
        place=f"{hook.hook.module}:{hook.hook.attribute}",
        behaviour=hook.hook.behaviour,
        state=FIRED,
        said="",
        calls=sum(each.calls for each in fired),
        left_alone=sum(count for *_, counts in entries for _, did, count in counts if not did),
        steps=sorted({step for each in fired for step in each.steps}),
        processes=fired,
    )
    if not fired:
        found.state, found.said = _why_not(hook, [(entry.state, entry.reason) for _, entry, _ in entries], found)
    failed = [record.errors[hook.key] for record, *_ in entries if hook.key in record.errors]
    if failed:
        times = units.count(sum(error.count for error in failed), "time")
        found.state, found.said = FAILED, f"it failed {times}: {failed[0].last}"
    return found


def _why_not(hook: BoundHook, entries: list[tuple[str, str]], found: TriedHook) -> tuple[str, str]:
    applied = sum(state == "applied" for state, _ in entries)
    where = f"applied in {units.count(applied, 'process', 'processes')}"
    if found.left_alone:
        times = units.count(found.left_alone, "call")
        return LEFT_ALONE, f"{times} did not fit its when or unless, or had a name that is in none of its tables"
    if applied and type(hook.behaviour).install is not Behaviour.install:
        return INSTALLED, f"{where}: it changes what it names, and its calls are not counted"
    if applied:
        return NOT_CALLED, f"{where}, and {hook.hook.attribute} was not called there"
    told = next(((state, reason) for state, reason in entries if reason != WAITING), None)
    if told is not None:
        return told
    return NOT_IMPORTED, f"no process imported {hook.hook.module}"


def _show(found: Tried) -> None:
    rows = [[hook.name, hook.state, str(hook.calls), units.ranges(hook.steps), _where(hook)] for hook in found.hooks]
    print()
    console.show(["hook", "state", "calls", "steps", "where, or why not"], rows)
    none = "none has ended: a hook with a step behaviour has to fire"
    print(f"\nsteps: {units.ranges(found.steps) if found.steps else none}")
    if found.stages:
        print()
        rows = [
            [each.role, each.stage, each.kind or "-", str(each.times), units.ranges(each.steps)]
            for each in found.stages
        ]
        console.show(["role", "stage", "kind", "times", "steps"], rows)
    for error in found.errors:
        complain(error, 0)


def _where(hook: TriedHook) -> str:
    if hook.said:
        return hook.said
    also = f"; {units.count(hook.left_alone, 'call')} left alone" if hook.left_alone else ""
    many = len(hook.processes) - _MOST_PROCESSES
    more = f"; and {units.count(many, 'more process', 'more processes')}" if many > 0 else ""
    shown = sorted(hook.processes, key=lambda each: -each.calls)[:_MOST_PROCESSES]
    return "; ".join(f"{each.process} ({each.pid}): {each.calls}" for each in shown) + more + also
