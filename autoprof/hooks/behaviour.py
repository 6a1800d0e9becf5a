"""Behaviours of hooks: the call that a hook sees, and the structs that act on it.

The names in `BEHAVIOURS` are those that recipes use; the fields of a struct are the `options` of a hook.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Generator, Mapping
from importlib import import_module
from numbers import Number
from types import FunctionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec

from autoprof.base import interrupts

# Options of behaviours that name a place in a call: `self.state.global_step` begins with a parameter, `app` is one.
# `extra` tells them from other texts when a recipe is checked.
PARAMETER = "parameter"
CallPath: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[^.\s]+)*$", extra={"takes": "path", PARAMETER: True})
]
Parameter: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", extra={"takes": "name", PARAMETER: True})
]
# A place in something else, such as what a call returns; empty for that itself.
Path: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([^.\s]+(\.[^.\s]+)*)?$", extra={"takes": "place"})]

MISSING = object()
# Names of Python's own that describe a value. The others lead from any object to every other.
_READABLE = ("__class__", "__name__", "__qualname__", "__module__")


def follow(root: Any, path: str, default: Any = MISSING) -> Any:
    """Return the value at `path` (`a.b.c`) from `root`: attributes of objects, keys of mappings.

    Raises:
        LookupError: A name is not there, and there is no `default`; or it is one of Python's own.
    """
    place = root
    for name in path.split("."):
        if name.startswith("__") and name not in _READABLE:
            raise LookupError(f"{name} (of {path}) belongs to Python itself and is not read")
        try:
            place = place[name] if isinstance(place, Mapping) else getattr(place, name)
        except (AttributeError, KeyError) as error:
            interrupts.pass_on(error)
            if default is not MISSING:
                return default
            raise LookupError(f"there is no {name} (of {path}) on {type(root).__name__}") from None
    return place


class Outcome(NamedTuple):
    """The end of the user's function: its result, or the exception it raised. `over`: an iterator had no more items."""

    result: Any
    error: BaseException | None
    over: bool = False


class Reply(NamedTuple):
    """An answer, in the function's place, to a call that autoprof itself made to a function of the target.

    A behaviour returns it before its `yield CALL`. It must never be the answer to a call of the user's.
    """

    value: Any


class Wait:
    """Something that a behaviour waits for: `answers = yield Wait(...)`. Never raises but to say that time is up."""

    def block(self) -> Any:
        """Wait in a synchronous function."""
        raise NotImplementedError

    async def suspend(self) -> Any:
        """Wait in a coroutine function, without blocking its event loop."""
        raise NotImplementedError


# What a hook goes around: the call, the `with` blocks of what it returns, or each `next` of what it returns.
Extent: TypeAlias = Literal["call", "with", "next"]
# `outcome = yield CALL` in a behaviour: the user's function is called now.
CALL: None = None
Around: TypeAlias = Generator["Wait | None", Any, "Reply | None"]


