"""Loops in the source of a trainer: their calls, and what they count."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import msgspec

from autoprof.cli.recipes.parsed import Function

# Names of counters and parameters that hold the number of a step.
COUNTER = re.compile(
    r"_*((global|train|training|update|current|cur|num|n|completed|total)_?)?(steps?|iterations?|iter|updates?)"
    r"(_(idx|num|number|count|done))?"
)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Call(msgspec.Struct, frozen=True):
    """A call in the loop.

    Attributes:
        path: The called function as the source has it, such as `self.update`.
        always: Whether each round of the loop makes it.
    """

    path: str
    node: ast.Call
    always: bool


class Loop(msgspec.Struct, frozen=True):
    """The loop over the steps.

    Attributes:
        function: The function that it is in.
        calls: Its calls in their order.
        counter: What it counts steps with, such as `self.global_step`, or empty.
        counts_after: Whether the counter is that of the finished step while a step is going on.
        each_round: Whether each round counts.
    """

    function: str
    calls: list[Call]
    counter: str = ""
    counts_after: bool = False
    each_round: bool = False


def walk(body: Iterable[ast.AST], kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.For]:
    """Yield nodes of these kinds, but for those of functions and classes that are defined in between."""
    for node in body:
        if isinstance(node, kinds):
            yield node  # type: ignore[misc]
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            yield from walk(ast.iter_child_nodes(node), kinds)


class Count(msgspec.Struct, frozen=True):
    """A place where steps are counted: what with, and the statement."""

    path: str
    node: ast.stmt


def increments(body: list[ast.stmt]) -> list[Count]:
    """Return where a counter goes up by one, in the order of the source."""
    found: list[Count] = []
    for node in walk(body, (ast.AugAssign,)):
        assert isinstance(node, ast.AugAssign)
        by_one = isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant) and node.value.value == 1
        if by_one and (path := _counter(node.target)):
            found.append(Count(path, node))
    return sorted(found, key=lambda each: each.node.lineno)


def counts(loop: ast.For | ast.AsyncFor | ast.While) -> list[Count]:
    """Return where a loop counts: by its own target, by adding one, or by setting the counter to what is counted."""
    found = increments(loop.body)
    for node in walk(loop.body, (ast.Assign,)):
        assert isinstance(node, ast.Assign)
        if isinstance(node.value, ast.Name | ast.BinOp) and (path := _counter(node.targets[0])):
            found.append(Count(path, node))
    own = [] if isinstance(loop, ast.While) else [Count(path, loop)] if (path := _counter(loop.target)) else []
    return [*own, *sorted(found, key=lambda each: each.node.lineno)]


def _counter(target: ast.expr) -> str:
    """Return an attribute of `self` that is named like a counter of steps, or an empty text."""
    path = ast.unparse(target)
    return path if path.startswith("self.") and COUNTER.fullmatch(path.rpartition(".")[2]) else ""


def calls_in(body: list[ast.stmt], always: bool = True) -> Iterator[Call]:
    """Yield the calls of plain names and of attributes, in the order of the source."""
    for node in body:
        yield from _calls_of(node, always)


def _calls_of(node: ast.AST, always: bool) -> Iterator[Call]:
    if isinstance(node, Function | ast.ClassDef | ast.Lambda):
        return
    if isinstance(node, ast.Call):
        for child in ast.iter_child_nodes(node):
            yield from _calls_of(child, always)
        path = ast.unparse(node.func)
        if re.fullmatch(r"[\w.]+", path):
            yield Call(path, node, always)
        return
    if isinstance(node, ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While):
        head = [node.iter] if isinstance(node, ast.For | ast.AsyncFor) else [node.test]
        for child in ast.iter_child_nodes(node):
            yield from _calls_of(child, always and child in head)
        return
    inside = always and not isinstance(node, ast.ExceptHandler | ast.BoolOp)
    for child in ast.iter_child_nodes(node):
        yield from _calls_of(child, inside)
