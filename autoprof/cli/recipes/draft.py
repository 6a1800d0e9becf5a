"""First recipe for a trainer, made from its source: a step, stages, and the counter of steps."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

import msgspec

from autoprof import _boot
from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes import places
from autoprof.cli.recipes.outline import ROLES, Loop, Outline, kind_of, trainer_in
from autoprof.cli.recipes.source import Class, Function, Missing, Sources, Unknown, parameter_names
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, RecipeError, script

_BEGINS = re.compile(
    r"_*(on_)?((train|training)_)?(step|iteration|batch)_(begin|start)|_*(begin|start)_(step|iteration)"
)
_WHOLE = re.compile(
    r"_*((do|run|fit|one|single|ppo|grpo|rl|async|make)_)*((train|training|learn)_)?((one|single)_)?"
    r"(step|iteration|iter)(_once)?"
)
_UNNUMBERED = (
    'No counter was found, so steps are counted from 1, those of a resumed run too: number = "self.global_step" in the '
    "options would name one."
)
_ENTRIES = ("train", "fit", "run", "learn", "main")


def is_whole(function: str) -> bool:
    """Return whether a function's name says that it is one step."""
    return _WHOLE.fullmatch(function) is not None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A hook for steps. `owner` is the class of the function; None for one of a module."""

    name: str
    owner: Class | None
    function: str
    behaviour: str
    options: dict[str, object]
    comment: str


class StepSearch:
    """The hooks that find the steps of an outline.

    Attributes:
        found: The hooks.
        whole: The function whose call is one step, where there is one.
    """

    def __init__(self, outline: Outline, target: str) -> None:
        self.outline = outline
        self.found: list[Found] = []
        self.whole = ""
        self._target = target

    def loops(self) -> set[str]:
        """Return the functions that make all steps."""
        return {self.outline.loop.function, *self._callers(self.outline.loop)} if self.outline.loop else set()

    def _callers(self, loop: Loop | None) -> list[str]:
        """Return the functions from that of the loop up to the one that others call, such as `train`."""
        found: list[str] = []
        name = loop.function if loop is not None else ""
        while name and (users := [each for each in self.outline.users(name) if each not in found]):
            best = next((each for each in _ENTRIES if each in users), users[0])
            if len(users) > 1 and best == users[0] and best not in _ENTRIES:
                break
            found.append(best)
            name = best
        return found

    def find(self, stages: list[str]) -> list[Found]:
        """Return the hooks. `stages` are functions that are stages."""
        outline, loop = self.outline, self.outline.loop
        if loop is None:
            self.whole = next((each for each in outline.functions if is_whole(each)), "")
            if self.whole:
                self._add("step", self.whole, "step.wrap", self._numbered(self.whole, None), "One call is one step.")
            return self.found
        if not self._begin_elsewhere(loop) and not self._whole(loop, stages):
            self._first_call(loop)
        entry = [loop.function, *self._callers(loop)][-1]
        if self.found and not self.whole and entry in outline.functions:
            self._add("loop", entry, "step.loop", {}, "It makes all steps: the last one ends with it.")
        return self.found

    def _begin_elsewhere(self, loop: Loop) -> bool:
        """Begin the step with a call that is named so."""
        for call in loop.calls:
            name = call.path.rpartition(".")[2]
            if not _BEGINS.fullmatch(name):
                continue
            comment = "Each call begins a step."
            if own := self.outline.own(call.path):
                self._add("step-begin", own, "step.begin", self._numbered(own, loop), comment)
                return True
            found = self.outline.elsewhere(call.path)
            if found is None or target_of(found[0].module.name) != self._target:
                continue
            kind, node = found
            options: dict[str, object] = {}
            parts = loop.counter.split(".")
            for place, argument in enumerate(call.node.args):
                given = ast.unparse(argument).split(".")
                names = parameter_names(node)[0][1:]
                if loop.counter and parts[: len(given)] == given and place < len(names):
                    options["number"] = ".".join([names[place], *parts[len(given) :]])
            if "number" in options and loop.counts_after:
                options["offset"] = 1
            self._add("step-begin", name, "step.begin", options, comment, kind)
            return True
        return False

    def _whole(self, loop: Loop, stages: list[str]) -> bool:
        """Take a function that is one step by its name."""
        outline = self.outline
        for call in loop.calls:
            name = outline.own(call.path)
            if not name or not call.always or not is_whole(name):
                continue
            within = loop.counter and loop.function == name
            if loop.counter and not loop.each_round and not within:
                continue
            rest = {outline.own(each.path) for each in loop.calls if each.node.lineno > call.node.lineno}
            if rest & set(stages):
                comment = "Each call begins a step, which lasts to the next."
                self._add("step-begin", name, "step.begin", self._numbered(name, loop), comment)
            else:
                self.whole = name
                self._add("step", name, "step.wrap", self._numbered(name, loop), "One call is one step.")
            return True
        return False

    def _first_call(self, loop: Loop) -> None:
        """Begin the step with the first call that each round makes. With the same number again no step begins."""
        own = [self.outline.own(call.path) for call in loop.calls if call.always]
        name = next((each for each in own if each and not self.outline.counts_only(each)), "")
        if name:
            comment = "The first call of each round of the loop begins a step, which lasts to the next."
            self._add("step-begin", name, "step.begin", self._numbered(name, loop), comment)

    def _numbered(self, name: str, loop: Loop | None) -> dict[str, object]:
        node = self.outline.functions[name]
        if parameter := self.outline.number(node):
            return {"number": parameter}
        if loop is not None and loop.counter:
            counter, after = loop.counter, loop.counts_after
        else:
            counter, after = self.outline.counter_in(name)
        if not counter or "self" not in parameter_names(node)[0][:1]:
            return {}
        return {"number": counter, "offset": 1} if after else {"number": counter}

    def _add(
        self,
        name: str,
        function: str,
        behaviour: str,
        options: dict[str, object],
        comment: str,
        owner: Class | None = None,
    ) -> None:
        whose = owner or self.outline.owner
        if "number" not in options and behaviour != "step.loop":
            comment += f" {_UNNUMBERED}"
        found = Found(name=name, owner=whose, function=function, behaviour=behaviour, options=options, comment=comment)
        self.found.append(found)


class DraftHook(msgspec.Struct, kw_only=True):
    """A hook as the file has it, with a comment above it."""

    name: str
    module: str
    attribute: str
    behaviour: str
    kind: str = ""
    options: dict[str, object] = {}
    comment: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of its table."""
        if self.comment:
            yield f"# {self.comment}"
        yield "[[hook]]"
        for key in ("name", "module", "attribute", "behaviour", "kind"):
            if value := getattr(self, key):
                yield f"{key} = {json.dumps(value)}"
        if self.options:
            inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.options.items())
            yield f"options = {{ {inner} }}"
        yield ""


