"""The command line. Exit status 0, 1 (what was asked for was not found or failed), 2 (wrong use)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from autoprof import __version__, analysing, doctor, doctor_run, listing, opening, settings, tables, triggering
from autoprof._boot import ENABLE, own_recipes
from autoprof.authoring import command as authoring
from autoprof.collect import command as collecting
from autoprof.redaction import plain
from autoprof.report import command as reporting
from autoprof.settings import PREFIX, SettingsError

# Options of `autoprof run`, each the setting of that name.
_OPTIONS = {
    "steps": "steps to capture: 2,5 or 10:13 or ::50 or +2",
    "when": "conditions that open a window: step>2x,update_actor>1.5x,rank>1.3x,memory>0.9,resume:2,oom",
    "dir": "parent of the run directory",
    "access": "who may read it: private or group",
    "tool": "what records: torch, npu, nsys, memory",
    "mode": "a trace per stage (discrete) or per step (continuous)",
    "consecutive": "steps that follow one another, in continuous mode: apart or together",
    "roles": "roles to capture, as patterns",
    "ranks": "global ranks to capture: 0,8 or 0:4 or all or slowest:2",
    "contents": "what to record: cpu,cuda,memory,shapes,stack,...",
    "rollout-iterations": "forward passes of the engine to record: start:stop or all",
    "mini-batches": "mini-batches of a stage to record: start:stop or all",
    "config": "a TOML file with settings",
    "recipes": "further recipe files or folders",
    "disable": "recipes or hooks to leave out, as patterns",
    "collect": "1: bring the parts of all nodes together at the end; a URL: and copy the run there",
    "on-finish": "a command to run after the last window",
    "log": "level of autoprof's own log",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        return status
    except SettingsError as error:
        return _complain(str(error), 2)
    except listing.NotFound as error:
        return _complain(str(error), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("autoprof", description="Profiles LLM reinforcement-learning runs from outside.")
    parser.add_argument("--version", action="version", version=f"autoprof {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a command with autoprof on", usage="autoprof run [options] -- COMMAND")
    for option, text in _OPTIONS.items():
        run.add_argument(f"--{option}", metavar="VALUE", help=text)
    run.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")
    run.set_defaults(run=_run)

    ls = commands.add_parser("ls", help="list runs, their steps and captures")
    ls.add_argument("name", nargs="?", metavar="RUN", help="a run: its folder, its id, the beginning of it, or latest")
    ls.set_defaults(run=_ls)

    checkup = commands.add_parser("doctor", help="say what applies here, or why a run lacks a trace")
    checkup.add_argument("name", nargs="?", metavar="RUN", help="a run, as for ls; without it, this environment")
    checkup.set_defaults(run=_doctor)

    merge = commands.add_parser("merge", help="make one trace of a step's, all processes on one clock")
    merge.add_argument("name", nargs="*", metavar="RUN", help="a run, as for ls (default: latest), or trace files")
    merge.add_argument("--step", type=int, metavar="N", help="the step; not needed where there is one only")
    merge.add_argument("--role", metavar="PATTERNS", default="*", help="roles, as for AUTOPROF_ROLES (default: all)")
    merge.add_argument("-o", "--output", metavar="FILE", type=Path, help="(default: in the step's folder)")
    merge.add_argument("--tar", action="store_true", help="an archive of the traces as they are, for Perfetto 58.2 on")
    merge.add_argument(
        "--clocks",
        choices=("measured", "as-set"),
        default="measured",
        help="of several hosts: set right by what was measured in the run (default), or taken as they are set",
    )
    merge.set_defaults(run=_merge)

    analysis = commands.add_parser("analyse", help="have torch_npu analyse what it recorded and has not analysed yet")
    analysis.add_argument("name", nargs="?", metavar="RUN", default="latest", help="a run, as for ls (default: latest)")
    analysis.add_argument("--step", type=int, metavar="N", help="a step (default: all)")
    analysis.set_defaults(run=_analyse)

    collect = collecting.add(commands, _parent)
    report = reporting.add(commands, _parent)
    show = opening.add(commands, _parent)
    ask = triggering.add(commands, _parent, _OPTIONS)

    authoring.add(commands)

    for command in (ls, ask, merge, checkup, analysis, collect, report, show):
        command.add_argument("--dir", help="parent of the run directories (default: AUTOPROF_DIR, ./autoprof_runs)")
    for command in (ls, checkup, collect):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(parsed: argparse.Namespace) -> int:
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        return _complain("run: there is no command; write autoprof run [options] -- COMMAND", 2)
    for option in _OPTIONS:
        name = option.replace("-", "_")
        if (value := getattr(parsed, name)) is not None:
            os.environ[PREFIX + name.upper()] = value
    settings.load(os.environ, Path.cwd())
    site = os.path.join(os.path.dirname(own_recipes()), "sitecustomize")
    os.environ[ENABLE] = "1"
    os.environ["AUTOPROF_SITE"] = site
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return _complain(f"run: {command[0]}: {error.strerror}", 1)


def _ls(parsed: argparse.Namespace) -> int:
    parent = _parent(parsed)
    if parsed.name:
        return _show([listing.find(parent, parsed.name)], parsed.json, captures=True)
    found = listing.runs(parent)
    if not found:
        raise listing.NotFound(f"there are no runs in {parent}")
    return _show(found, parsed.json, captures=False)


def _show(found: list[listing.Run], as_json: bool, captures: bool) -> int:
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=1))
        return 0
    rows = [
        [
            run.id,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.info.get("started", 0))),
            run.state,
            ",".join(str(step.number) for step in run.steps) or "-",
            str(len(run.captures)),
            tables.size(run.bytes),
        ]
        for run in found
    ]
    tables.show(["run", "started", "state", "steps", "captures", "size"], rows)
    if captures:
        rows = [
            [f"{step.number}", capture.name, capture.state, tables.size(capture.bytes)]
            for run in found
            for step in run.steps
            for capture in [*step.captures, *step.merged]
        ]
        print()
        tables.show(["step", "capture", "state", "size"], rows)
        for line in [line for run in found for line in run.left_out]:
            _complain(f"ls: {line}", 0)
    return 0


def _merge(parsed: argparse.Namespace) -> int:
    from autoprof import progress
    from autoprof.traces import steps
    from autoprof.traces.reader import TraceError

    wishes = steps.Wishes(roles=parsed.role, output=parsed.output, tar=parsed.tar, clocks=parsed.clocks)
    given = [Path(name) for name in parsed.name]
    try:
        if given and (len(given) > 1 or (given[0].exists() and not (given[0] / "run.json").is_file())):
            work = steps.of_files(given, wishes)
        else:
            run = listing.find(_parent(parsed), parsed.name[0] if given else "latest")
            work = steps.of_step(run, steps.chosen(run, parsed.step), wishes)
        with progress.bar("merging", work.bytes) as done:
            said = list(steps.do(work, wishes.tar, done))
        for line in said:
            print(plain(line))
    except (TraceError, OSError) as error:
        return _complain(f"merge: {error}", 1)
    return 0


def _analyse(parsed: argparse.Namespace) -> int:
    failed = count = 0
    try:
        for name, done in analysing.analyse(listing.find(_parent(parsed), parsed.name), parsed.step):
            print(f"{name}: {'analysed' if done else 'torch_npu could not analyse it'}", flush=True)
            count += 1
            failed += not done
    except (analysing.NoTorchNpu, OSError) as error:
        return _complain(f"analyse: {error}", 1)
    if not count:
        print("all is analysed")
    return 1 if failed else 0


def _doctor(parsed: argparse.Namespace) -> int:
    if parsed.name:
        report = doctor_run.examine_run(listing.find(_parent(parsed), parsed.name))
    else:
        report = doctor.examine_environment(settings.load(os.environ, Path.cwd()))
    if parsed.json:
        print(json.dumps(msgspec.to_builtins(report), indent=1))
    else:
        doctor.show(report)
    return 1 if report.problems else 0


def _parent(parsed: argparse.Namespace) -> Path:
    return Path(parsed.dir) if parsed.dir else Path(settings.load(os.environ, Path.cwd()).dir)


def _complain(text: str, status: int) -> int:
    print(f"autoprof: {plain(text)}", file=sys.stderr)
    return status
