"""Boundary between autoprof's errors and the user's exceptions, around each call of a hooked function.

Errors of autoprof are reported here and do not reach the user. The user's function is called exactly once, with its own
arguments. The function's result and exceptions pass unchanged. If a behaviour fails, the recording that it began is
ended. All this also holds for hooks around one item of an iterator or around one `with` block.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any

from autoprof.base import log, process, seam
from autoprof.base.originals import threading
from autoprof.capture import recorder
from autoprof.hooks import registry
from autoprof.hooks.behaviour import Around, Call, Outcome, Reply, Wait
from autoprof.run import cluster, runtime


class InThread(Wait):
    """Wait for a short blocking call. In a coroutine, a new thread makes the call. Otherwise this thread makes it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = function
        self._args = args

    def block(self) -> Any:
        return self._function(*self._args)

    async def suspend(self) -> Any:
        """Make the call in a new thread, without blocking the event loop.

        The threads of the user's executors are not used (`asyncio.to_thread`), because all of them may be waiting for
        this coroutine.
        """
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
            process.start_thread(thread.start)
        except RuntimeError as error:  # the system can't start another thread
            seam.pass_on(error)
            return self.block()
        return await answer


def ask(function: Callable[..., Any], *args: Any) -> Generator[Wait, Any, Any]:
    """Call a function that may wait for Ray, and return its result: `answer = yield from ask(...)`.

    If Ray is not up, the function does not block. So it is called directly, because a wait would make the user's
    coroutine yield to its event loop once more.
    """
    if not cluster.is_up():
        return function(*args)
    return (yield InThread(function, *args))


class Coroutine(Wait):
    """Wait for a coroutine. Only for behaviours of coroutine functions."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._awaitable = awaitable

    async def suspend(self) -> Any:
        return await self._awaitable


class RayCalls(Wait):
    """Wait for concurrent calls of Ray actors.

    The answer is a list with the results in the order of the calls. If a call fails, the list
    contains the exception of that call.
    """

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
        result, error = seam.attempt(ray.get, reference)
        return result if error is None else error


def drive(
    key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None
) -> Any:
    """Call `function`, with the behaviour of the hook `key` around the call, and return the function's result.

    Args:
        key: Key of the hook.
        function: Function to call.
        args: Positional arguments.
        kwargs: Keyword arguments.
        call: If `function` makes the next item of an iterator: the hooked call that returned the iterator. None if
            `function` itself is hooked.
    """
    if is_compiling():
        return function(*args, **kwargs)
    hook_call = HookCall(key, function, args, kwargs) if call is None else HookCall.of(call)
    try:
        hook_call.proceed()
        if hook_call.reply is not None:
            return hook_call.reply.value
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            traceback = seam.traceback_of(error)
            try:
                hook_call.proceed(_outcome_of_error(error, call))
            finally:
                seam.set_traceback(error, traceback)
                del traceback
            raise
        hook_call.proceed(Outcome(result, None))
        return result
    finally:
        if hook_call._around is not None:  # an exception has interrupted the behaviour
            hook_call.abort(sys.exc_info()[1])


async def drive_coroutine(
    key: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None
) -> Any:
    """Await `function`, with the behaviour of the hook `key` around the call, and return the function's result.

    It takes the arguments of `drive`.
    """
    hook_call = HookCall(key, function, args, kwargs) if call is None else HookCall.of(call)
    try:
        await hook_call.proceed_coroutine()
        if hook_call.reply is not None:
            return hook_call.reply.value
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            traceback = seam.traceback_of(error)
            try:
                await hook_call.proceed_coroutine(_outcome_of_error(error, call))
            finally:
                seam.set_traceback(error, traceback)
                del traceback
            raise
        await hook_call.proceed_coroutine(Outcome(result, None))
        return result
    finally:
        if hook_call._around is not None:  # an exception has interrupted the behaviour
            hook_call.abort(sys.exc_info()[1])


def advance(call: Call, resume: Callable[[Any], Any], value: Any) -> Any:
    """Return the next item of a generator, with the hook around the work on the item.

    Args:
        call: The hooked call that returned the generator.
        resume: The `send` or `throw` of the generator.
        value: The argument for `resume`.
    """
    if is_compiling() or issubclass(type(value), GeneratorExit) or registry.gate(call.key):
        return resume(value)
    return drive(call.key, resume, (value,), {}, call)


async def advance_coroutine(call: Call, resume: Callable[[Any], Any], value: Any) -> Any:
    """Return the next item of an asynchronous generator, with the hook around the work on the item.

    Args:
        call: The hooked call that returned the generator.
        resume: The `asend` or `athrow` of the generator.
        value: The argument for `resume`.
    """
    if issubclass(type(value), GeneratorExit) or registry.gate(call.key):
        return await resume(value)
    return await drive_coroutine(call.key, resume, (value,), {}, call)


def _outcome_of_error(error: BaseException, call: Call | None) -> Outcome:
    """Return the outcome of a function that has raised `error`.

    Args:
        error: The exception. An iterator without more items raises StopIteration, which is not an error.
        call: As in `drive`.
    """
    over = call is not None and issubclass(type(error), (StopIteration, StopAsyncIteration))
    return Outcome(None, None if over else error, over)


def is_compiling() -> bool:
    """Return True if torch.compile is tracing this call. The traced graph must contain only the user's function."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def _raise_if_users(error: BaseException) -> None:
    """If `error` is a cancellation or comes from a signal handler, raise the user's exception.

    It replaces the error that it has caused in autoprof.
    """
    if (user_error := seam.error_for_user(error)) is not None:
        raise user_error


