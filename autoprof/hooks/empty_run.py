"""The warning at the end of a run in which no hook was applied. It gives the cause and the remedy, in one output line.

Only the process that started the run prints the warning, because this process ends last. The other processes write the
states of their hooks into the run directory.

`autoprof doctor` also uses this module, but does not need the modules of `autoprof.run`. So the functions for the
warning import these modules when they are called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from autoprof import _boot
from autoprof.base import identity, log, seam
from autoprof.base.originals import os
from autoprof.base.redact import redacted
from autoprof.config.settings import Settings
from autoprof.hooks import recipe
from autoprof.hooks.recipe import RecipeError, fits
from autoprof.rundir import layout, processes
from autoprof.rundir.processes import RUNNING, WAITING, merged_hooks
from autoprof.rundir.records import HookLine, RunFile

if TYPE_CHECKING:
    from autoprof.run.runtime import Runtime

Hooks = Mapping[str, HookLine]

# Maximum number of names of hooks or modules in the warning.
MAX_NAMES = 3


def report() -> None:
    """If no process of the run applied a hook, print a warning with the reason, and write the reason into `run.json`.

    If a process applied a hook, warn only of hooks of the user's own recipes that no process applied.
    """
    from autoprof.run import runtime

    run = runtime.start(at_run_end=True)
    if run is None:
        return
    # If the run has other nodes, do not warn: all workers, with all applied hooks, may be on those nodes.
    if not identity.first_rank() or any(node.id != run.hooks.node for node in run.nodes):
        _end_for_another_program(run)
        return
    hooks: dict[str, HookLine] = {}
    versions: dict[str, str] = {}
    for hooks_of_process, versions_of_process in _hooks_of_processes(run):
        versions.update(versions_of_process)
        passive_keys = {key for target in _targets(hooks_of_process) for key in _passive_hooks(target)}
        active_hooks = {key: hook for key, hook in hooks_of_process.items() if key not in passive_keys}
        if any(hook.state == "applied" for hook in active_hooks.values()):
            _warn_of_own_recipes(run)
            _end_for_another_program(run)
            return
        hooks = merged_hooks([hooks, active_hooks], "skipped", "failed")
    reason = cause(hooks, versions, run.settings)
    prefix = "" if reason == _no_recipe() else "no hook was applied in this run, so there is no profile: "
    if not log.has_warned(recipe.ignored(reason)):
        log.warning(f"{prefix}{reason}")
    try:
        run.leave_without_hooks(reason, keep_latest=not hooks)
    except OSError as error:
        seam.pass_on(error)
        # Without a target, there was nothing to record.
        (log.warning_once if hooks else log.info)(run.rundir.unwritable(error))


def _end_for_another_program(run: Runtime) -> None:
    """End the run for the programs that this process started, or for the program that it was before `os.exec`.

    If one of these programs is running, hand the run over to it.

    `exec` replaces the program of a process. The process keeps its id and its start time. `exec` runs no functions of
    `atexit`, so the first program could not end the run.
    """
    from autoprof.run import end

    info = layout.read_json(run.rundir.run_json, RunFile)
    this_process = (identity.HOST, os.getpid(), identity.start_ticks(os.getpid()))
    if info.state != "running" or (info.host, info.pid, info.ticks) != this_process:
        return
    states = processes.read(run.rundir.path)
    alive = next((state for state in states if state.state == RUNNING and state.pid != os.getpid()), None)
    if alive is None:
        end.end_run(run)
    else:
        fields = layout.fields(run.rundir.run_json, RunFile)
        layout.write_json(run.rundir.run_json, fields | {"pid": alive.pid, "ticks": alive.ticks})


def _warn_of_own_recipes(run: Runtime) -> None:
    """Warn of the hooks of the user's own recipes that were tried, but that no process could apply."""
    from autoprof.hooks import registry

    for path in _user_recipe_files(run.settings):
        try:
            keys = {hook.key for hook in recipe.load(path) if not registry.left_out(run, hook)}
        except RecipeError as error:
            log.warning_once(recipe.ignored(str(error)))
            continue
        hooks = merged_hooks((hooks for hooks, _ in _hooks_of_processes(run)), "skipped", "failed", "applied")
        tried_hooks = [hook for hook in hooks.items() if hook[0] in keys and hook[1].reason != WAITING]
        names = [f"{key.partition('/')[2]} ({hook.reason})" for key, hook in tried_hooks if hook.state != "applied"]
        if names:
            log.warning(
                f"{path}: these hooks were not applied: {_join_names(names)}; "
                f"autoprof recipes --check {path} says what does not fit"
            )


