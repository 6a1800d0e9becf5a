"""Check of hooks against the source of the installed target, which is not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes.catalog import by_recipe
from autoprof.cli.recipes.check import RecipeFinding, parameters
from autoprof.cli.recipes.source import (
    NO_FUNCTION,
    Definition,
    Function,
    NotInSource,
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

# Key and text of a finding, and True if it is an error.
_Finding = tuple[str, str, bool]


def check_hooks(path: str, hooks: list[BoundHook], sources: Sources) -> tuple[list[RecipeFinding], str]:
    """Check each hook against the source of its target.

    Returns:
        The findings, and in a few words the source that was searched.
    """
    if not hooks:
        return [], "it has no hooks"
    checked = [_check(path, content, own_hooks, sources) for content, own_hooks in by_recipe(hooks)]
    return [finding for findings, _ in checked for finding in findings], "; ".join(scope for _, scope in checked)


def _check(path: str, content: Recipe, hooks: list[BoundHook], sources: Sources) -> tuple[list[RecipeFinding], str]:
    target = content.target
    if not sources.installed(target):
        return [], f"{target} is not installed here, so modules, attributes and parameters were not checked"
    version = installed_version(content)
    findings = []
    others = [hook.hook.name for hook in hooks if not fits(version, hook.hook.versions)]
    if others:
        names = ", ".join(others)
        text = f"not checked: {target} is {version} here, and these hooks are for other releases: {names}"
        findings.append(RecipeFinding(file=path, table="", key="", text=text, error=False))
    ranged = [hook.hook.name for hook in hooks if hook.hook.versions and not version]
    if ranged:
        text = f"not checked for hooks {', '.join(ranged)}: no distribution states the version of {target}"
        findings.append(RecipeFinding(file=path, table="", key="versions", text=text, error=False))
    outside = not fits(version, content.versions)
    for hook in hooks:
        if hook.hook.name in others:
            continue
        for key, text, error in _findings(hook, sources):
            if outside and error:
                text += f" ({target} is {version} here, and the recipe is for {content.versions})"
            table = recipe.table(hook.hook.name)
            findings.append(RecipeFinding(file=path, table=table, key=key, text=text, error=error and not outside))
    return findings, f"looked up in the source of {target} {version}".rstrip()


def _findings(hook: BoundHook, sources: Sources) -> Iterator[_Finding]:
    """Yield the findings about one hook."""
    try:
        sources.module(hook.hook.module)
    except NotInSource as error:
        yield "module", f"{error}", True
        return
    except Unknown as error:
        yield "module", f"not checked: {error}", False
        return
    try:
        definition = sources.find(hook.hook.module, hook.hook.attribute)
    except NotInSource as error:
        adds = type(hook.behaviour).supply is not behaviours.Behaviour.supply
        yield "attribute", f"{error}{f'; {hook.hook.behaviour} adds it' if adds else ''}", not adds
    except Unknown as error:
        yield "attribute", f"not checked: {error}", False
    else:
        yield from _definition_findings(hook, definition, sources)


def _definition_findings(hook: BoundHook, definition: Definition, sources: Sources) -> Iterator[_Finding]:
    name, behaviour = hook.hook.attribute, hook.hook.behaviour
    if isinstance(definition.node, ast.ClassDef):
        if type(hook.behaviour).install is behaviours.Behaviour.install:
            yield "attribute", f"{name} is a class, and {behaviour} wraps a function; name one of its methods", True
        return
    decorator_names = decorators(definition.node)
    yield from _around_findings(hook, definition.node, bool(decorator_names & _CONTEXT_MANAGERS))
    if decorator_names & {"property", "cached_property"}:
        yield "attribute", f"{name} is a property; name a method", True
    if (others := decorator_names & NO_FUNCTION) and not hook.hook.rewrap:
        text = f"{name} is not a function, because it is decorated by {others.pop()}; name a function that calls it"
        yield "attribute", text, True
    if "abstractmethod" in decorator_names:
        yield "attribute", f"{name} is abstract and never called; name the method that overrides it", True
    if decorator_names and hook.hook.rewrap and hook.hook.rewrap.rpartition(".")[2] not in decorator_names:
        yield "rewrap", f"{name} is decorated by {', '.join(sorted(decorator_names))}, not by {hook.hook.rewrap}", True
    if not decorator_names and hook.hook.rewrap:
        yield "rewrap", f"{name} is not decorated", True
    yield from _path_findings(hook, definition, sources)


def _around_findings(hook: BoundHook, node: Function, context_manager: bool) -> Iterator[_Finding]:
    name, around = hook.hook.attribute, hook.hook.around
    if context_manager and around != "with":
        yield "around", f'{name} makes a context manager; around = "with" hooks it from its enter to its exit', True
    elif generator(node) and not context_manager and around == "call":
        text = f"{name} is a generator: its work is not done when the call returns"
        yield "around", f'{text}; use around = "next" to hook each item, or name the function that uses it', True
    elif generator(node) and not context_manager and around == "with":
        yield "around", f"{name} is a generator, but not a context manager", True


def _path_findings(hook: BoundHook, definition: Definition, sources: Sources) -> Iterator[_Finding]:
    """Yield the paths whose first name is not a parameter, or whose name after `self` is not an attribute."""
    assert not isinstance(definition.node, ast.ClassDef)
    names, any_keyword = parameter_names(definition.node)
    for key, path in parameters(type(hook.behaviour), hook.hook.options):
        first, _, tail = path.partition(".")
        if first == "self" and definition.owner is not None:
            second = tail.partition(".")[0]
            try:
                known = sources.attributes(definition.owner) if second else set()
            except Unknown:
                # The method was found, so the hook works; that a base class was not found is not worth a note.
                continue
            if second and second not in known:
                text = f"{definition.owner.node.name} sets no {second} in its source{did_you_mean(second, known)}"
                text += "; ignore this if a subclass or other code sets it"
                yield f"options.{key}", text, False
        elif first not in names and not any_keyword:
            near = did_you_mean(first, names)
            text = f"{hook.hook.attribute} has no parameter {first}{near}; it has {', '.join(names) or 'none'}"
            yield f"options.{key}", text, True
