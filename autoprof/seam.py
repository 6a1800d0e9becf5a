"""The seam where autoprof's own errors end, around each call of a wrapped function.

The user's function is called exactly once, with its own arguments, and its result and exceptions pass unchanged,
whatever a behaviour does. What a behaviour began to record before it failed is ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeGuard

from autoprof import gates, interrupts
from autoprof.wrapping import Around, Call, Outcome, Reply, Wait


def drive(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with the behaviour of the hook `key` around it."""
    if _compiling():
        return function(*args, **kwargs)
    run = _Run(key)
    with run:
        wait = run.before(Call(key, function, args, kwargs))
        while wait is not None:
            wait = run.resume(*_block(run, wait))
    if run.reply is not None:
        return run.reply.value
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        traceback = error.__traceback__
        try:
            with run:
                wait = run.after(Outcome(None, error))
                while wait is not None:
                    wait = run.resume(*_block(run, wait))
        finally:
            error.__traceback__ = traceback
            del traceback
        raise
    with run:
        wait = run.after(Outcome(result, None))
        while wait is not None:
            wait = run.resume(*_block(run, wait))
    return result


async def drive_coroutine(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Await `function` with the behaviour of the hook `key` around it."""
    run = _Run(key)
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


def _compiling() -> bool:
    """Whether torch.compile traces this call into a graph, in which only the user's function belongs."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def _block(run: _Run, wait: Wait) -> tuple[Any, Exception | None]:
    try:
        return wait.block(), None
    except BaseException as error:
        if not _ours(error):
            run.give_up()
            run.cut_short(error)
            raise
        return None, error


async def _suspend(run: _Run, wait: Wait) -> tuple[Any, Exception | None]:
    try:
        return await wait.suspend(), None
    except BaseException as error:
        # A cancellation is of the user's task, and what a signal handler raises is the user's: the call ends here.
        if not _ours(error):
            run.give_up()
            raise
        return None, error


def _ours(error: BaseException) -> TypeGuard[Exception]:
    """Whether an exception that comes out of autoprof's code is an error of autoprof's. If not, it is the user's."""
    return isinstance(error, Exception) and not interrupts.from_handler(error)


class _Run:
    """A behaviour's generator during one call. This is the seam: no exception of ours leaves it.

    Its parts run in a `with` block of it: what leaves that is the user's, and has nothing of autoprof's as its context.
    """

    __slots__ = ("_around", "_called", "_key", "_outer", "_recording", "reply")

    def __init__(self, key: str) -> None:
        self.reply: Reply | None = None
        self._around: Around | None = None
        self._called = False
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
        """Run the behaviour up to the call; what it returns is to be waited for first."""
        try:
            from autoprof import capture, importing

            self._recording = capture.current()
            behaviour = importing.behaviour(call.key)
            if behaviour is None or not behaviour.applies(call):
                return None
            self._around = behaviour.around(call)
        except BaseException as error:
            if not _ours(error):
                raise
            self._failed(error)
        return self._advance(lambda around: next(around))

    def after(self, outcome: Outcome) -> Wait | None:
        """Go on with the behaviour after the call."""
        self._called = True
        return self._advance(lambda around: around.send(outcome))

    def resume(self, answer: Any, error: Exception | None) -> Wait | None:
        """Go on with the behaviour after it waited."""
        if error is not None:
            try:
                return self._advance(lambda around: around.throw(error))
            finally:
                error.__traceback__ = None  # as in _failed
        return self._advance(lambda around: around.send(answer))

    def give_up(self) -> None:
        """Have the behaviour end what it began: the call is cancelled while the behaviour waits."""
        around, self._around = self._around, None
        try:
            if around is not None:
                around.close()
        except BaseException as error:
            if not _ours(error):
                raise
            self._failed(error)

    def _advance(self, move: Callable[[Around], Wait | None]) -> Wait | None:
        if self._around is None:
            return None
        try:
            wait = move(self._around)
            if wait is None and self._called:
                self._around.close()
                raise RuntimeError("the behaviour yielded to the call twice")
            return wait
        except StopIteration as stop:
            self._around = None
            if isinstance(stop.value, Reply) and not self._called:
                self.reply = stop.value
            gates.worked(self._key)
        except BaseException as error:
            self._around = None
            if not _ours(error):
                self.cut_short(error)
                raise
            self._failed(error)
        return None

    def _failed(self, error: Exception) -> None:
        try:
            from autoprof import runtime

            runtime.report(self._key, error)
            if gates.failed(self._key):
                runtime.switched_off(self._key)
            self.cut_short(f"autoprof failed in {self._key}")
        except Exception as another:  # not even the report works: the user's call matters more
            interrupts.pass_on(another)
        # Its frames hold the user's arguments, and some of them the error itself: a cycle, which would keep a model.
        error.__traceback__ = None

    def cut_short(self, why: str | BaseException) -> None:
        """End what this call has begun to record: nobody else would."""
        from autoprof import capture

        reason = why if isinstance(why, str) else f"{type(why).__name__} was raised while autoprof was at work"
        capture.cut_short(reason, but_for=self._recording)
