"""What a module's source says of its classes and functions, by `ast`: nothing is imported or run.

Kept are names, parameters with their defaults, decorators, bases and fields: facts, and no text of the source.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import msgspec

Facts = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef

# A default or an annotation that is longer says nothing that a test could use.
_LONGEST = 100


class Wanted(msgspec.Struct, kw_only=True):
    """What is kept of the modules.

    Attributes:
        names: Patterns of `function`, `Class.method`, or `Class`, which keeps its fields.
        attributes: Names that are noted where a kept class sets them on itself.
        followed: Full names of classes and functions that are kept wherever they are defined. Grows by what these
            inherit from.
        members: Methods and attributes that are kept of the classes in `followed`.
    """

    names: set[str]
    attributes: set[str] = set()
    followed: set[str] = set()
    members: set[str] = set()

    def keeps(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names if pattern.count(".") == name.count("."))


class Module:
    """One parsed module: what is defined at its top, and what it imports from where."""

    def __init__(self, name: str, source: str, is_package: bool) -> None:
        self.name = name
        package = name if is_package else name.rpartition(".")[0]
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, Function] = {}
        self.imports: dict[str, str] = {}
        for node in _statements(ast.parse(source).body):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, Function):
                self.functions[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                origin = ".".join([*parents, *filter(None, [node.module])])
                self.imports.update({alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names})
            elif isinstance(node, ast.Import):
                self.imports.update({alias.asname: alias.name for alias in node.names if alias.asname})

    def resolved(self, node: ast.expr) -> str:
        """The full name of what an expression such as a base class or a decorator refers to, without arguments."""
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Subscript):
            node = node.value
        head, dot, rest = ast.unparse(node).partition(".")
        if head in self.classes or head in self.functions:
            return f"{self.name}.{head}{dot}{rest}"
        return f"{self.imports.get(head, head)}{dot}{rest}"


def collect(read: Callable[[str], Module | None], modules: Iterable[str], wanted: Wanted) -> Facts:
    """The facts of `modules`, and of what their kept classes inherit from in the same package.

    Args:
        read: Parses a module, or returns None where the release has none of that name.
        modules: The modules to begin with.
        wanted: What to keep of them.
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
    return {"absent": sorted(absent), "modules": {name: facts for name, facts in kept.items() if facts}}


def _drop_empty(modules: dict[str, Facts], asked: Callable[[str, str], bool]) -> None:
    """Leave out bases of which nothing is kept, and imports of them, unless they were asked for by name."""

    def says_something(module: str, name: str, content: Any) -> bool:
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
                kept = {
                    name: content for name, content in facts[group].items() if says_something(module, name, content)
                }
                dropped |= len(kept) < len(facts[group])
                facts[group] = kept


def _defines(modules: dict[str, Facts], full: str) -> bool:
    module, _, name = full.rpartition(".")
    return any(name in group for group in modules.get(module, {}).values())


def _module_facts(module: Module, wanted: Wanted) -> Facts:
    followed = {name.rpartition(".")[2] for name in wanted.followed if name.rpartition(".")[0] == module.name}
    functions = {
        name: _function_facts(module, node)
        for name, node in sorted(module.functions.items())
        if name in followed or wanted.keeps(name)
    }
    kinds = {
        name: _class_facts(module, node, wanted, name in followed) for name, node in sorted(module.classes.items())
    }
    return _filled(
        functions=functions,
        classes={name: facts for name, facts in kinds.items() if facts is not None},
        imports={name: module.imports[name] for name in sorted(followed & set(module.imports))},
    )


def _class_facts(module: Module, node: ast.ClassDef, wanted: Wanted, followed: bool) -> Facts | None:
    methods: Facts = {}
    fields: Facts = {}
    whole = wanted.keeps(node.name)
    members = wanted.members if followed else set()
    for item in _statements(node.body):
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
    return _filled(
        bases=[base for base in map(module.resolved, node.bases) if base not in ("object", "abc.ABC", "ABC")],
        decorators=[module.resolved(decorator) for decorator in node.decorator_list],
        fields={name: fields[name] for name in sorted(fields) if not name.startswith("_")},
        methods={name: methods[name] for name in sorted(methods)},
        attributes=sorted(_set_on_self(node) & (wanted.attributes | members)),
    )


def _set_on_self(node: ast.ClassDef) -> set[str]:
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def _function_facts(module: Module, node: Function) -> Facts:
    return {
        "async": isinstance(node, ast.AsyncFunctionDef),
        "parameters": list(_parameters(node.args)),
    } | _filled(
        decorators=[module.resolved(decorator) for decorator in node.decorator_list],
        generator=any(isinstance(item, ast.Yield | ast.YieldFrom) for item in _own_nodes(node)),
    )


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Each parameter as in the source, `*` and `/` among them."""
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
    return text if len(text) <= _LONGEST else "..."


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions in it."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))


def _filled(**facts: Any) -> Facts:
    """The facts that say something."""
    return {name: value for name, value in facts.items() if value}