def own_hooks() -> dict[str, BoundHook]:
    """Return the hooks of autoprof's recipes by their keys."""
    found: dict[str, BoundHook] = {}
    for path in places.toml_files(_boot.own_recipes()):
        try:
            found |= {hook.key: hook for hook in recipe.load(path)}
        except RecipeError:
            continue
    return found


def target_of(module: str) -> str:
    """Return the target of a module or a script."""
    return script(module) or module.partition(".")[0]


def is_step(hook: BoundHook) -> bool:
    """Return whether a hook finds steps."""
    return hook.hook.behaviour.startswith("step.") and hook.hook.behaviour != "step.trainer"


_GUIDE = "docs/reference/recipes.md"
# Kinds of stages that do what other kinds do, as a validation generates.
_WITH_OTHERS: dict[str, set[str] | None] = {
    "update_actor": {"log_prob", "ref_log_prob", "values", "optimizer", "data", "update_critic"},
    "update_critic": {"values", "optimizer", "data"},
    "ref_log_prob": {"log_prob"},
    "advantage": {"values"},
    "validate": None,
    "checkpoint": None,
}


def draft_recipe(place: str, sources: Sources) -> str:
    """Return a recipe for `package.module:Class` or `train.py:Class`; without a class for that which is a trainer.

    Raises:
        LookupError: The place is not there, or the source does not tell, or there is nothing to hook.
    """
    module_name, _, class_name = place.rpartition(":") if ":" in place else (place, "", "")
    module = sources.module(module_name)
    class_name = class_name or trainer_in(module)
    owner = None
    if class_name:
        try:
            owner = sources.class_named(module_name, class_name)
        except Missing as error:
            classes = [name for name, node in module.defined.items() if not isinstance(node, Function)]
            near = "" if "did you mean" in str(error) else did_you_mean(class_name, classes)
            there = f"; its classes are {', '.join(classes)}" if classes and not near else ""
            raise Missing(f"{error}{near}{there if 'did you mean' not in str(error) else ''}") from None
    outline = Outline(sources, owner.module if owner is not None else module, owner)
    return _Draft(place, outline).text()


