"""Error boundary around each call of a wrapped function.

Errors of autoprof are reported here and do not reach the user. The user's function is called exactly once, with its own
arguments; its result and exceptions pass unchanged. If a behaviour fails, a recording that it began is ended. The same
holds for hooks around one item of an iterator or one `with` block.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NoReturn, TypeAlias

from autoprof.base import exceptions, log, seam, threads
from autoprof.base.exception_text import described
from autoprof.base.originals import threading
from autoprof.capture import lifecycle
from autoprof.hooks import gates, registry
from autoprof.hooks.behaviour import Around, Call, Outcome, Reply, Wait
from autoprof.run import call_counts, cluster, runtime


class InThread(Wait):
    """A short blocking call. In a coroutine function, a new thread makes it; otherwise the calling thread does."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = function
        self._args = args

    def block(self) -> Any:
        return self._function(*self._args)

    async def suspend(self) -> Any:
        """Make the call in a new thread: all threads of the user's executors may be waiting for it (`to_thread`)."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def call() -> None:
            try:
                settle, outcome = answer.set_result, self.block()
            except BaseException as error:
                seam.pass_on(error)
                settle, outcome = answer.set_exception, error
            with seam.suppress(RuntimeError):  # the loop is closed, so no task waits for the answer
                loop.call_soon_threadsafe(lambda: None if answer.done() else settle(outcome))

        context = contextvars.copy_context()
        try:
            thread = threading.Thread(target=context.run, args=(call,), name="autoprof-waiting", daemon=True)
            threads.start(thread.start)
        except RuntimeError as error:  # the system can't start another thread
            seam.pass_on(error)
            return self.block()
        return await answer


def ask(function: Callable[..., Any], *args: Any) -> Generator[Wait, Any, Any]:
    """Call a function that may wait for Ray: `answer = yield from ask(...)`.

    If Ray is not up, the function does not block. It is then called directly, so that the coroutine does not yield to
    its event loop once more.
    """
    if not cluster.is_up():
        return function(*args)
    return (yield InThread(function, *args))


class Coroutine(Wait):
    """Wait for a coroutine, in behaviours of coroutine functions."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._awaitable = awaitable

    async def suspend(self) -> Any:
        return await self._awaitable


class RayCalls(Wait):
    """Wait for concurrent calls of Ray actors. Answers keep the calls' order; a failed call gives its exception."""

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
            seam.pass_on(error)
            return error


