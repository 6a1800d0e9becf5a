"""`autoprof recipes`: lists recipes; drafts, checks and tries recipe files; prints the schema.

`--try` runs a command with a recipe, in a separate run, and shows the result of each hook.
"""

from __future__ import annotations

import argparse
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

import msgspec
from msgspec import Struct

from autoprof import _boot
from autoprof.base import units
from autoprof.cli import arguments, console, recipes_catalog, recipes_check, recipes_new, recipes_try
from autoprof.cli.console import complain
from autoprof.cli.documents import Document
from autoprof.cli.recipes_catalog import Entry
from autoprof.cli.recipes_check import RecipeFinding
from autoprof.cli.recipes_try import ReadValue, Uncovered
from autoprof.cli.run import not_run, switch_on
from autoprof.hooks import recipe
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.recipe import BoundHook, Hook, RecipeError, described, summary, takes
from autoprof.run import runtime, try_stacks
from autoprof.rundir import runs
from autoprof.rundir.processes import WAITING, ProcessState


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


class TriedProcess(Struct):
    """A process in which a hook fired."""

    process: str  # The command line of the process, or the title that Ray gave the process.
    host: str  # The host of the process.
    pid: int  # The process id.
    calls: int  # The number of calls in this process for which the hook fired.
    steps: list[int]  # The steps of these calls; empty if the process did not know its step.


class TriedHook(Struct):
    """The result of a hook, after the command has ended."""

    name: str  # The name of the hook in the recipe.
    place: str  # The module and the attribute that the hook names, as `module:attribute`.
    behaviour: str  # The behaviour of the hook.
    # `fired`, `left alone` (by `when`, `unless`, or the names in its tables), `not called`, `not imported`, `skipped`,
    # `failed`, `installed` (the hook changed a class and wraps no function).
    state: str
    said: str  # The reason why the hook did not fire, or its error; empty if it fired without errors.
    calls: int  # The number of calls in all processes for which the hook fired.
    left_alone: int  # The number of calls that the hook left alone.
    steps: list[int]  # The steps in which the hook fired; empty if no process knew its step.
    processes: list[TriedProcess]  # The processes in which the hook fired.


class TriedStage(Struct):
    """A stage or span on the timeline."""

    role: str  # The role of the stage.
    stage: str  # The name of the stage.
    kind: str  # The kind of the stage; empty if the stage has none.
    times: int  # The number of times that the stage ran.
    steps: list[int]  # The steps in which the stage ran.


class Tried(Document):
    """The output of `autoprof recipes --try RECIPE --json -- COMMAND`."""

    recipe: str  # The path of the recipe file.
    status: int  # The exit status of the command.
    hooks: list[TriedHook]  # The hooks of the recipe, each with its result.
    steps: list[int]  # The steps that ended during the command.
    stages: list[TriedStage]  # The stages and spans on the timeline, also from hooks of other recipes.
    errors: list[str]  # The errors of autoprof, including those from hooks of other recipes.
    uncovered: Uncovered | None  # The time of the steps that no stage covers; null if no step has ended.
    values: list[ReadValue]  # The values that hooks for single samples have read.
    makes_traces: bool  # False if the recipe has no hook that makes traces.


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
        return _try_command(parsed.attempt, command, parsed.json)
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
        return _list_behaviours(parsed.json)
    if parsed.check:
        return _check_files(parsed.check, parsed.json)
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
        _show_recipes(entries)
    problems = [entry.problem for entry in entries if entry.problem] + (
        [] if parsed.name else list(recipes_catalog.unreadable_places())
    )
    for problem in problems:
        complain(problem, 1)
    return 1 if problems else 0


def _show_recipes(entries: list[Entry]) -> None:
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


def _options(hook: Hook) -> str:
    options = hook.options | ({"rewrap": hook.rewrap} if hook.rewrap else {})
    return " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items()) or "-"


def _check_files(files_or_folders: list[str], as_json: bool) -> int:
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


def _list_behaviours(as_json: bool) -> int:
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


# Maximum number of processes that are shown per hook.
_MAX_PROCESSES = 4
# A count of calls of a hook in one process: the step of the calls, True if the hook fired for them, and their number.
_Count = tuple[int | None, bool, int]


