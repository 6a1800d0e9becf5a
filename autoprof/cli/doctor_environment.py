"""Checks of an environment: which hooks apply here, and why the other hooks do not.

Hooks are looked up in the metadata and the source of the installed targets. The targets are imported only if `--deep`
is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from autoprof import _boot, agent
from autoprof.capture import profilers
from autoprof.capture.artifacts import Budget, OverBudget
from autoprof.capture.profilers import foreign, npu, nsys
from autoprof.cli import recipes_catalog
from autoprof.cli.documents import Report
from autoprof.cli.recipes_catalog import ChildFailed, NotInSource, Sources, Unknown, import_problem, run_module_in_child
from autoprof.config.selection import steps_in_words
from autoprof.config.settings import Settings, unknown, unknown_roles
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks import empty_run, recipe, registry
from autoprof.hooks.recipe import DISABLED, BoundHook, RecipeError, exceeds, fits, installed_version
from autoprof.run import runtime
from autoprof.rundir.records import HookLine

# States of a hook whose function is in the target's source, and of a hook whose function may exist, although the source
# does not show it.
FOUND, UNKNOWN = "found", "unknown"
# The module of verl that looks vLLM up by the name of vLLM's distribution (verl 0.5 to 0.9.1).
_VLLM_LOOKUP = "verl.third_party.vllm"


class Lookup(msgspec.Struct):
    """The hooks that apply in an environment, by a look at the source of the targets or by imports.

    Attributes:
        tool: The profiler that a process would use.
        hooks: dict from the key of a hook to the state that it would have.
        errors: dict from a recipe to its error.
        versions: dict from an installed target to its version.
        absent: The targets that are not installed.
        notes: Notes about targets, such as a target that is newer than the releases for which its recipe was made.
    """

    tool: str
    hooks: dict[str, HookLine] = {}
    errors: dict[str, str] = {}
    versions: dict[str, str] = {}
    absent: list[str] = []
    notes: list[str] = []


def look_up(settings: Settings) -> Lookup:
    """Look up the hooks of all recipes in the source of their targets."""
    sources = Sources()
    lookup = Lookup(tool=profilers.outlook(settings.tool, may_import=False))
    versions: dict[str, str] = {}
    # The releases for which the recipes were made, by target and file.
    ranges: dict[tuple[str, str], str] = {}
    for file in recipes_catalog.recipe_files(settings.recipes):
        try:
            bound = recipe.load(file.path, check_options=file.origin != recipes_catalog.OWN)
        except RecipeError as error:
            lookup.errors[file.name] = str(error)
            continue
        for hook in bound:
            target = hook.recipe.target
            if target not in versions:
                versions[target] = installed_version(hook.recipe)
            state, reason = _state(hook, versions[target], settings, sources)
            lookup.hooks[hook.key] = HookLine(hook=hook.key, state=state, reason=reason)
            if fits(versions[target], hook.hook.versions):
                ranges.setdefault((target, file.path), hook.recipe.versions)
    lookup.versions = {target: version for target, version in versions.items() if version or sources.installed(target)}
    lookup.absent = sorted(versions.keys() - lookup.versions.keys())
    lookup.notes = [
        f"{target} {versions[target]} is newer than the releases that its recipe was made for ({releases}); "
        "its hooks are tried anyway"
        for (target, _), releases in sorted(ranges.items())
        if exceeds(versions[target], releases)
    ]
    if not settings.disabled("verl", "") and (note := _renamed_vllm(lookup.versions, sources)):
        lookup.notes.append(note)
    return lookup


def _state(hook: BoundHook, version: str, settings: Settings, sources: Sources) -> tuple[str, str]:
    """Return the state that a hook would have in a process that imports the target, and the reason for this state."""
    target = hook.recipe.target
    if reason := hook.left_out(version, settings):
        return "skipped", reason
    if not version and not sources.installed(target):
        return "skipped", f"{target} is not installed"
    outside = recipe.outside(version, hook.recipe)
    try:
        sources.module(hook.hook.module)
        sources.find(hook.hook.module, hook.hook.attribute)
    except NotInSource as error:
        if type(hook.behaviour).supply is behaviours.Behaviour.supply:
            # A missing function is an error only if the recipe was made for this release of the target.
            return ("skipped" if outside else "failed"), f"{error}"
    except Unknown as error:
        return UNKNOWN, f"{error}"
    return FOUND, outside


def _renamed_vllm(versions: dict[str, str], sources: Sources) -> str:
    """Return a note if the distribution of the installed vLLM has a name by which verl does not find vLLM.

    A run may have the metadata of a distribution `vllm` on its own PYTHONPATH. If verl finds vLLM, return an empty
    text.
    """
    version = versions.get("vllm", "")
    try:
        sources.module(_VLLM_LOOKUP)
    except (NotInSource, Unknown):
        return ""
    if not version or installed_version(recipe.Recipe(target="vllm", hook=[])):
        return ""
    return (
        f"vLLM {version} is installed under another name than vllm, which {_VLLM_LOOKUP} looks up: verl imports its "
        "vLLM servers only in runs with metadata of a distribution vllm on their PYTHONPATH, as in examples/verl_cpu"
    )


# Targets that trainers are built on. These libraries have no steps themselves.
_NO_TRAINERS = {"ray", "codetiming"}


def examine_environment(settings: Settings, import_targets: bool = False) -> Report:
    """Return a report on what autoprof would patch in this environment.

    Args:
        settings: The settings of this environment.
        import_targets: True to import the targets in a separate process; False to read only the source of the targets.
    """
    report = Report(subject=f"environment: {sys.executable}")
    report.facts["settings"] = f"{steps_in_words(settings.steps, settings.when)}, ranks {settings.ranks}"
    _check_activation(report)
    _check_folder(report, settings)
    _check_variables(report)
    _check_nsys(report, settings)
    _check_recipes(report, settings.recipes)
    lookup = look_up(settings)
    if import_targets:
        _import_targets(report, lookup)
    report.problems += [f"{source}: {error}" for source, error in lookup.errors.items()]
    report.facts["tool"] = lookup.tool
    if find_spec("torch") is None:
        report.problems.append("torch is not installed, so torch.profiler records nothing; install torch")
    for name, version in sorted(lookup.versions.items()):
        report.facts[name] = version or "without a version"
    report.notes += [*lookup.notes, *unread(os.environ, lookup.versions.get("vllm", ""))]
    report.problems += unknown(os.environ)
    report.notes += unknown_roles(settings)
    _check_targets(report, lookup)
    report.add_hooks(lookup.hooks)
    if lookup.absent:
        report.notes.append(f"not installed here: {', '.join(lookup.absent)}")
    report.verdict = _verdict(report, import_targets)
    return report


def _check_targets(report: Report, lookup: Lookup) -> None:
    """Add a problem for each installed target to which no hook applies, with the reason."""
    for target in sorted(filter(empty_run.makes_run_part, lookup.versions)):
        target_hooks = [hook for key, hook in lookup.hooks.items() if key.partition("/")[0] == target]
        if all(hook.state in ("skipped", "failed") for hook in target_hooks) and any(
            hook.reason != DISABLED for hook in target_hooks
        ):
            version = lookup.versions[target]
            report.problems.append(empty_run.explain_target(target, lookup.hooks, version, "is installed"))


def _verdict(report: Report, deep: bool) -> str:
    targets = {key.partition("/")[0] for key, state, _ in report.hooks if state in ("applied", FOUND)}
    if not targets - _NO_TRAINERS:
        return "no problems found, but no trainer or engine with a recipe is installed here"
    return "no problems found" + ("" if deep else "; nothing was imported; --deep imports the targets")


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
    parent = Path(folder)
    while not parent.exists():
        parent = parent.parent
    report.facts["folder"] = folder
    if not os.access(parent, os.W_OK):
        report.problems.append(f"{folder} can't be made or written; set AUTOPROF_DIR to a folder that can")
    try:
        Budget(settings, "", 0, parent)
    except OverBudget as error:
        report.problems.append(f"captures to {folder} are {error}")


def _check_variables(report: Report) -> None:
    if foreign.names_cupti(os.environ):
        text = f"{foreign.INJECTION} names libcupti, with which torch.profiler records no GPU activity"
        if foreign.keeps_injection(os.environ):
            report.problems.append(f"{text}; unset it, or {foreign.KEEP}")
        else:
            report.notes.append(f"{text}; autoprof disables it in its runs")
    for name in npu.external_control():
        report.problems.append(
            f"{name} is set, so torch_npu starts its own profiler and autoprof can't record the NPU; unset it"
        )
    if os.environ.get("KINETO_USE_DAEMON"):
        report.notes.append("KINETO_USE_DAEMON is set: dynolog may start its own captures")


def _check_nsys(report: Report, settings: Settings) -> None:
    if "nsys" in settings.tool:
        executable = settings.nsys.executable
        if path := nsys.find_nsys(settings.nsys):
            report.facts["nsys"] = f"{nsys.nsys_version(path)} ({path})"
            if not nsys.writes_at_once(path):
                report.notes.append(nsys.AT_THE_END)
        else:
            report.problems.append(
                f"AUTOPROF_TOOL asks for nsys, but {executable} is not on the PATH, so torch.profiler would record "
                "instead; install Nsight Systems on every node, or set AUTOPROF_NSYS=executable=/.../nsys"
            )
        if os.environ.get("KINETO_USE_DAEMON"):
            report.problems.append("KINETO_USE_DAEMON is set: dynolog may take CUPTI from nsys; unset it")
    elif nsys.runs_under_nsys():
        report.notes.append(
            "this command runs under nsys, which takes the only CUPTI subscription: processes started here can be "
            "captured with AUTOPROF_TOOL=nsys only"
        )


def _check_recipes(report: Report, recipe_places: Sequence[str]) -> None:
    """Add the recipes that are not autoprof's own to the facts, and the errors of entry points to the problems."""
    for file in recipes_catalog.recipe_files(recipe_places):
        if file.origin != recipes_catalog.OWN:
            report.facts[f"recipe {file.name}"] = f"{file.path}, from {file.origin}"
    report.problems += recipes_catalog.unreadable_places()


