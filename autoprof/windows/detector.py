"""Detector of outliers by the conditions of `AUTOPROF_WHEN`: slow steps, stages, ranks and replicas, and full memory.

This module only compares numbers, which `stats.py` and `monitor.py` supply.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from autoprof.base.intervals import Union
from autoprof.base.units import seconds as in_words
from autoprof.base.units import share as percent
from autoprof.config.selection import HANG, MEMORY, OOM, OWN, RANK, REPLICA, RESUME, STEP, Condition, Ranks
from autoprof.config.settings import Settings
from autoprof.windows.stats import HOST, RankStats, ReplicaStats, per_unit

# The ranks with the highest mean time over this number of steps are the slowest ranks.
KEPT_STEPS = 5
_ROLLOUT = "rollout"
# Times of ranks that differ by less than this share are equal, within the noise.
_ALIKE = 0.05


class Slowest:
    """The times of ranks and replicas in the last steps that were not captured, to find the slowest ones."""

    def __init__(self) -> None:
        # By role: for each step, a dict from rank to seconds, and the same without the seconds that it waited.
        self._ranks: dict[str, deque[Mapping[int, float]]] = defaultdict(lambda: deque(maxlen=KEPT_STEPS))
        self._without_waits: dict[str, deque[Mapping[int, float]]] = defaultdict(lambda: deque(maxlen=KEPT_STEPS))
        # For each step, a dict from replica to seconds per unit. The unit is a token or a request.
        self._replicas: deque[Mapping[int, float]] = deque(maxlen=KEPT_STEPS)
        self._unit = ""

    def note(self, ranks: Sequence[RankStats], replicas: Sequence[ReplicaStats]) -> None:
        """Add the times of one step, from the statistics of ranks and replicas."""
        times: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        waits: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for (role, _), calls in _by_stage(ranks).items():
            for rank, wait_s in _waits(calls).items():
                times[role][rank] += calls[rank][0]
                waits[role][rank] += wait_s
        for role, took in times.items():
            if len(took) > 1:
                self._ranks[role].append(took)
                self._without_waits[role].append({rank: took[rank] - waits[role][rank] for rank in took})
        if len(replicas) > 1:
            unit, took = per_unit(replicas)
            if unit != self._unit:
                self._replicas.clear()
            self._unit = unit
            self._replicas.append(took)

    def find(self, settings: Settings, first: Mapping[int, int]) -> dict[str, tuple[str, str]]:
        """Return the slowest ranks of each role that asks for the slowest ranks.

        Args:
            settings: The settings of the window.
            first: The first global rank of each replica.

        Returns:
            Dict from role to two texts: the ranks in the grammar of `AUTOPROF_RANKS`, and the reason for the choice.
        """
        slowest = {}
        for role in {*self._ranks, _ROLLOUT}:
            count = Ranks.parse(settings.for_role(role).ranks).slowest
            if not count:
                continue
            if role == _ROLLOUT and self._replicas and first:
                replicas, reason = _slowest_on_average("replica", self._unit, self._replicas, count)
                ranks = [first[replica] for replica in replicas if replica in first]
            elif role in self._ranks:
                ranks, reason = _slowest_on_average("rank", "step", self._ranks[role], count, self._without_waits[role])
            else:
                continue
            if ranks:
                slowest[role] = ",".join(map(str, sorted(ranks))), f"slowest:{count}: {reason}"
        return slowest


def _slowest_on_average(
    noun: str,
    unit: str,
    steps: Sequence[Mapping[int, float]],
    count: int,
    without_waits: Sequence[Mapping[int, float]] = (),
) -> tuple[list[int], str]:
    """Return the workers with the highest mean time, slowest first, and a text that gives the reason.

    Only workers of the last step are considered.

    Args:
        noun: Word for a worker in the reason: `rank` or `replica`.
        unit: Word for the unit of work in the reason: `step`, `token` or `request`.
        steps: For each step, a dict from worker to seconds.
        count: Number of workers to return.
        without_waits: The same times without the waits for other workers, if these are known. They decide the order.
    """
    times, own = (
        {worker: mean(step[worker] for step in own_steps if worker in step) for worker in steps[-1]}
        for own_steps in (steps, without_waits or steps)
    )
    workers = sorted(times, key=lambda worker: -own[worker])[:count]
    text = ", ".join(f"{noun} {worker} {in_words(times[worker])}" for worker in workers)
    compared = f"in the last {len(steps)} steps that were compared" if len(steps) > 1 else "in the last step compared"
    text = f"{text} a {unit} {compared}; the median of {len(times)} is {in_words(median(times.values()))}"
    if without_waits and len(times) > count and max(own.values()) - min(own.values()) < _ALIKE * max(own.values()):
        text += "; ranks that wait for each other inside a stage take equally long, so another one may be the slow one"
    elif any(times[worker] >= min(times[each] for each in workers) for worker in times if worker not in workers):
        text += "; the time in which a rank waited for another one does not count"
    return workers, text


def _by_stage(entries: Iterable[RankStats]) -> dict[tuple[str, str], dict[int, tuple[float, float]]]:
    """Return for each role and stage a dict from rank to the seconds of the stage and the time of its end."""
    calls: dict[tuple[str, str], dict[int, tuple[float, float]]] = defaultdict(dict)
    for entry in entries:
        for role, stages in entry.stages.items():
            for stage, took_s in stages.items():
                calls[role, stage][entry.rank] = took_s, entry.ends.get(role, {}).get(stage, 0.0)
    return calls


def _waits(calls: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Return for each rank the seconds that it waited in a stage for the rank that began the stage last.

    A rank that waits begins earlier, takes longer, and does not end later.
    """
    last_begin_s, last_took_s = max((end_s - took_s, took_s) for took_s, end_s in calls.values())
    return {
        rank: max(0.0, min(took_s - last_took_s, last_begin_s - (end_s - took_s)))
        for rank, (took_s, end_s) in calls.items()
    }


