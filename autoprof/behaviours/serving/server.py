"""Engines without a trainer: a step is a generation batch, or a window that a request opens.

A batch lasts from the first request of an idle engine to the moment when none is left. Batches are counted from 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from autoprof.base import interrupts, log
from autoprof.base.originals import time
from autoprof.behaviours.rollout.engine import ROLE, Request
from autoprof.config.values import REASON
from autoprof.run import end, runtime
from autoprof.run.timeline import Span
from autoprof.windows.chooser import Chooser

# How often a busy server looks whether somebody asked for a window: with the first request after so many seconds.
_LOOK_S = 1.0


class Batches:
    """The generation batches of one engine: counted, each a step of the timeline.

    Attributes:
        are_steps: False where a trainer of the same run counts its steps, and takes what is asked for.
    """

    def __init__(self) -> None:
        self.count = 0
        self.are_steps = True
        self._span: Span | None = None
        self._last_window = False
        self._chooser = Chooser()
        self._looked = 0.0

    @property
    def going_on(self) -> bool:
        return self._span is not None

    @property
    def overdue(self) -> bool:
        """Return whether nobody has looked for some time for requests of `autoprof trigger`."""
        return time.monotonic() - self._looked > _LOOK_S

    def look(self, run: runtime.Runtime, led: bool = False) -> None:
        """Take the requests of `autoprof trigger`: `+1` is the batch that is going on, or else the next.

        Where the engine is `led`, a trainer opens its windows, and nobody else.
        """
        self._looked = time.monotonic()
        if not self.are_steps:  # they are the trainer's
            return
        self._chooser.look(run.rundir, self.count - self.going_on)
        if led:
            self._chooser.close("a trainer decides what this server records; use autoprof trigger on the trainer's run")

    def asked(self, run: runtime.Runtime) -> Request | None:
        """Return the request to the engine if a trigger chose this batch."""
        overrides = self._chooser.asked(run.settings, self.count, self.count)
        return None if overrides is None else self._request(overrides)

    def begin(self, run: runtime.Runtime) -> Request | None:
        """Begin a batch; return the request to the engine if it is chosen, by `AUTOPROF_STEPS` or by a trigger."""
        self.count += 1
        # The numbers of batches are no steps of the trainer's.
        kind = "step" if self.are_steps else "batch"
        self._span = Span(run.timeline, kind, kind, step=self.count, role=ROLE, rank=None)
        if not self.are_steps:
            return None
        self._chooser.step_began(run, self.count, self.count)
        overrides = self._chooser.choose(run.settings, self.count, self.count)
        if overrides is None:
            return None
        self._last_window = not self._chooser.any_after(run.settings, self.count, self.count)
        return self._request(overrides)

    def end(self) -> None:
        """End the batch, whose recording is stopped."""
        span, self._span = self._span, None
        if span is not None and self.are_steps:
            span.end()
            self._chooser.step_ended(self.count, self.count)
        elif span is not None:
            span.drop()
        self._chooser.ended()
        run = runtime.current()
        if self._last_window and run is not None:
            self._last_window = False
            end.window_passed(run)

    def _request(self, overrides: dict[str, Any]) -> Request:
        return Request(action="start", step=self.count, overrides=overrides)


# Each answers with `{"problem": text}`, empty if there is none. The text that a stop takes says why the recording ends
# early, if it does.
Start = Callable[[Any, Request], Awaitable[dict[str, Any]]]
Stop = Callable[[Any, str], Awaitable[dict[str, Any]]]


class Server:
    """One engine behind a server, and the recording of it: a batch, or a window that was asked for."""

    def __init__(self, engine: Any, start: Start, stop: Stop) -> None:
        self._engine = engine
        self._start = start
        self._stop = stop
        self._batches = Batches()
        # The last request of the batch is done; what ends the batch is on its way.
        self._over = False
        self._captured = False
        # A trainer says which step it is: batches are counted, but not chosen by their numbers.
        self._led = False
        self._waiting = 0
        # The open window that was asked for. Each is an object of its own, so that a late timer closes no other.
        self._window: object | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Requests that arrive while a recording starts or stops wait for it, or they would be outside of it.
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[str]] = set()

    async def request(self, run: runtime.Runtime) -> None:
        """Note a request that reaches the engine. An idle one begins a batch, which is recorded when this returns."""
        look = not self._busy or self._batches.overdue
        if not look and not self._lock.locked():
            return
        self._waiting += 1
        try:
            await self._whole(self._requested(run, look))
        finally:
            self._waiting -= 1

    def idle(self) -> None:
        """End the batch: the engine has no request left. Called in the engine's event loop."""
        # A late output of the batch before does not end one whose first request waits for its recording.
        if self._busy and not self._waiting:
            self._over = True
            self._spawn(self._end_over())

    def follow(self, same_run: bool = False) -> None:
        """Follow a trainer, which opens the windows of its steps here: a batch is recorded in one of those alone.

        Args:
            same_run: Whether the trainer is of this run, whose steps are the trainer's then.
        """
        self._led = True
        self._batches.are_steps = not same_run

    async def open_window(
        self, step: int | None = None, duration_s: float | None = None, request: Request | None = None
    ) -> str:
        """Record from now on, whether the engine is idle or not.

        Args:
            step: Names the folder; without it the batch that is going on, or the next.
            duration_s: Seconds after which the window closes by itself; without it, when `close_window` is called.
            request: What a trainer asks for, which names the step.

        Returns:
            The reason that it is not recorded, or an empty text.
        """
        return await self._whole(self._open(step, duration_s, request))

    async def close_window(self) -> str:
        """Close the window that was asked for. Return the problem, or an empty text."""
        return await self._whole(self._close(self._window))

    async def give_way(self) -> None:
        """End autoprof's recording early: somebody else is about to profile the engine."""
        await self._whole(self._give_way())

    @property
    def _busy(self) -> bool:
        return self._batches.going_on and not self._over

    async def _requested(self, run: runtime.Runtime, look: bool) -> str:
        async with self._lock:
            if self._busy and not look:
                return ""
            if not self._busy:
                await self._end_batch()
            await asyncio.to_thread(self._batches.look, run, self._led)
            chosen = self._batches.asked(run) if self._busy else self._batches.begin(run)
            if chosen is not None and not self._led and self._window is None and not self._captured:
                self._captured = not await self._started(chosen)
        return ""

    async def _end_over(self) -> str:
        async with self._lock:
            if self._over:
                await self._end_batch()
        return ""

    async def _end_batch(self) -> None:
        self._over = False
        captured, self._captured = self._captured, False
        if captured:
            await self._stopped()
        self._batches.end()

    async def _open(self, step: int | None, duration_s: float | None, request: Request | None) -> str:
        async with self._lock:
            if self._over:
                await self._end_batch()
            if self._window is not None or self._captured:
                return "a window is open already"
            number = self._batches.count + (not self._busy) if step is None else step
            asked = request or Request(action="start", step=number, overrides={REASON: "/start_profile"})
            problem = await self._started(asked)
            if problem:
                return problem
            window = self._window = object()
            if duration_s is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(duration_s, lambda: self._spawn(self._close(window)))
            return ""

    async def _give_way(self) -> str:
        async with self._lock:
            recording = self._captured or self._window is not None
            self._forget_window()
            self._captured = False
            return await self._stopped("somebody else started the engine's profiler") if recording else ""

    async def _close(self, window: object | None) -> str:
        async with self._lock:
            if window is None or self._window is not window:
                return "no window is open"
            self._forget_window()
            return await self._stopped()

    def _forget_window(self) -> None:
        self._window = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _started(self, asked: Request) -> str:
        return await _asked(self._start(self._engine, asked))

    async def _stopped(self, cut: str = "") -> str:
        return await _asked(self._stop(self._engine, cut))

    async def _whole(self, work: Coroutine[Any, Any, str]) -> str:
        # A request may be given up while it waits, but an engine that is half started would stay so.
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
        task = asyncio.get_running_loop().create_task(_guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def said(answer: dict[str, Any]) -> str:
    """Return the problem that an engine answered with, if any; it is logged."""
    problem = str(answer["problem"])
    if problem:
        log.warning(f"the engine could not be recorded: {problem}")
    return problem


async def _asked(answer: Awaitable[dict[str, Any]]) -> str:
    try:
        return said(await answer)
    except Exception as error:
        interrupts.pass_on(error)
        return said({"problem": f"{type(error).__name__}: {error}"})


async def _guarded(work: Coroutine[Any, Any, str]) -> str:
    try:
        return await work
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("serve", error)
        return f"{type(error).__name__}: {error}"