class _Draft:
    """The hooks of one recipe."""

    def __init__(self, place: str, outline: Outline) -> None:
        self._place, self._outline = place, outline
        self._module = outline.module.name
        self._target = target_of(self._module)
        self._known = own_hooks()
        self._based_on = self._other_target()
        self._hooks: list[DraftHook] = []
        self._search = StepSearch(outline, self._target)

    def text(self) -> str:
        """Return the file's text.

        Raises:
            Unknown: There is nothing to hook.
        """
        stages = list(self._stages())
        comments = [f"# A first recipe for {self._place}, from its source: go through each hook."]
        if self._based_on:
            comments.append(f"# Its steps are those of {self._based_on}, for which autoprof has a recipe.")
        else:
            for found in self._search.find([name for name, _ in stages]):
                self._put(found.name, found.owner, found.function, found.behaviour, found.options, found.comment)
        for name, kind in stages:
            if name != self._search.whole:
                self._add_stage(name, kind)
        others = self._other_stages({kind for _, kind in stages})
        if not self._hooks:
            raise Unknown(f"{self._place}: no function in it is named like a step or a stage; see {_GUIDE}")
        if not self._based_on and not self._search.found:
            comments.append(f"# No step was found: add a hook by {_GUIDE}.")
        if any(hook.recipe.target == self._target for hook in self._known.values()):
            comments.append(f"# autoprof has hooks for {self._target} already (autoprof recipes {self._target}).")
        if others:
            comments.append(f"# The loop also calls {', '.join(others)}: hook these where their classes are.")
        if self._outline.lost:
            comments.append(f"# Not all was looked at: {self._outline.lost}.")
        file = f"{self._target}.mine.toml"
        comments.append(f"# Save it as {file}, check it with autoprof recipes --check {file}, and try it with")
        comments.append(f"# autoprof recipes --try {file} -- COMMAND.")
        lines = [*comments, f"target = {json.dumps(self._target)}", ""]
        for hook in self._hooks:
            lines += hook.lines()
        return "\n".join(lines).rstrip() + "\n"

    def _other_target(self) -> str:
        """Return the base class of another target that autoprof knows the steps of, or an empty text."""
        stepped = {target_of(hook.hook.module) for hook in self._known.values() if is_step(hook)}
        for kind in self._outline.lineage:
            top = target_of(kind.module.name)
            if top != self._target and top in stepped:
                return f"{kind.module.name}:{kind.node.name}"
        return ""

    def _stages(self) -> Iterator[tuple[str, str]]:
        """Yield the functions that are stages, and their kinds: not what others of the kind do a part of, nor what goes
        on to other kinds."""
        outline = self._outline
        kinds = {
            name: kind
            for name in outline.functions
            if (kind := kind_of(name)) and target_of(outline.homes[name]) == self._target
        }
        loops = self._search.loops()
        taken = {}
        for name, kind in kinds.items():
            others = {kinds[each] for each in outline.called(name) if each in kinds} - {kind}
            allowed = _WITH_OTHERS.get(kind, set())
            if name not in loops and (allowed is None or others <= allowed):
                taken[name] = kind
        # A whole step is no stage beside the stages in it.
        steps = {name for name in taken if is_whole(name) and outline.called(name) & taken.keys()}
        for name, kind in taken.items():
            around = [other for other, of in taken.items() if of == kind and other not in steps]
            if name not in steps and not any(name in outline.called(other) for other in around):
                yield name, kind

    def _other_stages(self, there: set[str]) -> list[str]:
        """Add stages that are methods of other objects, and return the calls whose class the source does not tell.

        Args:
            there: The kinds of stages that the class has itself.
        """
        unknown: dict[str, str] = {}
        for call in self._outline.calls_of_parts():
            name = call.rpartition(".")[2]
            kind = kind_of(name)
            if not kind or kind in (*there, "checkpoint", "data", "optimizer", "validate"):
                continue
            if (found := self._outline.elsewhere(call)) is not None and self._target == target_of(found[0].module.name):
                self._add_stage(name, kind, found[0])
                there = {*there, kind}
            else:
                unknown[call] = kind
        return [path for path, kind in unknown.items() if kind not in there]

    def _add_stage(self, name: str, kind: str, owner: Class | None = None) -> None:
        options: dict[str, object] = {"stage": name.strip("_"), "role": ROLES.get(kind, "trainer")}
        if kind == "validate":
            options["whole"] = True
        elif owner is None and self._outline.sets("rank"):
            options["rank"] = "self.rank"
        behaviour = "span" if kind == "validate" else "stage"
        self._put(name.strip("_").replace("_", "-"), owner or self._outline.owner, name, behaviour, options, kind=kind)

    def _put(
        self,
        name: str,
        owner: Class | None,
        function: str,
        behaviour: str,
        options: dict[str, object],
        comment: str = "",
        kind: str = "",
    ) -> None:
        taken = {hook.name for hook in self._hooks} | {
            key.partition("/")[2] for key in self._known if key.partition("/")[0] == self._target
        }
        while name in taken:
            name = f"my-{name}"
        module = owner.module.name if owner is not None else self._module
        attribute = f"{owner.node.name}.{function}" if owner is not None else function
        self._hooks.append(
            DraftHook(
                name=name,
                module=module,
                attribute=attribute,
                behaviour=behaviour,
                kind=kind,
                options=options,
                comment=comment,
            )
        )
