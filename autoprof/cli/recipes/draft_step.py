"""Search for the step of a trainer in its source: what begins it, what ends the last one, and its number."""

from __future__ import annotations

import ast
import re

import msgspec

from autoprof.cli.recipes.draft_hooks import target_of
from autoprof.cli.recipes.loops import Loop
from autoprof.cli.recipes.outline import Outline
from autoprof.cli.recipes.parsed import parameter_names
from autoprof.cli.recipes.source import Class

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
