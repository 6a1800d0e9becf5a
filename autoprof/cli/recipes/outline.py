"""Outline of a trainer, from its source: its functions, its loop over steps, and the counter of steps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import msgspec

from autoprof.cli.recipes.source import (
    NO_FUNCTION,
    Class,
    Function,
    Missing,
    Module,
    Sources,
    Unknown,
    attributes_set,
    decorators,
    generator,
    parameter_names,
)

# What a name that begins so does beside the work that the rest of it names.
_ASIDE = re.compile(
    "log|dump|write|print|init|create|set|is|has|build|setup|shutdown|register|add|remove|make|parse|count|num|check|"
    "resolve|assert|load|on|should|maybe|prepare|wait|default|reissue|submit|fetch|merge|start|stop"
)
_CRITIC = {"critic", "value"}
# Who does the work of a kind.
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
    """Return the words of a name in small letters."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+", name)]


def kind_of(name: str) -> str:
    """Return the kind of stage that a function of this name is, or an empty text."""
    words = tokens(name)
    if not words or _ASIDE.fullmatch(words[0]):
        return ""
    joined, there = "_".join(words), set(words)
    if re.search(r"log_?probs?|logps?|log_likelihood", joined):
        return "ref_log_prob" if there & {"ref", "reference"} else "log_prob"
    if words[0] in ("validate", "evaluate", "evaluation", "eval", "validation", "test") and (
        len(words) == 1 or words[1] in ("epoch", "step", "model", "policy")
    ):
        return "validate"
    if words[0] in ("save", "checkpoint") and (len(words) == 1 or there & {"checkpoint", "ckpt", "checkpoints"}):
        return "checkpoint"
    if there & {"sync", "update", "push", "broadcast", "transfer", "refit"} and there & {
        "weight",
        "weights",
        "params",
        "parameters",
    }:
        return "weight_sync"
    if (words[0] in ("optimizer", "optim") and "step" in there) or joined in ("optimize", "step_optimizer"):
        return "optimizer"
    if words[0] in ("update", "train", "training", "learn", "optimize", "ppo", "fit", "policy"):
        return _update(words)
    if there & {"advantage", "advantages", "adv", "gae", "returns"}:
        return "advantage"
    if words[0] in ("generate", "sample", "gen", "generation") or joined.endswith("_rollout"):
        return "generate"
    if words[0] == "rollout" and (len(words) == 1 or words[1] in ("step", "batch", "phase", "once", "samples")):
        return "generate"
    if there & {"generate", "rollouts", "rollout"} and words[0] in ("do", "run", "collect", "async"):
        return "generate"
    if there & {"reward", "rewards", "score", "scores"} and not there & {"metrics", "extra", "fn", "func", "handles"}:
        return "reward" if words[0] not in ("get", "val") or words[1:] in (["reward"], ["rewards"]) else ""
    if words[-1] == "values" and words[0] in ("compute", "get", "calculate", "values"):
        return "values"
    return "data" if re.fullmatch(r"(get|next|load|read|sample)_(next_)?batch(es)?(_samples)?", joined) else ""


def _update(words: list[str]) -> str:
    rest = set(words[1:])
    if rest & _CRITIC and not rest & {"target"}:
        return "update_critic"
    known = {"actor", "policy", "model", "step", "batch", "minibatch", "mini", "grpo", "ppo", "on", "update", "train"}
    if words[0] in ("train", "fit", "ppo") and not rest:
        return ""
    return "update_actor" if rest <= known | {"one", "training"} else ""


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


# Names of functions in which the loop over the steps is looked for where nothing is counted.
_LOOPS = ("fit", "train", "run", "learn", "main", "train_loop", "training_loop", "run_loop", "loop")
_NOT_HOOKED = {"property", "cached_property", "abstractmethod", "contextmanager", "asynccontextmanager", "overload"}
_NOT_HOOKED |= NO_FUNCTION


