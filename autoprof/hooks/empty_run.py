"""Cause of a run in which no hook was applied, and its remedy, in one line at the run's end.

Only the process that started the run says it, since it ends last. The others leave their hooks in its directory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from autoprof import _boot
from autoprof._boot import command
from autoprof.base import files, identity, interrupts, log
from autoprof.base.originals import os
from autoprof.config.settings import Settings
from autoprof.hooks import recipe, registry
from autoprof.hooks.recipe import RecipeError, fits
from autoprof.run import end, raised, runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir import decoder, ranks
from autoprof.rundir.processes import WAITING
from autoprof.rundir.records import HookEntry, HooksFile, RunFile

Hooks = Mapping[str, HookEntry]

# So many names stand in the line.
_NAMED = 3


def tell() -> None:
    """Say why no hook was applied in any process of the run, where none was; leave it in `run.json`, too, where a
    target was imported. Where some were, say which ones of the user's own recipes were not."""
    run = runtime.start(late=True)
    # A driver may have all its workers on other nodes.
    if run is None or not identity.first_rank() or any(node["id"] != run.hooks.node for node in run.nodes):
        return
    hooks: dict[str, HookEntry] = {}
    versions: dict[str, str] = {}
    passive: dict[str, set[str]] = {}
    for file in _left(run):
        versions.update(file.versions)
        for key, hook in file.hooks.items():
            target, _, name = key.partition("/")
            if name in passive.setdefault(target, _passive_hooks(target)):
                continue
            if hook.state == "applied":
                _tell_of_own(run)
                _end_for_another_program(run)
                return
            if _says(hook) > _says(hooks.setdefault(key, hook)):
                hooks[key] = hook
    why = cause(hooks, versions, run.settings)
    log.warning(f"no hook was applied in this run, so there is no profile: {why}")
    if hooks:
        try:
            run.leave_without_hooks(why)
        except OSError as error:
            interrupts.pass_on(error)
            log.warning_once(run.rundir.unwritable(error))


def _end_for_another_program(run: Runtime) -> None:
    """End the run if another program has started it in this process, and has become this one by `os.exec`.

    `exec` leaves the number and the start time of the process as they are, and runs no function of `atexit`.
    """
    info = decoder.read(run.rundir.run_json, RunFile)
    own = (identity.HOST, os.getpid(), identity.start_ticks(os.getpid()))
    of_ranks = files.exists(run.rundir.path / ranks.FOLDER)
    if info.state == "running" and (info.host, info.pid, info.ticks) == own and not of_ranks:
        end.end_run(run)


def _tell_of_own(run: Runtime) -> None:
    """Name the hooks of the user's own recipes that were tried and fitted in no process."""
    for path in _own(run.settings):
        with interrupts.suppress(RecipeError):
            left = {hook.key: "" for hook in recipe.load(path) if not registry.left_out(run, hook)}
            for file in _left(run):
                for key in left.keys() & file.hooks.keys():
                    hook = file.hooks[key]
                    if hook.state == "applied":
                        del left[key]
                    elif hook.reason != WAITING:
                        left[key] = f"{key.partition('/')[2]} ({hook.reason})"
            if found := [why for why in left.values() if why]:
                log.warning(
                    f"{path}: of its hooks not applied: {_some(found)}; "
                    f"autoprof recipes --check {path} says what does not fit"
                )


def _own(settings: Settings) -> list[str]:
    """Return the files of the user's own recipes."""
    paths = [path for paths in _boot.recipe_files().values() for path in paths]
    return [path for path in paths if path in settings.recipes or os.path.dirname(path) in settings.recipes]


def cause(hooks: Hooks, versions: Mapping[str, str], settings: Settings) -> str:
    """Return why none of these hooks was applied, and what to do. The user's own recipes come first."""
    own, targets = _own(settings), _targets(hooks)
    for place in settings.recipes:
        if not any(place in (path, os.path.dirname(path)) for path in own):
            return f"AUTOPROF_RECIPES: {place} is no recipe; it takes *.toml files, and folders that have some"
    for path in own:
        try:
            recipe.load(path)
        except RecipeError as error:
            return str(error)
    for path in own:
        if said := _in_main(path) or ("" if set(_targets_of(path)) & set(targets) else _not_imported(path)):
            return said
    named = {target for path in own for target in _targets_of(path)}
    targets.sort(key=lambda target: target not in named)
    if targets:
        left_out = _left_out_by_user(targets[0], hooks, settings)
        return left_out or of_target(targets[0], hooks, versions.get(targets[0], ""))
    known = ", ".join(target for target in sorted(_boot.recipe_files()) if active(target))
    return (
        f"{_before()}{_program()} imported no trainer or engine that autoprof has a recipe for ({known}); "
        "for another one name a recipe in AUTOPROF_RECIPES; autoprof doctor shows what applies here"
    )


