"""First draft of a recipe for a trainer, from its source: hooks for its steps and stages."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

import msgspec

from autoprof import _boot
from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes import places
from autoprof.cli.recipes.outline import ROLES, Outline, StepLoop, kind_of, trainer_in
from autoprof.cli.recipes.source import Class, Function, NotInSource, Sources, Unknown, parameter_names
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
    'No counter was found, so steps are counted from 1, also after a resume; number = "self.global_step" in the '
    "options would name a counter."
)
_ENTRIES = ("train", "fit", "run", "learn", "main")


def is_whole(function: str) -> bool:
    """Return whether a function is one step, by its name."""
    return _WHOLE.fullmatch(function) is not None


class StepHook(msgspec.Struct, frozen=True, kw_only=True):
    """A hook for steps. `owner` is the function's class; None for a function of a module."""

    name: str
    owner: Class | None
    function: str
    behaviour: str
    options: dict[str, object]
    comment: str


class StepSearch:
    """Search for the functions at which steps begin and end.

    Attributes:
        hooks: The hooks for these functions.
        whole: The function whose call is one step, or an empty text.
    """

    def __init__(self, outline: Outline, target: str) -> None:
        self.outline = outline
        self.hooks: list[StepHook] = []
        self.whole = ""
        self._target = target

    def loops(self) -> set[str]:
        """Return the function with the loop over the steps, and its callers."""
        return {self.outline.loop.function, *self._callers(self.outline.loop)} if self.outline.loop else set()

    def _callers(self, loop: StepLoop | None) -> list[str]:
        """Return the chain of callers of the loop's function, up to the entry function, such as `train`."""
        callers: list[str] = []
        name = loop.function if loop is not None else ""
        while name and (users := [user for user in self.outline.users(name) if user not in callers]):
            best = next((entry for entry in _ENTRIES if entry in users), users[0])
            if len(users) > 1 and best == users[0] and best not in _ENTRIES:
                break
            callers.append(best)
            name = best
        return callers

    def find(self, stages: list[str]) -> list[StepHook]:
        """Search, and return the hooks. `stages` lists the functions that are stages."""
        outline, loop = self.outline, self.outline.loop
        if loop is None:
            self.whole = next((name for name in outline.functions if is_whole(name)), "")
            if self.whole:
                self._add("step", self.whole, "step.wrap", self._numbered(self.whole, None), "One call is one step.")
            return self.hooks
        if not self._add_named_begin(loop) and not self._add_whole_step(loop, stages):
            self._add_first_call(loop)
        entry = [loop.function, *self._callers(loop)][-1]
        if self.hooks and not self.whole and entry in outline.functions:
            self._add("loop", entry, "step.loop", {}, "This function runs all steps; the last step ends with it.")
        return self.hooks

    def _add_named_begin(self, loop: StepLoop) -> bool:
        """Add a hook for a call that begins a step by its name; return False if the loop has no such call."""
        for call in loop.calls:
            name = call.path.rpartition(".")[2]
            if not _BEGINS.fullmatch(name):
                continue
            comment = "Each call begins a step."
            if own := self.outline.own(call.path):
                self._add("step-begin", own, "step.begin", self._numbered(own, loop), comment)
                return True
            method = self.outline.elsewhere(call.path)
            if method is None or target_of(method[0].module.name) != self._target:
                continue
            owner, node = method
            options: dict[str, object] = {}
            parts = loop.counter.split(".")
            for index, argument in enumerate(call.node.args):
                argument_parts = ast.unparse(argument).split(".")
                names = parameter_names(node)[0][1:]
                if loop.counter and parts[: len(argument_parts)] == argument_parts and index < len(names):
                    options["number"] = ".".join([names[index], *parts[len(argument_parts) :]])
            if "number" in options and loop.counts_after:
                options["offset"] = 1
            self._add("step-begin", name, "step.begin", options, comment, owner)
            return True
        return False

    def _add_whole_step(self, loop: StepLoop, stages: list[str]) -> bool:
        """Add a hook for a function that is one step by its name; return False if the loop calls no such function."""
        outline = self.outline
        for call in loop.calls:
            name = outline.own(call.path)
            if not name or not call.always or not is_whole(name):
                continue
            is_loop_itself = loop.counter and loop.function == name
            if loop.counter and not loop.each_round and not is_loop_itself:
                continue
            later = {outline.own(other.path) for other in loop.calls if other.node.lineno > call.node.lineno}
            if later & set(stages):
                comment = "Each call begins a step, which lasts until the next call."
                self._add("step-begin", name, "step.begin", self._numbered(name, loop), comment)
            else:
                self.whole = name
                self._add("step", name, "step.wrap", self._numbered(name, loop), "One call is one step.")
            return True
        return False

    def _add_first_call(self, loop: StepLoop) -> None:
        """Add a hook for the first call of each round of the loop. A call with the same number begins no new step."""
        own = [self.outline.own(call.path) for call in loop.calls if call.always]
        name = next((function for function in own if function and not self.outline.counts_only(function)), "")
        if name:
            comment = "The first call in each round of the loop begins a step, which lasts until the next round's call."
            self._add("step-begin", name, "step.begin", self._numbered(name, loop), comment)

    def _numbered(self, name: str, loop: StepLoop | None) -> dict[str, object]:
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
        owner = owner or self.outline.owner
        if "number" not in options and behaviour != "step.loop":
            comment += f" {_UNNUMBERED}"
        hook = StepHook(
            name=name, owner=owner, function=function, behaviour=behaviour, options=options, comment=comment
        )
        self.hooks.append(hook)


