"""Hooks around what functions return: context managers from enter to exit, iterators from `next` to `next`."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from pytest_mock import MockerFixture

from autoprof.hooks import registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call
from autoprof.hooks.wrapper import wrap, wrapped_by
from autoprof.run import runtime


class Recorder(Behaviour):
    """Behaviour that records the begin and the outcome of each block or item."""

    seen: list[Any] = []

    def around(self, call: Call) -> Around:
        self.seen.append(("begin", call.args))
        outcome = yield CALL
        self.seen.append(("over" if outcome.over else "end", outcome.error or outcome.result))
        return None


@pytest.fixture
def seen(mocker: MockerFixture) -> list[Any]:
    recorder = Recorder()
    mocker.patch.object(registry, "active", side_effect=lambda key: (None, recorder))
    return recorder.seen


class Block:
    """A context manager of a library."""

    def __init__(self, name: str = "", swallows: bool = False) -> None:
        self.name = name
        self.swallows = swallows

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *raised: object) -> bool:
        return self.swallows

    async def __aenter__(self) -> str:
        return self.name

    async def __aexit__(self, *raised: object) -> bool:
        return self.swallows


class Items:
    """An iterator of a library."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> int:
        if self.count == 0:
            raise StopIteration
        self.count -= 1
        return self.count


class Loader:
    """An iterable that is no iterator itself, such as a data loader."""

    def __iter__(self) -> Items:
        return Items(1)


class Registered:
    """A class whose subclasses the user's code sees."""

    known: list[type] = []

    def __init_subclass__(cls) -> None:
        cls.known.append(cls)

    __enter__ = Block.__enter__
    __exit__ = Block.__exit__


@contextlib.contextmanager
def made(name: str) -> Iterator[str]:
    try:
        yield name
    except KeyError:
        pass


def generator(first: Any) -> Iterator[Any]:
    try:
        given = yield first
        yield given
    except KeyError:
        yield "caught"
    return "result"


async def agenerator(first: Any) -> AsyncIterator[Any]:
    try:
        given = yield first
        yield given
    except KeyError:
        yield "caught"


def hooked(function: Callable[..., Any], around: str = "with") -> Callable[..., Any]:
    return wrap(function, "k", around)


def begun_and_ended(seen: list[Any]) -> list[str]:
    return [what for what, _ in seen]


async def later(name: str) -> Block:
    return Block(name)


@pytest.mark.parametrize("makes", [made, Block])
def test_a_block_lasts_from_enter_to_exit(makes: Callable[..., Any], seen: list[Any]) -> None:
    with hooked(makes)("t") as value:
        assert (value, seen) == ("t", [("begin", ("t",))])
    assert begun_and_ended(seen) == ["begin", "end"]


@pytest.mark.parametrize("makes", [Block, later])
def test_an_asynchronous_block_lasts_from_enter_to_exit(makes: Any, seen: list[Any]) -> None:
    async def main() -> None:
        block = hooked(makes)("t")
        async with await block if makes is later else block as value:
            assert (value, begun_and_ended(seen)) == ("t", ["begin"])

    asyncio.run(main())
    assert begun_and_ended(seen) == ["begin", "end"]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("swallows", [False, True])
def test_exceptions_pass_through_a_block(kind: str, swallows: bool, seen: list[Any]) -> None:
    error = ValueError("the user's")

    async def amain() -> None:
        async with hooked(Block)("t", swallows):
            raise error

    def main() -> None:
        with hooked(Block)("t", swallows):
            raise error

    with contextlib.nullcontext() if swallows else pytest.raises(ValueError, match="the user's") as raised:
        asyncio.run(amain()) if kind == "async" else main()
    assert swallows or raised.value is error
    assert error.__context__ is None
    assert seen[-1] == ("end", None if swallows else error)


def test_exceptions_pass_through_a_block_of_a_generator(seen: list[Any]) -> None:
    errors = [ValueError("the user's"), StopIteration("the user's"), RuntimeError("the user's")]
    for error in errors:
        with pytest.raises(type(error)) as raised, hooked(made)("t"):
            raise error
        assert raised.value is error
        assert (error.__context__, error.__cause__) == (None, None)
        assert seen[-1] == ("end", error)
    with hooked(made)("t"):
        raise KeyError("the block's own")
    assert seen[-1] == ("end", None)


def test_a_block_that_fails_to_begin(seen: list[Any]) -> None:
    class Fails(Block):
        def __enter__(self) -> str:
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"), hooked(Fails)():
        pass
    assert begun_and_ended(seen) == ["begin", "end"]
    assert isinstance(seen[-1][1], KeyError)


def test_a_block_in_itself_ends_as_often_as_it_begins(seen: list[Any]) -> None:
    block = hooked(Block)("t")
    with block, block:
        assert begun_and_ended(seen) == ["begin", "begin"]
    assert begun_and_ended(seen) == ["begin", "begin", "end", "end"]


def test_a_block_that_is_an_iterator_too(mocker: MockerFixture) -> None:
    class Both(Items):
        def __enter__(self) -> Both:
            return self

        def __exit__(self, *raised: object) -> None: ...

    recorders = {"block": Recorder(), "items": Recorder()}
    mocker.patch.object(registry, "active", side_effect=lambda key: (None, recorders[key]))
    function = wrap(wrap(Both, "block", "with"), "items", "next")
    with function(1) as both:
        assert list(both) == [0]
    assert isinstance(both, Both)
    assert begun_and_ended(recorders["block"].seen) == ["begin", "end"]
    assert begun_and_ended(recorders["items"].seen) == ["begin", "end", "begin", "over"]


