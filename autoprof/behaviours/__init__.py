"""Behaviours: what recipes name. Each is a struct whose fields are the `options` of a recipe's hook."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import msgspec

from autoprof.paths import CallPath
from autoprof.wrapping import Around, Call

BEHAVIOURS = {
    "aside.start": "autoprof.behaviours.aside:Start",
    "aside.stop": "autoprof.behaviours.aside:Stop",
    "main": "autoprof.behaviours.main:Main",
    "ray.actor": "autoprof.behaviours.ray_nsys:Actor",
    "ray.actor-class": "autoprof.behaviours.ray:ActorClass",
    "ray.init": "autoprof.behaviours.ray:Init",
    "ray.shutdown": "autoprof.behaviours.ray:Shutdown",
    "rollout.around": "autoprof.behaviours.rollout:AroundGeneration",
    "rollout.end": "autoprof.behaviours.rollout:EndOfSampling",
    "rollout.http": "autoprof.behaviours.rollout_http:OverHttp",
    "rpc.server": "autoprof.behaviours.rpc:Server",
    "sglang.pass": "autoprof.behaviours.sglang_scheduler:Pass",
    "sglang.released": "autoprof.behaviours.sglang_serve:Released",
    "sglang.scheduler": "autoprof.behaviours.sglang_scheduler:Scheduler",
    "sglang.server": "autoprof.behaviours.sglang:Server",
    "sglang.set-up": "autoprof.behaviours.sglang_serve:SetUp",
    "sglang.tokenized": "autoprof.behaviours.sglang_serve:Tokenized",
    "span": "autoprof.behaviours.span:Span",
    "span.begin": "autoprof.behaviours.stage_pair:SpanBegin",
    "stage": "autoprof.behaviours.stage:Stage",
    "stage.begin": "autoprof.behaviours.stage_pair:Begin",
    "stage.end": "autoprof.behaviours.stage_pair:End",
    "stage.mini-batch": "autoprof.behaviours.stage:MiniBatch",
    "stage.pass": "autoprof.behaviours.stage:Pass",
    "step.begin": "autoprof.behaviours.step:Begin",
    "step.counter": "autoprof.behaviours.counter:Counter",
    "step.end": "autoprof.behaviours.step:End",
    "step.loop": "autoprof.behaviours.step:Loop",
    "step.tick": "autoprof.behaviours.step:Tick",
    "step.trainer": "autoprof.behaviours.step:Trainer",
    "step.wrap": "autoprof.behaviours.step:Wrap",
    "timer.start": "autoprof.behaviours.timer:Start",
    "timer.stop": "autoprof.behaviours.timer:Stop",
    "vllm.add-request": "autoprof.behaviours.vllm_serve:AddRequest",
    "vllm.engine": "autoprof.behaviours.vllm:Engine",
    "vllm.offline-profile": "autoprof.behaviours.vllm_offline:Profile",
    "vllm.offline-request": "autoprof.behaviours.vllm_offline:AddRequest",
    "vllm.offline-step": "autoprof.behaviours.vllm_offline:Step",
    "vllm.offline-whole": "autoprof.behaviours.vllm_offline:Whole",
    "vllm.outputs": "autoprof.behaviours.vllm_serve:Outputs",
    "vllm.routes": "autoprof.behaviours.vllm_serve:Routes",
    "vllm.server": "autoprof.behaviours.vllm:Server",
    "vllm.worker": "autoprof.behaviours.vllm_worker:Worker",
}


class Behaviour(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Goes around the calls of one function. A behaviour that changes a class instead overrides `install`.

    Attributes:
        when: Paths from a parameter of the call, with the values they must have; other calls are left alone.
        unless: Path from a parameter of the call to a value that is true where the call is left alone.
    """

    # Of the hooks on one function, those of a higher layer go around the others, wherever they stand in a recipe.
    layer: ClassVar[int] = 0
    when: dict[CallPath, str] = {}
    unless: CallPath = ""

    def applies(self, call: Call) -> bool:
        """Whether the call is one that the hook is for."""
        if self.unless and call.at(self.unless, None):
            return False
        return not self.when or all(str(call.at(path, "")) == value for path, value in self.when.items())

    def around(self, call: Call) -> Around:
        """A generator: what comes before its `yield CALL` runs before the call, the rest after it."""
        raise NotImplementedError

    def idle_unless(self) -> str:
        """What somebody must be counting (`gates.counting`) for the hook to have anything to do; empty for always."""
        return ""

    def install(self, owner: Any) -> bool:
        """Change the hook's attribute in place and return True, or return False to have it wrapped."""
        return False

    def supply(self, owner: type, name: str, key: str) -> bool:
        """Give a class the attribute of the hook `key`, which this release lacks, and return True; or return False."""
        return False


def find(name: str) -> type[Behaviour] | None:
    """The class of the behaviour that recipes call `name`."""
    place = BEHAVIOURS.get(name)
    if place is None:
        return None
    module, _, attribute = place.partition(":")
    kind: type[Behaviour] = getattr(import_module(module), attribute)
    return kind
