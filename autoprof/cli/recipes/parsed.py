"""One module's source, parsed: its definitions and imports. Nothing is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

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
