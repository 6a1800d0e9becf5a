"""First recipe for a trainer, made from its source: a step, stages, and what counts the steps."""

from __future__ import annotations

import json
from collections.abc import Iterator

from autoprof.base.similar import did_you_mean
from autoprof.cli.recipes.draft_hooks import DraftHook, is_step, own_hooks, target_of
from autoprof.cli.recipes.draft_step import StepSearch, is_whole
from autoprof.cli.recipes.outline import Outline, trainer_in
from autoprof.cli.recipes.parsed import Function
from autoprof.cli.recipes.source import Class, Missing, Sources, Unknown
from autoprof.cli.recipes.stage_words import ROLES, kind_of

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


def draft(place: str, sources: Sources) -> str:
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
