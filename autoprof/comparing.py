"""Watches the steps of a run, in the process that drives them: when each has ended it is held against the conditions,
and who was slowest is noted.

What the process's own spans say is judged at once. What other processes tell is read in a thread, which no step waits
for: its window begins with the next step, or with the one after where that has begun by then.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from autoprof import control, interrupts, log, posting, runtime, telling
from autoprof.conditions import RESUME
from autoprof.judging import FIRST, Judge, Measured, Opened
from autoprof.runtime import Runtime
from autoprof.settings import FOUND, REASON
from autoprof.slowest import Slowest
from autoprof.telling import RANK, REPLICA, OfRank, OfReplica, Teller

# How long the thread waits for what is told of a step, and how often it looks.
_PATIENCE_S, _LOOK_S = 2.0, 0.25
# How long the end of Ray waits for the thread.
_END_S = 2.0

_stop = threading.Event()
_threads: list[threading.Thread] = []
_Told = TypeVar("_Told", OfRank, OfReplica)


class Watch:
    """The steps of the trainer in this process, or the batches of an engine without one."""

    def __init__(self, run: Runtime, teller: Teller) -> None:
        self._run = run
        self._teller = teller
        self._judge = Judge(run.settings.when)
        self._slowest = Slowest()
        self._asks = telling.asked(run.settings)
        self._lock = threading.Lock()
        self._due: Opened | None = None
        self._resumed: Opened | None = None
        self._at = 0
        self._thread: threading.Thread | None = None
        self._before: dict[int, OfReplica] = {}
        self._told_of = -1
        # Of several trainers that a launcher has started one decides, and asks the others as `autoprof trigger` does.
        self._several = posting.ranks() > 1
        self._decides = not self._several or int(os.environ.get("RANK") or 0) == 0 or run.started_here

    def begins(self, step: int, ordinal: int) -> None:
        """A step begins; `ordinal` counts those of this run from 1."""
        self._at = step
        if ordinal > 1:
            return
        for condition in self._run.settings.when:
            # A run that was not resumed begins with step 1, or 0.
            if condition.what == RESUME and step > 1 and self._resumed is None:
                why = f"the run was resumed at step {step} ({condition})"
                self._resumed = Opened(condition.steps, condition.overrides, why)

    def due(self, ordinal: int) -> dict[str, Any] | None:
        """The settings of the step that begins, if it is of a window that a condition has opened; that has one less."""
        with self._lock:
            found = self.foresee(ordinal)
            if self._due is not None:
                self._due = self._due._replace(steps=self._due.steps - 1) if self._due.steps > 1 else None
        return found

    def foresee(self, ordinal: int) -> dict[str, Any] | None:
        """What `due` will say of a step that comes, by what is known now."""
        opened = self._due
        if opened is None and self._resumed is not None and ordinal <= self._resumed.steps:
            opened = self._resumed
        return None if opened is None else opened.overrides | {REASON: opened.reason}

    def any_left(self, ordinal: int) -> bool:
        """Whether a condition may open a window for a step after this one."""
        resumed = self._resumed is not None and ordinal < self._resumed.steps
        return self._due is not None or resumed or self._judge.any_left

    def found(self, overrides: Mapping[str, Any], first: Callable[[], Mapping[int, int]]) -> dict[str, Any]:
        """The settings of a window with the ranks that are the slowest now, where it asks for those.

        Args:
            overrides: The settings that the window has of its own.
            first: Gives the first global rank of each replica.
        """
        settings = self._run.settings.overridden(overrides)
        if not telling.asks_for_slowest(settings):
            return dict(overrides)
        with self._lock:
            found = self._slowest.find(settings, first())
        return {**overrides, FOUND: found} if found else dict(overrides)

    def ended(self, number: int, ordinal: int, captured: bool) -> None:
        """The step has ended, and its span was written."""
        line, parts = self._teller.take()
        if line is None or line.step != number:
            return
        if not self._decides:
            self._teller.tell()
            return
        step = Measured(number, line.start_ns, line.end_ns, parts)
        fair = not captured and line.error is None
        if fair:
            with self._lock:
                self._open(self._judge.step(step, ordinal))
                unknown = self._judge.unknown(step, ordinal)
            if unknown:
                log.warning_once(unknown)
        if self._asks and (self._thread is None or not self._thread.is_alive()) and not _stop.is_set():
            own = self._teller.of_rank()
            thread = threading.Thread(
                target=self._hear, args=(step, ordinal, fair, own), name="autoprof-comparing", daemon=True
            )
            with interrupts.suppress(RuntimeError):  # there may be no more threads
                thread.start()
                self._thread = thread
                _threads[:] = [thread, *(each for each in _threads if each.is_alive())]

    def _hear(self, step: Measured, ordinal: int, fair: bool, own: OfRank) -> None:
        try:
            ranks = [own, *self._read_ranks(step.number)]
            replicas = self._since(_decoded(posting.read(self._run, REPLICA), OfReplica))
            same = [each for each in ranks if each.step == step.number]
            with self._lock:
                self._open(self._judge.states(step.number, ranks, ordinal))
                if fair and ordinal > FIRST:
                    self._slowest.note(same, replicas)
                    self._open(self._judge.ranks(step, same, ordinal))
                    self._open(self._judge.replicas(step, replicas, ordinal))
        except Exception as error:
            interrupts.pass_on(error)
            if not _stop.is_set():
                runtime.report("comparing", error)

    def _read_ranks(self, number: int) -> list[OfRank]:
        """What the ranks tell. They do so when their last stage has ended, as the step does: for those that told of the
        step before a moment is waited."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            told = _decoded(posting.read(self._run, RANK), OfRank)
            late = any(each.step is not None and number - 2 <= each.step < number for each in told)
            if not late or time.monotonic() > deadline or _stop.wait(_LOOK_S):
                return told

    def _since(self, told: list[OfReplica]) -> list[OfReplica]:
        """What the replicas have done since the last step."""
        before, self._before = self._before, {each.replica: each for each in told}
        found = []
        for each in told:
            last = before.get(each.replica)
            if last is None or last.requests > each.requests:  # it is new
                last = OfReplica(replica=each.replica)
            if each.requests > last.requests:
                found.append(
                    OfReplica(
                        replica=each.replica,
                        requests=each.requests - last.requests,
                        seconds=each.seconds - last.seconds,
                        tokens=each.tokens - last.tokens,
                    )
                )
        return found

    def _open(self, opened: Opened | None) -> None:
        if opened is None:
            return
        log.info(f"{opened.reason}: {opened.steps} of the next steps are captured")
        if self._several:
            # The others may have begun the next step, and none is further than that.
            steps = f"{self._at + 2}:{self._at + 2 + opened.steps}"
            asked = control.Trigger(at=steps, overrides=opened.overrides, reason=opened.reason)
            control.ask(self._run.rundir, asked)
            return
        # A step that is slow for its slowest rank meets two conditions.
        if self._due is not None:
            both = f"{self._due.reason}; {opened.reason}"
            opened = Opened(max(self._due.steps, opened.steps), self._due.overrides or opened.overrides, both)
        self._due = opened


def stop() -> None:
    """Ray is about to end: nothing is read or told any more."""
    _stop.set()
    posting.stop()
    for thread in _threads:
        if thread is not threading.current_thread():
            thread.join(_END_S)


def resume() -> None:
    """Ray is up again."""
    _stop.clear()
    posting.resume()


def _decoded(entries: list[bytes], kind: type[_Told]) -> list[_Told]:
    """The entries of a kind; what another version of autoprof has written, or nobody, is left out."""
    found = []
    for entry in entries:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(entry, type=kind))
    return found
