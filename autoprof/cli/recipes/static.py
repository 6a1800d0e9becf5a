"""Check of hooks against the source of the installed target, which is not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes.catalog import by_recipe
from autoprof.cli.recipes.check import RecipeFinding, parameters
from autoprof.cli.recipes.source import (
    NO_FUNCTION,
    Function,
    Missing,
    Place,
    Sources,
    Unknown,
    decorators,
    generator,
    parameter_names,
)
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, Recipe, fits, installed_version

_CONTEXT_MANAGERS = {"contextmanager", "asynccontextmanager"}

_Said = tuple[str, str, bool]


def check_hooks(path: str, hooks: list[BoundHook], sources: Sources) -> tuple[list[RecipeFinding], str]:
    """Look for each hook in the source of its target.

    Returns:
        What was found, and in a few words what the hooks were looked for in.
    """
    if not hooks:
        return [], "it has no hooks"
    checked = [_check(path, made, of_it, sources) for made, of_it in by_recipe(hooks)]
    return [finding for found, _ in checked for finding in found], "; ".join(where for _, where in checked)


def _check(path: str, made: Recipe, hooks: list[BoundHook], sources: Sources) -> tuple[list[RecipeFinding], str]:
    if not sources.installed(made.target):
        return [], f"{made.target} is not installed here, so modules, attributes and parameters were not checked"
    version = installed_version(made)
    findings = []
    others = [hook.hook.name for hook in hooks if not fits(version, hook.hook.versions)]
    if others:
        names = ", ".join(others)
        text = f"not checked: {made.target} is {version} here, and these hooks are for other releases: {names}"
        findings.append(RecipeFinding(file=path, table="", key="", text=text, error=False))
    ranged = [hook.hook.name for hook in hooks if hook.hook.versions and not version]
    if ranged:
        text = f"not looked at, as no distribution tells the version of {made.target}: those of {', '.join(ranged)}"
        findings.append(RecipeFinding(file=path, table="", key="versions", text=text, error=False))
    outside = not fits(version, made.versions)
    for hook in hooks:
        if hook.hook.name in others:
            continue
        for key, text, error in _said(hook, sources):
            if outside and error:
                text += f" ({made.target} is {version} here, and the recipe is for {made.versions})"
            table = recipe.table(hook.hook.name)
            findings.append(RecipeFinding(file=path, table=table, key=key, text=text, error=error and not outside))
    return findings, f"looked up in the source of {made.target} {version}".rstrip()


def _said(hook: BoundHook, sources: Sources) -> Iterator[_Said]:
    """Yield the key and text of each finding, and whether it is an error."""
    try:
        sources.module(hook.hook.module)
    except Missing as error:
        yield "module", f"{error}", True
        return
    except Unknown as error:
        yield "module", f"not checked: {error}", False
        return
    try:
        place = sources.find(hook.hook.module, hook.hook.attribute)
    except Missing as error:
        adds = type(hook.behaviour).supply is not behaviours.Behaviour.supply
        yield "attribute", f"{error}{f'; {hook.hook.behaviour} adds it' if adds else ''}", not adds
    except Unknown as error:
        yield "attribute", f"not checked: {error}", False
    else:
        yield from _of_place(hook, place, sources)


def _of_place(hook: BoundHook, place: Place, sources: Sources) -> Iterator[_Said]:
    name, behaviour = hook.hook.attribute, hook.hook.behaviour
    if isinstance(place.node, ast.ClassDef):
        if type(hook.behaviour).install is behaviours.Behaviour.install:
            yield "attribute", f"{name} is a class, and {behaviour} wraps a function; name one of its methods", True
        return
    by = decorators(place.node)
    yield from _around(hook, place.node, bool(by & _CONTEXT_MANAGERS))
    if by & {"property", "cached_property"}:
        yield "attribute", f"{name} is a property; name a method", True
    if (others := by & NO_FUNCTION) and not hook.hook.rewrap:
        text = f"{name} is no function, but what {others.pop()} makes of one; name a function that calls it"
        yield "attribute", text, True
    if "abstractmethod" in by:
        yield "attribute", f"{name} is abstract: what overrides it is called instead; name that", True
    if by and hook.hook.rewrap and hook.hook.rewrap.rpartition(".")[2] not in by:
        yield "rewrap", f"{name} is decorated by {', '.join(sorted(by))}, not by {hook.hook.rewrap}", True
    if not by and hook.hook.rewrap:
        yield "rewrap", f"{name} is not decorated", True
    yield from _paths(hook, place, sources)


def _around(hook: BoundHook, node: Function, context_manager: bool) -> Iterator[_Said]:
    name, around = hook.hook.attribute, hook.hook.around
    if context_manager and around != "with":
        yield "around", f'{name} makes a context manager; around = "with" is from its enter to its exit', True
    elif generator(node) and not context_manager and around == "call":
        text = f"{name} is a generator: it has not done its work when the call returns"
        yield "around", f'{text}; around = "next" is around each item, or name the function that uses it', True
    elif generator(node) and not context_manager and around == "with":
        yield "around", f"{name} is a generator, and no context manager is made of it", True


def _paths(hook: BoundHook, place: Place, sources: Sources) -> Iterator[_Said]:
    """Compare the first names of paths with the function's parameters, and the next after `self` with its class."""
    assert not isinstance(place.node, ast.ClassDef)
    names, any_keyword = parameter_names(place.node)
    for key, path in parameters(type(hook.behaviour), hook.hook.options):
        first, _, rest = path.partition(".")
        if first == "self" and place.owner is not None:
            second = rest.partition(".")[0]
            try:
                known = sources.attributes(place.owner) if second else set()
            except Unknown:  # it says so where it matters: the attribute was found
                continue
            if second and second not in known:
                text = f"{place.owner.node.name} sets no {second} in its source{did_you_mean(second, known)}"
                text += "; right if a subclass or other code does"
                yield f"options.{key}", text, False
        elif first not in names and not any_keyword:
            near = did_you_mean(first, names)
            text = f"{hook.hook.attribute} has no parameter {first}{near}; it has {', '.join(names) or 'none'}"
            yield f"options.{key}", text, True