def _user_recipe_files(settings: Settings) -> list[str]:
    """Return the paths of the user's own recipe files: the files and folders in `AUTOPROF_RECIPES`."""
    paths = [path for paths in _boot.recipe_files().values() for path in paths]
    return [path for path in paths if path in settings.recipes or os.path.dirname(path) in settings.recipes]


def cause(hooks: Hooks, versions: Mapping[str, str], settings: Settings) -> str:
    """Return a text with the reason why none of the hooks was applied, and with a remedy.

    Problems of the user's own recipes come before other reasons.

    Args:
        hooks: The hooks, as a dict from their keys to their states.
        versions: The versions of the imported targets.
        settings: The settings of the run.
    """
    own_recipes, targets = _user_recipe_files(settings), _targets(hooks)
    for setting in settings.recipes:
        if not any(setting in (path, os.path.dirname(path)) for path in own_recipes):
            return f"AUTOPROF_RECIPES: {setting} is not a recipe; use *.toml files, or folders that contain some"
    for path in own_recipes:
        try:
            recipe.load(path)
        except RecipeError as error:
            return str(error)
    for path in own_recipes:
        if reason := _names_in_main_script(path) or (
            "" if set(_targets_of(path)) & set(targets) else _not_imported(path)
        ):
            return reason
    own_targets = {target for path in own_recipes for target in _targets_of(path)}
    targets.sort(key=lambda target: target not in own_targets)
    if targets:
        left_out = _left_out_by_user(targets[0], hooks, settings)
        return left_out or explain_target(targets[0], hooks, versions.get(targets[0], ""))
    return _no_recipe()


def _no_recipe() -> str:
    """Return the reason for a program that imported no target, with the command that writes a recipe for it."""
    # The program may have changed both lists.
    words = getattr(sys, "orig_argv", None) or getattr(sys, "argv", None) or ["python"]
    command = redacted([os.path.basename(words[0]), *words[1:]])
    return f"{_early_end()}no recipe for {_program()}; write one: autoprof recipes --new -- {command}"


def _left_out_by_user(target: str, hooks: Hooks, settings: Settings) -> str:
    """If `AUTOPROF_DISABLE` names every hook of a target, return a message. Otherwise return an empty string."""
    if any(hook.reason != recipe.DISABLED for hook in _hooks_of(target, hooks)):
        return ""
    return (
        f"AUTOPROF_DISABLE={','.join(settings.disable)} leaves out every hook of {target}; "
        f"name single hooks in it; autoprof recipes {target} lists them"
    )


def explain_target(target: str, hooks: Hooks, version: str, seen: str = "was imported") -> str:
    """Return a text with the reason why no hook of an imported target was applied, and with a remedy.

    Hooks that `AUTOPROF_DISABLE` names are ignored. The target must have at least one other hook.

    Args:
        target: The import name of the target.
        hooks: The hooks of all targets, as a dict from their keys to their states.
        version: The version of the target, or an empty string.
        seen: Verb of the sentence: how autoprof has seen the target.
    """
    enabled_hooks = [hook for hook in _hooks_of(target, hooks) if hook.reason != recipe.DISABLED]
    name = f"{target} {version}".strip()
    tried_hooks = [hook for hook in enabled_hooks if hook.reason != WAITING]
    if not tried_hooks:
        modules = _join_names(sorted({hook.module for hook in enabled_hooks}))
        return (
            f"{_early_end()}{name} was imported, but none of the modules that have its hooks: {modules}; "
            f"autoprof recipes {target} lists the hooks"
        )
    files = _boot.recipe_files().get(target, [])
    ranges = dict.fromkeys(str(document.get("versions", "")) for document in _documents(target))
    missed_ranges = [text for text in ranges if text and not fits(version, text)]
    outside = f" ({name} is outside the recipe's versions, {' and '.join(missed_ranges)})" if missed_ranges else ""
    own_recipe = next((file for file in files if os.path.dirname(file) != _boot.own_recipes()), "")
    check = (
        f"autoprof recipes --check {own_recipe} says what does not fit"
        if own_recipe
        else "autoprof doctor shows which hooks apply"
    )
    reasons = _join_names(list(dict.fromkeys(hook.reason for hook in tried_hooks)))
    return f"{name} {seen}, but no hook fits it: {reasons}{outside}; {check}"