# Minimum and maximum number of steps for a median, and number of first steps of a run that are ignored as untypical.
FEWEST, KEPT, FIRST = 5, 100, 2
# Minimum time that a stage, rank or replica takes longer than usual to count as an outlier, as a share of the step.
LEAST_SHARE = 0.03
# Number of steps after which a stage that has not run counts as unknown, and after which a step must be compared.
_UNKNOWN_AFTER_STEPS = 10


class Measured(NamedTuple):
    """The times of one step in the process that drives the steps.

    Attributes:
        number: The global step.
        start_ns: Start of the step, on the timeline's clock.
        end_ns: End of the step, on the same clock.
        parts: Name, start and end (in ns) of each stage and timer of the step.
        kinds: Dict from the name of a stage or timer to its kind.
    """

    number: int
    start_ns: int
    end_ns: int
    parts: Sequence[tuple[str, int, int]] = ()
    kinds: Mapping[str, str] = {}

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class OpenedWindow(NamedTuple):
    """Window that a condition opens.

    Attributes:
        steps: Number of steps to capture.
        overrides: Settings of the window.
        reason: Description of the outlier.
    """

    steps: int
    overrides: dict[str, Any]
    reason: str


class Detector:
    """Detector of outliers in one run's steps. Only one thread at a time may use it."""

    def __init__(self, conditions: Iterable[Condition]) -> None:
        self._ready = [_Ready(condition) for condition in conditions if condition.what not in (RESUME, HANG)]
        self._usual = _UsualStep()
        names = {ready.condition.what for ready in self._ready} - set(OWN)
        self._stages: dict[str, deque[float]] = {name: deque(maxlen=KEPT) for name in names}
        self._fullest: dict[str, float] = {}
        self._ran_out: set[str] = set()

    @property
    def any_left(self) -> bool:
        """True if a condition may still open a window."""
        return any(ready.has_windows_left for ready in self._ready)

    def compare_step(self, step: Measured, step_in_run: int) -> OpenedWindow | None:
        """Compare a step, and the stages and timers of the step, with the previous steps.

        Don't pass captured steps, or steps that raised an exception: their times are not usual.

        Args:
            step: The times of the step.
            step_in_run: Number of the step in this run, from 1. In a resumed run, it is lower than the global step.

        Returns:
            The window that a condition opens, or None.
        """
        if step_in_run <= FIRST:
            return None
        outliers: dict[str, tuple[float, float, str]] = {}
        took_s, median_s, left_out = self._usual.compare(step)
        if median_s:
            suffix = f" without {', '.join(left_out)}" if left_out else ""
            outliers[STEP] = took_s, median_s, f"step {step.number} took {in_words(took_s)}{suffix}"
        for name, times in self._stages.items():
            spans = ((start, end) for part, start, end in step.parts if name in (part, step.kinds.get(part)))
            took_s = Union(spans).length() / 1e9
            if took_s and len(times) >= FEWEST and took_s - median(times) >= LEAST_SHARE * step.seconds:
                outliers[name] = took_s, median(times), f"{name} took {in_words(took_s)} in step {step.number}"
            if took_s:
                times.append(took_s)
        met = []
        for ready in self._ready:
            took_s, median_s, text = outliers.get(ready.condition.what, (0.0, 0.0, ""))
            if median_s and took_s > ready.condition.above * median_s:
                met.append((ready, f"{text}, {took_s / median_s:.1f} times the median of {in_words(median_s)}"))
        return self._open_window(met, step_in_run)

    def unknown_names(self, step: Measured, step_in_run: int) -> str:
        """Return a warning if conditions name stages or kinds that no step has had, else an empty text.

        To warn only once, the text is empty for all steps except one: step `_UNKNOWN_AFTER_STEPS` of this run.
        """
        missing_names = [name for name, times in self._stages.items() if not times]
        if step_in_run != _UNKNOWN_AFTER_STEPS or not missing_names:
            return ""
        names = sorted({name for name, _, _ in step.parts})
        kinds = sorted({step.kinds[name] for name in names if name in step.kinds})
        names_text = f"{', '.join(names) or 'none'}{f', of kinds {listed}' if (listed := ', '.join(kinds)) else ''}"
        return (
            f"AUTOPROF_WHEN: no step had a stage {', '.join(missing_names)} in the trainer's process; "
            f"there are {names_text}"
        )

    def nothing_compared(self, step_in_run: int) -> str:
        """Return a warning if conditions compare times, but no step could be compared yet, else an empty text.

        As with `unknown_names`, the text is empty for all steps except one.
        """
        names = [ready.condition.what for ready in self._ready if ready.condition.what not in (MEMORY, OOM)]
        if step_in_run != _UNKNOWN_AFTER_STEPS or not names:
            return ""
        return (
            f"AUTOPROF_WHEN: {', '.join(names)} compared none of {step_in_run} steps: captured steps and the steps "
            "after them are not compared; let AUTOPROF_STEPS capture fewer steps"
        )

    def compare_ranks(self, step: Measured, entries: Sequence[RankStats], step_in_run: int) -> OpenedWindow | None:
        """Compare the stage times of the ranks in one step. Return the window that a condition opens, or None.

        A rank that waits for another rank in a stage does not end the stage later than that rank, so it is not slow.
        """
        outliers = []
        for (role, stage), calls in _by_stage(entries).items():
            rank, took_s, median_s = _slowest({rank: took_s for rank, (took_s, _) in calls.items()})
            others_end_s = median([end_s for other, (_, end_s) in calls.items() if other != rank] or [0.0])
            late_s = calls[rank][1] - others_end_s if len(calls) > 1 else 0.0
            if min(took_s - median_s, late_s) >= LEAST_SHARE * step.seconds:
                text = f"{role} rank {rank} took {in_words(took_s)} for {stage} in step {step.number}"
                outliers.append((took_s, median_s, text))
        return self._open_window(self._above(RANK, outliers), step_in_run)

    def compare_replicas(
        self, step: Measured, entries: Sequence[ReplicaStats], step_in_run: int
    ) -> OpenedWindow | None:
        """Compare the times per token of the replicas in one step, or the times per request if tokens are unknown.

        Return the window that a condition opens, or None.
        """
        if any(entry.seconds < LEAST_SHARE * step.seconds for entry in entries):
            return None
        unit, times = per_unit(entries)
        replica, took_s, median_s = _slowest(times)
        text = f"replica {replica} took {in_words(took_s)} a {unit} in step {step.number}"
        return self._open_window(self._above(REPLICA, [(took_s, median_s, text)]), step_in_run)

    def check_memory(self, number: int, entries: Iterable[RankStats], step_in_run: int) -> OpenedWindow | None:
        """Check how much memory each rank uses, and if a rank ran out of memory.

        Return the window that a condition opens, or None.

        Args:
            number: Number of the last step, for the text of the reason.
            entries: The newest statistics of each rank.
            step_in_run: Number of the step in this run, from 1. In a resumed run, it is lower than the global step.
        """
        met = []
        for entry in entries:
            if entry.oom and entry.oom not in self._ran_out:
                self._ran_out.add(entry.oom)
                met += [(ready, entry.oom) for ready in self._ready if ready.condition.what == OOM]
            on_host = entry.memory_of == HOST
            owner = entry.host if on_host else f"{entry.role} rank {entry.rank}"
            # A peak never falls. The same peak must not open a second window, so only a higher peak counts.
            if entry.memory <= self._fullest.get(owner, 0.0):
                continue
            limits = [ready.condition.above for ready in self._ready if ready.condition.what == MEMORY]
            if entry.memory > min(limits, default=1.0):
                self._fullest[owner] = entry.memory
            text = f"{owner} had {percent(entry.memory)} of its memory in use after step {number}"
            if not on_host:
                text = f"{owner} had reserved up to {percent(entry.memory)} of its device's memory by step {number}"
            met += [
                (ready, text)
                for ready in self._ready
                if ready.condition.what == MEMORY and entry.memory > ready.condition.above
            ]
        return self._open_window(met, step_in_run)

    def _above(self, what: str, outliers: Iterable[tuple[float, float, str]]) -> list[tuple[_Ready, str]]:
        """Return the conditions that the worst outlier meets, each with the reason.

        Args:
            what: Value of `Condition.what` of the conditions to check.
            outliers: For each outlier, the seconds of the slowest worker, the median seconds of the other workers, and
                a description.
        """
        comparable = (outlier for outlier in outliers if outlier[1])
        worst = max(comparable, key=lambda outlier: outlier[0] / outlier[1], default=None)
        if worst is None:
            return []
        took_s, median_s, text = worst
        text = f"{text}, {took_s / median_s:.1f} times the median of the others, {in_words(median_s)}"
        conditions = [ready for ready in self._ready if ready.condition.what == what]
        return [(ready, text) for ready in conditions if took_s > ready.condition.above * median_s]

    def _open_window(self, met: Iterable[tuple[_Ready, str]], step_in_run: int) -> OpenedWindow | None:
        """Return one window for all conditions that are met, or None if none of them may open a window now.

        The settings of the window come from the first of these conditions that has settings.

        Args:
            met: The conditions that are met, each with the reason.
            step_in_run: Number of the step in this run, from 1. In a resumed run, it is lower than the global step.
        """
        opening = {id(ready): (ready, text) for ready, text in met if ready.may_open(step_in_run)}
        if not opening:
            return None
        conditions = [ready.condition for ready, _ in opening.values()]
        for ready, _ in opening.values():
            ready.open(step_in_run)
        reasons = [f"{text} ({ready.condition})" for ready, text in opening.values()]
        overrides = next((condition.overrides for condition in conditions if condition.overrides), {})
        return OpenedWindow(max(condition.steps for condition in conditions), overrides, "; ".join(reasons))


