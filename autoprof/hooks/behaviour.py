"""Base class and list of behaviours, and the call of a hooked function that a behaviour gets.

A recipe names a behaviour by its key in `BEHAVIOURS`. The fields of a behaviour's struct are the `options` of its hook.
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

from autoprof.base import seam

# Options that name a value of a call: a `CallPath` begins with a parameter (`self.state.global_step`), a `Parameter` is
# one (`app`). The check of recipes recognizes them by `extra`.
PARAMETER = "parameter"
CallPath: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[^.\s]+)*$", extra={"takes": "path", PARAMETER: True})
]
Parameter: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", extra={"takes": "name", PARAMETER: True})
]
# Option that names a value inside another value, such as a call's result. Empty: that value itself.
Path: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([^.\s]+(\.[^.\s]+)*)?$", extra={"takes": "place"})]

MISSING = object()
# Special names that a path may contain. With the others, such as `__globals__`, a path could reach any object.
_READABLE = ("__class__", "__name__", "__qualname__", "__module__")


def follow(root: Any, path: str, default: Any = MISSING) -> Any:
    """Return the value at `path` (`a.b.c`) from `root`: attributes of objects, keys of mappings.

    Raises:
        LookupError: A value has no such name and `default` is not set, or the path contains a special name of Python.
    """
    value = root
    for name in path.split("."):
        if name.startswith("__") and name not in _READABLE:
            raise LookupError(f"{name} (path {path}) is a special name of Python, which autoprof does not read")
        try:
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        except (AttributeError, KeyError) as error:
            seam.pass_on(error)
            if default is not MISSING:
                return default
            raise LookupError(f"{type(root).__name__} has no {name} (path {path})") from None
    return value


class Outcome(NamedTuple):
    """Result of the user's function, or the exception that it raised. `over`: an iterator had no more items."""

    result: Any
    error: BaseException | None
    over: bool = False


class Reply(NamedTuple):
    """Answer to a call that autoprof itself made to a hooked function, which is then not called.

    A behaviour returns it instead of its `yield CALL`. It must never answer a call of the user.
    """

    value: Any


class Wait:
    """Base class of the waits of a behaviour: `answer = yield InThread(...)`.

    If the wait raises an exception, the behaviour gets it at its `yield`.
    """

    def block(self) -> Any:
        """Wait in a synchronous function."""
        raise NotImplementedError

    async def suspend(self) -> Any:
        """Wait in a coroutine function, without blocking its event loop."""
        raise NotImplementedError


# Part of a call that a hook wraps: the call, the `with` blocks of its result, or each `next` of its result.
Extent: TypeAlias = Literal["call", "with", "next"]
# Value that a behaviour yields to have the user's function called: `outcome = yield CALL`.
CALL: None = None
Around: TypeAlias = Generator["Wait | None", Any, "Reply | None"]


