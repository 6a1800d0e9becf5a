"""Checks of an environment: which hooks apply here, and why others do not.

Hooks are looked up in the metadata and the source of the installed targets; nothing is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoprof import _boot
from autoprof.capture import cupti, profilers
from autoprof.capture.budget import Budget, OverBudget
from autoprof.capture.profilers import npu, nsys
from autoprof.cli.documents import Document
from autoprof.cli.recipes import places
from autoprof.cli.recipes.source import Missing, Sources, Unknown
from autoprof.config.settings import Settings, unknown, unknown_roles
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks import empty_run, recipe
from autoprof.hooks.recipe import BoundHook, RecipeError, exceeds, fits, installed_version
from autoprof.hooks.registry import DISABLED
from autoprof.rundir import decoder
from autoprof.rundir.records import HookEntry

# Of a hook whose function the source has, and of one of which it does not tell.
FOUND, UNKNOWN = "found", "unknown"
# Where verl asks for vLLM by the name of its distribution (0.5 to 0.9.1).
_ASKS_FOR_VLLM = "verl.third_party.vllm"


def look_up(settings: Settings) -> dict[str, Any]:
    """Return the hooks with their states, versions and errors, in the form of `hooks/*.json`, and the tool."""
    sources = Sources()
    hooks: dict[str, dict[str, str]] = {}
    errors: dict[str, dict[str, str]] = {}
    versions: dict[str, str] = {}
    for file in places.recipe_files(settings.recipes):
        try:
            bound = recipe.load(file.path)
        except RecipeError as error:
            errors[file.name] = {"last": str(error)}
            continue
        for hook in bound:
            target = hook.recipe.target
            if target not in versions:
                versions[target] = installed_version(hook.recipe)
            state, reason = _state(hook, versions[target], settings, sources)
            hooks[hook.key] = {"state": state, "reason": reason}
    there = {target: version for target, version in versions.items() if version or sources.installed(target)}
    if not settings.disabled("verl", ""):
        errors |= _renamed(there, sources)
    return {
        "hooks": hooks,
        "errors": errors,
        "versions": there,
        "absent": sorted(versions.keys() - there.keys()),
        "tool": profilers.outlook(settings.tool, imports=False),
    }


def _state(hook: BoundHook, version: str, settings: Settings, sources: Sources) -> tuple[str, str]:
    """Return the state of a hook and its reason, as a process that imports the target would have them."""
    target = hook.recipe.target
    if any(settings.disabled(name, hook.hook.name) for name in (target, hook.file)):
        return "skipped", "AUTOPROF_DISABLE names it"
    if not version and not sources.installed(target):
        return "skipped", f"{target} is not installed"
    if not fits(version, hook.hook.versions):
        return "skipped", f"{target} is {version}, the hook is for {hook.hook.versions}"
    outside = "" if fits(version, hook.recipe.versions) else f"{version} is outside the recipe's range "
    try:
        sources.module(hook.hook.module)
        sources.find(hook.hook.module, hook.hook.attribute)
    except Missing as error:
        if type(hook.behaviour).supply is behaviours.Behaviour.supply:
            # A recipe promises its hooks for the releases in its range only.
            return ("skipped" if outside else "failed"), f"{error}"
    except Unknown as error:
        return UNKNOWN, f"{error}"
    return FOUND, f"{outside}{hook.recipe.versions}" if outside else ""


def _renamed(versions: dict[str, str], sources: Sources) -> dict[str, dict[str, str]]:
    """Return what is wrong where vLLM is installed under a name by which verl does not find it."""
    version = versions.get("vllm", "")
    try:
        sources.module(_ASKS_FOR_VLLM)
    except (Missing, Unknown):
        return {}
    if not version or installed_version(recipe.Recipe(target="vllm", hook=[])):
        return {}
    text = (
        f"vLLM {version} is installed, but under another name than vllm, by which {_ASKS_FOR_VLLM} asks for it: "
        "verl can't import its vLLM servers; install the distribution vllm"
    )
    return {"verl": {"last": text}}


_PROBE_TIMEOUT_S = 300
# What other targets are built on, of which autoprof has no steps.
_NO_TRAINERS = {"ray", "codetiming"}
# A module that a target is imported without is a part that is not used here.
_RAISED = re.compile("importing [^ ]+ raised (?!ModuleNotFoundError:)")


class Report(Document, kw_only=True):
    """`autoprof doctor --json`."""

    subject: str  # The environment or the run.
    verdict: str = ""  # What it comes to, in a sentence.
    facts: dict[str, str] = {}  # What works, and figures, by name.
    hooks: list[tuple[str, str, str]] = []  # Each hook, its state and the reason.
    problems: list[str] = []  # What does not work, and what to do; with problems the exit status is 1.
    notes: list[str] = []  # What is worth knowing.


def examine_environment(settings: Settings, deep: bool = False) -> Report:
    """Find out what autoprof would patch here and now.

    Args:
        settings: The settings here.
        deep: Whether the targets are imported, in a process of its own; else their source tells.
    """
    report = Report(subject=f"environment: {sys.executable}")
    when = f", when {', '.join(map(str, settings.when))}" if settings.when else ""
    report.facts["settings"] = f"steps {settings.steps or 'none'}{when}, ranks {settings.ranks}"
    _check_activation(report)
    _check_folder(report, settings)
    _check_variables(report)
    _check_nsys(report, settings)
    _check_recipes(report, settings.recipes)
    found = look_up(settings)
    if deep:
        found = _imported(found, _probe(report))
    for where, error in found["errors"].items():
        report.problems.append(f"{where}: {error['last']}")
    report.facts["tool"] = found["tool"]
    if find_spec("torch") is None:
        report.problems.append("torch is not installed, so torch.profiler records nothing; install torch")
    versions = found["versions"]
    for name, version in sorted(versions.items()):
        report.facts[name] = version or "without a version"
    check_versions(report, versions, settings.recipes)
    report.notes += unread(os.environ, versions.get("vllm", ""))
    report.problems += unknown(os.environ)
    report.notes += unknown_roles(settings)
    _check_targets(report, found)
    list_hooks(report, found)
    if absent := found["absent"]:
        report.notes.append(f"not installed here: {', '.join(absent)}")
    report.verdict = _verdict(report, deep)
    return report


def _check_targets(report: Report, found: dict[str, Any]) -> None:
    """Say of each target that is installed, and has no hook that fits, why that is so."""
    hooks = {key: decoder.record(hook, HookEntry) for key, hook in found["hooks"].items()}
    for target in sorted(filter(empty_run.active, found["versions"])):
        own = [hook for key, hook in hooks.items() if key.partition("/")[0] == target]
        if all(hook.state in ("skipped", "failed") for hook in own) and any(hook.reason != DISABLED for hook in own):
            report.problems.append(empty_run.of_target(target, hooks, found["versions"][target], "is installed"))


def _verdict(report: Report, deep: bool) -> str:
    targets_here = {key.partition("/")[0] for key, state, _ in report.hooks if state in ("applied", FOUND)}
    if report.problems:
        return problems_found(report)
    if not targets_here - _NO_TRAINERS:
        return "no problems found, but no trainer and no engine is installed here for which there is a recipe"
    return "no problems found" + ("" if deep else "; nothing was imported, which --deep does")


def problems_found(report: Report) -> str:
    """Return the verdict of a checkup by its problems alone."""
    count = len(report.problems)
    return f"{count} problem{'' if count == 1 else 's'} found" if count else "no problems found"


def _imported(looked_up: dict[str, Any], probed: dict[str, Any]) -> dict[str, Any]:
    """Return what importing the targets told, and of it what the source told only."""
    hooks = probed.get("hooks", {})
    for key, hook in looked_up["hooks"].items():
        # In a process of a run this is no error: a release may lack what another one has.
        if hook["state"] == "failed" and hooks.get(key, hook)["state"] == "skipped":
            hooks[key]["state"] = "failed"
    return looked_up | {name: probed[name] for name in ("hooks", "errors", "tool") if name in probed}


def _check_activation(report: Report) -> None:
    code = "import sys; print('autoprof._boot' in sys.modules)"
    environment = os.environ | {_boot.ENABLE: "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    active = result.stdout.strip() == "True"
    report.facts["activation"] = "AUTOPROF=1 in front of a command" if active else "autoprof run -- COMMAND only"
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
    for name in npu.external_control():
        report.problems.append(
            f"{name} is set: torch_npu profiles by itself then, and autoprof records no NPU; unset it"
        )
    if os.environ.get("KINETO_USE_DAEMON"):
        report.notes.append("KINETO_USE_DAEMON is set: dynolog may start its own captures")


def _check_nsys(report: Report, settings: Settings) -> None:
    if "nsys" in settings.tool:
        executable = settings.nsys.executable
        if found := nsys.find_nsys(settings.nsys):
            report.facts["nsys"] = f"{nsys.nsys_version(found)} ({found})"
            if not nsys.writes_at_once(found):
                report.notes.append(nsys.AT_THE_END)
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
    for file in places.recipe_files(extra):
        if file.origin != places.OWN:
            report.facts[f"recipe {file.name}"] = f"{file.path}, from {file.origin}"
    report.problems += places.place_problems()


def check_versions(report: Report, versions: dict[str, str], extra: Sequence[str]) -> None:
    """Say which targets are newer than their recipes."""
    files = places.recipe_files(extra)
    for target, version in sorted(versions.items()):
        for path in [file.path for file in files if target in file.targets]:
            try:
                hooks = recipe.load(path)
            except recipe.RecipeError:
                continue
            tried = [
                hook.recipe.versions
                for hook in hooks
                if hook.recipe.target == target and fits(version, hook.hook.versions)
            ]
            if tried and exceeds(version, tried[0]):
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
            _boot.STARTER: "",
            "AUTOPROF_DIR": folder,
            "AUTOPROF_ON_FINISH": "",
        }
        from rich.console import Console

        with Console(stderr=True).status("importing the targets"):
            try:
                child = subprocess.run(
                    [sys.executable, "-m", "autoprof.cli.doctor.probe", output],
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
    return content


def list_hooks(report: Report, found: dict[str, Any]) -> None:
    """Add the hooks to a report, and what is wrong with them. Hooks with one reason are one problem."""
    alike: dict[tuple[str, str], list[str]] = {}
    for key, hook in sorted(found.get("hooks", {}).items()):
        reason = hook["reason"] or (hook.get("fired", "") if hook["state"] == "applied" else "")
        report.hooks.append((key, hook["state"], reason))
        if hook["state"] == "failed":
            alike.setdefault((key, hook["reason"]), []).append(key)
        elif _RAISED.match(hook["reason"]):
            alike.setdefault(("", hook["reason"]), []).append(key)
    for (_, reason), keys in alike.items():
        report.problems.append(f"hook{'s' if len(keys) > 1 else ''} {', '.join(keys)}: {reason}")


# vllm/envs.py of 0.9.2 to 0.33.0; from 0.13 on there is `profiler_config` as well, from 0.16 on nothing else.
VLLM = {
    "<0.16": ("VLLM_TORCH_PROFILER_DIR",),
    ">=0.10,<0.16": (
        "VLLM_TORCH_PROFILER_RECORD_SHAPES",
        "VLLM_TORCH_PROFILER_WITH_FLOPS",
        "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY",
        "VLLM_TORCH_PROFILER_WITH_STACK",
    ),
    ">=0.11,<0.16": ("VLLM_TORCH_CUDA_PROFILE",),
    ">=0.12,<0.16": (
        "VLLM_PROFILER_DELAY_ITERS",
        "VLLM_PROFILER_MAX_ITERS",
        "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM",
        "VLLM_TORCH_PROFILER_DUMP_CUDA_TIME_TOTAL",
        "VLLM_TORCH_PROFILER_USE_GZIP",
    ),
}


def unread(names: Iterable[str], version: str) -> Iterator[str]:
    """Yield notes on those of the variables `names` that `version` of vLLM does not read."""
    there = set(names)
    for versions, read in VLLM.items():
        if version and not fits(version, versions):
            for name in sorted(there.intersection(read)):
                yield f"{name} is set, but vLLM {version} does not read it ({versions} do); autoprof does not need it"
