"""Behaviours, by the names that recipes use: structs whose fields are the `options` of a hook."""

from __future__ import annotations

import operator
from importlib import import_module
from numbers import Number
from typing import Any, ClassVar, TypeAlias

import msgspec

from autoprof.hooks.attribute_path import CallPath
from autoprof.hooks.call import Around, Call

BEHAVIOURS = {
    "aside.start": "autoprof.behaviours.trainer.native_profiler:Start",
    "aside.stop": "autoprof.behaviours.trainer.native_profiler:Stop",
    "main": "autoprof.behaviours.trainer.main_module:Main",
    "hooks.again": "autoprof.behaviours.trainer.main_module:Replaced",
    "ray.actor": "autoprof.behaviours.ray.nsys_actors:Actor",
    "ray.actor-class": "autoprof.behaviours.ray.session:ActorClass",
    "ray.init": "autoprof.behaviours.ray.session:Init",
    "ray.shutdown": "autoprof.behaviours.ray.session:Shutdown",
    "rollout.around": "autoprof.behaviours.rollout.replicas:AroundGeneration",
    "rollout.end": "autoprof.behaviours.rollout.replicas:EndOfSampling",
    "rollout.http": "autoprof.behaviours.serving.http_client:OverHttp",
    "rpc.server": "autoprof.behaviours.rollout.rpc:Server",
    "sglang.pass": "autoprof.behaviours.sglang.scheduler:Pass",
    "sglang.released": "autoprof.behaviours.sglang.api_server:Released",
    "sglang.scheduler": "autoprof.behaviours.sglang.scheduler:Scheduler",
    "sglang.server": "autoprof.behaviours.sglang.engine:Server",
    "sglang.set-up": "autoprof.behaviours.sglang.api_server:SetUp",
    "sglang.tokenized": "autoprof.behaviours.sglang.api_server:Tokenized",
    "span": "autoprof.behaviours.trainer.spans:Span",
    "span.begin": "autoprof.behaviours.trainer.stage_pairs:SpanBegin",
    "stage": "autoprof.behaviours.trainer.stages:Stage",
    "stage.begin": "autoprof.behaviours.trainer.stage_pairs:Begin",
    "stage.end": "autoprof.behaviours.trainer.stage_pairs:End",
    "stage.mini-batch": "autoprof.behaviours.trainer.stages:MiniBatch",
    "stage.pass": "autoprof.behaviours.trainer.stages:Pass",
    "step.begin": "autoprof.behaviours.trainer.steps:Begin",
    "step.counter": "autoprof.behaviours.trainer.counter:Counter",
    "step.end": "autoprof.behaviours.trainer.steps:End",
    "step.finished": "autoprof.behaviours.trainer.steps:Finished",
    "step.loop": "autoprof.behaviours.trainer.steps:Loop",
    "step.receive": "autoprof.behaviours.trainer.sent_steps:Receive",
    "step.send": "autoprof.behaviours.trainer.sent_steps:Send",
    "step.tick": "autoprof.behaviours.trainer.steps:Tick",
    "step.trainer": "autoprof.behaviours.trainer.main_module:Trainer",
    "step.update": "autoprof.behaviours.trainer.steps:Update",
    "step.wrap": "autoprof.behaviours.trainer.steps:Wrap",
    "timer.start": "autoprof.behaviours.trainer.timers:Start",
    "timer.stop": "autoprof.behaviours.trainer.timers:Stop",
    "vllm.add-request": "autoprof.behaviours.vllm.api_server:AddRequest",
    "vllm.engine": "autoprof.behaviours.vllm.engine:Engine",
    "vllm.offline-profile": "autoprof.behaviours.vllm.offline:Profile",
    "vllm.offline-request": "autoprof.behaviours.vllm.offline:AddRequest",
    "vllm.offline-step": "autoprof.behaviours.vllm.offline:Step",
    "vllm.offline-whole": "autoprof.behaviours.vllm.offline:Whole",
    "vllm.outputs": "autoprof.behaviours.vllm.api_server:Outputs",
    "vllm.routes": "autoprof.behaviours.vllm.api_server:Routes",
    "vllm.server": "autoprof.behaviours.vllm.engine:Server",
    "vllm.start": "autoprof.behaviours.vllm.scheduler:Start",
    "vllm.worker": "autoprof.behaviours.vllm.worker:Worker",
}


# What a value of the call is compared with: a text with its text, `true` and `false` with no number.
Value: TypeAlias = str | bool | int | float


class Behaviour(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Code around the calls of one function. A behaviour that changes a class instead overrides `install`.

    Attributes:
        when: Paths from a parameter of the call, with the value they must have, or an array of values, one of which
            they must have; other calls are left alone.
        unless: Path from a parameter of the call to a value that is true where the call is left alone.
    """

    # Hooks of a higher layer go around the other hooks on the same function, whatever their order in the recipe.
    layer: ClassVar[int] = 0
    # Whether its hooks make stages or spans, which have a `kind`.
    makes_stages: ClassVar[bool] = False
    when: dict[CallPath, Value | list[Value]] = {}
    unless: CallPath = ""

    def applies(self, call: Call) -> bool:
        """Return whether the hook is for this call."""
        if self.unless and call.at(self.unless, None):
            return False
        return not self.when or all(_has(call.at(path, ""), wanted) for path, wanted in self.when.items())

    def concerns(self, call: Call) -> bool:
        """Return whether the hook has something to do in a call that it applies to. `recipes --try` alone asks."""
        return True

    def around(self, call: Call) -> Around:
        """Run code around the call, as a generator: the part before its `yield CALL` runs before the call."""
        raise NotImplementedError

    def idle_unless(self) -> str:
        """Return the group without whose counting (`gates.counting`) the hook has nothing to do; empty for none."""
        return ""

    def install(self, owner: Any) -> bool:
        """Change the hook's attribute in place and return True, or return False to have it wrapped."""
        return False

    def supply(self, owner: type, name: str, key: str) -> bool:
        """Give a class the attribute of the hook `key`, which this release lacks, and return True; or return False."""
        return False


def _has(found: Any, wanted: Value | list[Value]) -> bool:
    if isinstance(wanted, list):
        return any(_has(found, each) for each in wanted)
    # A flag of numpy's has the text of Python's.
    if isinstance(wanted, (str, bool)):
        return str(found) == str(wanted)
    return isinstance(found, Number) and not isinstance(found, bool) and bool(operator.eq(found, wanted))


def find(name: str) -> type[Behaviour] | None:
    """Return the class of the behaviour that recipes call `name`."""
    place = BEHAVIOURS.get(name)
    if place is None:
        return None
    module, _, attribute = place.partition(":")
    kind: type[Behaviour] = getattr(import_module(module), attribute)
    return kind
