"""Monitor of a run's steps, in the process that drives them: compares each step that has ended with the conditions.

It judges the process's own spans at once, and reads the statistics of other processes in a thread, which no step waits
for. So a window begins with the next step, or with the one after where that has begun by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from autoprof.base import identity, interrupts, log, process, threads
from autoprof.base.originals import threading, time
from autoprof.config.conditions import RESUME
from autoprof.config.values import FOUND, REASON
from autoprof.run import runtime
from autoprof.run.runtime import Runtime
from autoprof.windows import requests, stats
from autoprof.windows.detector import FIRST, Detector, Measured, Opened, Slowest
from autoprof.windows.stats import RANK, REPLICA, RankStats, ReplicaStats, StatsReporter

# How long the thread waits for the statistics of a step, and how often it looks.
_PATIENCE_S, _LOOK_S = 2.0, 0.25
# How long the end of Ray waits for the thread.
_END_S = 2.0

_Told = TypeVar("_Told", RankStats, ReplicaStats)


class _State(process.State):
    """The threads that wait for statistics, and whether they have to stop."""

    def begin(self) -> None:
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []


_state = _State()


class Monitor:
    """The steps of the trainer in this process, or the batches of an engine without one."""

    def __init__(self, run: Runtime, reporter: StatsReporter) -> None:
        self._run = run
        self._reporter = reporter
        self._detector = Detector(run.settings.when)
        self._slowest = Slowest()
        self._asks = stats.asked(run.settings)
        self._lock = threading.Lock()
        self._due: Opened | None = None
        self._resumed: Opened | None = None
        self._at = 0
        self._thread: threading.Thread | None = None
        self._before: dict[int, ReplicaStats] = {}
        self._told_of = -1
        # Of several trainers that a launcher has started one decides, and asks the others as `autoprof trigger` does.
        self._several = identity.ranks() > 1
        self._decides = not self._several or run.decides

    def begins(self, step: int, ordinal: int) -> None:
        """Note that a step has begun; `ordinal` counts those of this run from 1."""
        self._at = step
        if ordinal > 1:
            return
        for condition in self._run.settings.when:
            # A run that was not resumed begins with step 1, or 0.
            if condition.what == RESUME and step > 1 and self._resumed is None:
                why = f"the run was resumed at step {step} ({condition})"
                self._resumed = Opened(condition.steps, condition.overrides, why)

    def due(self, ordinal: int) -> dict[str, Any] | None:
        """Return the settings of the step that begins, if a condition has opened a window that has some left."""
        with self._lock:
            found = self.foresee(ordinal)
            if self._due is not None:
                self._due = self._due._replace(steps=self._due.steps - 1) if self._due.steps > 1 else None
        return found

    def foresee(self, ordinal: int) -> dict[str, Any] | None:
        """Return what `due` will return for a step to come, as far as is known now."""
        opened = self._due
        if opened is None and self._resumed is not None and ordinal <= self._resumed.steps:
            opened = self._resumed
        return None if opened is None else opened.overrides | {REASON: opened.reason}

    def any_left(self, ordinal: int) -> bool:
        """Return whether a condition may open a window for a step after this one."""
        resumed = self._resumed is not None and ordinal < self._resumed.steps
        return self._due is not None or resumed or self._detector.any_left

    def with_stragglers(self, overrides: Mapping[str, Any], first: Callable[[], Mapping[int, int]]) -> dict[str, Any]:
        """Return the settings of a window with the ranks that are the slowest now, where it asks for those.

        Args:
            overrides: The settings that the window has of its own.
            first: Gives the first global rank of each replica.
        """
        settings = self._run.settings.overridden(overrides)
        if not stats.asks_for_slowest(settings):
            return dict(overrides)
        with self._lock:
            found = self._slowest.find(settings, first())
        return {**overrides, FOUND: found} if found else dict(overrides)

    def ended(self, number: int, ordinal: int, captured: bool) -> None:
        """Compare a step that has ended and whose span was written."""
        line, parts = self._reporter.take()
        if line is None or line.step != number:
            return
        if not self._decides:
            self._reporter.tell()
            return
        step = Measured(number, line.start_ns, line.end_ns, parts, self._reporter.kinds)
        fair = not captured and line.error is None
        if fair:
            with self._lock:
                self._open(self._detector.step(step, ordinal))
                unknown = self._detector.unknown(step, ordinal)
            if unknown:
                log.warning_once(unknown)
        if self._asks and (self._thread is None or not self._thread.is_alive()) and not _state.stop.is_set():
            own = self._reporter.of_rank()
            thread = threading.Thread(
                target=self._hear, args=(step, ordinal, fair, own), name="autoprof-comparing", daemon=True
            )
            with interrupts.suppress(RuntimeError):  # there may be no more threads
                threads.start(thread.start)
                self._thread = thread
                _state.threads[:] = [thread, *(each for each in _state.threads if each.is_alive())]

    def _hear(self, step: Measured, ordinal: int, fair: bool, own: RankStats) -> None:
        try:
            ranks = [own, *self._read_ranks(step.number)]
            replicas = self._since(_decoded(stats.read_entries(self._run, REPLICA), ReplicaStats))
            same = [each for each in ranks if each.step == step.number]
            with self._lock:
                self._open(self._detector.states(step.number, ranks, ordinal))
                if fair and ordinal > FIRST:
                    self._slowest.note(same, replicas)
                    self._open(self._detector.ranks(step, same, ordinal))
                    self._open(self._detector.replicas(step, replicas, ordinal))
        except Exception as error:
            interrupts.pass_on(error)
            if not _state.stop.is_set():
                runtime.report("comparing", error)

    def _read_ranks(self, number: int) -> list[RankStats]:
        """Return the statistics of the ranks.

        A rank sends them when its last stage has ended, as the step does. Those that sent them for the step before are
        waited for a moment.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            told = _decoded(stats.read_entries(self._run, RANK), RankStats)
            late = any(each.step is not None and number - 2 <= each.step < number for each in told)
            if not late or time.monotonic() > deadline or _state.stop.wait(_LOOK_S):
                return told

    def _since(self, told: list[ReplicaStats]) -> list[ReplicaStats]:
        """Return what the replicas have done since the last step."""
        before, self._before = self._before, {each.replica: each for each in told}
        found = []
        for each in told:
            last = before.get(each.replica)
            if last is None or last.requests > each.requests:  # it is new
                last = ReplicaStats(replica=each.replica)
            if each.requests > last.requests:
                found.append(
                    ReplicaStats(
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
            asked = requests.Trigger(at=steps, overrides=opened.overrides, reason=opened.reason)
            requests.ask(self._run.rundir, asked)
            return
        # A step that is slow for its slowest rank meets two conditions.
        if self._due is not None:
            both = f"{self._due.reason}; {opened.reason}"
            opened = Opened(max(self._due.steps, opened.steps), self._due.overrides or opened.overrides, both)
        self._due = opened


def stop() -> None:
    """Stop reading and sending: Ray is about to end."""
    _state.stop.set()
    stats.stop_channel()
    for thread in _state.threads:
        if thread is not threading.current_thread():
            thread.join(_END_S)


def resume() -> None:
    """Read and send again: Ray is up."""
    _state.stop.clear()
    stats.resume_channel()


def _decoded(entries: list[bytes], kind: type[_Told]) -> list[_Told]:
    """Return the entries of a kind, but for those of another version of autoprof or of somebody else."""
    found = []
    for entry in entries:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(entry, type=kind))
    return found
