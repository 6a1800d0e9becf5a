"""Stored signatures: the releases, and the look-up of names in a release."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from autoprof.hooks.recipe import BoundHook, load
from tests.contracts import signature_files
from tests.contracts.signature_files import HERE
from tests.contracts.signatures import Facts

RECIPES = HERE.parent.parent / "recipes"


class Releases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table of `releases.toml`, which explains the fields."""

    wheels: list[str] = []
    git: str = ""
    releases: list[str]
    modules: list[str]
    names: list[str]
    attributes: list[str]
    imported: list[str] = []


class NotFound(LookupError):
    """Error of a name that a release lacks, or that was not stored."""


class Contract:
    """Stored signatures of one release of a target."""

    def __init__(self, target: str, version: str) -> None:
        self.name = f"{target} {version}"
        self.version = version
        self._stored = store(target).release(version)
        self.modules = {name: facts for name, facts in self._stored.items() if facts is not None}

    def module(self, name: str) -> Facts:
        """Return the facts of a module.

        Raises:
            NotFound: The release lacks the module, or it was not stored.
        """
        if name in self.modules:
            return self.modules[name]
        if name in self._stored:
            raise NotFound(f"{self.name} has no module {name}")
        raise NotFound(f"module {name} is not stored for {self.name}; run make contracts")

    def has(self, module: str, attribute: str) -> bool:
        """Return True if the release has `Class`, `Class.method` or `function` in a module."""
        try:
            self.find(module, attribute)
        except NotFound:
            return False
        return True

    def find(self, module: str, attribute: str) -> Facts:
        """Return the facts of a class, a function, or a method, which may be inherited.

        Raises:
            NotFound: The release lacks the name, or it was not stored.
        """
        head, _, method = attribute.partition(".")
        module, head = self._origin(module, head)
        facts = self.module(module)
        if method:
            for kind in self.lineage(module, head):
                if method in kind.get("methods", {}):
                    return kind["methods"][method]
        for group in () if method else ("functions", "classes"):
            if head in facts.get(group, {}):
                return facts[group][head]
        raise NotFound(f"{self.name}: {module} has no {attribute}, or it is not stored; run make contracts")

    def lineage(self, module: str, name: str) -> list[Facts]:
        """Return the stored facts of a class and its bases, the nearest first."""
        module, name = self._origin(module, name)
        kind = self.module(module).get("classes", {}).get(name)
        if kind is None:
            raise NotFound(f"{self.name}: {module} has no class {name}")
        found = [kind]
        for base in kind.get("bases", []):
            origin, original = self._origin(*_divided(base))
            if original in self.modules.get(origin, {}).get("classes", {}):
                found += self.lineage(origin, original)
        return found

    def _origin(self, module: str, name: str) -> tuple[str, str]:
        """Return the module that defines a name, and the name there, if this module only imports it."""
        while name in self.modules.get(module, {}).get("imports", {}):
            module, name = _divided(self.modules[module]["imports"][name])
        return module, name

    def sets(self, module: str, name: str, attribute: str) -> bool:
        """Return True if instances of a class have an attribute, set by a method, or as a field or property."""
        return any(
            attribute in kind.get(facts, ())
            for kind in self.lineage(module, name)
            for facts in ("attributes", "fields", "methods")
        )


def _divided(full: str) -> tuple[str, str]:
    module, _, name = full.rpartition(".")
    return module, name


def parameters(function: Facts) -> dict[str, str]:
    """Return the parameters as in the source, by name; the name of `**kwargs` is `**`."""
    named = {}
    for text in function["parameters"]:
        name = text.split(":", 1)[0].split("=", 1)[0].strip()
        named["**" if name.startswith("**") else name] = text
    return named


@functools.cache
def releases() -> dict[str, Releases]:
    """Return the tables of `releases.toml`, by target."""
    document = msgspec.toml.decode((HERE / "releases.toml").read_bytes())
    return msgspec.convert(document, dict[str, Releases])


@functools.cache
def store(target: str) -> signature_files.Store:
    """Return the stored signatures of a target; they are read once."""
    return signature_files.read(target)


@functools.cache
def contract(target: str, version: str) -> Contract:
    """Return the stored signatures of a release."""
    return Contract(target, version)


def versions(target: str) -> list[str]:
    """Return the stored releases of a target, oldest first."""
    return store(target).versions()


@functools.cache
def hooks(target: str) -> list[BoundHook]:
    """Return all hooks of the recipes of a target."""
    return [hook for hook in _all_hooks() if hook.recipe.target == target]


@functools.cache
def _all_hooks() -> list[BoundHook]:
    return [hook for file in sorted(RECIPES.glob("*.toml")) for hook in load(str(file))]


def option_paths(hook: BoundHook) -> list[str]:
    """Return the paths in a hook's options. Each path begins with a parameter of the function."""
    options: dict[str, Any] = hook.hook.options
    plain = [options.get(name) for name in ("engine", "number", "of", "rank", "step", "unless")]
    read = [options.get(name) for name in ("role", "stage")]
    paths = [*plain, *options.get("when", {}), *(name["path"] for name in read if isinstance(name, dict))]
    for name in ("ids", "otherwise", "counts"):
        paths += options.get(name, {}).values()
    return [path for path in paths if isinstance(path, str) and path]


def attribute_options(hook: BoundHook) -> set[str]:
    """Return the attributes of the instance that a hook needs, according to its options.

    The attribute of `unless` is left out, since only a subclass may have it.
    """
    paths = [path for path in option_paths(hook) if path != hook.hook.options.get("unless")]
    return {path.split(".")[1] for path in paths if path.startswith("self.")}