class Opens(Behaviour):
    """Behaviour that opens something, as a stage does."""

    open: list[str] = []

    def around(self, call: Call) -> Around:
        call.on_interrupt = self.open.clear
        self.open.append(call.key)
        yield CALL
        self.open.clear()
        return None


def test_a_block_that_is_never_left_ends_with_its_object(mocker: MockerFixture) -> None:
    opens = Opens()
    mocker.patch.object(registry, "active", return_value=(None, opens))
    block = hooked(Block)()
    block.__enter__()
    assert opens.open == ["k"]
    del block
    assert opens.open == []


def test_the_user_gets_the_object_itself(seen: list[Any]) -> None:
    block = Block("t")
    got = hooked(lambda: block)()
    assert got is block
    assert isinstance(got, Block)
    assert got.__class__ is Block
    assert vars(got) == {"name": "t", "swallows": False}
    assert repr(got).startswith(f"<{__name__}.Block object at")
    assert (hasattr(got, "__len__"), isinstance(got, Iterator)) == (False, False)
    # Lightning creates another loader in this way, for a distributed run.
    assert vars(type(got)("u")) == {"name": "u", "swallows": False}
    for again in (copy.copy(got), copy.deepcopy(got), pickle.loads(pickle.dumps(got))):
        assert (type(again), vars(again)) == (Block, vars(block))
    assert seen == []


def test_results_and_arguments_are_not_kept_alive(seen: list[Any]) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loader = hooked(lambda of: Loader(), "next")(self)

    trainer = Trainer()
    assert list(trainer.loader) == [0]
    gone = weakref.ref(trainer), weakref.ref(trainer.loader)
    seen.clear()
    gc.disable()
    try:
        del trainer
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_the_wait_for_a_data_loader_is_timed(seen: list[Any]) -> None:
    loader = hooked(Loader, "next")()
    assert isinstance(loader, Loader)
    iterator = iter(loader)
    assert isinstance(iterator, Items)
    assert seen == []
    assert list(iterator) == [0]
    assert [(what, value) for what, value in seen if what != "begin"] == [("end", 0), ("over", None)]
    assert list(loader) == [0]


@pytest.mark.parametrize("decorated", [False, True])
def test_a_generator_is_the_same(decorated: bool, seen: list[Any]) -> None:
    """Check a generator of a generator function, and one that another function returns."""
    function = hooked((lambda first: generator(first)) if decorated else generator, "next")
    assert inspect.isgeneratorfunction(function) != decorated
    made = function(1)
    assert inspect.isgenerator(made)
    assert made.__name__ == "generator"
    assert seen == []
    assert next(made) == 1
    assert begun_and_ended(seen) == ["begin", "end"]
    assert made.send(2) == 2
    assert made.throw(KeyError("the user's")) == "caught"
    with pytest.raises(StopIteration) as end:
        next(made)
    assert end.value.value == "result"
    assert begun_and_ended(seen) == ["begin", "end"] * 3 + ["begin", "over"]


def test_a_generator_that_is_closed_or_raises(seen: list[Any]) -> None:
    closed: list[str] = []

    def closes() -> Iterator[int]:
        try:
            yield 1
        except GeneratorExit:
            closed.append("closed")
            return 2  # type: ignore[return-value]

    def fails() -> Iterator[int]:
        yield 1
        raise LookupError("the user's")

    plain, made = closes(), hooked(closes, "next")()
    assert next(plain) == next(made) == 1
    # Python 3.13 returns the generator's value.
    assert made.close() == plain.close()
    assert closed == ["closed"] * 2
    assert begun_and_ended(seen) == ["begin", "end"]
    with pytest.raises(LookupError, match="the user's") as raised:
        list(hooked(fails, "next")())
    assert raised.value.__context__ is None
    assert seen[-1] == ("end", raised.value)


def test_an_asynchronous_generator_is_the_same(seen: list[Any]) -> None:
    function = hooked(agenerator, "next")
    assert inspect.isasyncgenfunction(function)

    async def main() -> None:
        made = function(1)
        assert inspect.isasyncgen(made)
        assert await anext(made) == 1
        assert await made.asend(2) == 2
        assert await made.athrow(KeyError("the user's")) == "caught"
        assert [item async for item in made] == []
        closed = function(1)
        assert await anext(closed) == 1
        await closed.aclose()
        assert [item async for item in closed] == []

    asyncio.run(main())
    assert begun_and_ended(seen) == ["begin", "end"] * 3 + ["begin", "over"] + ["begin", "end"]


def test_wrappers_of_generators_are_recognized(seen: list[Any]) -> None:
    functions = [hooked(generator, "next"), hooked(agenerator, "next"), hooked(made), hooked(asyncio.sleep)]
    assert [wrapped_by(function) for function in functions] == [{"k"}] * 4


@pytest.mark.parametrize("returned", [3, [1].__iter__(), Registered(), abc], ids=["none", "C", "registry", "module"])
def test_results_that_can_not_have_hooks_are_unchanged(returned: Any, mocker: MockerFixture, seen: list[Any]) -> None:
    report = mocker.patch.object(runtime, "report")
    for around in ("with", "next"):
        assert hooked(lambda: returned, around)() is returned
    assert [call.args[0] for call in report.call_args_list] == ["k", "k"]
    assert Registered.known == []
    assert seen == []


@pytest.mark.parametrize("around", ["call", "with"])
def test_generator_functions_need_a_next(around: str) -> None:
    for function in (generator, agenerator):
        with pytest.raises(TypeError, match='around = "next"'):
            wrap(function, "k", around)
