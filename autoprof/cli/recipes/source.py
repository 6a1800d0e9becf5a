"""Lookup of a hook's place in the source of an installed target, by `ast`: nothing is imported or run."""

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
    """A parsed module: its statements, and the names that it defines or imports, on whatever condition."""

    def __init__(self, name: str, source: str | bytes, is_package: bool) -> None:
        self.name = name
        package = name if is_package else name.rpartition(".")[0]
        self.defined: dict[str, Function | ast.ClassDef] = {}
        self.imported: dict[str, str] = {}
        # Names that are set in some other way; and whether names may come from elsewhere (`__getattr__`, `import *`).
        self.assigned: set[str] = set()
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
        """Return the full name that an expression such as a base class or a decorator refers to, without arguments."""
        while isinstance(node, ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        head, dot, rest = ast.unparse(node).partition(".")
        origin = f"{self.name}.{head}" if head in self.defined else self.imported.get(head, head)
        return f"{origin}{dot}{rest}"


# Decorators that leave something else than a function, which can't be wrapped.
NO_FUNCTION = {"lru_cache", "cache", "singledispatchmethod", "remote"}


def decorators(function: Function) -> set[str]:
    """Return the names of a function's decorators, without their modules and arguments."""
    return {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in function.decorator_list}


def generator(function: Function) -> bool:
    """Return whether a function yields, itself and not a function in it."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))
    return False


def parameter_names(function: Function) -> tuple[list[str], bool]:
    """Return the names of a function's parameters, and whether it takes any keyword besides."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
    return [parameter.arg for parameter in named], given.kwarg is not None


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, those under `if`, `try`, `with` and loops too."""
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
    """Yield the attributes that methods of a class set: the variable that holds the object, and the attribute."""
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


class Missing(LookupError):
    """The place is certainly not there. The message says what is there instead."""


class Unknown(LookupError):
    """The source does not tell. The message says why."""


class Place(msgspec.Struct, frozen=True):
    """A function or class in the source.

    Attributes:
        node: Its definition.
        owner: The class that it was asked of, where it is a method.
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
        """Return whether a top-level package or module is there."""
        return bool(_spec_places(package))

    def module(self, name: str) -> Module:
        """Return a parsed module.

        Raises:
            Missing: There is none of that name.
            Unknown: There is, but it has no source.
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

    def find(self, module: str, attribute: str) -> Place:
        """Return a function, a class, or a method, which may be inherited, wherever it is defined.

        Raises:
            Missing: There is none of that name.
            Unknown: The source does not tell.
        """
        head, *rest = attribute.split(".")
        found, where = self._top(self.module(module), head)
        owner = None
        for name in rest:
            if not isinstance(found, ast.ClassDef):
                raise Missing(f"{module} has {head}, which is no class")
            owner = Class(found, where)
            found, where = self._member(owner, name)
        return Place(found, owner)

    def class_named(self, module: str, name: str) -> Class:
        """Return a class, wherever it is defined.

        Raises:
            Missing: There is none of that name.
            Unknown: The source does not tell.
        """
        found, where = self._top(self.module(module), name)
        if not isinstance(found, ast.ClassDef):
            raise Missing(f"{module} has {name}, which is no class")
        return Class(found, where)

    def lineage(self, owner: Class) -> tuple[list[Class], str]:
        """Return a class and all that it inherits from, and why some of that was not found, or an empty text."""
        found: list[Class] = []
        try:
            for kind in self._lineage(owner):
                found.append(kind)
        except Unknown as error:
            return found, str(error)
        return found, ""

    def attributes(self, owner: Class) -> set[str]:
        """Return the names that instances of a class have: methods, fields, and attributes that methods set.

        Raises:
            Unknown: A base class was not found.
        """
        names: set[str] = set()
        for kind in self._lineage(owner):
            members = list(statements(kind.node.body))
            if any(isinstance(node, Function) and node.name in ("__getattr__", "__getattribute__") for node in members):
                raise Unknown(f"{kind.node.name} makes attributes as they are asked for")
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
            except Missing as error:
                raise Unknown(f"{module.name} imports it, but {error}") from None
        if name in module.assigned or module.open:
            raise Unknown(f"{module.name} makes {name} in a way that is not looked at")
        raise Missing(f"{module.name} has no {name}{did_you_mean(name, module.defined)}")

    def _member(self, owner: Class, name: str) -> tuple[Function | ast.ClassDef, Module]:
        known: list[str] = []
        for kind in self._lineage(owner):
            for node in statements(kind.node.body):
                if isinstance(node, ast.ClassDef | Function):
                    known.append(node.name)
                    if node.name == name:
                        return node, kind.module
                elif name in assigned(node):
                    raise Unknown(f"{kind.node.name} sets {name} in a way that is not looked at")
        raise Missing(f"{owner.node.name} has no {name}{did_you_mean(name, known)}")

    def _lineage(self, owner: Class) -> Iterator[Class]:
        """Yield a class and all that it inherits from, depth first.

        Raises:
            Unknown: A base was not found, after what was.
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
                    found, where = self._base(full, kind.module)
                except LookupError:
                    lost = lost or ("" if full.rpartition(".")[2] in _EMPTY_BASES else full)
                    continue
                if isinstance(found, ast.ClassDef):
                    bases.append(Class(found, where))
            queue = bases + queue
        if lost:
            raise Unknown(f"the base class {lost} of {owner.node.name} was not found")

    def _base(self, full: str, module: Module) -> tuple[Function | ast.ClassDef, Module]:
        origin, _, name = full.rpartition(".")
        return self._top(self.module(origin) if origin else module, name)


# Bases that add nothing of their own that a hook could name.
_EMPTY_BASES = ("object", "ABC", "Generic", "Protocol", "Enum", "NamedTuple", "Exception")


def _parse(name: str, path: str) -> Module:
    with open(path, "rb") as file:
        return Module(name, file.read(), is_package=os.path.basename(path) == "__init__.py")


def _path(name: str) -> str:
    """Return the file of a module.

    Raises:
        Missing: There is none of that name.
        Unknown: It is no file.
    """
    top, *inner = name.split(".")
    places = _spec_places(top)
    if not places:
        raise Missing(f"{top} is not installed here")
    known: set[str] = set()
    for place in places:
        if not inner and os.path.isfile(place):
            return place
        base = os.path.join(place, *inner)
        for path in (os.path.join(base, "__init__.py"), f"{base}.py", *(base + end for end in EXTENSION_SUFFIXES)):
            if os.path.isfile(path):
                return path
        if os.path.isdir(base):
            return base
        names = _names(os.path.dirname(base))
        known.update(entry.removesuffix(".py") for entry in names if not entry.startswith("__"))
    last = name.rpartition(".")[2]
    raise Missing(f"there is no module {name}{did_you_mean(last, known)}")


def _spec_places(top: str) -> list[str]:
    """Return the folders of a top-level package, or the file of a single module; the working directory counts too."""
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    except Exception:  # somebody else's finder
        spec = None
    if spec is None:
        return []
    places = list(spec.submodule_search_locations or ())
    if spec.origin is None:
        # A namespace package, or any folder of that name that happens to lie on the path.
        return [place for place in places if _holds_python(place)]
    return places or [spec.origin]


def _holds_python(folder: str) -> bool:
    return any(
        name.endswith(".py") or os.path.isfile(os.path.join(folder, name, "__init__.py")) for name in _names(folder)
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