class Outline:
    """The functions of a class, inherited ones included, or those of a module.

    Attributes:
        owner: The class; None for the functions of a module.
        module: The module that defines it.
        functions: The functions that can be hooked, by name.
        homes: The module that defines each of them.
        lost: Why not all bases are known, or empty.
    """

    def __init__(self, sources: Sources, module: Module, owner: Class | None) -> None:
        self.module, self.owner = module, owner
        self.functions: dict[str, Function] = {}
        # Of each name all definitions, with the place of their class in the lineage: `super()` calls those of bases.
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
        for place, kind in enumerate(self.lineage):
            self._take((node for node in kind.node.body if isinstance(node, Function)), kind.module, place)
        self.loop = self._loop()

    def _take(self, nodes: Iterable[Function], module: Module, place: int = 0) -> None:
        for node in nodes:
            self._all.setdefault(node.name, []).append((place, node))
            if node.name not in self.homes:
                self.homes[node.name] = module.name
                if not decorators(node) & _NOT_HOOKED and not generator(node) and not node.name.startswith("__"):
                    self.functions[node.name] = node

    def called(self, name: str) -> set[str]:
        """Return the functions of the outline that a function uses, those that these use included."""
        found: set[tuple[str, int]] = set()
        queue = [(name, 0)]
        while queue:
            called, least = queue.pop()
            there = [each for each in self._all.get(called, ()) if each[0] >= least][:1]
            new = {(used, own + 1 if up else 0) for own, node in there for used, up in self._used(node)} - found
            found |= new
            queue.extend(new)
        return {each for each, _ in found} - {name}

    def users(self, name: str) -> list[str]:
        """Return the functions that use a function themselves."""
        used = {each: {of for of, _ in self._used(node)} for each, node in self.functions.items() if each != name}
        return [each for each, names in used.items() if name in names]

    def own(self, path: str) -> str:
        """Return the name of the outline's function that a path such as `self.update` is, or an empty text."""
        head, _, rest = path.rpartition(".")
        return rest if head == ("" if self.owner is None else "self") and rest in self.functions else ""

    def calls_of_parts(self) -> list[str]:
        """Return the calls such as `self.policy.generate` of the loop, and of what the loop calls."""
        if self.loop is None:
            return []
        inside = {name for call in self.loop.calls if (own := self.own(call.path)) for name in (own, *self.called(own))}
        found = [call.path for call in self.loop.calls]
        for name in inside & self.functions.keys():
            found += [call.path for call in calls_in(self.functions[name].body)]
        return list(dict.fromkeys(path for path in found if path.startswith("self.") and path.count(".") > 1))

    def elsewhere(self, path: str) -> tuple[Class, Function] | None:
        """Return the method that `self.part.method` is, where the source tells the class of the part."""
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
                        found = self._sources.class_named(origin, called)
                        place = self._sources.find(found.module.name, f"{found.node.name}.{name}")
                    except (Missing, Unknown):
                        continue
                    if isinstance(place.node, Function):
                        return found, place.node
        return None

    def number(self, function: Function) -> str:
        """Return the parameter that holds the number of the step, or an empty text."""
        return next((name for name in parameter_names(function)[0] if COUNTER.fullmatch(name)), "")

    def counter_in(self, name: str) -> tuple[str, bool]:
        """Return what a function counts, or an empty text, and whether that is of the finished step before."""
        found = increments(self.functions[name].body)
        path = found[0].path if found else ""
        return path, bool(path) and not self._begins_with_one(path)

    def sets(self, attribute: str) -> bool:
        """Return whether the class sets an attribute of `self`."""
        return any(("self", attribute) in attributes_set(kind.node) for kind in self.lineage)

    def _used(self, function: Function) -> Iterator[tuple[str, bool]]:
        """Yield the functions of the outline that a function names, and whether by `super()`."""
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Call):
                of = ast.unparse(node.value)
                if self.owner is not None and of in ("self", "super()") and node.attr in self.functions:
                    yield node.attr, of != "self"
            elif self.owner is None and isinstance(node, ast.Name) and node.id in self.functions:
                yield node.id, False

    def _loop(self, extra: Module | None = None) -> Loop | None:
        bodies: list[tuple[str, list[ast.stmt]]] = [(name, node.body) for name, node in self.functions.items()]
        if extra is not None:
            bodies.append(("", [node for node in extra.body if not isinstance(node, Function | ast.ClassDef)]))
        counting = [loop for name, body in bodies for loop in self._counting(name, body)]
        if counting:
            return max(counting, key=lambda loop: (loop.function in _LOOPS, bool(loop.calls), len(loop.calls)))
        for name, body in sorted(bodies, key=lambda each: each[0] not in (*_LOOPS, "")):
            for loop in walk(body, LOOPS):
                calls = [call for call in calls_in(loop.body) if self.own(call.path)]
                if calls and name in (*_LOOPS, ""):
                    return Loop(name, calls)
        return None

    def _counting(self, name: str, body: list[ast.stmt]) -> Iterator[Loop]:
        for loop in walk(body, LOOPS):
            inner = [each for each in walk(loop.body, LOOPS) if self._counts(each)]
            if inner or not (found := self._counts(loop)):
                continue
            first, path = found[0].node, found[0].path
            before = [each for each in increments(body) if each.node.lineno < loop.lineno and each.path == path]
            calls = list(calls_in(loop.body))
            work = [
                call.node.lineno for call in calls if self.own(call.path) and not self.counts_only(self.own(call.path))
            ]
            after = bool(work) and first.lineno > min(work) and not before and not self._begins_with_one(path)
            yield Loop(name, calls, path, after, first in (loop, *loop.body))

    def _counts(self, loop: ast.For | ast.AsyncFor | ast.While) -> list[Count]:
        """Return where a loop counts, by functions that do nothing else too."""
        calls = [node for node in walk(loop.body, (ast.Expr,)) if isinstance(node, ast.Expr)]
        own = [
            Count(path, node)
            for node in calls
            if isinstance(node.value, ast.Call) and (path := self.counts_only(self.own(ast.unparse(node.value.func))))
        ]
        return sorted([*counts(loop), *own], key=lambda each: each.node.lineno)

    def counts_only(self, name: str) -> str:
        """Return what a function counts that does nothing else, or an empty text."""
        body = [node for node in self.functions[name].body if not _is_text(node)] if name else []
        return found[0].path if len(body) == 1 and (found := increments(body)) else ""

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
    """Return the class of a module that looks most like a trainer, or an empty text where it has none."""

    def worth(node: ast.ClassDef) -> int:
        names = {each.name.strip("_") for each in node.body if isinstance(each, Function)}
        named = {"trainer", "learner", "runner", "driver"} & set(tokens(node.name))
        return 2 * len(names & set(_LOOPS)) + bool(named) + any("step" in tokens(name) for name in names)

    classes = [node for node in module.defined.values() if isinstance(node, ast.ClassDef)]
    best = max(classes, key=worth, default=None)
    return best.name if best is not None and worth(best) else ""
