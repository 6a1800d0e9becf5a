"""Error boundary around each call of a wrapped function: autoprof's own errors end here.

The user's function is called exactly once, with its own arguments; its result and exceptions pass unchanged. If a
behaviour fails, what it began to record is ended. The same holds for hooks around one item of an iterator or one block.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NoReturn, TypeAlias

from autoprof.base import exceptions, interrupts, log, threads
from autoprof.base.exception_text import described
from autoprof.base.originals import threading
from autoprof.capture import lifecycle
from autoprof.hooks import gates, registry
from autoprof.hooks.behaviour import Around, Call, Outcome, Reply, Wait
from autoprof.run import call_counts, cluster, runtime


class InThread(Wait):
    """A short blocking call: made here by a function, in a thread by a coroutine function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = function
        self._args = args

    def block(self) -> Any:
        return self._function(*self._args)

    async def suspend(self) -> Any:
        """Wait for a thread of its own: those of the user's executors may all wait for this call (`to_thread`)."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                settle, outcome = answer.set_result, self.block()
            except BaseException as error:
                interrupts.pass_on(error)
                settle, outcome = answer.set_exception, error
            with interrupts.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if answer.done() else settle(outcome))

        context = contextvars.copy_context()
        try:
            thread = threading.Thread(target=context.run, args=(run,), name="autoprof-waiting", daemon=True)
            threads.start(thread.start)
        except RuntimeError as error:  # the system gives no more threads
            interrupts.pass_on(error)
            return self.block()
        return await answer


def ask(function: Callable[..., Any], *args: Any) -> Generator[Wait, Any, Any]:
    """Call a function that asks Ray where Ray is up: `answer = yield from ask(...)`.

    Without Ray there is nothing to wait for, and a coroutine function takes no turn of its event loop more.
    """
    if not cluster.is_up():
        return function(*args)
    return (yield InThread(function, *args))


class Coroutine(Wait):
    """A coroutine, for the behaviours of coroutine functions."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._awaitable = awaitable

    async def suspend(self) -> Any:
        return await self._awaitable


class RayCalls(Wait):
    """Calls of Ray actors that run at the same time. The answers stand in their order, errors as exceptions."""

    def __init__(self, references: Sequence[Any], timeout_s: float) -> None:
        self._references = references
        self._timeout_s = timeout_s

    def block(self) -> list[Any]:
        import ray

        done, _ = ray.wait(list(self._references), num_returns=len(self._references), timeout=self._timeout_s)
        return [self._answer(ray, reference, done) for reference in self._references]

    async def suspend(self) -> list[Any]:
        async def answer(reference: Any) -> Any:
            return await reference

        waits = [asyncio.wait_for(answer(reference), self._timeout_s) for reference in self._references]
        return await asyncio.gather(*waits, return_exceptions=True)

    def _answer(self, ray: Any, reference: Any, done: list[Any]) -> Any:
        if reference not in done:
            return TimeoutError(f"no answer within {self._timeout_s:g} s")
        try:
            return ray.get(reference)
        except Exception as error:
            interrupts.pass_on(error)
            return error


