"""Outline of a trainer, from its source: its functions, its loop over the steps, and the counter of steps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import msgspec

from autoprof.cli.recipes.source import (
    NO_FUNCTION,
    Class,
    Function,
    Module,
    NotInSource,
    Sources,
    Unknown,
    attributes_set,
    decorators,
    generator,
    parameter_names,
)

# First words of functions that are no stage, though the rest of the name is like a stage's, such as `log_rewards`.
_NO_STAGE_VERB = re.compile(
    "log|dump|write|print|init|create|set|is|has|build|setup|shutdown|register|add|remove|make|parse|count|num|check|"
    "resolve|assert|load|on|should|maybe|prepare|wait|default|reissue|submit|fetch|merge|start|stop"
)
_CRITIC = {"critic", "value"}
# Roles by the kind of stage.
ROLES = {
    "generate": "rollout",
    "reward": "reward",
    "log_prob": "actor",
    "ref_log_prob": "ref",
    "values": "critic",
    "update_actor": "actor",
    "update_critic": "critic",
    "optimizer": "actor",
    "weight_sync": "actor",
}


def tokens(name: str) -> list[str]:
    """Return the words of a name in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+", name)]


def kind_of(name: str) -> str:
    """Return the kind of stage of a function, by its name; an empty text if it is no stage."""
    words = tokens(name)
    if not words or _NO_STAGE_VERB.fullmatch(words[0]):
        return ""
    joined, word_set = "_".join(words), set(words)
    if re.search(r"log_?probs?|logps?|log_likelihood", joined):
        return "ref_log_prob" if word_set & {"ref", "reference"} else "log_prob"
    if words[0] in ("validate", "evaluate", "evaluation", "eval", "validation", "test") and (
        len(words) == 1 or words[1] in ("epoch", "step", "model", "policy")
    ):
        return "validate"
    if words[0] in ("save", "checkpoint") and (len(words) == 1 or word_set & {"checkpoint", "ckpt", "checkpoints"}):
        return "checkpoint"
    if word_set & {"sync", "update", "push", "broadcast", "transfer", "refit"} and word_set & {
        "weight",
        "weights",
        "params",
        "parameters",
    }:
        return "weight_sync"
    if (words[0] in ("optimizer", "optim") and "step" in word_set) or joined in ("optimize", "step_optimizer"):
        return "optimizer"
    if words[0] in ("update", "train", "training", "learn", "optimize", "ppo", "fit", "policy"):
        return _update_kind(words)
    if word_set & {"advantage", "advantages", "adv", "gae", "returns"}:
        return "advantage"
    if words[0] in ("generate", "sample", "gen", "generation") or joined.endswith("_rollout"):
        return "generate"
    if words[0] == "rollout" and (len(words) == 1 or words[1] in ("step", "batch", "phase", "once", "samples")):
        return "generate"
    if word_set & {"generate", "rollouts", "rollout"} and words[0] in ("do", "run", "collect", "async"):
        return "generate"
    if word_set & {"reward", "rewards", "score", "scores"} and not word_set & {
        "metrics",
        "extra",
        "fn",
        "func",
        "handles",
    }:
        return "reward" if words[0] not in ("get", "val") or words[1:] in (["reward"], ["rewards"]) else ""
    if words[-1] == "values" and words[0] in ("compute", "get", "calculate", "values"):
        return "values"
    return "data" if re.fullmatch(r"(get|next|load|read|sample)_(next_)?batch(es)?(_samples)?", joined) else ""


def _update_kind(words: list[str]) -> str:
    others = set(words[1:])
    if others & _CRITIC and not others & {"target"}:
        return "update_critic"
    known = {"actor", "policy", "model", "step", "batch", "minibatch", "mini", "grpo", "ppo", "on", "update", "train"}
    if words[0] in ("train", "fit", "ppo") and not others:
        return ""
    return "update_actor" if others <= known | {"one", "training"} else ""


# Names of counters and parameters for the number of a step.
COUNTER = re.compile(
    r"_*((global|train|training|update|current|cur|num|n|completed|total)_?)?(steps?|iterations?|iter|updates?)"
    r"(_(idx|num|number|count|done))?"
)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class LoopCall(msgspec.Struct, frozen=True):
    """A call in the loop.

    Attributes:
        path: The called function as it is written in the source, such as `self.update`.
        always: True if every round of the loop makes the call.
    """

    path: str
    node: ast.Call
    always: bool


