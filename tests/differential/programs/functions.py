#: functions: together
"""Hooked functions and classes as the program sees and uses them."""

import abc
import asyncio
import collections
import contextlib
import copy
import dataclasses
import decimal
import enum
import fractions
import functools
import inspect
import os
import pickle
import pydoc
import sys
import traceback
import typing
from unittest import mock

import tinyrl
import tinyrl.trainer
from tinyrl import Trainer, evaluate, score
from tinyrl import trainer as module


def asking_functions():
    """Attributes of a function, which some frameworks read directly instead of through inspect."""
    for function in (score, Trainer.generate, Trainer.agenerate):
        print(function.__annotations__, typing.get_type_hints(function), asyncio.iscoroutinefunction(function))
        print(
            callable(function), hasattr(function, "__get__"), function.__class__, isinstance(function, type(lambda: 0))
        )
    score.note = "mine"
    print(score.note, vars(score)["note"])
    del score.note
    print(hasattr(score, "note"), score(["a"]))


def identity():
    """Wrapped function, which is always the same object, with its own names and module."""
    print(tinyrl.score is tinyrl.trainer.score is score)
    print(Trainer.update is Trainer.update, Trainer.__dict__["update"] is Trainer.update)
    print({Trainer.update: 1}[Trainer.update], Trainer.update in {Trainer.update})
    trainer = Trainer()
    print(
        trainer.update == trainer.update, trainer.update.__func__ is Trainer.update, trainer.update.__self__ is trainer
    )
    for function in (Trainer.update, Trainer.build, Trainer.reward, Trainer.agenerate, score):
        print(function.__name__, function.__qualname__, function.__module__, function.__doc__, type(function).__name__)
    print(type(Trainer.__dict__["build"]).__name__, type(Trainer.__dict__["reward"]).__name__)
    trainer.fit()


def inspecting():
    """Results of inspect for functions, methods and classes."""
    for function in (
        score,
        evaluate,
        Trainer.update,
        Trainer.build,
        Trainer.reward,
        Trainer.agenerate,
        Trainer().update,
    ):
        print(inspect.signature(function), inspect.getdoc(function))
        print(inspect.isfunction(function), inspect.ismethod(function), inspect.isroutine(function))
        print(inspect.iscoroutinefunction(function), inspect.isgeneratorfunction(function))
        print(inspect.getsource(function).splitlines()[0], inspect.getsourcelines(function)[1])
    print(inspect.getsource(Trainer) in inspect.getsource(tinyrl.trainer))
    print([name for name, _ in inspect.getmembers(Trainer, inspect.isfunction)])
    print([name for name, _ in inspect.getmembers(Trainer(), inspect.ismethod)])
    print([name for name, _ in inspect.getmembers(tinyrl.trainer, inspect.isfunction)])
    print(
        [(each.name, each.kind, each.defining_class.__name__) for each in inspect.classify_class_attrs(Trainer)][-12:]
    )
    print(type(inspect.getattr_static(Trainer, "build")), type(inspect.getattr_static(Trainer(), "reward")))
    print(Trainer().update(inside=lambda: 3))


def help_texts():
    """help() and pydoc of hooked functions and modules."""
    for thing in (score, Trainer, Trainer.update, tinyrl.trainer):
        print(pydoc.render_doc(thing, renderer=pydoc.plaintext))
    print(score(["a"]))


#: differs: inspect.getsourcefile and getfile do not follow __wrapped__, so they return a file of autoprof
def source_files():
    """File in which a function is defined, according to inspect."""
    for function in (score, Trainer.update, Trainer.build):
        print(os.path.basename(inspect.getfile(function)), os.path.basename(inspect.getsourcefile(function)))
        print(os.path.basename(inspect.getabsfile(function)))
    print(score(["a"]))


#: differs: a wrapper is a separate function with other __code__, __defaults__ and __globals__
def code_objects():
    """Code that reads a function's code object, as older libraries do for the names of parameters."""
    print(score.__code__.co_name, score.__code__.co_varnames[: score.__code__.co_argcount], score.__defaults__)
    print(score.__kwdefaults__, score.__globals__["__name__"])
    print(Trainer.update.__code__.co_varnames[0], Trainer.update.__code__.co_firstlineno)
    print(score(["a"]))