class HookCall(Call, eq=False):
    """One call of a hooked function, with the generator of the behaviour. No method lets an exception of autoprof pass.

    An exception that leaves `proceed` belongs to the user. Its context contains no exception of autoprof.

    The generator always ends: it returns, it raises, or `abort` closes it. In each case, the recording that it began is
    ended.
    """

    reply: Reply | None = None
    _around: Around | None = None
    _begun: bool = False
    _called: bool = False
    _concerns: bool = True
    _recording: object = None

    @classmethod
    def of(cls, call: Call) -> HookCall:
        """Return the hook call for one item of an iterator or for one `with` block.

        Args:
            call: The hooked call that returned the iterator or the context manager. The behaviour gets this call.
        """
        return cls(call.key, call.function, call.args, call.kwargs)

    def proceed(self, outcome: Outcome | None = None) -> None:
        """Run the part of the behaviour before the call, or the part after the call.

        Args:
            outcome: None before the call. After the call: the outcome of the call, or of the item or the block.
        """
        outer = sys.exc_info()[1]
        self._called = outcome is not None
        try:
            wait = self._advance(outcome)
            while wait is not None:
                wait = self._advance(*_block(wait))
        except BaseException as error:
            seam.alone(error, outer)
            self.abort(error)
            raise

    async def proceed_coroutine(self, outcome: Outcome | None = None) -> None:
        """Do the work of `proceed` in a coroutine.

        If the user's coroutine is being closed, it must not wait. So each wait of the behaviour times out.
        """
        outer = sys.exc_info()[1]
        self._called = outcome is not None
        closed = outcome is not None and issubclass(type(outcome.error), GeneratorExit)
        try:
            wait = self._advance(outcome)
            while wait is not None:
                answer = (None, TimeoutError("the coroutine was closed")) if closed else await _suspend(wait)
                wait = self._advance(*answer)
                del answer
        except BaseException as error:
            seam.alone(error, outer)
            self.abort(error)
            raise

    def _advance(self, value: Any, failure: BaseException | None = None) -> Wait | None:
        """Run the behaviour up to its next wait, and return the wait.

        Return None if the behaviour has reached its `yield CALL` or has ended.

        Args:
            value: Value for the behaviour's last `yield`: the outcome of the call, or the answer of the last wait.
            failure: Exception that the last wait raised, or None.
        """
        try:
            if not self._begun:
                self._begun = True
                self._around = self._begin()
            if self._around is None:
                return None
            wait: Wait | None = self._around.send(value) if failure is None else self._around.throw(failure)
            if wait is None and self._called:
                self._around.close()
                raise RuntimeError("the behaviour yielded to the call twice")
            if wait is None and runtime.call_counts.on:
                runtime.call_counts.add(self.key, applies=self._concerns)
            return wait
        except BaseException as error:
            # If the generator has returned, the traceback of the StopIteration has only this frame.
            if type(error) is StopIteration and seam.traceback_of(error).tb_next is None:  # type: ignore[union-attr]
                self._around = None
                if isinstance(error.value, Reply) and not self._called:
                    self.reply = error.value
                if self.key in registry.failures:
                    registry.worked(self.key)
                return None
            _raise_if_users(error)
            self._around = None
            self._handle_own_error(error)
        finally:
            if failure is not None:
                seam.set_traceback(failure, None)  # for the reason in `_handle_own_error`
        return None

    def _begin(self) -> Around | None:
        """Return the generator of the behaviour. Return None if the hook ignores the call or autoprof is off."""
        self._recording = recorder.current()
        active = registry.active(self.key)
        if active is None:
            return None
        self.run, behaviour = active
        counts = runtime.call_counts.on
        if (behaviour.when or behaviour.unless) and not behaviour.applies(self):
            if counts:
                runtime.call_counts.add(self.key, applies=False)
            return None
        if counts:
            self._concerns = behaviour.concerns(self)
        return behaviour.around(self)

    def abort(self, error: BaseException | None) -> None:
        """If `error` has interrupted the behaviour, close the behaviour and end its recording.

        Afterwards, the caller raises `error`. Without an error, do nothing.

        If `error` is the cancellation of the call, only the spans and captures that the behaviour opened are ended. The
        recording of this thread is not ended, because it may belong to another task.
        """
        if error is not None and self._around is not None:
            outer = sys.exc_info()[1]
            closed = issubclass(type(error), (asyncio.CancelledError, GeneratorExit))
            try:
                seam.undo(error, partial(self._end, abort_recording=not closed))
            except BaseException as interrupt:
                seam.alone(interrupt, outer)
                raise

    def _end(self, abort_recording: bool) -> None:
        if self._around is not None:
            try:
                self._around.close()
                if self.on_interrupt is not None:
                    self.on_interrupt()
            finally:
                if abort_recording:
                    recorder.abort(seam.AT_WORK, but_for=self._recording)
            self._around = None

    def _handle_own_error(self, error: BaseException) -> None:
        """Report an error of autoprof, and end the recording that this call began. No other code would end it."""
        with seam.guard(f"an error in {self.key} could not be reported", log.error_once):
            try:
                report(self.key, error)
            finally:
                recorder.abort(f"autoprof failed in {self.key}", but_for=self._recording)
        # The frames of the traceback refer to the user's arguments, and some frames refer to the error. This reference
        # cycle could keep a model alive.
        seam.set_traceback(error, None)


def _block(wait: Wait) -> tuple[Any, BaseException | None]:
    try:
        return wait.block(), None
    except BaseException as error:
        _raise_if_users(error)
        return None, error


async def _suspend(wait: Wait) -> tuple[Any, BaseException | None]:
    try:
        return await wait.suspend(), None
    except BaseException as error:
        _raise_if_users(error)
        return None, error


def report(key: str, error: BaseException) -> None:
    """Report an error of the hook `key`. If the hook has failed too often in a row, disable it in this process."""
    runtime.report(key, error)
    if registry.count_failure(key):
        runtime.switched_off(key, registry.SWITCHED_OFF)
