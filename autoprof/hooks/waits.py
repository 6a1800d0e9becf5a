"""Waits of behaviours, in functions and in coroutine functions alike."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from autoprof.base import interrupts, threads
from autoprof.base.originals import threading
from autoprof.hooks.call import Wait
from autoprof.run.cluster import kv


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
    if not kv.up():
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
