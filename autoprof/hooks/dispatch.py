"""Error boundary around each call of a wrapped function: autoprof's own errors end here.

The user's function is called exactly once, with its own arguments, and its result and exceptions pass unchanged,
whatever a behaviour does. What a behaviour began to record before it failed is ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from autoprof.base import interrupts, log
from autoprof.capture import lifecycle
from autoprof.hooks import gates, registry
from autoprof.hooks.call import Around, Call, Outcome, Reply, Wait
from autoprof.run import call_counts, runtime


def drive(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with the behaviour of the hook `key` around it."""
    if compiling():
        return function(*args, **kwargs)
    run = enter(Call(key, function, args, kwargs))
    if run.reply is not None:
        return run.reply.value
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        traceback = error.__traceback__
        try:
            leave(run, Outcome(None, error))
        finally:
            error.__traceback__ = traceback
            del traceback
        raise
    leave(run, Outcome(result, None))
    return result


def enter(call: Call) -> Run:
    """Run the behaviour of a call's hook up to the call. The caller makes the call, or does what stands for it."""
    run = Run(call.key)
    with run:
        wait = run.before(call)
        while wait is not None:
            wait = run.resume(*_block(run, wait))
    return run


def leave(run: Run, outcome: Outcome) -> None:
    """Go on with the behaviour after the call."""
    with run:
        wait = run.after(outcome)
        while wait is not None:
            wait = run.resume(*_block(run, wait))


async def enter_coroutine(call: Call) -> Run:
    """Run the behaviour of a call's hook up to the call, in a coroutine."""
    run = Run(call.key)
    with run:
        wait = run.before(call)
        while wait is not None:
            wait = run.resume(*await _suspend(run, wait))
    return run


async def leave_coroutine(run: Run, outcome: Outcome) -> None:
    """Go on with the behaviour after the call, in a coroutine. One that is being closed must not wait any more."""
    closed = isinstance(outcome.error, GeneratorExit)
    with run:
        wait = run.after(outcome)
        while wait is not None:
            answer = (None, TimeoutError("the coroutine was closed")) if closed else await _suspend(run, wait)
            wait = run.resume(*answer)
            del answer


