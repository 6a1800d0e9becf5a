"""What `autoprof doctor` says of an environment: what applies here and why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from autoprof import _boot, cupti, recipe, tables, variables
from autoprof.authoring import places
from autoprof.budget import Budget, OverBudget
from autoprof.redaction import plain
from autoprof.settings import Settings
from autoprof.tools import npu, nsys, nsys_launch

_PROBE_TIMEOUT_S = 300


class Report(msgspec.Struct, kw_only=True):
    """What was found. `hooks` are rows of hook, state and reason; `problems` make the exit status 1."""

    subject: str
    facts: dict[str, str] = {}
    hooks: list[tuple[str, str, str]] = []
    problems: list[str] = []
    notes: list[str] = []


def show(report: Report) -> None:
    """Print a report for a person."""
    print(plain(report.subject))
    for name, value in report.facts.items():
        print(plain(f"  {name}: {value}"))
    if report.hooks:
        print()
        tables.show(["hook", "state", "reason"], _grouped(report.hooks))
    for title, lines in (("notes", report.notes), ("problems", report.problems)):
        if lines:
            print(f"\n{title}:")
            for line in lines:
                print(plain(f"  - {line}"))
    if not report.problems:
        print("\nno problems found")


def _grouped(hooks: list[tuple[str, str, str]]) -> list[list[str]]:
    """Rows for a person: hooks of one recipe that were skipped for one reason share a row."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for key, state, reason in hooks:
        name = key.partition("/")[0] if state == "skipped" else key
        grouped.setdefault((name, state, reason), []).append(key)
    return [
        [keys[0] if len(keys) == 1 else f"{name}: {len(keys)} hooks", state, reason]
        for (name, state, reason), keys in grouped.items()
    ]


def examine_environment(settings: Settings) -> Report:
    """What autoprof would patch here and now, by importing the targets in a process of its own."""
    report = Report(subject=f"environment: {sys.executable}")
    when = f", when {', '.join(map(str, settings.when))}" if settings.when else ""
    report.facts["settings"] = f"steps {settings.steps or 'none'}{when}, ranks {settings.ranks}"
    _check_activation(report)
    _check_folder(report, settings)
    _check_variables(report)
    _check_nsys(report, settings)
    _check_recipes(report, settings.recipes)
    found = _probe(report)
    report.facts["tool"] = found.get("tool", "unknown")
    for name, version in sorted(found.get("versions", {}).items()):
        report.facts[name] = version or "without a version"
    check_versions(report, found.get("versions", {}), settings.recipes)
    report.notes += variables.unread(os.environ, found.get("versions", {}).get("vllm", ""))
    list_hooks(report, found)
    return report


