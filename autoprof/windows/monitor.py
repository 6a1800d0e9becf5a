"""Monitor of a run's steps: it compares each ended step with the conditions, in the process that drives the steps.

The monitor checks the spans of this process when the step ends. The statistics of other processes arrive later. A
thread reads them, so that no step has to wait. So a window begins with the next step, or one step later if the next
step has already begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoprof.base import identity, log, seam
from autoprof.base.originals import threading, time
from autoprof.config.selection import RESUME
from autoprof.config.values import FOUND, REASON
from autoprof.run.runtime import Runtime
from autoprof.windows import requests, stats
from autoprof.windows.detector import FIRST, Detector, Measured, OpenedWindow, Slowest
from autoprof.windows.stats import RANK, REPLICA, RankStats, ReplicaStats, StatsReporter, state

# Maximum seconds that the thread waits for the statistics of a step, and seconds between two reads.
_PATIENCE_S, _POLL_S = 2.0, 0.25


class Monitor:
    """Monitor of the trainer's steps in this process, or of an engine's batches if there is no trainer."""

    def __init__(self, run: Runtime, reporter: StatsReporter) -> None:
        self._run = run
        self._reporter = reporter
        self._detector = Detector(run.settings.when)
        self._slowest = Slowest()
        self._asks = stats.needs_other_processes(run.settings)
        self._lock = threading.Lock()
        self._due: OpenedWindow | None = None
        self._resumed: OpenedWindow | None = None
        self._follows_captured = False
        self._any_compared = False
        self._thread: threading.Thread | None = None
        self._before: dict[int, ReplicaStats] = {}
        # If a launcher has started several trainer processes, only one of them compares steps. To open a window in all
        # of them, it sends a request as `autoprof trigger` does.
        self._several = identity.ranks() > 1
        self._decides = not self._several or run.decides

    def step_began(self, step: int, step_in_run: int) -> None:
        """Note that a step has begun. `step_in_run` is the number of the step in this run, from 1."""
        if step_in_run > 1:
            return
        for condition in self._run.settings.when:
            # A run that was not resumed begins with step 1, or 0.
            if condition.what == RESUME and step > 1 and self._resumed is None:
                reason = f"the run was resumed at step {step} ({condition})"
                self._resumed = OpenedWindow(condition.steps, condition.overrides, reason)

    def take_overrides(self, step_in_run: int) -> dict[str, Any] | None:
        """Return the overrides for the step that begins now if it belongs to a window of a condition, else None.

        Each call uses up one step of the window. `step_in_run` is the number of the step in this run, from 1.
        """
        with self._lock:
            overrides = self.foresee(step_in_run)
            if self._due is not None:
                self._due = self._due._replace(steps=self._due.steps - 1) if self._due.steps > 1 else None
        return overrides

    def foresee(self, step_in_run: int) -> dict[str, Any] | None:
        """Return the overrides that `take_overrides` would return for a step, but use up no step of the window."""
        opened = self._due
        if opened is None and self._resumed is not None and step_in_run <= self._resumed.steps:
            opened = self._resumed
        return None if opened is None else opened.overrides | {REASON: opened.reason}

    def any_left(self, step_in_run: int) -> bool:
        """Return True if a condition may cause the capture of a step after the `step_in_run`-th step of this run."""
        resumed = self._resumed is not None and step_in_run < self._resumed.steps
        return self._due is not None or resumed or self._detector.any_left

    def with_stragglers(self, overrides: Mapping[str, Any], first: Callable[[], Mapping[int, int]]) -> dict[str, Any]:
        """Return the overrides of a window. If the window captures the slowest ranks, add the currently slowest ranks.

        Args:
            overrides: The overrides of the window.
            first: Function that returns the first global rank of each replica.
        """
        settings = self._run.settings.overridden(overrides)
        if FOUND in overrides or not stats.asks_for_slowest(settings):
            return dict(overrides)
        with self._lock:
            slowest = self._slowest.find(settings, first())
        return {**overrides, FOUND: slowest} if slowest else dict(overrides)

    def step_ended(self, step: int, step_in_run: int, captured: bool) -> None:
        """Compare an ended step with the conditions. The span of the step must be written before this call.

        Args:
            step: The global step.
            step_in_run: Number of the step in this run, from 1. In a resumed run, it is lower than the global step.
            captured: True if the step was captured. A capture makes a step slower, and its traces may still be exported
                in the next step. So the times of both steps are not compared.
        """
        follows_captured, self._follows_captured = self._follows_captured, captured
        line, parts = self._reporter.take()
        if line is None or line.step != step:
            return
        if not self._decides:
            self._reporter.send()
            return
        measured = Measured(step, line.start_ns, line.end_ns, parts, self._reporter.kinds)
        fair = not captured and not follows_captured and line.error is None
        self._any_compared |= fair and step_in_run > FIRST
        warning = "" if self._any_compared else self._detector.nothing_compared(step_in_run)
        if fair:
            with self._lock:
                self._open_window(self._detector.compare_step(measured, step_in_run))
                warning = warning or self._detector.unknown_names(measured, step_in_run)
        if warning:
            log.warning_once(warning)
        if self._asks and (self._thread is None or not self._thread.is_alive()) and not state.stop.is_set():
            own_entry = self._reporter.of_rank()
            thread = threading.Thread(
                target=self._compare_ranks_and_replicas,
                args=(measured, step_in_run, fair, own_entry),
                name="autoprof-comparing",
                daemon=True,
            )
            if stats.start_thread(thread):
                self._thread = thread
                state.threads[:] = [thread, *(other for other in state.threads if other.is_alive())]

    def _compare_ranks_and_replicas(
        self, step: Measured, step_in_run: int, compare_times: bool, own_entry: RankStats
    ) -> None:
        """Read the statistics of all ranks and replicas, and open the windows of conditions that are met."""
        with seam.guard("comparing", stats.report):
            ranks = [own_entry, *self._read_ranks(step.number)]
            replicas = self._work_since_last_call(stats.read_entries(self._run, REPLICA, ReplicaStats))
            step_entries = [entry for entry in ranks if entry.step == step.number]
            with self._lock:
                self._open_window(self._detector.check_memory(step.number, ranks, step_in_run))
                if compare_times and step_in_run > FIRST:
                    self._slowest.note(step_entries, replicas)
                    self._open_window(self._detector.compare_ranks(step, step_entries, step_in_run))
                    self._open_window(self._detector.compare_replicas(step, replicas, step_in_run))

    def _read_ranks(self, step: int) -> list[RankStats]:
        """Return the newest statistics of each rank.

        A rank sends its statistics when its last stage has ended, at about the same time as the step ends. So this
        function waits up to `_PATIENCE_S` if the newest statistics of a rank belong to one of the two previous steps.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            entries = stats.read_entries(self._run, RANK, RankStats)
            any_is_late = any(entry.step is not None and step - 2 <= entry.step < step for entry in entries)
            if not any_is_late or time.monotonic() > deadline or state.stop.wait(_POLL_S):
                return entries

    def _work_since_last_call(self, entries: list[ReplicaStats]) -> list[ReplicaStats]:
        """Return the work of each replica since the previous call, from totals. Replicas without work are left out."""
        earlier_totals, self._before = self._before, {entry.replica: entry for entry in entries}
        new_work = []
        for entry in entries:
            total = earlier_totals.get(entry.replica)
            if total is None or total.requests > entry.requests:  # the replica is new
                total = ReplicaStats(replica=entry.replica)
            if entry.requests > total.requests:
                new_work.append(
                    ReplicaStats(
                        replica=entry.replica,
                        requests=entry.requests - total.requests,
                        seconds=entry.seconds - total.seconds,
                        tokens=entry.tokens - total.tokens,
                    )
                )
        return new_work

    def _open_window(self, opened: OpenedWindow | None) -> None:
        if opened is None:
            return
        log.info(f"{opened.reason}: {opened.steps} of the next steps are captured")
        if self._several:
            trigger = requests.Trigger(steps=opened.steps, overrides=opened.overrides, reason=opened.reason)
            requests.ask(self._run.rundir, trigger)
            return
        # A step that is slow because of its slowest rank meets two conditions.
        if self._due is not None:
            both = f"{self._due.reason}; {opened.reason}"
            opened = OpenedWindow(max(self._due.steps, opened.steps), self._due.overrides or opened.overrides, both)
        self._due = opened