class Call:
    """One call of a wrapped function.

    Attributes:
        on_interrupt: Function that ends everything that the behaviour has opened. It is called if the behaviour is
            interrupted or closed, perhaps more than once. The behaviour sets it before it opens something.
    """

    __slots__ = ("args", "function", "key", "kwargs", "on_interrupt")

    def __init__(self, key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.key = key
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.on_interrupt: Callable[[], None] | None = None

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
        if (value := _positional_argument(self.function, name, self.args)) is not MISSING:
            return value
        bound = inspect.signature(self.function).bind_partial(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments[name]

    def at(self, path: str, default: Any = MISSING) -> Any:
        """Return the value at a recipe's path, which begins with a parameter: `self.global_steps`, `prompts.meta_info`.

        Raises:
            LookupError: The call or a value has no such name, and `default` is not set.
        """
        name, _, attributes = path.partition(".")
        try:
            value = self.argument(name)
        except LookupError as error:
            seam.pass_on(error)
            if default is not MISSING:
                return default
            raise LookupError(f"the function has no parameter {name} (path {path})") from None
        return follow(value, attributes, default) if attributes else value


def _positional_argument(function: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Return the argument of a parameter that was passed by position, or the parameter's default.

    Returns MISSING if the code object is not enough to find it: `inspect.signature` is needed, which takes 30 us.

    Raises:
        LookupError: The parameter has neither, or does not exist.
    """
    if type(function) is not FunctionType or function.__dict__:
        # As `inspect.signature` does. Raises ValueError for an endless chain, such as a proxy that has every attribute.
        function = inspect.unwrap(function, stop=lambda wrapper: hasattr(wrapper, "__signature__"))
    if type(function) is not FunctionType or hasattr(function, "__signature__"):
        return MISSING
    code = function.__code__
    names, count = code.co_varnames, code.co_argcount
    if name in names[:count]:
        index = names.index(name)
        if index < len(args):
            return args[index]
        defaults = function.__defaults__ or ()
        return defaults[index - count + len(defaults)] if count - index <= len(defaults) else _raise_missing(name)
    if name in names[count : count + code.co_kwonlyargcount]:
        return (function.__kwdefaults__ or {})[name]
    # The names of `*args` and `**kwargs` follow.
    variadic = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    first = count + code.co_kwonlyargcount
    return MISSING if name in names[first : first + variadic] else _raise_missing(name)


def _raise_missing(name: str) -> Any:
    raise LookupError(name)


BEHAVIOURS = {
    "aside.start": "autoprof.behaviours.trainer.stages:NativeStart",
    "aside.stop": "autoprof.behaviours.trainer.stages:NativeStop",
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
    "sglang.pass": "autoprof.behaviours.sglang.scheduler:SchedulerPass",
    "sglang.released": "autoprof.behaviours.sglang.api_server:Released",
    "sglang.scheduler": "autoprof.behaviours.sglang.scheduler:Scheduler",
    "sglang.server": "autoprof.behaviours.sglang.engine:SglangActor",
    "sglang.set-up": "autoprof.behaviours.sglang.api_server:SetUp",
    "sglang.tokenized": "autoprof.behaviours.sglang.api_server:Tokenized",
    "span": "autoprof.behaviours.trainer.spans:CallSpan",
    "span.begin": "autoprof.behaviours.trainer.pairs:SpanBegin",
    "stage": "autoprof.behaviours.trainer.stages:Stage",
    "stage.begin": "autoprof.behaviours.trainer.pairs:StageBegin",
    "stage.end": "autoprof.behaviours.trainer.pairs:StageEnd",
    "stage.mini-batch": "autoprof.behaviours.trainer.stages:MiniBatch",
    "stage.pass": "autoprof.behaviours.trainer.stages:StagePass",
    "step.begin": "autoprof.behaviours.trainer.steps:StepBegin",
    "step.counter": "autoprof.behaviours.trainer.steps:Counter",
    "step.end": "autoprof.behaviours.trainer.steps:StepEnd",
    "step.finished": "autoprof.behaviours.trainer.steps:Finished",
    "step.loop": "autoprof.behaviours.trainer.steps:Loop",
    "step.receive": "autoprof.behaviours.trainer.steps:Receive",
    "step.send": "autoprof.behaviours.trainer.steps:Send",
    "step.tick": "autoprof.behaviours.trainer.steps:Tick",
    "step.trainer": "autoprof.behaviours.trainer.steps:Trainer",
    "step.update": "autoprof.behaviours.trainer.steps:Update",
    "step.wrap": "autoprof.behaviours.trainer.steps:Wrap",
    "timer.start": "autoprof.behaviours.trainer.pairs:TimerStart",
    "timer.stop": "autoprof.behaviours.trainer.pairs:TimerStop",
    "vllm.add-request": "autoprof.behaviours.vllm.api_server:AddRequest",
    "vllm.engine": "autoprof.behaviours.vllm.engine:Engine",
    "vllm.offline-profile": "autoprof.behaviours.vllm.offline:Profile",
    "vllm.offline-request": "autoprof.behaviours.vllm.offline:OfflineRequest",
    "vllm.offline-step": "autoprof.behaviours.vllm.offline:OfflineStep",
    "vllm.offline-whole": "autoprof.behaviours.vllm.offline:Whole",
    "vllm.outputs": "autoprof.behaviours.vllm.api_server:Outputs",
    "vllm.routes": "autoprof.behaviours.vllm.api_server:Routes",
    "vllm.server": "autoprof.behaviours.vllm.engine:VllmActor",
    "vllm.start": "autoprof.behaviours.vllm.worker:ProcessStart",
    "vllm.worker": "autoprof.behaviours.vllm.worker:Worker",
}


# Value of `when` in a recipe. A string is compared with the `str` of the call's value. True and False equal no number.
Value: TypeAlias = str | bool | int | float


class Behaviour(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Code around the calls of one function. A behaviour that changes a class instead overrides `install`.

    Attributes:
        when: Conditions of the hook: paths that begin with a parameter of the call, each with the value it must have,
            or an array of allowed values. The hook ignores calls that differ.
        unless: Path that begins with a parameter of the call. If its value is true, the hook ignores the call.
    """

    # Order of the hooks on one function: a higher layer goes around a lower one, in any order in the recipe.
    layer: ClassVar[int] = 0
    # True if its hooks make stages or spans, which have a `kind`.
    makes_stages: ClassVar[bool] = False
    when: dict[CallPath, Value | list[Value]] = {}
    unless: CallPath = ""

    def applies(self, call: Call) -> bool:
        """Return whether `when` and `unless` select this call."""
        if self.unless and call.at(self.unless, None):
            return False
        return not self.when or all(_matches(call.at(path, ""), wanted) for path, wanted in self.when.items())

    def concerns(self, call: Call) -> bool:
        """Return whether the hook has something to do in a selected call. Only `recipes --try` calls this."""
        return True

    def around(self, call: Call) -> Around:
        """Run code around the call. A generator: the part before its `yield CALL` runs before the call."""
        raise NotImplementedError

    def idle_unless(self) -> str:
        """Return the group that must count (`registry.counting`) for the hook to have work, or an empty string."""
        return ""

    def install(self, owner: Any) -> bool:
        """Change the hooked attribute in place and return True, or return False to have it wrapped."""
        return False

    def supply(self, owner: type, name: str, key: str) -> bool:
        """Add the hooked attribute to a class that lacks it in this release. Return False if it adds nothing.

        Args:
            owner: Class that lacks the attribute.
            name: Name of the attribute.
            key: Key of the hook.
        """
        return False


def _matches(value: Any, wanted: Value | list[Value]) -> bool:
    if isinstance(wanted, list):
        return any(_matches(value, choice) for choice in wanted)
    # numpy's booleans are no `bool`, but their `str` is the same.
    if isinstance(wanted, (str, bool)):
        return str(value) == str(wanted)
    return isinstance(value, Number) and not isinstance(value, bool) and bool(operator.eq(value, wanted))


def named(name: str) -> type[Behaviour]:
    """Import and return the class of the behaviour that recipes call `name`, a key of `BEHAVIOURS`."""
    module, _, attribute = BEHAVIOURS[name].partition(":")
    kind: type[Behaviour] = getattr(import_module(module), attribute)
    return kind