def _check_activation(report: Report) -> None:
    code = "import sys; print('autoprof._boot' in sys.modules)"
    environment = os.environ | {_boot.ENABLE: "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    active = result.stdout.strip() == "True"
    report.facts["activation"] = "autoprof.pth or sitecustomize works" if active else "not active by itself"
    if not active:
        report.notes.append("AUTOPROF=1 alone does nothing with this interpreter; start with autoprof run -- COMMAND")


def _check_folder(report: Report, settings: Settings) -> None:
    folder = settings.dir
    place = Path(folder)
    while not place.exists():
        place = place.parent
    report.facts["folder"] = folder
    if not os.access(place, os.W_OK):
        report.problems.append(f"{folder} can't be made or written; set AUTOPROF_DIR to a folder that can")
    try:
        Budget(settings, "", 0, place).begin()
    except OverBudget as error:
        report.problems.append(f"captures to {folder} are {error}")


def _check_variables(report: Report) -> None:
    if cupti.names_cupti(os.environ):
        text = f"{cupti.INJECTION} names libcupti, with which torch.profiler records no GPU activity"
        if cupti.kept(os.environ):
            report.problems.append(f"{text}; unset it, or {cupti.KEEP}")
        else:
            report.notes.append(f"{text}; autoprof's runs go without it")
    for name in npu.by_itself():
        report.problems.append(
            f"{name} is set: torch_npu profiles by itself then, and autoprof records no NPU; unset it"
        )
    if os.environ.get("KINETO_USE_DAEMON"):
        report.notes.append("KINETO_USE_DAEMON is set: dynolog may start its own captures")


def _check_nsys(report: Report, settings: Settings) -> None:
    if "nsys" in settings.tool:
        executable = settings.nsys.executable
        if found := nsys_launch.find(settings.nsys):
            report.facts["nsys"] = f"{nsys_launch.version(found)} ({found})"
            if not nsys_launch.writes_at_once(found):
                report.notes.append(nsys_launch.AT_THE_END)
        else:
            report.problems.append(
                f"AUTOPROF_TOOL asks for nsys, but there is no {executable} on the path: torch.profiler would record "
                "instead; install Nsight Systems on every node, or say where it is: AUTOPROF_NSYS=executable=/.../nsys"
            )
        if os.environ.get("KINETO_USE_DAEMON"):
            report.problems.append("KINETO_USE_DAEMON is set: dynolog may take CUPTI from nsys; unset it")
    elif nsys.here():
        report.notes.append(
            "this runs under nsys, which takes the only CUPTI subscription: nothing is captured in processes started "
            "here, unless by AUTOPROF_TOOL=nsys"
        )


def _check_recipes(report: Report, extra: Sequence[str]) -> None:
    """Say which recipes there are besides autoprof's own, and what is wrong with entry points."""
    for file in places.files(extra):
        if file.origin != places.OWN:
            report.facts[f"recipe {file.name}"] = f"{file.path}, from {file.origin}"
    report.problems += places.problems()


def check_versions(report: Report, versions: dict[str, str], extra: Sequence[str]) -> None:
    """Say which targets are newer than their recipes."""
    files = places.files(extra)
    for target, version in sorted(versions.items()):
        for path in [file.path for file in files if file.target == target]:
            try:
                hooks = recipe.load(path)
            except recipe.RecipeError:
                continue
            tried = [hook.recipe.versions for hook in hooks if recipe.fits(version, hook.hook.versions)]
            if tried and recipe.exceeds(version, tried[0]):
                report.notes.append(
                    f"{target} {version} is newer than what its recipe was made for ({tried[0]}); "
                    "its hooks are tried all the same"
                )


def _probe(report: Report) -> dict[str, Any]:
    """Import the targets with autoprof on, in a child process and with a run directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "hooks.json")
        kept = {name: value for name, value in os.environ.items() if name not in (_boot.RUN_ID, _boot.RUN_INFO)}
        environment = kept | {
            _boot.ENABLE: "1",
            _boot.RUN_ID: _boot.new_run_id(),
            "AUTOPROF_DIR": folder,
            "AUTOPROF_ON_FINISH": "",
        }
        with Console(stderr=True).status("importing the targets"):
            try:
                child = subprocess.run(
                    [sys.executable, "-m", "autoprof.probe", output],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=_PROBE_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                report.problems.append(f"importing the targets took more than {_PROBE_TIMEOUT_S} s")
                return {}
        if not os.path.exists(output):
            last = (child.stderr.strip().splitlines() or ["no output"])[-1]
            report.problems.append(f"importing the targets ended the process (status {child.returncode}): {last}")
            return {}
        content: dict[str, Any] = json.loads(Path(output).read_bytes())
    for where, error in content["errors"].items():
        report.problems.append(f"{where}: {error['last']}")
    return content


def list_hooks(report: Report, found: dict[str, Any]) -> None:
    for key, hook in sorted(found.get("hooks", {}).items()):
        reason = hook["reason"] or (hook.get("fired", "") if hook["state"] == "applied" else "")
        report.hooks.append((key, hook["state"], reason))
        if hook["state"] == "failed":
            report.problems.append(f"hook {key}: {hook['reason']}")