class _Ready:
    """A condition, the number of windows that it has opened, and the end of its cool-down."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self._windows = 0
        self._quiet_until = 0

    @property
    def has_windows_left(self) -> bool:
        return self._windows < self.condition.at_most

    def may_open(self, step_in_run: int) -> bool:
        return self.has_windows_left and step_in_run > self._quiet_until

    def open(self, step_in_run: int) -> None:
        self._windows += 1
        self._quiet_until = step_in_run + self.condition.steps + self.condition.cool_down


class _UsualStep:
    """The usual duration of a step, without parts that most steps lack, such as validation and checkpoints."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Mapping[str, Union]]] = deque(maxlen=KEPT)
        self._had: Counter[str] = Counter()

    def compare(self, step: Measured) -> tuple[float, float, list[str]]:
        """Compare the duration of a step with the previous steps.

        Rare parts are parts that most steps lack. They are subtracted from all durations.

        Returns:
            The seconds of the step; the median seconds of the previous steps, or 0 if there are too few; the names of
            the rare parts that were long in the step.
        """
        parts: dict[str, Union] = defaultdict(Union)
        for name, start, end in step.parts:
            parts[name].add(max(start, step.start_ns), min(end, step.end_ns))
        length = step.end_ns - step.start_ns
        step_count = len(self._steps)
        rare = {name for name in {*self._had, *parts} if 2 * self._had[name] <= step_count}
        took_s = _seconds_without_rare_parts(length, parts, rare)
        median_s = (
            median(_seconds_without_rare_parts(*earlier, rare) for earlier in self._steps)
            if step_count >= FEWEST
            else 0.0
        )
        if step_count == KEPT:
            self._had.subtract(self._steps[0][1].keys())
        self._had.update(parts.keys())
        self._steps.append((length, dict(parts)))
        left_out = sorted(name for name in rare & parts.keys() if parts[name].length() >= LEAST_SHARE * length)
        return took_s, median_s, left_out


def _seconds_without_rare_parts(length: int, parts: Mapping[str, Union], rare: set[str]) -> float:
    """Return the seconds of a step outside of its rare parts. Rare parts may overlap; `length` is in ns."""
    left_out = Union(piece for name in rare & parts.keys() for piece in parts[name].pieces())
    return (length - left_out.length()) / 1e9


def _slowest(times: Mapping[int, float]) -> tuple[int, float, float]:
    """Return the slowest worker, its seconds, and the median seconds of the other workers.

    Return three zeros if there are fewer than two workers.
    """
    if len(times) < 2:
        return 0, 0.0, 0.0
    slowest = max(times, key=lambda worker: times[worker])
    return slowest, times[slowest], median(took for worker, took in times.items() if worker != slowest)