def drive(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with the behaviour of the hook `key` around it."""
    if compiling():
        return function(*args, **kwargs)
    hook_call = HookCall(key)
    try:
        hook_call.enter(Call(key, function, args, kwargs))
        if hook_call.reply is not None:
            return hook_call.reply.value
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            traceback = exceptions.traceback_of(error)
            try:
                hook_call.leave(Outcome(None, error))
            finally:
                exceptions.set_traceback(error, traceback)
                del traceback
            raise
        hook_call.leave(Outcome(result, None))
        return result
    except BaseException as error:
        hook_call.undo(error)
        raise


def enter(call: Call) -> HookCall:
    """Run the behaviour of a call's hook up to the call, which the caller makes next (or the action in its place)."""
    hook_call = HookCall(call.key)
    hook_call.enter(call)
    return hook_call


async def enter_coroutine(call: Call) -> HookCall:
    """Run the behaviour of a call's hook up to the call, in a coroutine."""
    hook_call = HookCall(call.key)
    await hook_call.enter_coroutine(call)
    return hook_call


async def drive_coroutine(key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Await `function` with the behaviour of the hook `key` around it."""
    hook_call = HookCall(key)
    try:
        await hook_call.enter_coroutine(Call(key, function, args, kwargs))
        if hook_call.reply is not None:
            return hook_call.reply.value
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            traceback = exceptions.traceback_of(error)
            try:
                await hook_call.leave_coroutine(Outcome(None, error))
            finally:
                exceptions.set_traceback(error, traceback)
                del traceback
            raise
        await hook_call.leave_coroutine(Outcome(result, None))
        return result
    except BaseException as error:
        hook_call.undo(error)
        raise


def compiling() -> bool:
    """Return whether torch.compile is tracing this call. Its graph must contain the user's function only."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def _block(wait: Wait) -> tuple[Any, BaseException | None]:
    try:
        return wait.block(), None
    except BaseException as error:
        if (user_error := seam.of_user(error)) is not None:
            _raise_users(user_error)
        return None, error


async def _suspend(hook_call: HookCall, wait: Wait) -> tuple[Any, BaseException | None]:
    try:
        return await wait.suspend(), None
    except BaseException as error:
        # A cancellation and an exception from a signal handler belong to the user. Either ends the call here.
        if (user_error := seam.of_user(error)) is not None:
            hook_call.give_up()
            _raise_users(user_error)
        return None, error


def _raise_users(error: BaseException) -> NoReturn:
    """Raise the user's exception, instead of the error that it caused in autoprof."""
    raise error


class HookCall:
    """A behaviour's generator during one call. No exception of autoprof leaves it.

    An exception that leaves `enter` or `leave` is the user's; its context contains no exception of autoprof.

    The generator always ends: it returns, it raises, or `undo` closes it. Each way ends the recording that it began.
    """

    __slots__ = ("_around", "_called", "_concerns", "_key", "_recording", "reply")

    def __init__(self, key: str) -> None:
        self.reply: Reply | None = None
        self._around: Around | None = None
        self._called = False
        self._concerns = True
        self._key = key
        self._recording: object = None

    def enter(self, call: Call) -> None:
        """Run the behaviour up to the call, which the caller makes next (or the action in its place)."""
        self._run(self._before, call)

    def leave(self, outcome: Outcome) -> None:
        """Resume the behaviour after the call."""
        self._called = True
        self._run(self._advance, outcome)

    async def enter_coroutine(self, call: Call) -> None:
        """Do the same as `enter`, in a coroutine."""
        await self._run_coroutine(self._before, call)

    async def leave_coroutine(self, outcome: Outcome) -> None:
        """Do the same as `leave`, in a coroutine. If it is being closed, it must not wait: each wait times out."""
        self._called = True
        await self._run_coroutine(self._advance, outcome, closed=issubclass(type(outcome.error), GeneratorExit))

    def _run(self, part: Callable[[Any], Wait | None], argument: Any) -> None:
        """Run a part of the behaviour, with its waits."""
        outer = sys.exc_info()[1]
        try:
            wait = part(argument)
            while wait is not None:
                wait = self._resume(*_block(wait))
        except BaseException as error:
            seam.alone(error, outer)
            self.undo(error)
            raise

    async def _run_coroutine(self, part: Callable[[Any], Wait | None], argument: Any, closed: bool = False) -> None:
        outer = sys.exc_info()[1]
        try:
            wait = part(argument)
            while wait is not None:
                answer = (None, TimeoutError("the coroutine was closed")) if closed else await _suspend(self, wait)
                wait = self._resume(*answer)
                del answer
        except BaseException as error:
            seam.alone(error, outer)
            self.undo(error)
            raise

    def _before(self, call: Call) -> Wait | None:
        """Run the behaviour up to the call, or return the first wait before it."""
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
            if (user_error := seam.of_user(error)) is not None:
                _raise_users(user_error)
            self._failed(error)
        return self._advance(None)

    def _resume(self, answer: Any, error: BaseException | None) -> Wait | None:
        """Resume the behaviour after a wait, with the answer or the error. Return its next wait, if any."""
        if error is None:
            return self._advance(answer)
        try:
            return self._advance(error, "throw")
        finally:
            exceptions.set_traceback(error, None)  # as in _failed

    def give_up(self) -> None:
        """Close the behaviour: the call was cancelled while it waited. Its cleanup runs."""
        around, self._around = self._around, None
        try:
            if around is not None:
                around.close()
        except BaseException as error:
            if (user_error := seam.of_user(error)) is not None:
                _raise_users(user_error)
            self._failed(error)

    def undo(self, error: BaseException) -> None:
        """Close the behaviour and end its recording if `error` interrupted it. The caller raises `error`."""
        if self._around is not None:
            outer = sys.exc_info()[1]
            try:
                seam.undo(error, self._end)
            except BaseException as interrupt:
                seam.alone(interrupt, outer)
                raise

    def _end(self) -> None:
        if self._around is not None:
            self._around.close()
            lifecycle.cut_short(seam.AT_WORK, but_for=self._recording)
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
            # The StopIteration of the generator's return has only this frame in its traceback.
            if type(error) is StopIteration and exceptions.traceback_of(error).tb_next is None:  # type: ignore[union-attr]
                self._around = None
                if isinstance(error.value, Reply) and not self._called:
                    self.reply = error.value
                gates.worked(self._key)
                return None
            if (user_error := seam.of_user(error)) is not None:
                _raise_users(user_error)
            self._around = None
            self._failed(error)
        return None

    def _failed(self, error: BaseException) -> None:
        try:
            report(self._key, error)
            self._cut_short(f"autoprof failed in {self._key}")
        except Exception as report_error:  # the report failed, too; the user's call must still run
            seam.pass_on(report_error)
        # The frames hold the user's arguments, and some frames hold the error: a cycle that could keep a model alive.
        exceptions.set_traceback(error, None)

    def _cut_short(self, reason: str) -> None:
        """End the recording that this call began. No other code would."""
        try:
            lifecycle.cut_short(reason, but_for=self._recording)
        except Exception as error:
            seam.pass_on(error)
            log.warning(f"{self._key}: its recording could not be ended ({described(error)})")


def report(key: str, error: BaseException) -> None:
    """Report an error of the hook `key`. If it failed too often in a row, disable the hook in this process."""
    runtime.report(key, error)
    if gates.failed(key):
        runtime.switched_off(key, gates.SWITCHED_OFF)


# Hook calls that have been entered, outermost first.
HookCalls: TypeAlias = list[HookCall]


def advance(call: Call, resume: Callable[[Any], Any], value: Any) -> Any:
    """Have a generator make its next item, inside the hook. `resume` is its `send` or `throw`."""
    if compiling() or issubclass(type(value), GeneratorExit) or gates.gate(call.key):
        return resume(value)
    return within([enter(call)], resume, value)


async def advance_coroutine(call: Call, resume: Callable[[Any], Any], value: Any) -> Any:
    """Have an asynchronous generator make its next item, inside the hook."""
    if issubclass(type(value), GeneratorExit) or gates.gate(call.key):
        return await resume(value)
    return await within_coroutine([await enter_coroutine(call)], resume, value)


def within(hook_calls: HookCalls, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose hooks have been entered, then leave the hooks."""
    try:
        result = function(*args)
    except BaseException as error:
        leave_item(hook_calls, _ended(error))
        raise
    leave_item(hook_calls, Outcome(result, None))
    return result


async def within_coroutine(hook_calls: HookCalls, function: Callable[..., Any], *args: Any) -> Any:
    """Await a coroutine function whose hooks have been entered, then leave the hooks."""
    try:
        result = await function(*args)
    except BaseException as error:
        await leave_item_coroutine(hook_calls, _ended(error))
        raise
    await leave_item_coroutine(hook_calls, Outcome(result, None))
    return result


def _ended(error: BaseException) -> Outcome:
    over = issubclass(type(error), (StopIteration, StopAsyncIteration))
    return Outcome(None, None if over else error, over)


def leave_item(hook_calls: HookCalls, outcome: Outcome) -> None:
    """Leave hooks, innermost first."""
    traceback = exceptions.traceback_of(outcome.error) if outcome.error is not None else None
    try:
        while hook_calls:
            hook_calls.pop().leave(outcome)
    finally:
        if outcome.error is not None:
            exceptions.set_traceback(outcome.error, traceback)
        del traceback


async def leave_item_coroutine(hook_calls: HookCalls, outcome: Outcome) -> None:
    """Leave hooks in a coroutine, innermost first."""
    traceback = exceptions.traceback_of(outcome.error) if outcome.error is not None else None
    try:
        while hook_calls:
            await hook_calls.pop().leave_coroutine(outcome)
    finally:
        if outcome.error is not None:
            exceptions.set_traceback(outcome.error, traceback)
        del traceback
