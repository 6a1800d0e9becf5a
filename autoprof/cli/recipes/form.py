"""Check of a recipe's form: finds all errors, where `recipe.load` stops at the first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes import places
from autoprof.cli.recipes.vocabulary import wrong
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, Hook, Recipe, RecipeError


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


def _errors(path: str, document: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the table, key and text of each error."""
    hooks = document.get("hook")
    # Hooks are gone through below, one table at a time.
    top = document | ({"hook": []} if isinstance(hooks, list) else {})
    for key, text in wrong(Recipe, top):
        hint = "; write [[hook]] with two brackets" if key == "hook" and isinstance(hooks, dict) else ""
        yield "", key, text + hint
    target = document.get("target")
    name = os.path.basename(path).split(".", 1)[0]
    if isinstance(target, str) and name != target:
        yield "", "target", recipe.misnamed(path, target)
    if problem := recipe.versions_problem(document.get("versions")):
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