def drive(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with the behaviour of the hook `key` around it."""
    if compiling():
        return function(*args, **kwargs)
    run = Driven(key)
    try:
        run.enter(Call(key, function, args, kwargs))
        if run.reply is not None:
            return run.reply.value
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            traceback = exceptions.traceback_of(error)
            try:
                run.leave(Outcome(None, error))
            finally:
                exceptions.set_traceback(error, traceback)
                del traceback
            raise
        run.leave(Outcome(result, None))
        return result
    except BaseException as error:
        run.undo(error)
        raise


def enter(call: Call) -> Driven:
    """Run the behaviour of a call's hook up to the call. The caller makes the call, or does what stands for it."""
    run = Driven(call.key)
    try:
        run.enter(call)
    except BaseException as error:
        run.undo(error)
        raise
    return run


def leave(run: Driven, outcome: Outcome) -> None:
    """Go on with the behaviour after the call."""
    try:
        run.leave(outcome)
    except BaseException as error:
        run.undo(error)
        raise


async def enter_coroutine(call: Call) -> Driven:
    """Run the behaviour of a call's hook up to the call, in a coroutine."""
    run = Driven(call.key)
    try:
        await run.enter_coroutine(call)
    except BaseException as error:
        run.undo(error)
        raise
    return run


async def leave_coroutine(run: Driven, outcome: Outcome) -> None:
    """Go on with the behaviour after the call, in a coroutine."""
    try:
        await run.leave_coroutine(outcome)
    except BaseException as error:
        run.undo(error)
        raise


async def drive_coroutine(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Await `function` with the behaviour of the hook `key` around it."""
    run = Driven(key)
    try:
        await run.enter_coroutine(Call(key, function, args, kwargs))
        if run.reply is not None:
            return run.reply.value
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            traceback = exceptions.traceback_of(error)
            try:
                await run.leave_coroutine(Outcome(None, error))
            finally:
                exceptions.set_traceback(error, traceback)
                del traceback
            raise
        await run.leave_coroutine(Outcome(result, None))
        return result
    except BaseException as error:
        run.undo(error)
        raise


def compiling() -> bool:
    """Return whether torch.compile traces this call into a graph, in which only the user's function belongs."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def _block(wait: Wait) -> tuple[Any, BaseException | None]:
    try:
        return wait.block(), None
    except BaseException as error:
        if (theirs := interrupts.of_user(error)) is not None:
            _hand_on(theirs)
        return None, error


async def _suspend(run: Driven, wait: Wait) -> tuple[Any, BaseException | None]:
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


class Driven:
    """A behaviour's generator during one call. No exception of autoprof's leaves it.

    Its parts run in a `with` block of it. An exception that leaves the block is the user's, without one of autoprof's
    as its context.

    The generator comes to its end, whatever happens: it returns, or raises, or is closed by `undo`. What it has begun
    it ends in all three cases.
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

    def enter(self, call: Call) -> None:
        """Run the behaviour up to the call. The caller makes the call, or does what stands for it."""
        with self:
            wait = self.before(call)
            while wait is not None:
                wait = self.resume(*_block(wait))

    def leave(self, outcome: Outcome) -> None:
        """Go on with the behaviour after the call."""
        with self:
            wait = self.after(outcome)
            while wait is not None:
                wait = self.resume(*_block(wait))

    async def enter_coroutine(self, call: Call) -> None:
        """As `enter`, in a coroutine."""
        with self:
            wait = self.before(call)
            while wait is not None:
                wait = self.resume(*await _suspend(self, wait))

    async def leave_coroutine(self, outcome: Outcome) -> None:
        """As `leave`, in a coroutine. One that is being closed must not wait any more."""
        closed = issubclass(type(outcome.error), GeneratorExit)
        with self:
            wait = self.after(outcome)
            while wait is not None:
                answer = (None, TimeoutError("the coroutine was closed")) if closed else await _suspend(self, wait)
                wait = self.resume(*answer)
                del answer

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
            exceptions.set_traceback(error, None)  # as in _failed

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

    def undo(self, error: BaseException) -> None:
        """End what the behaviour has begun in this call, if `error` interrupted it. The caller raises `error`."""
        if self._around is not None:
            with self:
                interrupts.undo(error, self._end)

    def _end(self) -> None:
        if self._around is not None:
            self._around.close()
            lifecycle.cut_short(interrupts.AT_WORK, but_for=self._recording)
            self._around = None

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
            # The traceback of the generator's own end has no frame but this one.
            if type(error) is StopIteration and exceptions.traceback_of(error).tb_next is None:  # type: ignore[union-attr]
                self._around = None
                if isinstance(error.value, Reply) and not self._called:
                    self.reply = error.value
                gates.worked(self._key)
                return None
            if (theirs := interrupts.of_user(error)) is not None:
                _hand_on(theirs)
            self._around = None
            self._failed(error)
        return None

    def _failed(self, error: BaseException) -> None:
        try:
            runtime.report(self._key, error)
            if gates.failed(self._key):
                runtime.switched_off(self._key, gates.SWITCHED_OFF)
            self._cut_short(f"autoprof failed in {self._key}")
        except Exception as another:  # not even the report works: the user's call matters more
            interrupts.pass_on(another)
        # Its frames hold the user's arguments, and some of them the error itself: a cycle, which would keep a model.
        exceptions.set_traceback(error, None)

    def _cut_short(self, reason: str) -> None:
        """End what this call has begun to record: nobody else would."""
        try:
            lifecycle.cut_short(reason, but_for=self._recording)
        except Exception as error:
            interrupts.pass_on(error)
            log.warning(f"{self._key}: its recording could not be ended ({described(error)})")


# Behaviours that have been entered, the outermost first.
Runs: TypeAlias = list[Driven]


def advance(call: Call, resume: Callable[[Any], Any], given: Any) -> Any:
    """Have a generator make its next item: `resume(given)` is a call of its `send` or `throw`."""
    if compiling() or issubclass(type(given), GeneratorExit) or gates.gate(call.key):
        return resume(given)
    return within([enter(call)], resume, given)


async def advance_coroutine(call: Call, resume: Callable[[Any], Any], given: Any) -> Any:
    """Have an asynchronous generator make its next item."""
    if issubclass(type(given), GeneratorExit) or gates.gate(call.key):
        return await resume(given)
    return await within_coroutine([await enter_coroutine(call)], resume, given)


def within(runs: Runs, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function for which the hooks have been entered, and leave them."""
    try:
        result = function(*args)
    except BaseException as error:
        leave_item(runs, _ended(error))
        raise
    leave_item(runs, Outcome(result, None))
    return result


async def within_coroutine(runs: Runs, function: Callable[..., Any], *args: Any) -> Any:
    """Await a coroutine function for which the hooks have been entered, and leave them."""
    try:
        result = await function(*args)
    except BaseException as error:
        await leave_item_coroutine(runs, _ended(error))
        raise
    await leave_item_coroutine(runs, Outcome(result, None))
    return result


def _ended(error: BaseException) -> Outcome:
    over = issubclass(type(error), (StopIteration, StopAsyncIteration))
    return Outcome(None, None if over else error, over)


def leave_item(runs: Runs, outcome: Outcome) -> None:
    """Leave hooks, the innermost first."""
    traceback = exceptions.traceback_of(outcome.error) if outcome.error is not None else None
    try:
        while runs:
            leave(runs.pop(), outcome)
    finally:
        if outcome.error is not None:
            exceptions.set_traceback(outcome.error, traceback)
        del traceback


async def leave_item_coroutine(runs: Runs, outcome: Outcome) -> None:
    """Leave hooks in a coroutine."""
    traceback = exceptions.traceback_of(outcome.error) if outcome.error is not None else None
    try:
        while runs:
            await leave_coroutine(runs.pop(), outcome)
    finally:
        if outcome.error is not None:
            exceptions.set_traceback(outcome.error, traceback)
        del traceback