#: differs: hooks read their options from the instance, so a counting __getattribute__ sees more reads of global_step
def asked_attributes():
    """Class that counts reads of its instances' attributes."""

    class Asked(Trainer):
        asked = collections.Counter()

        def __getattribute__(self, name):
            type(self).asked[name] += 1
            return super().__getattribute__(name)

    Asked().fit()
    print(Asked.asked)


def descriptors():
    """Descriptors: bound methods, explicit calls of __get__, __slots__, __getattr__, __getattribute__."""

    class Slotted(Trainer):
        __slots__ = ("extra",)

    class Strict:
        __slots__ = ("global_step", "seen")
        fit, train_step, generate, update = Trainer.fit, Trainer.train_step, Trainer.generate, Trainer.update

        def __init__(self):
            self.seen = []

    class Asked(Trainer):
        asked = []

        def __getattribute__(self, name):
            type(self).asked.append(name)
            return super().__getattribute__(name)

    class Loose:
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args: name

    print(Slotted().fit(), Strict().fit(), Trainer.update.__get__(Trainer())(lambda: 3))
    print(
        Trainer.__dict__["build"].__get__(None, Slotted)().__class__.__name__, Trainer.__dict__["reward"].__func__("a")
    )
    print(Trainer.update(Loose()), Trainer.train_step(Strict.__new__(Slotted).__class__()))
    asked = Asked()
    asked.fit()
    print("update" in Asked.asked)


def decorating():
    """Decorators of all kinds around hooked functions: classes with __call__, descriptors, contextlib's."""

    class Counting:
        def __init__(self, function):
            functools.update_wrapper(self, function)
            self.function, self.count = function, 0

        def __call__(self, *args, **kwargs):
            self.count += 1
            return self.function(*args, **kwargs)

        def __get__(self, instance, owner):
            return functools.partial(self, instance) if instance is not None else self

    class Mine(Trainer):
        update = Counting(Trainer.update)
        also = Trainer.update
        other = property(Trainer.update)

    print(Mine().fit(), Mine.update.count, Mine.update.__wrapped__ is Trainer.update, Mine().other, Mine().also())

    @contextlib.contextmanager
    def within():
        print("enters")
        try:
            yield score(["a"])
        finally:
            print("leaves", score(["b"]))

    with within() as found:
        print(found)
    print(within()(score)(["abc"]))
    with contextlib.ExitStack() as stack:
        stack.callback(score, ["a"])
        stack.enter_context(within())


def monkeypatching():
    """Hooked function that the user replaces and restores, as users of trainers do."""
    original = Trainer.update

    def mine(self, inside=None, *args):
        return "mine", original(self, lambda: "inner")

    Trainer.update = mine
    print(Trainer().fit(), Trainer.update is mine)
    Trainer.update = original
    print(Trainer().fit(), Trainer.update is original)
    trainer = Trainer()
    trainer.update = lambda inside: "of the instance"
    print(trainer.fit(), vars(trainer).keys())
    del trainer.update
    print(trainer.fit(1))
    module.score = lambda texts: "patched"
    print(module.score([]))
    module.score = score


def mocking():
    """Hooked functions replaced by unittest.mock."""
    with mock.patch.object(Trainer, "update", return_value=5) as patched:
        print(Trainer().fit(), patched.call_count)
    with mock.patch.object(Trainer, "update", autospec=True) as patched:
        patched.return_value = 6
        print(Trainer().fit(), patched.call_args_list[0].args[1:])
        try:
            Trainer().update(no_such=1, inside=2, other=3)
            patched(1, 2, 3)
            Trainer.update()
        except TypeError as error:
            print(error)
    with mock.patch("tinyrl.trainer.score", autospec=True) as patched:
        try:
            tinyrl.trainer.score(1, 2, 3)
        except TypeError as error:
            print(error)
    with mock.patch.object(Trainer, "agenerate") as patched:
        print(type(patched).__name__)
    with mock.patch.object(Trainer, "update", side_effect=Trainer.update, autospec=True) as patched:
        try:
            print(Trainer().update(lambda: 8))
        except RecursionError as error:
            print(error)
    with mock.patch.object(Trainer, "generate", wraps=Trainer().generate) as patched:
        print(Trainer().fit(1), patched.called)
    spec = mock.create_autospec(Trainer)
    print(isinstance(spec(), Trainer), type(spec.return_value.agenerate).__name__, type(spec.reward).__name__)
    print(Trainer().fit(1), Trainer.build().name)


