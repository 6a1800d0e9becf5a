"""Sampler of the stack of the thread that runs the steps, while a step is open and no stage and no timer of it.

The watcher's thread calls it. A sample reads code objects and line numbers, never locals, and keeps no frame. The
interval grows with the age of the gap and with the cost of a sample, so that sampling takes at most 0.1 % of a core.
"""

from __future__ import annotations

import resource
import sys
from collections import deque
from collections.abc import Callable, Sequence

from autoprof.base.originals import os, time
from autoprof.run import stacks
from autoprof.run.journal import Span, Timeline
from autoprof.rundir.records import LOCK_HELD, Frame, StacksLine

# Time from the start of a gap to the first sample, and the shortest time between two samples.
FIRST_NS = 100_000_000
# The interval is the larger of the gap's age divided by _AGE_RATIO, and of the CPU time that this thread took since the
# last sample, with all its other work, times _COST_RATIO. It is at most _MAX_INTERVAL_NS.
_AGE_RATIO, _COST_RATIO, _MAX_INTERVAL_NS = 20, 1_300, 1_000_000_000
# A sample is late if it comes this time after twice the interval. The time before a late sample is not sampled.
_LATE_NS = 250_000_000
# An unusual gap is written at once, because a killed process loses all other samples. It is longer than _EARLY_NS, and
# than twice the longest of the last _MAX_AGES gaps. It is written again each time its age has doubled.
_EARLY_NS, _MAX_AGES = 1_000_000_000, 64
# Samples are written once the first one has this age, or if there are too many.
_WRITE_AFTER_NS, _MAX_STACKS, _MAX_PERIODS = 10_000_000_000, 16, 64
# Maximum number of lines that a process writes, and of functions that are read and written of a stack.
_MAX_LINES, _MAX_DEPTH, _MAX_FRAMES = 10_000, 200, 24
# verl's timer around the whole step, which is no part of the step.
_WHOLE_STEP = "step"
# Without the interpreter's lock, threads would change their stacks while they are read.
_HAS_LOCK = getattr(sys, "_is_gil_enabled", lambda: True)()
_EVENT_LOOP = ("/asyncio/", "/selectors.py")
_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{os.path.dirname(os.__file__)}/", "<")


def step_without_stage(timeline: Timeline) -> Span | None:
    """Return the newest open step if no stage and no timer is open, else None.

    Batches of a rollout server, which are steps too, do not count.
    """
    step = None
    # No thread can interrupt the copy that `list` makes.
    for span in list(timeline.announced):
        line = span.line
        if line.span == "stage":
            return None
        if line.span == "step" and line.role != "rollout" and (step is None or span.begun_ns > step.begun_ns):
            step = span
    if step is not None:
        for span in list(timeline.running):
            if span.line.span in ("stage", "timer") and span.line.name != _WHOLE_STEP:
                return None
    return step