class StepLoop(msgspec.Struct, frozen=True):
    """The loop over the steps.

    Attributes:
        function: The function that contains it; empty for a module's top level.
        calls: Its calls, in the order of the source.
        counter: The counter of steps, such as `self.global_step`, or an empty text.
        counts_after: True if the counter has the number of the finished step while a step is running.
        each_round: True if every round increases the counter.
    """

    function: str
    calls: list[LoopCall]
    counter: str = ""
    counts_after: bool = False
    each_round: bool = False


def walk(body: Iterable[ast.AST], kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.For]:
    """Yield the nodes of these kinds, except those inside nested functions and classes."""
    for node in body:
        if isinstance(node, kinds):
            yield node  # type: ignore[misc]
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            yield from walk(ast.iter_child_nodes(node), kinds)


class Count(msgspec.Struct, frozen=True):
    """A statement that counts steps, and the counter that it changes."""

    path: str
    node: ast.stmt


def increments(body: list[ast.stmt]) -> list[Count]:
    """Return the statements that add one to a counter of steps, in the order of the source."""
    statements: list[Count] = []
    for node in walk(body, (ast.AugAssign,)):
        assert isinstance(node, ast.AugAssign)
        by_one = isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant) and node.value.value == 1
        if by_one and (path := _counter(node.target)):
            statements.append(Count(path, node))
    return sorted(statements, key=lambda count: count.node.lineno)


def counts(loop: ast.For | ast.AsyncFor | ast.While) -> list[Count]:
    """Return the statements of a loop that count: its own target, increments, and assignments to the counter."""
    statements = increments(loop.body)
    for node in walk(loop.body, (ast.Assign,)):
        assert isinstance(node, ast.Assign)
        if isinstance(node.value, ast.Name | ast.BinOp) and (path := _counter(node.targets[0])):
            statements.append(Count(path, node))
    own = [] if isinstance(loop, ast.While) else [Count(path, loop)] if (path := _counter(loop.target)) else []
    return [*own, *sorted(statements, key=lambda count: count.node.lineno)]


def _counter(target: ast.expr) -> str:
    """Return the target if it is an attribute of `self` named like a counter of steps, else an empty text."""
    path = ast.unparse(target)
    return path if path.startswith("self.") and COUNTER.fullmatch(path.rpartition(".")[2]) else ""


def calls_in(body: list[ast.stmt], always: bool = True) -> Iterator[LoopCall]:
    """Yield the calls of names and attributes, in the order of the source; other calls are omitted."""
    for node in body:
        yield from _calls_of(node, always)


def _calls_of(node: ast.AST, always: bool) -> Iterator[LoopCall]:
    if isinstance(node, Function | ast.ClassDef | ast.Lambda):
        return
    if isinstance(node, ast.Call):
        for child in ast.iter_child_nodes(node):
            yield from _calls_of(child, always)
        path = ast.unparse(node.func)
        if re.fullmatch(r"[\w.]+", path):
            yield LoopCall(path, node, always)
        return
    if isinstance(node, ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While):
        head = [node.iter] if isinstance(node, ast.For | ast.AsyncFor) else [node.test]
        for child in ast.iter_child_nodes(node):
            yield from _calls_of(child, always and child in head)
        return
    inside = always and not isinstance(node, ast.ExceptHandler | ast.BoolOp)
    for child in ast.iter_child_nodes(node):
        yield from _calls_of(child, inside)


# Functions that are searched for the loop over the steps if no loop counts steps.
_LOOPS = ("fit", "train", "run", "learn", "main", "train_loop", "training_loop", "run_loop", "loop")
_NOT_HOOKED = {"property", "cached_property", "abstractmethod", "contextmanager", "asynccontextmanager", "overload"}
_NOT_HOOKED |= NO_FUNCTION


