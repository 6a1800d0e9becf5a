"""Behaviours that break the rules for behaviours in every way, for tests of the code around the user's functions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, Reply, Wait


class Ours(Exception):
    """Error of autoprof itself, which must not reach the user."""


class Now(Wait):
    """Wait that ends at once; in coroutine functions, after one turn of the event loop."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def block(self) -> Any:
        if isinstance(self.answer, BaseException) or self.answer in (Ours, StopIteration):
            raise self.answer  # a class raises a new instance, so that the wait and its exception form no cycle
        return self.answer

    async def suspend(self) -> Any:
        await asyncio.sleep(0)
        return self.block()


class Scripted(Behaviour):
    """Behaviour whose generator function is `script`."""

    script: Callable[[Call], Any]

    def around(self, call: Call) -> Around:
        return self.script(call)


class NeverApplies(Scripted):
    """Behaviour that raises before its generator starts."""

    def applies(self, call: Call) -> bool:
        raise Ours


def nothing(call: Call) -> Any:
    yield CALL


def waits(call: Call) -> Any:
    yield Now()
    yield CALL
    yield Now()
    yield Now()


def raises_before(call: Call) -> Any:
    raise Ours
    yield


def raises_after(call: Call) -> Any:
    yield CALL
    raise Ours


def raises_after_a_wait(call: Call) -> Any:
    yield Now()
    yield CALL
    yield Now()
    raise Ours


def raises_stop_iteration(call: Call) -> Any:
    yield CALL
    raise StopIteration("ours")


def never_yields(call: Call) -> Any:
    return
    yield


def yields_too_often(call: Call) -> Any:
    for _ in range(5):
        yield CALL


def yields_at_its_end_too(call: Call) -> Any:
    try:
        yield CALL
        yield CALL
    finally:
        call.at("nothing.at.all", None)


def yields_what_is_no_wait(call: Call) -> Any:
    yield "not a wait"
    yield CALL


def yields_what_is_no_wait_after(call: Call) -> Any:
    yield CALL
    yield 5


def waits_in_vain(call: Call) -> Any:
    yield Now(Ours)
    yield CALL


def waits_in_vain_after(call: Call) -> Any:
    outcome = yield CALL
    yield Now(Ours)
    del outcome


def waits_in_vain_and_continues(call: Call) -> Any:
    for state in (Now(Ours), CALL, Now(Ours)):
        try:
            yield state
        except Ours:
            yield Now()


def waits_for_stop_iteration(call: Call) -> Any:
    yield Now(StopIteration)
    yield CALL


def returns_no_reply(call: Call) -> Any:
    return "not a reply"
    yield


def replies_too_late(call: Call) -> Any:
    yield CALL
    return Reply("too late")


def raises_the_users_error(call: Call) -> Any:
    outcome = yield CALL
    raise outcome.error or Ours


def raises_the_users_error_after_a_wait(call: Call) -> Any:
    outcome = yield CALL
    yield Now()
    raise outcome.error or Ours


def raises_from_the_users_error(call: Call) -> Any:
    outcome = yield CALL
    raise Ours from outcome.error


def is_no_generator(call: Call) -> Any:
    return 7


# All functions of this module, in their order.
SCRIPTS = [value for value in list(vars().values()) if inspect.isfunction(value)]
BEHAVIOURS: list[Scripted] = [Scripted(script=script) for script in SCRIPTS]
BEHAVIOURS.append(NeverApplies(script=nothing, unless="self"))
NAMES = [*(script.__name__ for script in SCRIPTS), "never_applies"]