class GapSampler:
    """Samples of the times without a stage, until they are written to the journal.

    Args:
        timeline: The timeline of this process.
        wake: Callback that makes the watcher's thread call `look` at once.
    """

    def __init__(self, timeline: Timeline, wake: Callable[[], None]) -> None:
        self._timeline, self._wake = timeline, wake
        self._lines = 0
        # The start of the current gap, the last sample in it (or its start), the interval after that sample, and the
        # last time at which the timeline was asked to report gaps. All are of `time.monotonic_ns`.
        self._gap_ns = self._sampled_ns = self._asked_ns = 0
        self._interval_ns = FIRST_NS
        # The ages of the last gaps, and the age of the current gap from which its samples are written.
        self._ages: deque[int] = deque(maxlen=_MAX_AGES)
        self._write_at_ns = _EARLY_NS
        # The CPU time of this thread at the last sample, or at the start of the gap.
        self._cpu_ns = 0
        self._switches = _switches()
        self._stacks: dict[tuple[stacks.Place, ...], int] = {}
        # The start and the end of each period, and the index of its stack.
        self._periods: list[tuple[int, int, int]] = []

    def look(self) -> float | None:
        """Sample the stack if a gap is open and the time has come.

        Returns:
            The seconds until the next call, or None if no gap is open. The timeline then reports the next gap.
        """
        if self._lines >= _MAX_LINES or not _HAS_LOCK:
            return None
        now = time.monotonic_ns()
        step = step_without_stage(self._timeline)
        wait_ns = self._await_gap(now) if step is None else self._look_at_gap(step, now)
        if self._periods and (
            now - self._periods[0][0] > _WRITE_AFTER_NS
            or (self._gap_ns and self._sampled_ns - self._gap_ns > self._write_at_ns)
            or len(self._stacks) >= _MAX_STACKS
            or len(self._periods) >= _MAX_PERIODS
        ):
            self.write()
            self._write_at_ns = 2 * (now - self._gap_ns)
        self._switches = _switches()
        return None if wait_ns is None else wait_ns / 1e9

    def _await_gap(self, now: int) -> int | None:
        """End the current gap. Ask the timeline to report the next gap, but at most once in `FIRST_NS`."""
        self._end_gap(now)
        self._gap_ns = 0
        if (rest_ns := self._asked_ns + FIRST_NS - now) > 0 and self._timeline.gap_began is None:
            return rest_ns
        self._timeline.gap_began, self._asked_ns = self._gap_began, now
        # A gap that began after the last check was not reported.
        return FIRST_NS if step_without_stage(self._timeline) is not None else None

    def _gap_began(self) -> None:
        """Wake the watcher if a gap has begun. The thread of the program calls this at the end of a stage."""
        if step_without_stage(self._timeline) is not None:
            self._timeline.gap_began = None
            self._wake()

    def _look_at_gap(self, step: Span, now: int) -> int:
        """Sample the gap of an open step if the time has come. Return the nanoseconds until the next call."""
        began_ns = max(step.begun_ns, self._timeline.stage_ended_ns)
        if began_ns != self._gap_ns:
            self._end_gap(began_ns)
            self._gap_ns = self._sampled_ns = began_ns
            self._write_at_ns = max(_EARLY_NS, 2 * max(self._ages, default=0))
            self._interval_ns, self._cpu_ns = FIRST_NS, time.thread_time_ns()
        due_ns = self._sampled_ns + self._interval_ns
        if now < due_ns:
            return due_ns - now
        self._sample(step, now)
        self._sampled_ns = now
        # With a long interval, the start of the next gap would be seen late.
        self._timeline.gap_began = self._gap_began if self._interval_ns > 2 * FIRST_NS else None
        return self._interval_ns

    def _sample(self, step: Span, now: int) -> None:
        stack, previous_ns = _stack(step), self._sampled_ns
        late_ns = now - previous_ns
        if late_ns > 2 * self._interval_ns + _LATE_NS:
            # A thread that waits for the interpreter's lock wakes once in each switch interval.
            if (_switches() - self._switches) * sys.getswitchinterval() * 1e9 > late_ns / 2:
                self._periods.append((previous_ns, now, LOCK_HELD))
            start_ns = now
        elif previous_ns == self._gap_ns or not self._periods:
            start_ns = previous_ns
        else:
            start_ns = (previous_ns + now) // 2
            self._extend(start_ns)
        if stack:
            self._add(start_ns, now, stack)
        cpu_ns, self._cpu_ns = self._cpu_ns, time.thread_time_ns()
        wanted_ns = max((now - self._gap_ns) // _AGE_RATIO, (self._cpu_ns - cpu_ns) * _COST_RATIO)
        self._interval_ns = max(FIRST_NS, min(wanted_ns, _MAX_INTERVAL_NS))

    def _add(self, start_ns: int, end_ns: int, stack: tuple[stacks.Place, ...]) -> None:
        index = self._stacks.setdefault(stack, len(self._stacks))
        if self._periods and self._periods[-1][1:] == (start_ns, index):
            start_ns = self._periods.pop()[0]
        self._periods.append((start_ns, end_ns, index))

    def _end_gap(self, until_ns: int) -> None:
        self._extend(until_ns)
        if self._gap_ns:
            self._ages.append(self._sampled_ns - self._gap_ns)

    def _extend(self, until_ns: int) -> None:
        """Extend the last period, which ends at the last sample, to `until_ns`, by at most one interval."""
        if self._periods and self._gap_ns and self._periods[-1][1] == self._sampled_ns:
            start_ns, end_ns, index = self._periods.pop()
            self._periods.append((start_ns, max(end_ns, min(until_ns, end_ns + self._interval_ns)), index))

    def finish(self) -> None:
        """Write the last samples at the end of the process. The last sample stands for the time after it too."""
        self._extend(time.monotonic_ns())
        self.write()

    def write(self) -> None:
        """Write the samples to the journal."""
        periods, self._periods = self._periods, []
        places, self._stacks = self._stacks, {}
        if not periods:
            return
        names = stacks.Names()
        indexes: dict[Frame, int] = {}
        written = [
            [indexes.setdefault(frame, len(indexes)) for frame in names.frames(_kept(stack))] for stack in places
        ]
        base_ns = periods[0][0]
        self._lines += 1
        self._timeline.write(
            StacksLine(
                unix_ns=time.time_ns() - (time.monotonic_ns() - base_ns),
                frames=list(indexes),
                stacks=written,
                periods=[
                    (round((start_ns - base_ns) / 1e6), round((end_ns - base_ns) / 1e6), index)
                    for start_ns, end_ns, index in periods
                ],
            )
        )


def _switches() -> int:
    """Return how often this thread has waited."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _stack(step: Span) -> tuple[stacks.Place, ...]:
    """Return the stack of the thread in which a step began, the innermost function first; empty if it has ended.

    If the thread waits in an event loop, return the coroutines of the task in which the step began.
    """
    places = stacks.places_of_thread(step.thread, _MAX_DEPTH)
    task = step.task() if step.task is not None else None
    if task is not None and places and any(name in places[0][0].co_filename for name in _EVENT_LOOP):
        places = stacks.awaited_places(task) or places
    return tuple(places)


def _kept(stack: Sequence[stacks.Place]) -> list[stacks.Place]:
    """Return the most important places of a stack: of the program's own and of all, the outermost and the innermost.

    The innermost place comes first.
    """
    places = [place for place in stack if not place[0].co_filename.startswith("<frozen importlib")]
    if len(places) <= _MAX_FRAMES:
        return places
    part = _MAX_FRAMES // 3
    own = [index for index, (code, _) in enumerate(places) if not any(name in code.co_filename for name in _LIBRARIES)]
    # The place before the first own one is the library function that it calls.
    called = [index - 1 for index in own[:1] if index]
    kept = {*own[: part - 1], *called, *range(part), *range(len(places) - part, len(places))}
    return [place for index, place in enumerate(places) if index in kept]