class Outline:
    """Functions of a class, including inherited ones, or of a module.

    Attributes:
        owner: The class; None for the functions of a module.
        module: The module of the class or the functions.
        functions: The functions that can be hooked, by name.
        homes: The names of the modules that define the functions, by function.
        lost: The reason why a base class is not known; empty if all are known.
        lineage: The class and its base classes; empty for a module.
        loop: The loop over the steps, or None.
    """

    def __init__(self, sources: Sources, module: Module, owner: Class | None) -> None:
        self.module, self.owner = module, owner
        self.functions: dict[str, Function] = {}
        # All definitions by name, each with the index of its class in the lineage, to resolve `super()`.
        self._all: dict[str, list[tuple[int, Function]]] = {}
        self.homes: dict[str, str] = {}
        self.lost = ""
        self._sources = sources
        self.lineage: list[Class] = []
        if owner is None:
            self._take((node for node in module.defined.values() if isinstance(node, Function)), module)
            self.loop = self._loop(extra=module)
            return
        self.lineage, self.lost = sources.lineage(owner)
        for level, kind in enumerate(self.lineage):
            self._take((node for node in kind.node.body if isinstance(node, Function)), kind.module, level)
        self.loop = self._loop()

    def _take(self, nodes: Iterable[Function], module: Module, level: int = 0) -> None:
        for node in nodes:
            self._all.setdefault(node.name, []).append((level, node))
            if node.name not in self.homes:
                self.homes[node.name] = module.name
                if not decorators(node) & _NOT_HOOKED and not generator(node) and not node.name.startswith("__"):
                    self.functions[node.name] = node

    def called(self, name: str) -> set[str]:
        """Return the functions of the outline that a function uses, directly or indirectly."""
        seen: set[tuple[str, int]] = set()
        queue = [(name, 0)]
        while queue:
            called, min_level = queue.pop()
            definition = [entry for entry in self._all.get(called, ()) if entry[0] >= min_level][:1]
            new = {
                (used, level + 1 if by_super else 0)
                for level, node in definition
                for used, by_super in self._used(node)
            } - seen
            seen |= new
            queue.extend(new)
        return {function for function, _ in seen} - {name}

    def users(self, name: str) -> list[str]:
        """Return the functions that use a function directly."""
        used = {
            user: {function for function, _ in self._used(node)}
            for user, node in self.functions.items()
            if user != name
        }
        return [user for user, names in used.items() if name in names]

    def own(self, path: str) -> str:
        """Return the name of the outline's function that a path such as `self.update` calls, or an empty text."""
        head, _, name = path.rpartition(".")
        return name if head == ("" if self.owner is None else "self") and name in self.functions else ""

    def calls_of_parts(self) -> list[str]:
        """Return calls of other objects' methods, such as `self.policy.generate`, in the loop and in its functions."""
        if self.loop is None:
            return []
        inside = {name for call in self.loop.calls if (own := self.own(call.path)) for name in (own, *self.called(own))}
        paths = [call.path for call in self.loop.calls]
        for name in inside & self.functions.keys():
            paths += [call.path for call in calls_in(self.functions[name].body)]
        return list(dict.fromkeys(path for path in paths if path.startswith("self.") and path.count(".") > 1))

    def elsewhere(self, path: str) -> tuple[Class, Function] | None:
        """Return the class and the method of a path `self.part.method`; None if the source does not show the class."""
        part, _, name = path.rpartition(".")
        for kind in self.lineage:
            for node in ast.walk(kind.node):
                if (
                    isinstance(node, ast.Assign)
                    and isinstance(node.value, ast.Call)
                    and any(ast.unparse(target) == part for target in node.targets)
                ):
                    origin, _, called = kind.module.full(node.value).rpartition(".")
                    try:
                        owner = self._sources.class_named(origin, called)
                        method = self._sources.find(owner.module.name, f"{owner.node.name}.{name}")
                    except (NotInSource, Unknown):
                        continue
                    if isinstance(method.node, Function):
                        return owner, method.node
        return None

    def number(self, function: Function) -> str:
        """Return the parameter that has the number of the step, by its name, or an empty text."""
        return next((name for name in parameter_names(function)[0] if COUNTER.fullmatch(name)), "")

    def counter_in(self, name: str) -> tuple[str, bool]:
        """Return a function's counter of steps, or an empty text, and True if it has the finished step's number."""
        statements = increments(self.functions[name].body)
        path = statements[0].path if statements else ""
        return path, bool(path) and not self._begins_with_one(path)

    def sets(self, attribute: str) -> bool:
        """Return whether the class sets an attribute of `self`."""
        return any(("self", attribute) in attributes_set(kind.node) for kind in self.lineage)

    def _used(self, function: Function) -> Iterator[tuple[str, bool]]:
        """Yield the functions of the outline that a function names, each with True if it is named with `super()`."""
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Call):
                holder = ast.unparse(node.value)
                if self.owner is not None and holder in ("self", "super()") and node.attr in self.functions:
                    yield node.attr, holder != "self"
            elif self.owner is None and isinstance(node, ast.Name) and node.id in self.functions:
                yield node.id, False

    def _loop(self, extra: Module | None = None) -> StepLoop | None:
        bodies: list[tuple[str, list[ast.stmt]]] = [(name, node.body) for name, node in self.functions.items()]
        if extra is not None:
            bodies.append(("", [node for node in extra.body if not isinstance(node, Function | ast.ClassDef)]))
        counting = [loop for name, body in bodies for loop in self._counting(name, body)]
        if counting:
            return max(counting, key=lambda loop: (loop.function in _LOOPS, bool(loop.calls), len(loop.calls)))
        for name, body in sorted(bodies, key=lambda item: item[0] not in (*_LOOPS, "")):
            for loop in walk(body, LOOPS):
                calls = [call for call in calls_in(loop.body) if self.own(call.path)]
                if calls and name in (*_LOOPS, ""):
                    return StepLoop(name, calls)
        return None

    def _counting(self, name: str, body: list[ast.stmt]) -> Iterator[StepLoop]:
        for loop in walk(body, LOOPS):
            inner = [inner_loop for inner_loop in walk(loop.body, LOOPS) if self._counts(inner_loop)]
            if inner or not (statements := self._counts(loop)):
                continue
            first, path = statements[0].node, statements[0].path
            before = [count for count in increments(body) if count.node.lineno < loop.lineno and count.path == path]
            calls = list(calls_in(loop.body))
            work = [
                call.node.lineno for call in calls if self.own(call.path) and not self.counts_only(self.own(call.path))
            ]
            after = bool(work) and first.lineno > min(work) and not before and not self._begins_with_one(path)
            yield StepLoop(name, calls, path, after, first in (loop, *loop.body))

    def _counts(self, loop: ast.For | ast.AsyncFor | ast.While) -> list[Count]:
        """Return the statements of a loop that count, including calls of functions that do nothing else."""
        calls = [node for node in walk(loop.body, (ast.Expr,)) if isinstance(node, ast.Expr)]
        own = [
            Count(path, node)
            for node in calls
            if isinstance(node.value, ast.Call) and (path := self.counts_only(self.own(ast.unparse(node.value.func))))
        ]
        return sorted([*counts(loop), *own], key=lambda count: count.node.lineno)

    def counts_only(self, name: str) -> str:
        """Return the counter if a function does nothing but count, else an empty text."""
        body = [node for node in self.functions[name].body if not _is_text(node)] if name else []
        return statements[0].path if len(body) == 1 and (statements := increments(body)) else ""

    def _begins_with_one(self, path: str) -> bool:
        trees: list[ast.AST] = [*(kind.node for kind in self.lineage)] or [*self.functions.values()]
        return any(
            isinstance(node, ast.Assign)
            and any(ast.unparse(target) == path for target in node.targets)
            and isinstance(node.value, ast.Constant)
            and node.value.value == 1
            for tree in trees
            for node in ast.walk(tree)
        )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def trainer_in(module: Module) -> str:
    """Return the class of a module that looks most like a trainer; an empty text if none does."""

    def score(node: ast.ClassDef) -> int:
        names = {member.name.strip("_") for member in node.body if isinstance(member, Function)}
        named = {"trainer", "learner", "runner", "driver"} & set(tokens(node.name))
        return 2 * len(names & set(_LOOPS)) + bool(named) + any("step" in tokens(name) for name in names)

    classes = [node for node in module.defined.values() if isinstance(node, ast.ClassDef)]
    best = max(classes, key=score, default=None)
    return best.name if best is not None and score(best) else ""