class DraftHook(msgspec.Struct, kw_only=True):
    """One `[[hook]]` table of the file, with a comment above it."""

    name: str
    module: str
    attribute: str
    behaviour: str
    kind: str = ""
    options: dict[str, object] = {}
    comment: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table."""
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
    """Return the hooks of autoprof's own recipes, by key."""
    hooks: dict[str, BoundHook] = {}
    for path in places.toml_files(_boot.own_recipes()):
        try:
            hooks |= {hook.key: hook for hook in recipe.load(path)}
        except RecipeError:
            continue
    return hooks


def target_of(module: str) -> str:
    """Return the target of a module or a script."""
    return script(module) or module.partition(".")[0]


def is_step(hook: BoundHook) -> bool:
    """Return whether a hook finds steps."""
    return hook.hook.behaviour.startswith("step.") and hook.hook.behaviour != "step.trainer"


_GUIDE = "docs/reference/recipes.md"
# Kinds of stages that a function of a kind may call and still be a stage itself; None: any. A validation generates.
_MAY_CALL: dict[str, set[str] | None] = {
    "update_actor": {"log_prob", "ref_log_prob", "values", "optimizer", "data", "update_critic"},
    "update_critic": {"values", "optimizer", "data"},
    "ref_log_prob": {"log_prob"},
    "advantage": {"values"},
    "validate": None,
    "checkpoint": None,
}