def _hooks_of(target: str, hooks: Hooks) -> list[HookLine]:
    """Return the states of the target's hooks."""
    return [hook for key, hook in hooks.items() if key.partition("/")[0] == target]


def _hooks_of_processes(run: Runtime) -> Iterator[tuple[Hooks, Mapping[str, str]]]:
    """Yield the hooks and the versions of the targets: first of this process, then of each other process of the run."""
    yield run.hooks.hooks, run.hooks.versions
    yield from ((state.hooks, state.versions) for state in processes.read(run.rundir.path))


def _names_in_main_script(path: str) -> str:
    """If a hook of this recipe names a function or class that the main script defines, return a message.

    Otherwise return an empty string. The main script is never imported, so the hook could not be applied.
    """
    main = vars(sys.modules["__main__"])
    script = os.path.basename(main.get("__file__") or _program())
    stem = script.removesuffix(".py")
    for hook in recipe.load(path):
        name = hook.hook.attribute.partition(".")[0]
        if getattr(main.get(name), "__module__", "") == "__main__":
            return (
                f"{name} is defined in {script}, which runs as __main__, but {path} is for an imported module; "
                f'name the script: target = "{stem}" and module = "{script}", in a file {stem}.toml'
            )
    return ""


def _not_imported(path: str) -> str:
    target = " and ".join(_targets_of(path))
    if target in sys.modules:
        return f"{target} was imported before autoprof read {path}; set AUTOPROF_RECIPES in front of the command"
    modules = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
    similar = get_close_matches(target, modules, 1, 0.75)
    imported = f", but {similar[0]}" if similar else ""
    # If Ray kills a worker, the worker does not write the states of its hooks.
    check = f"; if its Ray workers import it, autoprof recipes --check {path} says what does not fit"
    return (
        f"{_early_end()}{_program()} did not import {target}{imported}, and {path} is for {target}; "
        f"the file's name and its target must be the name that the program imports"
        f"{check if 'ray' in sys.modules else ''}"
    )


def _early_end() -> str:
    from autoprof.run import raised

    error = raised.exception_type()
    return f"{error} ended the process early; " if error else ""


def _program() -> str:
    return _boot.COMMAND.name or "the program"


def _targets_of(path: str) -> list[str]:
    return os.path.basename(path).partition(".")[0].split("+")


def _targets(hooks: Hooks) -> list[str]:
    return sorted({key.partition("/")[0] for key in hooks})


def makes_run_part(target: str) -> bool:
    """Return True if the import of the target makes a process part of a run."""
    return not all(document.get("passive") for document in _documents(target))


@functools.cache
def _passive_hooks(target: str) -> set[str]:
    """Return the keys of a target's hooks that do not make a process part of a run."""
    passive = [document for document in _documents(target) if document.get("passive")]
    return {f"{target}/{hook.get('name')}" for document in passive for hook in document.get("hook", ())}


def _documents(target: str) -> Iterator[dict[str, Any]]:
    """Yield the recipes of a target, as TOML documents. Files that can't be read are skipped."""
    for path in _boot.recipe_files().get(target, []):
        with seam.suppress(RecipeError):
            for document in recipe.tables(recipe.read(path)):
                if document.get("target") == target:
                    yield document


def _join_names(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{rest}"
