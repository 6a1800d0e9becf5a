"""The base class and the list of behaviours, and the class of the calls that behaviours get.

A recipe names a behaviour by its key in `BEHAVIOURS`. The fields of a behaviour's struct are the `options` of its hook.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Generator, Mapping
from importlib import import_module
from numbers import Number
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec

from autoprof.base import seam

if TYPE_CHECKING:
    from autoprof.run.runtime import Runtime

# Types of options that name a value of a call. A `CallPath` is a path that begins with a parameter of the hooked
# function (`self.state.global_step`). A `Parameter` is the name of a parameter (`app`). The check of recipes recognizes
# these types by `extra`.
PARAMETER = "parameter"
CallPath: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[^.\s]+)*$", extra={"takes": "path", PARAMETER: True})
]
Parameter: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", extra={"takes": "name", PARAMETER: True})
]
# Type of an option that names a value inside another value, for example inside the result of a call. An empty path
# names the other value itself.
Path: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([^.\s]+(\.[^.\s]+)*)?$", extra={"takes": "place"})]

MISSING = object()
# Special names of Python that a path may contain. With other special names, such as `__globals__`, a path could reach
# any object.
_READABLE = ("__class__", "__name__", "__qualname__", "__module__")


def follow(root: Any, path: str, default: Any = MISSING) -> Any:
    """Return the value to which a path such as `a.b.c` leads from `root`.

    Each part of the path is the name of an attribute, a key if the value is a mapping, or the number of an item if the
    value is a list or tuple. If a name does not exist and `default` is set, return `default`.

    Raises:
        LookupError: A name does not exist and `default` is not set, or the path contains a forbidden special name of
            Python.
    """
    value = root
    for name in path.split("."):
        if name.startswith("__") and name not in _READABLE:
            raise LookupError(f"{name} (path {path}) is a special name of Python, which autoprof does not read")
        try:
            if name.isdecimal() and isinstance(value, list | tuple):
                value = value[int(name)]
            else:
                value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        except (AttributeError, KeyError, IndexError) as error:
            seam.pass_on(error)
            if default is not MISSING:
                return default
            raise LookupError(f"{type(root).__name__} has no {name} (path {path})") from None
    return value


class Outcome(NamedTuple):
    """Outcome of the user's function: its result, or the exception that it raised.

    `over` is True if the function was the next method of an iterator, and the iterator had no more items.
    """

    result: Any
    error: BaseException | None
    over: bool = False


class Reply(NamedTuple):
    """Answer of a behaviour to a call of a hooked function that autoprof itself made.

    The behaviour returns a `Reply` instead of `yield CALL`. The hooked function is then not called. A behaviour must
    never answer a call of the user in this way.
    """

    value: Any


class Wait:
    """Base class of waits, which a behaviour yields to wait for an answer: `answer = yield InThread(...)`.

    If the wait raises an exception, the `yield` raises this exception in the behaviour.
    """

    def block(self) -> Any:
        """Wait and return the answer. Called if the hooked function is not a coroutine function."""
        raise NotImplementedError

    async def suspend(self) -> Any:
        """Wait and return the answer, without blocking the event loop. Called in coroutine functions."""
        raise NotImplementedError


# The code that a hook surrounds: the call itself, the `with` blocks of the call's result, or each `next` of the call's
# result.
Extent: TypeAlias = Literal["call", "with", "next"]
# A behaviour yields this value at the point where the user's function is to be called: `outcome = yield CALL`.
CALL: None = None
# Generator of a behaviour. It returns a `Reply`, or nothing.
Around: TypeAlias = Generator["Wait | None", Any, Any]


class Call(msgspec.Struct, eq=False):
    """One call of a hooked function.

    Attributes:
        key: Key of the hook.
        function: Hooked function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        run: Run of this process. autoprof sets it before it calls a behaviour, and calls none without a run.
        on_interrupt: Function that ends everything that the behaviour has opened. autoprof calls it if the behaviour is
            interrupted or closed, perhaps more than once. The behaviour must set it before it opens something.
    """

    key: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Runtime = None  # type: ignore[assignment]
    on_interrupt: Callable[[], None] | None = None

    @property
    def instance(self) -> Any:
        """Return the first positional argument, which is `self` in a method. Return None if the call has none."""
        return self.args[0] if self.args else None

    def argument(self, name: str) -> Any:
        """Return the argument for the parameter `name`. If the call does not pass it, return the parameter's default.

        Raises:
            LookupError: The function has no such parameter, or the parameter has neither an argument nor a default.
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
        """Return the value to which a path of a recipe leads, such as `self.global_steps` or `prompts.meta_info`.

        The path begins with a parameter of the function. If a name does not exist and `default` is set, return
        `default`.

        Raises:
            LookupError: A name does not exist and `default` is not set.
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
    """Return the argument that was passed by position for the parameter `name`, or the default of the parameter.

    Return MISSING if the code object of the function is not enough to find the argument. The caller then needs
    `inspect.signature`, which takes 30 us.

    Raises:
        LookupError: The parameter has neither an argument nor a default, or the parameter does not exist.
    """
    if type(function) is not FunctionType or function.__dict__:
        # `inspect.signature` unwraps in the same way. `unwrap` raises ValueError for an endless chain of wrappers, for
        # example a proxy that has every attribute.
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
    # In `co_varnames`, the names of `*args` and `**kwargs` follow the names of the parameters.
    variadic_count = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    first_index = count + code.co_kwonlyargcount
    return MISSING if name in names[first_index : first_index + variadic_count] else _raise_missing(name)


def _raise_missing(name: str) -> Any:
    raise LookupError(name)


BEHAVIOURS = {
    "aside.start": "autoprof.behaviours.stages:NativeStart",
    "aside.stop": "autoprof.behaviours.stages:NativeStop",
    "main": "autoprof.behaviours.steps:Main",
    "hooks.again": "autoprof.behaviours.steps:Replaced",
    "ray.actor": "autoprof.behaviours.ray:Actor",
    "ray.actor-class": "autoprof.behaviours.ray:ActorClass",
    "ray.init": "autoprof.behaviours.ray:Init",
    "ray.shutdown": "autoprof.behaviours.ray:Shutdown",
    "rollout.around": "autoprof.behaviours.rollout:AroundGeneration",
    "rollout.end": "autoprof.behaviours.rollout:EndOfSampling",
    "rollout.http": "autoprof.behaviours.serving:OverHttp",
    "rpc.server": "autoprof.behaviours.rollout:RpcServer",
    "sglang.pass": "autoprof.behaviours.sglang:SchedulerPass",
    "sglang.released": "autoprof.behaviours.sglang:Released",
    "sglang.scheduler": "autoprof.behaviours.sglang:Scheduler",
    "sglang.server": "autoprof.behaviours.sglang:SglangActor",
    "sglang.set-up": "autoprof.behaviours.sglang:SetUp",
    "sglang.tokenized": "autoprof.behaviours.sglang:Tokenized",
    "span": "autoprof.behaviours.spans:CallSpan",
    "span.begin": "autoprof.behaviours.stages:SpanBegin",
    "stage": "autoprof.behaviours.stages:Stage",
    "stage.begin": "autoprof.behaviours.stages:StageBegin",
    "stage.end": "autoprof.behaviours.stages:StageEnd",
    "stage.mini-batch": "autoprof.behaviours.stages:MiniBatch",
    "stage.pass": "autoprof.behaviours.stages:StagePass",
    "step.begin": "autoprof.behaviours.steps:StepBegin",
    "step.counter": "autoprof.behaviours.steps:Counter",
    "step.end": "autoprof.behaviours.steps:StepEnd",
    "step.finished": "autoprof.behaviours.steps:Finished",
    "step.loop": "autoprof.behaviours.steps:Loop",
    "step.receive": "autoprof.behaviours.steps:Receive",
    "step.send": "autoprof.behaviours.steps:Send",
    "step.tick": "autoprof.behaviours.steps:Tick",
    "step.trainer": "autoprof.behaviours.steps:Trainer",
    "step.update": "autoprof.behaviours.steps:Update",
    "step.wrap": "autoprof.behaviours.steps:Wrap",
    "timer.start": "autoprof.behaviours.spans:TimerStart",
    "timer.stop": "autoprof.behaviours.spans:TimerStop",
    "vllm.add-request": "autoprof.behaviours.vllm:AddRequest",
    "vllm.engine": "autoprof.behaviours.vllm:Engine",
    "vllm.offline-profile": "autoprof.behaviours.vllm:Profile",
    "vllm.offline-request": "autoprof.behaviours.vllm:OfflineRequest",
    "vllm.offline-step": "autoprof.behaviours.vllm:OfflineStep",
    "vllm.offline-whole": "autoprof.behaviours.vllm:Whole",
    "vllm.outputs": "autoprof.behaviours.vllm:Outputs",
    "vllm.routes": "autoprof.behaviours.vllm:Routes",
    "vllm.server": "autoprof.behaviours.vllm:VllmActor",
    "vllm.start": "autoprof.behaviours.vllm_worker:ProcessStart",
    "vllm.worker": "autoprof.behaviours.vllm_worker:Worker",
}


# Value in `when` of a recipe. If it is a string, it is compared with the `str` of the call's value. True and False are
# not equal to 1 and 0.
Value: TypeAlias = str | bool | int | float


class Behaviour(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Code that runs around the calls of one function.

    A behaviour that does not run around calls but changes a class overrides `install`.

    Attributes:
        when: Conditions of the hook, a table from paths to values. A path begins with a parameter of the call. The hook
            ignores a call if the value at a path differs from the value in the table. An array allows several values.
        unless: Path that begins with a parameter of the call. If the value at this path is true, the hook ignores the
            call.
    """

    # Order of several hooks on one function: the behaviour with the higher layer runs around the one with the lower
    # layer. The order of the hooks in the recipe has no effect on that.
    layer: ClassVar[int] = 0
    # True if hooks with this behaviour make stages or spans, which have a `kind`.
    makes_stages: ClassVar[bool] = False
    when: dict[CallPath, Value | list[Value]] = {}
    unless: CallPath = ""

    def applies(self, call: Call) -> bool:
        """Return True if `when` and `unless` select this call, so that the hook must not ignore it."""
        if self.unless and call.at(self.unless, None):
            return False
        return not self.when or all(_matches(call.at(path, ""), expected) for path, expected in self.when.items())

    def concerns(self, call: Call) -> bool:
        """Return True if the hook has work to do in a selected call. Only `recipes --try` calls this."""
        return True

    def around(self, call: Call) -> Around:
        """Run code around the call.

        This is a generator. Its code before `yield CALL` runs before the call, its code after `yield CALL` after the
        call.
        """
        raise NotImplementedError

    def idle_unless(self) -> str:
        """Return the group of calls that the hook counts, or an empty string if the hook counts none.

        The hook has no work while no object is registered as counting for the group (`registry.counting`).
        """
        return ""

    def install(self, owner: Any) -> bool:
        """Change the hooked attribute in place and return True. Return False if autoprof must wrap it instead.

        Args:
            owner: The hooked attribute, for example a class.
        """
        return False

    def supply(self, owner: type, name: str, key: str) -> bool:
        """Add the hooked attribute to a class that does not have it in the installed release, and return True.

        Return False if the behaviour adds no attribute.

        Args:
            owner: Class that lacks the attribute.
            name: Name of the attribute.
            key: Key of the hook.
        """
        return False


def _matches(value: Any, expected: Value | list[Value]) -> bool:
    if isinstance(expected, list):
        return any(_matches(value, choice) for choice in expected)
    # A boolean of numpy is not a `bool`, but has the same `str`.
    if isinstance(expected, (str, bool)):
        return str(value) == str(expected)
    return isinstance(value, Number) and not isinstance(value, bool) and bool(operator.eq(value, expected))


def named(name: str) -> type[Behaviour]:
    """Import and return the class of a behaviour.

    Args:
        name: The name of the behaviour in recipes, a key of `BEHAVIOURS`.
    """
    module, _, attribute = BEHAVIOURS[name].partition(":")
    kind: type[Behaviour] = getattr(import_module(module), attribute)
    return kind
