"""Steps and windows of engines without a trainer. A step is a generation batch, or a window that a user requests.

A batch lasts from the first request to an idle engine until the engine has no request left. Batches are counted from 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from autoprof.base import log
from autoprof.base.originals import time
from autoprof.behaviours.rollout.engine import ROLE, Request, awaited_problem
from autoprof.config.values import REASON
from autoprof.run import end, runtime
from autoprof.run.timeline import Span
from autoprof.windows.chooser import Chooser

# A request to a busy server causes a new look for requests of `autoprof trigger`, if the last look is more than this
# number of seconds ago.
LOOK_INTERVAL_S = 1.0
# Reason in meta files of recordings that end because the user profiles the engine.
ANOTHER_CALLER = "another caller started the engine's profiler"


# Functions that start and stop an engine's recording. They return `{"problem": text}`; the text is empty on success.
# The string argument of a stop is the reason why the recording ends early, or an empty string.
Start = Callable[[Any, Request], Awaitable[dict[str, Any]]]
Stop = Callable[[Any, str], Awaitable[dict[str, Any]]]


class Batches:
    """Generation batches of one engine, which are steps on the timeline, and the recordings of the batches.

    Attributes:
        count: Number of batches begun.
        are_steps: False if a trainer of the same run counts the steps and takes the requests of `autoprof trigger`.
        captured: True while the engine records a batch.
    """

    def __init__(self, engine: Any, start: Start, stop: Stop) -> None:
        self.count = 0
        self.are_steps = True
        self.captured = False
        self._engine = engine
        self._start = start
        self._stop = stop
        self._span: Span | None = None
        self._last_window = False
        self._chooser = Chooser()
        self._last_look = 0.0

    @property
    def is_open(self) -> bool:
        """Return whether a batch has begun and not ended."""
        return self._span is not None

    @property
    def overdue(self) -> bool:
        """Return True if the last look for requests of `autoprof trigger` is more than LOOK_INTERVAL_S ago."""
        return time.monotonic() - self._last_look > LOOK_INTERVAL_S

    def look(self, run: runtime.Runtime, led: bool = False) -> None:
        """Take the requests of `autoprof trigger`. In these requests, step `+1` means the open or else the next batch.

        Args:
            run: Run of this process.
            led: True if a trainer opens the engine's windows. Then the requests are refused.
        """
        self._last_look = time.monotonic()
        if not self.are_steps:  # the trainer takes the requests
            return
        self._chooser.look(run.rundir, self.count + (not self.is_open))
        if led:
            self._chooser.close("a trainer decides what this server records; use autoprof trigger on the trainer's run")

    def asked(self, run: runtime.Runtime) -> Request | None:
        """Return the request that starts the engine's recording if a trigger selects the open batch, or else None."""
        overrides = self._chooser.asked(run.settings, self.count)
        return None if overrides is None else self._request(overrides)

    def begin(self, run: runtime.Runtime) -> Request | None:
        """Begin a batch.

        Return the request that starts the engine's recording if `AUTOPROF_STEPS`, a condition or a trigger selects the
        batch. Otherwise, return None.
        """
        self.count += 1
        # Numbers of batches must not be confused with steps of the trainer.
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
        """End the batch. The caller must have stopped the recording of the batch."""
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

    async def capture(self, request: Request) -> None:
        """Start the recording of the open batch."""
        self.captured = not await self.start(request)

    async def finish(self, cut: str = "") -> None:
        """Stop the recording of the batch, if any.

        Args:
            cut: Reason why the recording ends early. Empty if the recording ends normally.
        """
        captured, self.captured = self.captured, False
        if captured:
            await self.stop(cut)

    async def start(self, request: Request) -> str:
        """Send a start request to the engine. Return the engine's problem, or an empty string."""
        return await _problem_of(self._start(self._engine, request))

    async def stop(self, cut: str = "") -> str:
        """Send a stop to the engine, with `cut` as in `finish`. Return the engine's problem, or an empty string."""
        return await _problem_of(self._stop(self._engine, cut))

    def _request(self, overrides: dict[str, Any]) -> Request:
        return Request(action="start", step=self.count, overrides=overrides)