def _import_targets(report: Report, lookup: Lookup) -> None:
    """Import the targets with autoprof on, in a child process with a temporary run directory, and update `lookup`.

    The imports decide the state of a hook, except for failures that only `look_up` finds. If the child process fails,
    add a problem.
    """
    variables = {_boot.ENABLE: "1", _boot.RUN_ID: _boot.new_run_id(), _boot.STARTER: "", "AUTOPROF_ON_FINISH": ""}
    try:
        imported = msgspec.convert(run_module_in_child("autoprof.cli.doctor_environment", **variables), Lookup)
    except ChildFailed as error:
        report.problems.append(str(error))
        return
    for key, hook in lookup.hooks.items():
        # A process of a run skips a hook whose function is missing; here it is a failure.
        if hook.state == "failed" and key in imported.hooks and imported.hooks[key].state == "skipped":
            imported.hooks[key] = msgspec.structs.replace(imported.hooks[key], state="failed")
    lookup.hooks, lookup.errors, lookup.tool = imported.hooks, imported.errors, imported.tool


# Environment variables of vLLM's own profiler, by the releases that read them (vllm/envs.py, 0.9.2 to 0.33.0). vLLM
# 0.13 added `profiler_config`, and 0.16 removed the variables.
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
    """Yield a note for each variable in `names` that other releases of vLLM read, but not the release `version`."""
    variables = set(names)
    for versions, read_variables in VLLM.items():
        if version and not fits(version, versions):
            for name in sorted(variables.intersection(read_variables)):
                yield f"{name} is set, but vLLM {version} does not read it ({versions} do); autoprof does not need it"


def main(output: str) -> None:
    """Import the module of each hook, and write the states of the hooks to the file `output` as JSON.

    The JSON document is a `Lookup`. `autoprof doctor --deep` runs this function in a child process, because the import
    of a target takes seconds and may do anything.
    """
    run = runtime.start()
    if run is None:
        return
    for target in _boot.recipe_files():
        agent.load(target)
    sources = Sources()
    for hook in list(registry.bound.values()):
        if registry.left_out(run, hook):
            continue
        # A user's own trainer may be a module on sys.path that belongs to no distribution.
        if installed_version(hook.recipe) or sources.installed(hook.recipe.target):
            if problem := import_problem(hook.hook.module):
                run.hooks.skipped(hook, problem)
        else:
            run.hooks.skipped(hook, f"{hook.recipe.target} is not installed")
    lookup = Lookup(
        tool=profilers.outlook(run.settings.tool),
        hooks=run.hooks.hooks,
        errors={source: line.last for source, line in run.hooks.errors.items()},
    )
    Path(output).write_bytes(msgspec.json.encode(lookup))


if __name__ == "__main__":
    main(sys.argv[1])
