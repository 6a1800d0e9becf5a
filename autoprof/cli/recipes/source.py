"""Lookup of functions and classes in the source of an installed target, with `ast`: nothing is imported or run."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from importlib.util import find_spec

import msgspec

from autoprof.base.similar import did_you_mean
from autoprof.hooks.recipe import script

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A parsed module: its statements, and the names that it defines or imports, also in conditional blocks."""

    def __init__(self, name: str, source: str | bytes, is_package: bool) -> None:
        self.name = name
        package = name if is_package else name.rpartition(".")[0]
        self.defined: dict[str, Function | ast.ClassDef] = {}
        self.imported: dict[str, str] = {}
        # Names that other statements set.
        self.assigned: set[str] = set()
        # True if the module may have further names, by `__getattr__` or `import *`.
        self.open = False
        self.body = ast.parse(source).body
        for node in statements(self.body):
            if isinstance(node, ast.ClassDef | Function):
                self.defined[node.name] = node
                self.open |= node.name == "__getattr__"
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                origin = ".".join([*parents, *filter(None, [node.module])])
                for alias in node.names:
                    self.open |= alias.name == "*"
                    self.imported[alias.asname or alias.name] = f"{origin}.{alias.name}"
            elif isinstance(node, ast.Import):
                self.imported.update({alias.asname: alias.name for alias in node.names if alias.asname})
            else:
                self.assigned.update(assigned(node))

    def full(self, node: ast.expr) -> str:
        """Return the full name of a base class or decorator, without its arguments."""
        while isinstance(node, ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        head, dot, rest = ast.unparse(node).partition(".")
        origin = f"{self.name}.{head}" if head in self.defined else self.imported.get(head, head)
        return f"{origin}{dot}{rest}"


# Decorators that replace a function by an object that autoprof can't wrap.
NO_FUNCTION = {"lru_cache", "cache", "singledispatchmethod", "remote"}


def decorators(function: Function) -> set[str]:
    """Return the names of a function's decorators, without their modules and arguments."""
    return {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in function.decorator_list}


def generator(function: Function) -> bool:
    """Return whether a function is a generator. A `yield` in a nested function does not count."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))
    return False


def parameter_names(function: Function) -> tuple[list[str], bool]:
    """Return the names of a function's parameters, and True if it also takes any other keyword."""
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, [spec.vararg, spec.kwarg])]
    return [parameter.arg for parameter in named], spec.kwarg is not None


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, including those in `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for block in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def assigned(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement sets."""
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets: list[ast.expr] = [node.target]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else []
    for target in targets:
        yield from (item.id for item in ast.walk(target) if isinstance(item, ast.Name))


def attributes_set(kind: ast.ClassDef) -> Iterator[tuple[str, str]]:
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


class NotInSource(LookupError):
    """The module, class or function does not exist. The message explains it and may name a similar one."""


class Unknown(LookupError):
    """The source does not show whether the module, class or function exists. The message gives the reason."""


class Definition(msgspec.Struct, frozen=True):
    """A function or class in the source.

    Attributes:
        node: Its definition.
        owner: If it is a method, the class in which it was looked up; a base class may define it.
    """

    node: Function | ast.ClassDef
    owner: Class | None = None


class Class(msgspec.Struct, frozen=True):
    """A class and the module in which it is defined."""

    node: ast.ClassDef
    module: Module


class Sources:
    """Modules of installed packages, each parsed once."""

    def __init__(self) -> None:
        self._modules: dict[str, Module | None] = {}

    def installed(self, package: str) -> bool:
        """Return whether a top-level package or module is installed, or is in the working directory."""
        return bool(_spec_paths(package))

    def module(self, name: str) -> Module:
        """Return a parsed module.

        Raises:
            NotInSource: There is no module of this name.
            Unknown: The module has no Python source, or its source can't be read.
        """
        if name not in self._modules:
            path = name if script(name) and os.path.isfile(name) else _path(script(name) or name)
            try:
                self._modules[name] = _parse(name, path) if path.endswith(".py") else None
            except (OSError, SyntaxError, ValueError, RecursionError) as error:
                raise Unknown(f"the source of {name} can't be read ({type(error).__name__})") from None
        module = self._modules[name]
        if module is None:
            raise Unknown(f"{name} has no Python source")
        return module

    def find(self, module: str, attribute: str) -> Definition:
        """Return a function, class or method of a module; it may be imported or inherited from another module.

        Raises:
            NotInSource: There is no function or class of this name.
            Unknown: The source does not show it.
        """
        head, *members = attribute.split(".")
        node, home = self._top(self.module(module), head)
        owner = None
        for name in members:
            if not isinstance(node, ast.ClassDef):
                raise NotInSource(f"{module} has {head}, but it is not a class")
            owner = Class(node, home)
            node, home = self._member(owner, name)
        return Definition(node, owner)

    def attributes(self, owner: Class) -> set[str]:
        """Return the attributes of a class's instances: methods, fields, and attributes that methods set.

        Raises:
            Unknown: A base class was not found, or the class defines `__getattr__` or `__getattribute__`.
        """
        names: set[str] = set()
        for kind in self._lineage(owner):
            members = list(statements(kind.node.body))
            if any(isinstance(node, Function) and node.name in ("__getattr__", "__getattribute__") for node in members):
                raise Unknown(f"{kind.node.name} makes attributes on access")
            names.update(node.name for node in members if isinstance(node, ast.ClassDef | Function))
            names.update(name for node in members for name in assigned(node))
            names.update(attribute for _, attribute in attributes_set(kind.node))
        return names

    def _top(self, module: Module, name: str) -> tuple[Function | ast.ClassDef, Module]:
        for _ in range(20):
            if name in module.defined:
                return module.defined[name], module
            if name not in module.imported:
                break
            origin, _, name = module.imported[name].rpartition(".")
            try:
                module = self.module(origin)
            except NotInSource as error:
                raise Unknown(f"{module.name} imports it, but {error}") from None
        if name in module.assigned or module.open:
            raise Unknown(f"{module.name} makes {name} in a way that this check does not follow")
        raise NotInSource(f"{module.name} has no {name}{did_you_mean(name, module.defined)}")

    def _member(self, owner: Class, name: str) -> tuple[Function | ast.ClassDef, Module]:
        known: list[str] = []
        for kind in self._lineage(owner):
            for node in statements(kind.node.body):
                if isinstance(node, ast.ClassDef | Function):
                    known.append(node.name)
                    if node.name == name:
                        return node, kind.module
                elif name in assigned(node):
                    raise Unknown(f"{kind.node.name} sets {name} in a way that this check does not follow")
        raise NotInSource(f"{owner.node.name} has no {name}{did_you_mean(name, known)}")

    def _lineage(self, owner: Class) -> Iterator[Class]:
        """Yield a class and its base classes, depth first.

        Raises:
            Unknown: A base class was not found. Raised at the end, after the classes that were found.
        """
        queue, seen = [owner], set()
        lost = ""
        while queue:
            kind = queue.pop(0)
            if id(kind.node) in seen:
                continue
            seen.add(id(kind.node))
            yield kind
            bases = []
            for node in kind.node.bases:
                full = kind.module.full(node)
                try:
                    base, home = self._base(full, kind.module)
                except LookupError:
                    lost = lost or ("" if full.rpartition(".")[2] in _EMPTY_BASES else full)
                    continue
                if isinstance(base, ast.ClassDef):
                    bases.append(Class(base, home))
            queue = bases + queue
        if lost:
            raise Unknown(f"the base class {lost} of {owner.node.name} was not found")

    def _base(self, full: str, module: Module) -> tuple[Function | ast.ClassDef, Module]:
        origin, _, name = full.rpartition(".")
        return self._top(self.module(origin) if origin else module, name)


# Base classes without methods that a hook could name.
_EMPTY_BASES = ("object", "ABC", "Generic", "Protocol", "Enum", "NamedTuple", "Exception")


def _parse(name: str, path: str) -> Module:
    with open(path, "rb") as file:
        return Module(name, file.read(), is_package=os.path.basename(path) == "__init__.py")


def _path(name: str) -> str:
    """Return the file of a module, or the folder of a namespace package.

    Raises:
        NotInSource: There is no module of this name.
    """
    top, *inner = name.split(".")
    paths = _spec_paths(top)
    if not paths:
        raise NotInSource(f"{top} is not installed here")
    known: set[str] = set()
    for root in paths:
        if not inner and os.path.isfile(root):
            return root
        base = os.path.join(root, *inner)
        for path in (os.path.join(base, "__init__.py"), f"{base}.py", *(base + end for end in EXTENSION_SUFFIXES)):
            if os.path.isfile(path):
                return path
        if os.path.isdir(base):
            return base
        names = _names(os.path.dirname(base))
        known.update(entry.removesuffix(".py") for entry in names if not entry.startswith("__"))
    last = name.rpartition(".")[2]
    raise NotInSource(f"there is no module {name}{did_you_mean(last, known)}")


def _spec_paths(top: str) -> list[str]:
    """Return the folders of a top-level package, or the file of a module; also if it is in the working directory."""
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except Exception:  # a finder of another package may raise anything
        spec = None
    if spec is None:
        return []
    paths = list(spec.submodule_search_locations or ())
    if spec.origin is None:
        # A namespace package. It may also be an unrelated folder of this name, so it must contain Python files.
        return [path for path in paths if _contains_python(path)]
    return paths or [spec.origin]


def _contains_python(folder: str) -> bool:
    return any(
        name.endswith(".py") or os.path.isfile(os.path.join(folder, name, "__init__.py")) for name in _names(folder)
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