def draft_recipe(place: str, sources: Sources) -> str:
    """Return a recipe for `package.module:Class` or `train.py:Class`; without a class, for the likeliest trainer.

    Raises:
        LookupError: The module or class does not exist or can't be read, or it has nothing to hook.
    """
    module_name, _, class_name = place.rpartition(":") if ":" in place else (place, "", "")
    module = sources.module(module_name)
    class_name = class_name or trainer_in(module)
    owner = None
    if class_name:
        try:
            owner = sources.class_named(module_name, class_name)
        except NotInSource as error:
            classes = [name for name, node in module.defined.items() if not isinstance(node, Function)]
            near = "" if "did you mean" in str(error) else did_you_mean(class_name, classes)
            listed = f"; its classes are {', '.join(classes)}" if classes and not near else ""
            raise NotInSource(f"{error}{near}{listed if 'did you mean' not in str(error) else ''}") from None
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
            Unknown: No function is named like a step or a stage.
        """
        stages = list(self._stages())
        comments = [f"# A first recipe for {self._place}, made from its source: review each hook."]
        if self._based_on:
            comments.append(f"# It inherits its steps from {self._based_on}, for which autoprof has a recipe.")
        else:
            for hook in self._search.find([name for name, _ in stages]):
                self._put(hook.name, hook.owner, hook.function, hook.behaviour, hook.options, hook.comment)
        for name, kind in stages:
            if name != self._search.whole:
                self._add_stage(name, kind)
        others = self._other_stages({kind for _, kind in stages})
        if not self._hooks:
            raise Unknown(f"{self._place}: no function in it is named like a step or a stage; see {_GUIDE}")
        if not self._based_on and not self._search.hooks:
            comments.append(f"# No step was found: add a hook for it; see {_GUIDE}.")
        if any(hook.recipe.target == self._target for hook in self._known.values()):
            comments.append(f"# autoprof already has hooks for {self._target} (autoprof recipes {self._target}).")
        if others:
            comments.append(f"# The loop also calls {', '.join(others)}: hook these methods in their own classes.")
        if self._outline.lost:
            comments.append(f"# Some source was not searched: {self._outline.lost}.")
        file = f"{self._target}.mine.toml"
        comments.append(f"# Save it as {file}, check it with autoprof recipes --check {file}, and try it with")
        comments.append(f"# autoprof recipes --try {file} -- COMMAND.")
        lines = [*comments, f"target = {json.dumps(self._target)}", ""]
        for table in self._hooks:
            lines += table.lines()
        return "\n".join(lines).rstrip() + "\n"

    def _other_target(self) -> str:
        """Return the base class of another target for whose steps autoprof has hooks, or an empty text."""
        stepped = {target_of(hook.hook.module) for hook in self._known.values() if is_step(hook)}
        for kind in self._outline.lineage:
            top = target_of(kind.module.name)
            if top != self._target and top in stepped:
                return f"{kind.module.name}:{kind.node.name}"
        return ""

    def _stages(self) -> Iterator[tuple[str, str]]:
        """Yield the functions that are stages, and their kinds.

        A function is no stage if another stage of its kind calls it, or if it calls stages of other kinds.
        """
        outline = self._outline
        kinds = {
            name: kind
            for name in outline.functions
            if (kind := kind_of(name)) and target_of(outline.homes[name]) == self._target
        }
        loops = self._search.loops()
        candidates = {}
        for name, kind in kinds.items():
            others = {kinds[called] for called in outline.called(name) if called in kinds} - {kind}
            allowed = _MAY_CALL.get(kind, set())
            if name not in loops and (allowed is None or others <= allowed):
                candidates[name] = kind
        # A function that is a whole step is no stage if it calls stages.
        steps = {name for name in candidates if is_whole(name) and outline.called(name) & candidates.keys()}
        for name, kind in candidates.items():
            same_kind = [other for other, its_kind in candidates.items() if its_kind == kind and other not in steps]
            if name not in steps and not any(name in outline.called(other) for other in same_kind):
                yield name, kind

    def _other_stages(self, known: set[str]) -> list[str]:
        """Add stages that are methods of other objects, and return the calls whose class is not known.

        Args:
            known: The kinds of stages that the class has itself.
        """
        unknown: dict[str, str] = {}
        for call in self._outline.calls_of_parts():
            name = call.rpartition(".")[2]
            kind = kind_of(name)
            if not kind or kind in (*known, "checkpoint", "data", "optimizer", "validate"):
                continue
            method = self._outline.elsewhere(call)
            if method is not None and self._target == target_of(method[0].module.name):
                self._add_stage(name, kind, method[0])
                known = {*known, kind}
            else:
                unknown[call] = kind
        return [path for path, kind in unknown.items() if kind not in known]

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
        used_names = {hook.name for hook in self._hooks} | {
            key.partition("/")[2] for key in self._known if key.partition("/")[0] == self._target
        }
        while name in used_names:
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
