"""Facts about the classes and functions of a module, from its parsed source: nothing is imported or run.

Facts are names, parameters with their defaults, decorators, bases and fields, without text of the source.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from autoprof.cli.recipes_catalog import Function, Module, statements

Facts = dict[str, Any]

# Characters of a default or an annotation; tests can't use longer ones.
_MAX_EXPRESSION = 100


class Wanted(msgspec.Struct, kw_only=True):
    """Selection of the facts to keep.

    Attributes:
        names: Patterns of `function`, `Class.method`, or `Class`; the latter keeps the fields of the class.
        attributes: Names of attributes to record if a kept class sets them on `self`.
        followed: Full names of classes and functions to keep, in any module. Their bases are added.
        members: Methods and attributes to keep of the classes in `followed`.
    """

    names: set[str]
    attributes: set[str] = set()
    followed: set[str] = set()
    members: set[str] = set()

    def keeps(self, name: str) -> bool:
        """Return True if a pattern in `names` matches."""
        return any(fnmatchcase(name, pattern) for pattern in self.names if pattern.count(".") == name.count("."))


def collect(read: Callable[[str], Module | None], modules: Iterable[str], wanted: Wanted) -> dict[str, Facts | None]:
    """Return the facts of `modules`, and of the bases of their kept classes in the same package.

    A missing module is None; a module without kept facts is left out.

    Args:
        read: Function that parses a module, or returns None if the release lacks it.
        modules: Names of the modules to begin with.
        wanted: Selection of the facts to keep.
    """
    found: dict[str, Facts] = {}
    absent: set[str] = set()
    hooks = set(wanted.followed)
    queue = sorted(modules)
    while queue:
        name = queue.pop(0)
        module = read(name)
        if module is None:
            absent.add(name)
            continue
        found[name] = facts = _module_facts(module, wanted)
        bases = [base for kind in facts.get("classes", {}).values() for base in kind.get("bases", [])]
        for full in [*bases, *facts.get("imports", {}).values()]:
            origin = full.rpartition(".")[0]
            if origin.partition(".")[0] == name.partition(".")[0] and full not in wanted.followed and read(origin):
                wanted.followed.add(full)
                queue.append(origin)
    _drop_empty(found, lambda module, name: f"{module}.{name}" in hooks or wanted.keeps(name))
    kept = {name: _filled(**facts) for name, facts in sorted(found.items())}
    return {name: facts for name, facts in kept.items() if facts} | dict.fromkeys(sorted(absent))


def _drop_empty(modules: dict[str, Facts], asked: Callable[[str, str], bool]) -> None:
    """Remove bases without kept facts, and imports of them, unless they are requested by name."""

    def has_facts(module: str, name: str, content: Any) -> bool:
        if asked(module, name):
            return True
        if isinstance(content, str):
            return _defines(modules, content)
        members = content.keys() & {"fields", "methods", "attributes"}
        return bool(members) or any(_defines(modules, base) for base in content.get("bases", []))

    dropped = True
    while dropped:
        dropped = False
        for module, facts in modules.items():
            for group in facts.keys() & {"classes", "imports"}:
                kept = {name: content for name, content in facts[group].items() if has_facts(module, name, content)}
                dropped |= len(kept) < len(facts[group])
                facts[group] = kept


def _defines(modules: dict[str, Facts], full: str) -> bool:
    module, _, name = full.rpartition(".")
    return any(name in group for group in modules.get(module, {}).values())


def _module_facts(module: Module, wanted: Wanted) -> Facts:
    followed = {name.rpartition(".")[2] for name in wanted.followed if name.rpartition(".")[0] == module.name}
    functions = {
        name: _function_facts(module, node)
        for name, node in sorted(module.defined.items())
        if isinstance(node, Function) and (name in followed or wanted.keeps(name))
    }
    kinds = {
        name: _class_facts(module, node, wanted, name in followed)
        for name, node in sorted(module.defined.items())
        if isinstance(node, ast.ClassDef)
    }
    return _filled(
        functions=functions,
        classes={name: facts for name, facts in kinds.items() if facts is not None},
        imports={name: module.imported[name] for name in sorted(followed & module.imported.keys())},
    )


def _class_facts(module: Module, node: ast.ClassDef, wanted: Wanted, followed: bool) -> Facts | None:
    methods: Facts = {}
    fields: Facts = {}
    whole = wanted.keeps(node.name)
    members = wanted.members if followed else set()
    for item in statements(node.body):
        if isinstance(item, Function):
            if item.name in members or wanted.keeps(f"{node.name}.{item.name}"):
                methods[item.name] = _function_facts(module, item)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if whole or item.target.id in members:
                fields[item.target.id] = _field(item)
        elif isinstance(item, ast.Assign) and whole:
            fields.update({target.id: "" for target in item.targets if isinstance(target, ast.Name)})
    if not (methods or fields or whole or followed):
        return None
    own = {attribute for owner, attribute in _attributes_set(node) if owner == "self"}
    return _filled(
        bases=[base for base in map(module.full, node.bases) if base not in ("object", "abc.ABC", "ABC")],
        decorators=[module.full(decorator) for decorator in node.decorator_list],
        fields={name: fields[name] for name in sorted(fields) if not name.startswith("_")},
        methods={name: methods[name] for name in sorted(methods)},
        attributes=sorted(own & (wanted.attributes | members)),
    )


def _function_facts(module: Module, node: Function) -> Facts:
    return {"async": isinstance(node, ast.AsyncFunctionDef), "parameters": list(_parameters(node.args))} | _filled(
        decorators=[module.full(decorator) for decorator in node.decorator_list], generator=_is_generator(node)
    )


def _is_generator(function: Function) -> bool:
    """Return whether a function is a generator. A `yield` in a nested function does not count."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))
    return False


def _attributes_set(kind: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the attributes that a class's methods set: the variable that holds the object, and the attribute's name."""
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):  # self.__dict__["name"] = ...
            holder, key = node.value, node.slice
            if (
                isinstance(holder, ast.Attribute)
                and holder.attr == "__dict__"
                and isinstance(holder.value, ast.Name)
                and isinstance(key, ast.Constant)
                and isinstance(key.value, str)
            ):
                yield holder.value.id, key.value


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Yield each parameter as in the source, including `*` and `/`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    for place, (parameter, default) in enumerate(zip(positional, defaults, strict=True), 1):
        yield _parameter(parameter, default)
        if place == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg:
        yield f"*{_parameter(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(parameter, default)
    if arguments.kwarg:
        yield f"**{_parameter(arguments.kwarg, None)}"


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {_short(parameter.annotation)}" if parameter.annotation else ""
    equals = " = " if annotation else "="
    return f"{parameter.arg}{annotation}{equals + _short(default) if default else ''}"


def _field(item: ast.AnnAssign) -> str:
    default = f" = {_short(item.value)}" if isinstance(item.value, ast.Constant) else ""
    return f"{_short(item.annotation)}{default}"


def _short(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= _MAX_EXPRESSION else "..."


def _filled(**facts: Any) -> Facts:
    """Return the facts that are not empty."""
    return {name: value for name, value in facts.items() if value}