def subclassing():
    """Subclasses that override, that call super with and without arguments, and that inherit from two classes."""

    class Timed:
        def update(self, *args, **kwargs):
            return "timed", super().update(*args, **kwargs)

    class Mine(Timed, Trainer):
        def update(self, *args, **kwargs):
            return "mine", super().update(*args, **kwargs)

        def generate(self, inside=None):
            return super(Mine, self).generate(lambda: "generated")

        @classmethod
        def build(cls, name="x"):
            return super().build(name + "y")

        @staticmethod
        def reward(text, scale=1):
            return Trainer.reward(text, scale) + 1

    print(Mine().fit(), Mine.build().name, Mine.reward("ab"), Mine.instances, Trainer.instances)
    print([each.__name__ for each in Mine.__mro__], Mine().generate())
    print("update" in vars(Mine), "train_step" in vars(Mine), Mine.train_step is Trainer.train_step)


def init_subclass():
    """__init_subclass__, __set_name__, class decorators, and classes made by type()."""
    made = []

    class Registered(Trainer):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__()
            made.append((cls.__name__, kwargs, "update" in vars(cls)))

    class Named:
        def __set_name__(self, owner, name):
            made.append((owner.__name__, name))

    def decorator(cls):
        for name in ("update", "generate"):
            setattr(
                cls, name, (lambda function: lambda self, *a: ("decorated", function(self, *a)))(getattr(cls, name))
            )
        return cls

    @decorator
    class One(Registered, flag=1):
        attribute = Named()

        def update(self, inside=None):
            return super().update(lambda: "one")

    Two = type("Two", (Registered,), {"update": Trainer.update, "field": Named()}, flag=2)
    print(One().fit(), Two().fit(lambda: 1) if False else Two().fit(1), made)


def abstract():
    """Abstract base classes, virtual subclasses, and a metaclass of a trainer."""

    class Base(abc.ABC):
        @abc.abstractmethod
        def update(self, inside=None): ...

        @classmethod
        def __subclasshook__(cls, other):
            return "extra" in vars(other) or NotImplemented

    class Mine(Trainer, Base):
        pass

    class Missing(Base):
        pass

    Base.register(Trainer)
    print(Mine().fit(), isinstance(Trainer(), Base), issubclass(Mine, Base), Mine.__abstractmethods__)
    try:
        Missing()
    except TypeError as error:
        print(error)

    class Meta(abc.ABCMeta):
        def __new__(mcs, name, bases, body):
            body["made"] = sorted(key for key in body if not key.startswith("_"))
            return super().__new__(mcs, name, bases, body)

        def __call__(cls, *args):
            return super().__call__(*args)

    class Other(Trainer, metaclass=Meta):
        def update(self, inside=None):
            return super().update(lambda: "other")

    print(Other().fit(), Other.made, type(Other).__name__)


def dataclass_trainers():
    """Dataclasses, enums, NamedTuples, generics and protocols around a trainer."""
    T = typing.TypeVar("T")

    @dataclasses.dataclass(eq=True, order=True)
    class Config(Trainer):
        name: str = "config"
        seen: list = dataclasses.field(default_factory=list)
        global_step: int = 0

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        scorer: typing.Callable = score
        update = Trainer.update

    class Stage(enum.Enum):
        UPDATE = 1

        def run(self):
            return Trainer().update(lambda: self)

    class Generic(Trainer, typing.Generic[T]):
        pass

    @typing.runtime_checkable
    class Updates(typing.Protocol):
        def update(self, inside=None): ...

    class Row(typing.NamedTuple):
        scores: list = score(["a"])

    config = Config()
    print(config.fit(), config, config == Config(), dataclasses.asdict(config), dataclasses.replace(config, name="x"))
    print(Frozen().scorer(["abc"]), Frozen().update(), Frozen() == Frozen(), hash(Frozen()) == hash(Frozen()))
    print(
        Stage.UPDATE.run(),
        Generic[int]().fit(),
        Generic[int].__origin__.__name__,
        isinstance(Trainer(), Updates),
        Row(),
    )


