"""Hooks of a first recipe as text, and the hooks that autoprof has already."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from autoprof import _boot
from autoprof.cli.recipes import places
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, RecipeError, script


class DraftHook(msgspec.Struct, kw_only=True):
    """A hook as the file has it, with a comment above it."""

    name: str
    module: str
    attribute: str
    behaviour: str
    kind: str = ""
    options: dict[str, object] = {}
    comment: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of its table."""
        if self.comment:
            yield f"# {self.comment}"
        yield "[[hook]]"
        for key in ("name", "module", "attribute", "behaviour", "kind"):
            if value := getattr(self, key):
                yield f"{key} = {json.dumps(value)}"
        if self.options:
            inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.options.items())
            yield f"options = {{ {inner} }}"
        yield ""


def own_hooks() -> dict[str, BoundHook]:
    """Return the hooks of autoprof's recipes by their keys."""
    found: dict[str, BoundHook] = {}
    for path in places.toml_files(_boot.own_recipes()):
        try:
            found |= {hook.key: hook for hook in recipe.load(path)}
        except RecipeError:
            continue
    return found


def target_of(module: str) -> str:
    """Return the target of a module or a script."""
    return script(module) or module.partition(".")[0]


def is_step(hook: BoundHook) -> bool:
    """Return whether a hook finds steps."""
    return hook.hook.behaviour.startswith("step.") and hook.hook.behaviour != "step.trainer"