async def drive_coroutine(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Await `function` with the behaviour of the hook `key` around it."""
    run = Run(key)
    with run:
        wait = run.before(Call(key, function, args, kwargs))
        while wait is not None:
            wait = run.resume(*await _suspend(run, wait))
    if run.reply is not None:
        return run.reply.value
    try:
        result = await function(*args, **kwargs)
    except BaseException as error:
        traceback = error.__traceback__
        try:
            with run:
                wait = run.after(Outcome(None, error))
                while wait is not None:
                    # A coroutine that is being closed must not wait any more.
                    closed = isinstance(error, GeneratorExit)
                    answer = (None, TimeoutError("the coroutine was closed")) if closed else await _suspend(run, wait)
                    wait = run.resume(*answer)
                    del answer
        finally:
            error.__traceback__ = traceback
            del traceback
        raise
    with run:
        wait = run.after(Outcome(result, None))
        while wait is not None:
            wait = run.resume(*await _suspend(run, wait))
    return result


def compiling() -> bool:
    """Return whether torch.compile traces this call into a graph, in which only the user's function belongs."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def _block(run: Run, wait: Wait) -> tuple[Any, BaseException | None]:
    try:
        return wait.block(), None
    except BaseException as error:
        if (theirs := interrupts.of_user(error)) is not None:
            run.give_up()
            run.cut_short(theirs)
            _hand_on(theirs)
        return None, error


async def _suspend(run: Run, wait: Wait) -> tuple[Any, BaseException | None]:
    try:
        return await wait.suspend(), None
    except BaseException as error:
        # A cancellation is of the user's task, and what a signal handler raises is the user's: the call ends here.
        if (theirs := interrupts.of_user(error)) is not None:
            run.give_up()
            _hand_on(theirs)
        return None, error


def _hand_on(theirs: BaseException) -> NoReturn:
    """Raise the user's exception itself, in the place of one that it has caused."""
    raise theirs


class Run:
    """A behaviour's generator during one call. No exception of autoprof's leaves it.

    Its parts run in a `with` block of it. An exception that leaves the block is the user's, without one of autoprof's
    as its context.
    """

    __slots__ = ("_around", "_called", "_concerns", "_key", "_outer", "_recording", "reply")

    def __init__(self, key: str) -> None:
        self.reply: Reply | None = None
        self._around: Around | None = None
        self._called = False
        self._concerns = True
        self._key = key
        self._outer: BaseException | None = None
        self._recording: object = None

    def __enter__(self) -> None:
        self._outer = sys.exc_info()[1]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            interrupts.alone(error, self._outer)
        self._outer = None

    def before(self, call: Call) -> Wait | None:
        """Run the behaviour up to the call, or to a wait that comes first, which is returned."""
        try:
            self._recording = lifecycle.current()
            behaviour = registry.behaviour(call.key)
            if behaviour is None or not behaviour.applies(call):
                if behaviour is not None and call_counts.state.on:
                    call_counts.add(self._key, fired=False)
                return None
            if call_counts.state.on:
                self._concerns = behaviour.concerns(call)
            self._around = behaviour.around(call)
        except BaseException as error:
            if (theirs := interrupts.of_user(error)) is not None:
                _hand_on(theirs)
            self._failed(error)
        return self._advance(None)

    def after(self, outcome: Outcome) -> Wait | None:
        """Go on with the behaviour after the call."""
        self._called = True
        return self._advance(outcome)

    def resume(self, answer: Any, error: BaseException | None) -> Wait | None:
        """Go on with the behaviour after it waited."""
        if error is None:
            return self._advance(answer)
        try:
            return self._advance(error, "throw")
        finally:
            error.__traceback__ = None  # as in _failed

    def give_up(self) -> None:
        """Close the behaviour, which ends what it began: the call is cancelled while the behaviour waits."""
        around, self._around = self._around, None
        try:
            if around is not None:
                around.close()
        except BaseException as error:
            if (theirs := interrupts.of_user(error)) is not None:
                _hand_on(theirs)
            self._failed(error)

    def _advance(self, value: Any, how: str = "send") -> Wait | None:
        if self._around is None:
            return None
        try:
            wait: Wait | None = getattr(self._around, how)(value)
            if wait is None and self._called:
                self._around.close()
                raise RuntimeError("the behaviour yielded to the call twice")
            if wait is None and call_counts.state.on:
                call_counts.add(self._key, fired=self._concerns)
            return wait
        except BaseException as error:
            self._around = None
            # The generator's own end has come through no other frame than this.
            if isinstance(error, StopIteration) and error.__traceback__.tb_next is None:  # type: ignore[union-attr]
                if isinstance(error.value, Reply) and not self._called:
                    self.reply = error.value
                gates.worked(self._key)
                return None
            if (theirs := interrupts.of_user(error)) is not None:
                self.cut_short(theirs)
                _hand_on(theirs)
            self._failed(error)
        return None

    def _failed(self, error: BaseException) -> None:
        try:
            runtime.report(self._key, error)
            if gates.failed(self._key):
                runtime.switched_off(self._key, gates.SWITCHED_OFF)
            self.cut_short(f"autoprof failed in {self._key}")
        except Exception as another:  # not even the report works: the user's call matters more
            interrupts.pass_on(another)
        # Its frames hold the user's arguments, and some of them the error itself: a cycle, which would keep a model.
        error.__traceback__ = None

    def cut_short(self, why: str | BaseException) -> None:
        """End what this call has begun to record: nobody else would."""
        try:
            reason = why if isinstance(why, str) else f"{type(why).__name__} was raised while autoprof was at work"
            lifecycle.cut_short(reason, but_for=self._recording)
        except Exception as error:
            interrupts.pass_on(error)
            log.warning(f"{self._key}: its recording could not be ended ({type(error).__name__}: {error})")