def _left_out_by_user(target: str, hooks: Hooks, settings: Settings) -> str:
    """Return that AUTOPROF_DISABLE names every hook of a target, or an empty text."""
    if any(hook.reason != registry.DISABLED for hook in _of(target, hooks)):
        return ""
    return (
        f"AUTOPROF_DISABLE={','.join(settings.disable)} leaves out every hook of {target}; "
        f"name single hooks in it; autoprof recipes {target} lists them"
    )


def of_target(target: str, hooks: Hooks, version: str, seen: str = "was imported") -> str:
    """Return why no hook of a target that was seen was applied, and what to do.

    Hooks that AUTOPROF_DISABLE leaves out are ignored. There must be other hooks.
    """
    wanted = [hook for hook in _of(target, hooks) if hook.reason != registry.DISABLED]
    name = f"{target} {version}".strip()
    tried = [hook for hook in wanted if hook.reason != WAITING]
    if not tried:
        modules = _some(sorted({hook.module for hook in wanted}))
        return (
            f"{_before()}{name} was imported, but none of the modules that have its hooks: {modules}; "
            f"autoprof recipes {target} lists the hooks"
        )
    files = _boot.recipe_files().get(target, [])
    ranges = dict.fromkeys(str(document.get("versions", "")) for document in _documents(target))
    passed = [text for text in ranges if text and not fits(version, text)]
    outside = f" ({name} is outside of the recipe's versions, {' and '.join(passed)})" if passed else ""
    own = next((file for file in files if os.path.dirname(file) != _boot.own_recipes()), "")
    check = f"autoprof recipes --check {own} says what does not fit" if own else "autoprof doctor says what applies"
    reasons = _some(list(dict.fromkeys(hook.reason for hook in tried)))
    return f"{name} {seen}, but no hook fits it: {reasons}{outside}; {check}"


def _of(target: str, hooks: Hooks) -> list[HookEntry]:
    """Return the hooks of a target."""
    return [hook for key, hook in hooks.items() if key.partition("/")[0] == target]


def _left(run: Runtime) -> Iterator[HooksFile]:
    """Yield the hooks of this process, and those that the others left."""
    yield decoder.record(run.hooks.content(), HooksFile)
    for path in run.rundir.hooks_files():
        yield decoder.read(path, HooksFile)


def _says(hook: HookEntry) -> tuple[bool, bool]:
    """Return how much the state of a hook that was not applied says, in comparison."""
    return hook.state == "failed", hook.reason != WAITING


def _in_main(path: str) -> str:
    """Return that a hook of this recipe names something of the script, which nobody imports, or an empty text."""
    main = vars(sys.modules["__main__"])
    script = os.path.basename(main.get("__file__") or _program())
    stem = script.removesuffix(".py")
    for hook in recipe.load(path):
        name = hook.hook.attribute.partition(".")[0]
        if getattr(main.get(name), "__module__", "") == "__main__":
            return (
                f"{name} is defined in {script}, which runs as __main__, and {path} is for a module that is imported; "
                f'name the script: target = "{stem}" and module = "{script}", in a file {stem}.toml'
            )
    return ""


def _not_imported(path: str) -> str:
    target = " and ".join(_targets_of(path))
    if target in sys.modules:
        return f"{target} was imported before autoprof knew {path}; set AUTOPROF_RECIPES in front of the command"
    modules = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
    near = get_close_matches(target, modules, 1, 0.75)
    found = f", but {near[0]}" if near else ""
    # A worker's reasons stay in the worker, which Ray kills.
    check = f"; if its Ray workers do, autoprof recipes --check {path} says what does not fit"
    return (
        f"{_before()}{_program()} did not import {target}{found}, and {path} is for {target}; "
        f"the file's name and its target are the name that the program imports{check if 'ray' in sys.modules else ''}"
    )


def _before() -> str:
    error = raised.exception_type()
    return f"{error} ended the process early; " if error else ""


def _program() -> str:
    return command.THIS.name or "the program"


def _targets_of(path: str) -> list[str]:
    return os.path.basename(path).partition(".")[0].split("+")


def _targets(hooks: Hooks) -> list[str]:
    return sorted({key.partition("/")[0] for key in hooks})


def active(target: str) -> bool:
    """Return whether importing the target makes a process part of a run."""
    return not all(document.get("passive") for document in _documents(target))


def _passive_hooks(target: str) -> set[str]:
    """Return the names of a target's hooks that make no process part of a run by themselves."""
    passive = [document for document in _documents(target) if document.get("passive")]
    return {hook["name"] for document in passive for hook in document.get("hook", ()) if "name" in hook}


def _documents(target: str) -> Iterator[dict[str, Any]]:
    """Yield the recipes of a target, without those that can't be read."""
    for path in _boot.recipe_files().get(target, []):
        with interrupts.suppress(RecipeError):
            for document in recipe.tables(recipe.read(path)):
                if document.get("target") == target:
                    yield document


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