class ServedEngine:
    """The engine behind a server, and the recording of the engine: of a batch, or of a requested window."""

    def __init__(self, engine: Any, start: Start, stop: Stop) -> None:
        self._batches = Batches(engine, start, stop)
        # True if the last request of the batch is finished, and a task is about to end the batch.
        self._over = False
        # True if a trainer opens the windows of the engine. Then batches are counted, but not captured.
        self._led = False
        self._waiting = 0
        # Requested window that is open, if any. Each window is a new object, so that a late timer can't close a later
        # window.
        self._window: object | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Requests that arrive while a recording starts or stops wait for this lock, so that the recording contains the
        # requests.
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[str]] = set()

    async def request(self, run: runtime.Runtime) -> None:
        """Handle a request to the engine. If the engine is idle, begin a batch.

        If the batch is selected, the engine already records when this coroutine returns.
        """
        must_look = not self._busy or self._batches.overdue
        if not must_look and not self._lock.locked():
            return
        self._waiting += 1
        try:
            await self._uninterrupted(self._handle_request(run, must_look))
        finally:
            self._waiting -= 1

    def idle(self) -> None:
        """End the batch, because the engine has no request left. The caller runs in the engine's event loop."""
        # While the first request of a new batch waits for the recording, a late output of the previous batch must not
        # end the new batch.
        if self._busy and not self._waiting:
            self._over = True
            self._spawn(self._end_over())

    def follow(self, same_run: bool = False) -> None:
        """Let a trainer open all windows. From now on, the engine records only in the trainer's windows.

        Args:
            same_run: True if the trainer and the server belong to the same run. Then the trainer counts the steps.
        """
        self._led = True
        self._batches.are_steps = not same_run

    async def open_window(
        self, step: int | None = None, duration_s: float | None = None, request: Request | None = None
    ) -> str:
        """Start a recording now, even if the engine is idle.

        Args:
            step: Step for the folder's name. Default: the number of the open batch, or else of the next batch.
            duration_s: Seconds after which the window closes automatically. Default: the window stays open until
                `close_window` is called.
            request: Request of a trainer. Then the step in the request replaces `step`.

        Returns:
            The reason why the engine does not record, or an empty string.
        """
        return await self._uninterrupted(self._open(step, duration_s, request))

    async def close_window(self) -> str:
        """Close the requested window. Return the problem, or an empty string."""
        return await self._uninterrupted(self._close(self._window))

    async def give_way(self) -> None:
        """End autoprof's recording early, because another caller is about to profile the engine."""
        await self._uninterrupted(self._give_way())

    @property
    def _busy(self) -> bool:
        return self._batches.is_open and not self._over

    async def _handle_request(self, run: runtime.Runtime, must_look: bool) -> str:
        async with self._lock:
            if self._busy and not must_look:
                return ""
            if not self._busy:
                await self._end_batch()
            await asyncio.to_thread(self._batches.look, run, self._led)
            request = self._batches.asked(run) if self._busy else self._batches.begin(run)
            if request is not None and not self._led and self._window is None and not self._batches.captured:
                await self._batches.capture(request)
        return ""

    async def _end_over(self) -> str:
        async with self._lock:
            if self._over:
                await self._end_batch()
        return ""

    async def _end_batch(self) -> None:
        self._over = False
        await self._batches.finish()
        self._batches.end()

    async def _open(self, step: int | None, duration_s: float | None, request: Request | None) -> str:
        async with self._lock:
            if self._over:
                await self._end_batch()
            if self._window is not None or self._batches.captured:
                return "a window is open already"
            number = self._batches.count + (not self._busy) if step is None else step
            request = request or Request(action="start", step=number, overrides={REASON: "/start_profile"})
            problem = await self._batches.start(request)
            if problem:
                return problem
            window = self._window = object()
            if duration_s is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(duration_s, lambda: self._spawn(self._close(window)))
            return ""

    async def _give_way(self) -> str:
        async with self._lock:
            recording = self._batches.captured or self._window is not None
            self._forget_window()
            self._batches.captured = False
            return await self._batches.stop(ANOTHER_CALLER) if recording else ""

    async def _close(self, window: object | None) -> str:
        async with self._lock:
            if window is None or self._window is not window:
                return "no window is open"
            self._forget_window()
            return await self._batches.stop()

    def _forget_window(self) -> None:
        self._window = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _uninterrupted(self, work: Coroutine[Any, Any, str]) -> str:
        # If the caller is cancelled, the work continues. Otherwise, the start of an engine could remain incomplete.
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
        task = asyncio.get_running_loop().create_task(awaited_problem("serve", work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _problem_of(answer: Awaitable[dict[str, Any]]) -> str:
    """Await an engine's answer. Log and return the problem in the answer, or return an empty string."""

    async def read() -> str:
        return str((await answer)["problem"])

    problem = await awaited_problem("", read())
    if problem:
        log.warning(f"the engine could not be recorded: {problem}")
    return problem