def wrong_arguments():
    """Calls with wrong arguments, which raise the same errors at the same place."""
    trainer = Trainer()
    for call in (
        lambda: score(),
        lambda: score(["a"], 2),
        lambda: score(["a"], scale=1, other=2),
        lambda: score(1),
        lambda: trainer.train_step(1, 2),
        lambda: Trainer.update(),
        lambda: Trainer.reward(),
        lambda: Trainer.build(1, 2),
        lambda: evaluate(inside=None),
        lambda: trainer.update(key=1),
    ):
        try:
            print(call())
        except Exception:
            traceback.print_exc()


def wrapping_around():
    """functools around hooked functions: wraps, partial, partialmethod, lru_cache, cached_property, singledispatch."""

    @functools.wraps(score)
    def mine(*args, **kwargs):
        return "mine", score(*args, **kwargs)

    print(mine(["a"]), mine.__name__, inspect.signature(mine), inspect.unwrap(mine).__name__)
    part = functools.partial(score, scale=3)
    print(part(["ab"]), part.func is score, part.keywords, inspect.signature(part))
    print(functools.partial(Trainer.update, Trainer())(lambda: 4))
    cached = functools.lru_cache(maxsize=4)(Trainer.reward)
    print(cached("abc"), cached("abc"), cached.cache_info(), cached.__wrapped__ is Trainer.reward)

    class Mine(Trainer):
        fast = functools.partialmethod(Trainer.update, lambda: "fast")
        cached_update = functools.lru_cache(Trainer.update)

        @functools.cached_property
        def scores(self):
            return score(["x", "yy"])

        @functools.singledispatchmethod
        def reward(self, text):
            return Trainer.reward(str(text))

        @reward.register
        def _(self, text: int):
            return text

    print(Mine().fast(), Mine().cached_update(), Mine().scores, Mine().reward(12), Mine().reward([1]))
    dispatched = functools.singledispatch(evaluate)
    dispatched.register(int, lambda number: number + 1)
    print(dispatched(4), dispatched(lambda: 5), functools.reduce(lambda a, b: a + b, score(["a", "bb"])))


def step_numbers():
    """Step numbers that are numbers of other types."""

    class Number(int):
        def __index__(self):
            raise RuntimeError("not you")

        def __str__(self):
            raise RuntimeError("nor you")

        __repr__ = __hash__ = __int__ = __format__ = __str__

    for number in (
        1,
        True,
        2.0,
        "3",
        None,
        decimal.Decimal(4),
        fractions.Fraction(5),
        Number(6),
        -7,
        2**70,
        [8],
        1e400,
    ):
        trainer = Trainer()
        trainer.global_step = number
        print(trainer.train_step(lambda: "works"), trainer.seen)


def properties_that_raise():
    """Trainer whose step number is a property that raises, or that later returns another value."""

    class Raises(Trainer):
        global_step = property(lambda self: 1 / 0, lambda self, value: None)

    class Exits(Trainer):
        global_step = property(lambda self: self.numbers.pop(), lambda self, value: None)

        def __init__(self):
            self.seen = []
            self.numbers = ["one", None, 3.5, float("nan"), -1, 10**30, b"2"]

    print(Raises().fit(), Exits().fit(7))


def pickling():
    """Functions, classes, instances and bound methods, pickled and unpickled."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for thing in (score, evaluate, Trainer, Trainer.build, Trainer.update, Trainer.reward, Trainer.agenerate):
            assert pickle.loads(pickle.dumps(thing, protocol)) == thing
    trainer = Trainer("a")
    trainer.fit()
    again = pickle.loads(pickle.dumps(trainer))
    print(vars(again) == vars(trainer), pickle.loads(pickle.dumps(again.update))(), len(pickle.dumps(trainer)))
    print(len(pickle.dumps([Trainer.update, score, trainer.update])))
    for copied in (copy.copy(trainer), copy.deepcopy(trainer)):
        copied.fit(1)
        print(copied.seen, trainer.seen)
    print(copy.copy(score) is score, copy.deepcopy(Trainer.update) is Trainer.update)
    print(pickle.dumps(score))


for name in sys.argv[1].split(","):
    print(name)
    globals()[name]()