def _try_command(file_or_name: str, argv: list[str], as_json: bool) -> int:
    """Run a command with a recipe, print the result of each hook, and return the command's exit status."""
    if not argv:
        return complain("recipes: --try: no command was given; write autoprof recipes --try RECIPE -- COMMAND", 2)
    path = file_or_name
    if not os.path.isfile(path):
        try:
            entries = recipes_catalog.entries(arguments.setting("recipes"))
            path = recipes_catalog.named_entries(entries, file_or_name)[0].path
        except LookupError as error:
            return complain(f"recipes: --try {file_or_name}: there is no such file, and {error}", 1)
    try:
        hooks = recipe.load(path)
    except RecipeError as error:
        return complain(f"{error}; autoprof recipes --check {path} lists all errors", 1)
    folder = tempfile.mkdtemp(prefix="autoprof-try-")
    try:
        status = _run_with(argv, _environment(os.path.abspath(path), folder), as_json)
        if status is None:
            return 127
        tried = _result(path, status, hooks, Path(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        console.print_json(tried)
    else:
        _show_trial(tried)
    return status


def _environment(path: str, folder: str) -> dict[str, str]:
    """Return the environment variables for the command.

    They make the command a separate run in `folder`, which is neither collected nor copied.
    """
    environ = dict(os.environ)
    switch_on(environ)
    for name in (_boot.RUN_ID, _boot.RUN_INFO, _boot.STARTER):
        environ.pop(name, None)
    recipes = [file for file in arguments.setting("recipes") if os.path.abspath(file) != path]
    environ[_boot.RECIPES] = os.pathsep.join([*recipes, path])
    environ.setdefault("AUTOPROF_LOG", "warning")  # the line at the end of the run would name the temporary folder
    return environ | {
        "AUTOPROF_DIR": folder,
        "AUTOPROF_COLLECT": "0",
        "AUTOPROF_ON_FINISH": "true",
        runtime.TRY_VARIABLE: "1",
    }


def _run_with(command: list[str], environ: dict[str, str], as_json: bool) -> int | None:
    """Run the command and return its exit status as in shells, or None if it can't be run."""
    try:
        # If --json is set, only the document goes to standard output.
        process = subprocess.Popen(command, env=environ, stdout=sys.stderr if as_json else None)
    except OSError as error:
        not_run("recipes: --try", command[0], error)
        return None
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # Ctrl-C also interrupts the command; wait for it
            continue
        return status if status >= 0 else 128 - status


def _result(path: str, status: int, hooks: list[BoundHook], folder: Path) -> Tried:
    processes: list[tuple[ProcessState, dict[str, list[_Count]]]] = []
    stages: dict[tuple[str, str, str], list[int | None]] = defaultdict(list)
    directories = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    for directory in directories:
        counts = _counts(directory)
        for state in runs.read(directory).processes:
            processes.append((state, counts.get(f"{state.host}-{state.pid}", {})))
    all_spans = recipes_try.read_spans(directories)
    spans = [line for journal in all_spans for line in journal.spans]
    for line in spans:
        if line.kind == "stage":
            stages[line.role, line.name, line.stage_kind].append(line.step)
    recipe_keys = {hook.key for hook in hooks}
    errors = dict.fromkeys(
        f"{source}: {error.last}"
        for record, _ in processes
        for source, error in record.errors.items()
        if source not in recipe_keys
    )
    return Tried(
        recipe=path,
        status=status,
        hooks=[_tried_hook(hook, processes) for hook in hooks],
        steps=sorted({line.step for line in spans if line.kind == "step" and line.step is not None}),
        stages=[
            TriedStage(role, stage, kind, len(numbers), sorted({number for number in numbers if number is not None}))
            for (role, stage, kind), numbers in stages.items()
        ],
        errors=list(errors),
        uncovered=recipes_try.uncovered(all_spans),
        values=recipes_try.read_values(hooks, spans),
        makes_traces=recipes_try.makes_traces(hooks),
    )


def _counts(directory: Path) -> dict[str, dict[str, list[_Count]]]:
    """Return the counts of calls: dict from process (`<host>-<pid>`) to dict from hook key to list of counts.

    Two processes that had the same pid one after the other have separate files.
    """
    counts: dict[str, dict[str, list[_Count]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted((directory / runtime.CALLS).glob("*.txt")):
        if path.name.endswith(try_stacks.ENDING):
            continue
        process = path.name.removesuffix(".txt").rpartition(".")[0]
        for line in path.read_text(encoding="utf-8").splitlines():
            call, _, count = line.rpartition(" ")
            try:
                key, step, fired = json.loads(call)
                counts[process][key].append((step, fired, int(count)))
            except ValueError:  # the machine stopped while the line was written
                continue
    return counts


def _tried_hook(hook: BoundHook, processes: Iterable[tuple[ProcessState, dict[str, list[_Count]]]]) -> TriedHook:
    entries = [
        (record, record.hooks[hook.key], counts.get(hook.key, []))
        for record, counts in processes
        if hook.key in record.hooks
    ]
    tried_processes = []
    for record, _, counts in entries:
        if calls := sum(count for _, fired, count in counts if fired):
            steps = sorted({step for step, fired, _ in counts if fired and step is not None})
            tried_processes.append(TriedProcess(record.process, record.host, record.pid, calls, steps))
    tried = TriedHook(
        name=hook.hook.name,
        place=f"{hook.hook.module}:{hook.hook.attribute}",
        behaviour=hook.hook.behaviour,
        state="fired",
        said="",
        calls=sum(process.calls for process in tried_processes),
        left_alone=sum(count for *_, counts in entries for _, fired, count in counts if not fired),
        steps=sorted({step for process in tried_processes for step in process.steps}),
        processes=tried_processes,
    )
    if not tried_processes:
        tried.state, tried.said = _why_not(hook, [(entry.state, entry.reason) for _, entry, _ in entries], tried)
    errors = [record.errors[hook.key] for record, *_ in entries if hook.key in record.errors]
    if errors:
        times = units.count(sum(error.count for error in errors), "time")
        tried.state, tried.said = "failed", f"it failed {times}: {errors[0].last}"
    return tried


def _why_not(hook: BoundHook, entries: list[tuple[str, str]], tried: TriedHook) -> tuple[str, str]:
    """Return the state of a hook that did not fire in any process, and the reason why it did not."""
    applied = sum(state == "applied" for state, _ in entries)
    applied_text = f"applied in {units.count(applied, 'process', 'processes')}"
    if tried.left_alone:
        calls = units.count(tried.left_alone, "call")
        return "left alone", f"{calls} did not fit its when or unless, or had a name that none of its tables has"
    if applied and type(hook.behaviour).install is not Behaviour.install:
        return "installed", f"{applied_text}: it changes the class that it names; calls are not counted"
    if applied:
        return "not called", f"{applied_text}, but {hook.hook.attribute} was not called"
    skipped = next(((state, reason) for state, reason in entries if reason != WAITING), None)
    if skipped is not None:
        return skipped
    return "not imported", f"no process imported {hook.hook.module}"


def _show_trial(tried: Tried) -> None:
    rows = [
        [hook.name, hook.state, str(hook.calls), units.ranges(hook.steps), _reason_of_hook(hook)]
        for hook in tried.hooks
    ]
    print()
    console.show(["hook", "state", "calls", "steps", "where, or why not"], rows)
    none = "no step has ended; a hook with a step behaviour must fire"
    print(f"\nsteps: {units.ranges(tried.steps) if tried.steps else none}")
    if tried.stages:
        print()
        rows = [
            [stage.role, stage.stage, stage.kind or "-", str(stage.times), units.ranges(stage.steps)]
            for stage in tried.stages
        ]
        console.show(["role", "stage", "kind", "times", "steps"], rows)
    if tried.values:
        print()
        rows = [
            [each.hook, each.value, each.path or "(the result)", f"{each.times} of {each.calls}", each.example or "-"]
            for each in tried.values
        ]
        console.show(["hook", "value", "path", "read", "last"], rows)
    if tried.uncovered is not None:
        print("", *recipes_try.uncovered_text(tried.uncovered), sep="\n")
    if not tried.makes_traces:
        complain(recipes_try.NO_STAGE, 0)
    for error in tried.errors:
        complain(error, 0)


def _reason_of_hook(hook: TriedHook) -> str:
    if hook.said:
        return hook.said
    left_alone = f"; {units.count(hook.left_alone, 'call')} left alone" if hook.left_alone else ""
    excess = len(hook.processes) - _MAX_PROCESSES
    more_text = f"; and {units.count(excess, 'more process', 'more processes')}" if excess > 0 else ""
    shown_processes = sorted(hook.processes, key=lambda process: -process.calls)[:_MAX_PROCESSES]
    return (
        "; ".join(f"{process.process} ({process.pid}): {process.calls}" for process in shown_processes)
        + more_text
        + left_alone
    )
