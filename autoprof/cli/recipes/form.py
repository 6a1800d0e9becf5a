"""Check of a recipe's form: finds all errors, where `recipe.load` stops at the first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes import places
from autoprof.cli.recipes.vocabulary import wrong
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, Hook, Recipe, RecipeError, Recipes
from autoprof.hooks.versions import versions_problem

# Behaviours that only another ends.
_ENDS = {
    "aside.start": "aside.stop",
    "span.begin": "stage.end",
    "stage.begin": "stage.end",
    "timer.start": "timer.stop",
}


class RecipeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One error or note about a recipe.

    Attributes:
        file: The recipe's file.
        table: `[[hook]] 'name'`, or empty for the top of the file.
        key: The key in the table, or empty for all of it.
        text: What was found and what to do.
        error: Whether it is wrong; otherwise it is a note.
    """

    file: str
    table: str
    key: str
    text: str
    error: bool = True

    def line(self) -> str:
        """Return the finding in one line."""
        place = " ".join(filter(None, [self.table, self.key]))
        return ": ".join(filter(None, [self.file, "" if self.error else "note", place, self.text]))


def check(path: str) -> tuple[list[BoundHook], list[RecipeFinding]]:
    """Read a recipe file.

    Returns:
        Its hooks, where nothing is wrong with it, and what is wrong.
    """
    try:
        document = recipe.read(path)
    except RecipeError as error:
        return [], [RecipeFinding(file=path, table="", key="", text=_without(path, error))]
    findings = [
        RecipeFinding(file=path, table=table, key=key, text=text) for table, key, text in _errors(path, document)
    ]
    if findings:
        return [], findings
    try:
        return recipe.load(path), []
    except RecipeError as error:
        return [], [RecipeFinding(file=path, table="", key="", text=_without(path, error))]


def replacements(path: str, hooks: list[BoundHook]) -> list[RecipeFinding]:
    """Return notes on the hooks of a recipe file that take the place of autoprof's own."""
    own = _boot.own_recipes()
    if not hooks or os.path.dirname(os.path.realpath(path)) == os.path.realpath(own):
        return []
    known = {hook.key: hook.file for file in places.toml_files(own) for hook in recipe.load(file)}
    return [
        RecipeFinding(
            file=path,
            table=recipe.table(hook.hook.name),
            key="name",
            text=f"it takes the place of autoprof's own hook of this name, in {known[hook.key]}.toml",
            error=False,
        )
        for hook in hooks
        if hook.key in known
    ]


def without_end(path: str, hooks: list[BoundHook], others: Iterable[BoundHook]) -> list[RecipeFinding]:
    """Return errors for hooks that begin something which no hook of the target ends, in this file or in `others`."""
    known = [*hooks, *others]
    return [
        RecipeFinding(
            file=path,
            table=recipe.table(hook.hook.name),
            key="behaviour",
            text=f"no {end} of {hook.recipe.target} ends what it begins; add one to the function where that ends"
            + (", with options.of as here" if getattr(hook.behaviour, "of", "") else ""),
        )
        for hook in hooks
        if (end := _ENDS.get(hook.hook.behaviour)) is not None
        and not any(
            other.recipe.target == hook.recipe.target
            and other.hook.behaviour == end
            and _fits(other.behaviour, hook.behaviour)
            for other in known
        )
    ]


def _fits(end: behaviours.Behaviour, begin: behaviours.Behaviour) -> bool:
    """Return whether a hook can end what another begins: both have `of` or none has, and their texts are the same."""
    if bool(getattr(end, "of", "")) != bool(getattr(begin, "of", "")):
        return False
    texts = [(getattr(end, name, ""), getattr(begin, name, "")) for name in ("stage", "role")]
    return all(not said or not isinstance(begun, str) or said == begun for said, begun in texts)


def _errors(path: str, document: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the table, key and text of each error."""
    several = isinstance(document.get(recipe.SEVERAL), list)
    if several:
        yield from (("", key, text) for key, text in wrong(Recipes, document | {recipe.SEVERAL: []}))
    targets = []
    for place, table in enumerate(recipe.tables(document)):
        target = table.get("target") if isinstance(table, dict) else None
        where = f"[[recipe]] {repr(target) if isinstance(target, str) else f'number {place + 1}'}" if several else ""
        if isinstance(table, dict):
            yield from ((f"{where} {part}".strip(), key, text) for part, key, text in _recipe_errors(table))
        else:
            yield where, "", f"got {table!r}; it takes a table"
        targets += [target] if isinstance(target, str) else []
    if len(targets) == len(recipe.tables(document)) and (problem := recipe.misnamed(path, targets)):
        yield "", "target", problem


def _recipe_errors(document: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    hooks = document.get("hook")
    # Hooks are gone through below, one table at a time.
    top = document | ({"hook": []} if isinstance(hooks, list) else {})
    for key, text in wrong(Recipe, top):
        hint = "; write [[hook]] with two brackets" if key == "hook" and isinstance(hooks, dict) else ""
        yield "", key, text + hint
    target = document.get("target")
    if problem := versions_problem(document.get("versions")):
        yield "", "versions", problem
    names: list[str] = []
    for place, table in enumerate(hooks if isinstance(hooks, list) else []):
        called = table.get("name") if isinstance(table, dict) else None
        where = recipe.table(called if isinstance(called, str) and called else place)
        for key, text in _hook_errors(table, target):
            yield where, key, text
        if isinstance(called, str):
            if names.count(called) == 1:
                yield where, "name", f"two [[hook]] tables are named {called!r}; give each its own name"
            names.append(called)


def _hook_errors(table: Any, target: Any) -> Iterator[tuple[str, str]]:
    yield from wrong(Hook, table)
    if not isinstance(table, dict):
        return
    texts = {key: value for key, value in table.items() if isinstance(value, str)}
    yield from recipe.hook_problems(texts, target if isinstance(target, str) else None)
    kind = behaviours.find(texts.get("behaviour", ""))
    options = table.get("options", {})
    if kind is None:
        if "behaviour" in texts:
            near = did_you_mean(texts["behaviour"], behaviours.BEHAVIOURS)
            known = ", ".join(sorted(behaviours.BEHAVIOURS))
            yield "behaviour", f"there is no {texts['behaviour']!r}{near}; there are {known}"
        return
    if isinstance(options, dict):
        yield from wrong(kind, options, "options")
    if table.get("kind") and not kind.makes_stages:
        yield "kind", f"{texts['behaviour']} makes no stage; leave it out"


def _without(path: str, error: RecipeError) -> str:
    return str(error).removeprefix(f"{path}: ")