class Call:
    """One call of a wrapped function."""

    __slots__ = ("args", "function", "key", "kwargs")

    def __init__(self, key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.key = key
        self.function = function
        self.args = args
        self.kwargs = kwargs

    @property
    def instance(self) -> Any:
        """Return the first argument: `self` of a method."""
        return self.args[0] if self.args else None

    def argument(self, name: str) -> Any:
        """Return the argument called `name`, or the default in the function's signature.

        Raises:
            LookupError: The function has no such parameter.
        """
        if name in self.kwargs:
            return self.kwargs[name]
        if name == "self" and self.args:
            return self.args[0]
        if (found := given(self.function, name, self.args)) is not MISSING:
            return found
        bound = inspect.signature(self.function).bind_partial(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments[name]

    def at(self, path: str, default: Any = MISSING) -> Any:
        """Return the value at a recipe's path, which begins with a parameter: `self.global_steps`, `prompts.meta_info`.

        Raises:
            LookupError: A name is not there, and there is no `default`.
        """
        name, _, rest = path.partition(".")
        try:
            value = self.argument(name)
        except LookupError as error:
            interrupts.pass_on(error)
            if default is not MISSING:
                return default
            raise LookupError(f"there is no parameter {name} (of {path})") from None
        return follow(value, rest, default) if rest else value


def given(function: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Return the argument that was given by position, or the default.

    Returns MISSING if only the signature can tell, which takes 30 us.

    Raises:
        LookupError: There is neither.
    """
    if type(function) is not FunctionType or function.__dict__:
        # As `inspect.signature` does; what leads nowhere, as a proxy that has every attribute, raises.
        function = inspect.unwrap(function, stop=lambda each: hasattr(each, "__signature__"))
    if type(function) is not FunctionType or hasattr(function, "__signature__"):
        return MISSING
    code = function.__code__
    names, count = code.co_varnames, code.co_argcount
    if name in names[:count]:
        place = names.index(name)
        if place < len(args):
            return args[place]
        defaults = function.__defaults__ or ()
        return defaults[place - count + len(defaults)] if count - place <= len(defaults) else _none(name)
    if name in names[count : count + code.co_kwonlyargcount]:
        return (function.__kwdefaults__ or {})[name]
    # What is left are `*args` and `**kwargs`.
    several = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    first = count + code.co_kwonlyargcount
    return MISSING if name in names[first : first + several] else _none(name)


def _none(name: str) -> Any:
    raise LookupError(name)


BEHAVIOURS = {
    "aside.start": "autoprof.behaviours.trainer.stages:Start",
    "aside.stop": "autoprof.behaviours.trainer.stages:Stop",
    "main": "autoprof.behaviours.trainer.steps:Main",
    "hooks.again": "autoprof.behaviours.trainer.steps:Replaced",
    "ray.actor": "autoprof.behaviours.ray.nsys_actors:Actor",
    "ray.actor-class": "autoprof.behaviours.ray.session:ActorClass",
    "ray.init": "autoprof.behaviours.ray.session:Init",
    "ray.shutdown": "autoprof.behaviours.ray.session:Shutdown",
    "rollout.around": "autoprof.behaviours.rollout.replicas:AroundGeneration",
    "rollout.end": "autoprof.behaviours.rollout.replicas:EndOfSampling",
    "rollout.http": "autoprof.behaviours.serving.http:OverHttp",
    "rpc.server": "autoprof.behaviours.rollout.engine:RpcServer",
    "sglang.pass": "autoprof.behaviours.sglang.scheduler:Pass",
    "sglang.released": "autoprof.behaviours.sglang.api_server:Released",
    "sglang.scheduler": "autoprof.behaviours.sglang.scheduler:Scheduler",
    "sglang.server": "autoprof.behaviours.sglang.engine:Server",
    "sglang.set-up": "autoprof.behaviours.sglang.api_server:SetUp",
    "sglang.tokenized": "autoprof.behaviours.sglang.api_server:Tokenized",
    "span": "autoprof.behaviours.trainer.spans:Span",
    "span.begin": "autoprof.behaviours.trainer.pairs:SpanBegin",
    "stage": "autoprof.behaviours.trainer.stages:Stage",
    "stage.begin": "autoprof.behaviours.trainer.pairs:Begin",
    "stage.end": "autoprof.behaviours.trainer.pairs:End",
    "stage.mini-batch": "autoprof.behaviours.trainer.stages:MiniBatch",
    "stage.pass": "autoprof.behaviours.trainer.stages:Pass",
    "step.begin": "autoprof.behaviours.trainer.steps:Begin",
    "step.counter": "autoprof.behaviours.trainer.steps:Counter",
    "step.end": "autoprof.behaviours.trainer.steps:End",
    "step.finished": "autoprof.behaviours.trainer.steps:Finished",
    "step.loop": "autoprof.behaviours.trainer.steps:Loop",
    "step.receive": "autoprof.behaviours.trainer.steps:Receive",
    "step.send": "autoprof.behaviours.trainer.steps:Send",
    "step.tick": "autoprof.behaviours.trainer.steps:Tick",
    "step.trainer": "autoprof.behaviours.trainer.steps:Trainer",
    "step.update": "autoprof.behaviours.trainer.steps:Update",
    "step.wrap": "autoprof.behaviours.trainer.steps:Wrap",
    "timer.start": "autoprof.behaviours.trainer.pairs:Start",
    "timer.stop": "autoprof.behaviours.trainer.pairs:Stop",
    "vllm.add-request": "autoprof.behaviours.vllm.api_server:AddRequest",
    "vllm.engine": "autoprof.behaviours.vllm.engine:Engine",
    "vllm.offline-profile": "autoprof.behaviours.vllm.offline:Profile",
    "vllm.offline-request": "autoprof.behaviours.vllm.offline:AddRequest",
    "vllm.offline-step": "autoprof.behaviours.vllm.offline:Step",
    "vllm.offline-whole": "autoprof.behaviours.vllm.offline:Whole",
    "vllm.outputs": "autoprof.behaviours.vllm.api_server:Outputs",
    "vllm.routes": "autoprof.behaviours.vllm.api_server:Routes",
    "vllm.server": "autoprof.behaviours.vllm.engine:Server",
    "vllm.start": "autoprof.behaviours.vllm.worker:Start",
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
