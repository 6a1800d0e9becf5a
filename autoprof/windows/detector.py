"""Detector of outliers by the conditions of `AUTOPROF_WHEN`: slow steps, stages, ranks and replicas, and full memory.

It only compares figures, which `stats.py` and `monitor.py` supply.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from autoprof.base.intervals import Union
from autoprof.base.units import seconds
from autoprof.base.units import seconds as in_words
from autoprof.base.units import share as percent
from autoprof.config.conditions import HANG, MEMORY, OOM, OWN, RANK, REPLICA, RESUME, STEP, Condition
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.windows.stats import HOST, RankStats, ReplicaStats, per_unit

# Number of steps of which the mean decides which ranks are the slowest.
KEPT_STEPS = 5
_ROLLOUT = "rollout"


class Slowest:
    """Times of ranks and replicas in the last steps that were not captured."""

    def __init__(self) -> None:
        # Seconds by role and rank.
        self._ranks: dict[str, deque[Mapping[int, float]]] = defaultdict(lambda: deque(maxlen=KEPT_STEPS))
        # Seconds for one unit, a token or a request, by replica.
        self._replicas: deque[Mapping[int, float]] = deque(maxlen=KEPT_STEPS)
        self._unit = ""

    def note(self, ranks: Sequence[RankStats], replicas: Sequence[ReplicaStats]) -> None:
        """Note the statistics of a step."""
        times: dict[str, dict[int, float]] = defaultdict(dict)
        for entry in ranks:
            for role, stages in entry.stages.items():
                times[role][entry.rank] = times[role].get(entry.rank, 0.0) + sum(stages.values())
        for role, took in times.items():
            if len(took) > 1:
                self._ranks[role].append(took)
        if len(replicas) > 1:
            unit, took = per_unit(replicas)
            if unit != self._unit:
                self._replicas.clear()
            self._unit = unit
            self._replicas.append(took)

    def find(self, settings: Settings, first: Mapping[int, int]) -> dict[str, tuple[str, str]]:
        """Return the slowest ranks for a window by role, in the grammar of `AUTOPROF_RANKS`, and the reason.

        Args:
            settings: The settings of the window.
            first: The first global rank of each replica.
        """
        slowest = {}
        for role in {*self._ranks, _ROLLOUT}:
            count = Ranks.parse(settings.for_role(role).ranks).slowest
            if not count:
                continue
            if role == _ROLLOUT and self._replicas and first:
                chosen, reason = _chosen("replica", self._unit, self._replicas, count)
                ranks = [first[replica] for replica in chosen if replica in first]
            elif role in self._ranks:
                ranks, reason = _chosen("rank", "step", self._ranks[role], count)
            else:
                continue
            if ranks:
                slowest[role] = ",".join(map(str, sorted(ranks))), f"slowest:{count}: {reason}"
        return slowest


def _chosen(noun: str, unit: str, steps: Sequence[Mapping[int, float]], count: int) -> tuple[list[int], str]:
    """Return the slowest workers on average, of all workers in the last step, and the reason.

    Args:
        noun: Word for a worker in the reason: `rank` or `replica`.
        unit: Unit of the times in the reason.
        steps: Seconds by worker, for each step.
        count: Number of workers to choose.
    """
    times = {worker: mean(step[worker] for step in steps if worker in step) for worker in steps[-1]}
    chosen = sorted(times, key=lambda worker: -times[worker])[:count]
    took = ", ".join(f"{noun} {worker} {seconds(times[worker])}" for worker in chosen)
    compared = f"in the last {len(steps)} steps that were compared" if len(steps) > 1 else "in the last step compared"
    return chosen, f"{took} a {unit} {compared}; the median of {len(times)} is {seconds(median(times.values()))}"


# Minimum and maximum number of steps for a median, and number of first steps of a run that are ignored as untypical.
FEWEST, KEPT, FIRST = 5, 100, 2
# Minimum excess time of a stage, rank or replica, as a share of the step.
LEAST_SHARE = 0.03
# Number of steps after which a stage that has not run counts as unknown.
_UNKNOWN_AFTER_STEPS = 10


class Measured(NamedTuple):
    """Step as measured in the process that drives it.

    Attributes:
        number: The global step.
        start_ns: Start, on the timeline's clock.
        end_ns: End.
        parts: Names, starts and ends in ns of its stages and timers.
        kinds: Kinds of the stages by name.
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
        steps: Number of steps.
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
        return any(ready.left for ready in self._ready)

    def step(self, step: Measured, ordinal: int) -> OpenedWindow | None:
        """Compare a step with the previous ones, by the times of the process that drives it.

        Captured steps, and steps that raised, must not be passed: they are neither judged nor compared with.

        Args:
            step: The step.
            ordinal: Number of the step in this run, from 1.

        Returns:
            The window that a condition opens, or None.
        """
        if ordinal <= FIRST:
            return None
        outliers: dict[str, tuple[float, float, str]] = {}
        took, usual, without = self._usual.compare(step)
        if usual:
            suffix = f" without {', '.join(without)}" if without else ""
            outliers[STEP] = took, usual, f"step {step.number} took {in_words(took)}{suffix}"
        for name, before in self._stages.items():
            spans = ((start, end) for part, start, end in step.parts if name in (part, step.kinds.get(part)))
            took = Union(spans).length() / 1e9
            if took and len(before) >= FEWEST and took - median(before) >= LEAST_SHARE * step.seconds:
                outliers[name] = took, median(before), f"{name} took {in_words(took)} in step {step.number}"
            if took:
                before.append(took)
        met = []
        for ready in self._ready:
            took, usual, text = outliers.get(ready.condition.what, (0.0, 0.0, ""))
            if usual and took > ready.condition.above * usual:
                met.append((ready, f"{text}, {took / usual:.1f} times the median of {in_words(usual)}"))
        return self._open(met, ordinal)

    def unknown(self, step: Measured, ordinal: int) -> str:
        """Return a warning about stages and kinds in conditions that no step has had, or an empty text.

        It is returned once, after `_UNKNOWN_AFTER_STEPS` steps.
        """
        missing = [name for name, before in self._stages.items() if not before]
        if ordinal != _UNKNOWN_AFTER_STEPS or not missing:
            return ""
        names = sorted({name for name, _, _ in step.parts})
        kinds = sorted({step.kinds[name] for name in names if name in step.kinds})
        known = f"{', '.join(names) or 'none'}{f', of kinds {listed}' if (listed := ', '.join(kinds)) else ''}"
        return f"AUTOPROF_WHEN: no step had a stage {', '.join(missing)} in the trainer's process; there are {known}"

    def ranks(self, step: Measured, entries: Sequence[RankStats], ordinal: int) -> OpenedWindow | None:
        """Compare the ranks of a step with each other. Return the window that a condition opens, or None."""
        by_stage: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for entry in entries:
            for role, stages in entry.stages.items():
                for stage, took in stages.items():
                    by_stage[role, stage][entry.rank] = took
        found = []
        for (role, stage), times in by_stage.items():
            rank, took, usual = _slowest(times)
            if took - usual >= LEAST_SHARE * step.seconds:
                text = f"{role} rank {rank} took {in_words(took)} for {stage} in step {step.number}"
                found.append((took, usual, text))
        return self._open(self._above(RANK, found), ordinal)

    def replicas(self, step: Measured, entries: Sequence[ReplicaStats], ordinal: int) -> OpenedWindow | None:
        """Compare the replicas of a step by their seconds per token, or per request.

        Return the window that a condition opens, or None.
        """
        if any(entry.seconds < LEAST_SHARE * step.seconds for entry in entries):
            return None
        unit, times = per_unit(entries)
        replica, took, usual = _slowest(times)
        text = f"replica {replica} took {in_words(took)} a {unit} in step {step.number}"
        return self._open(self._above(REPLICA, [(took, usual, text)]), ordinal)

    def states(self, number: int, entries: Iterable[RankStats], ordinal: int) -> OpenedWindow | None:
        """Check the memory of ranks, and whether one ran out of it. Return the window that a condition opens, or None.

        Args:
            number: The last step, for the reason.
            entries: The newest statistics of each rank.
            ordinal: Number of the step in this run, from 1.
        """
        met = []
        for entry in entries:
            if entry.oom and entry.oom not in self._ran_out:
                self._ran_out.add(entry.oom)
                met += [(ready, entry.oom) for ready in self._ready if ready.condition.what == OOM]
            on_host = entry.memory_of == HOST
            owner = entry.host if on_host else f"{entry.role} rank {entry.rank}"
            # A peak never falls, so it counts again only if it is higher than before.
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
        return self._open(met, ordinal)

    def _above(self, what: str, outliers: Iterable[tuple[float, float, str]]) -> list[tuple[_Ready, str]]:
        """Return the conditions that the worst outlier meets, with the reason.

        Args:
            what: Kind of the conditions.
            outliers: Seconds of the slowest one, median seconds of the others, and description.
        """
        comparable = (outlier for outlier in outliers if outlier[1])
        worst = max(comparable, key=lambda outlier: outlier[0] / outlier[1], default=None)
        if worst is None:
            return []
        took, usual, text = worst
        text = f"{text}, {took / usual:.1f} times the median of the others, {in_words(usual)}"
        same = [ready for ready in self._ready if ready.condition.what == what]
        return [(ready, text) for ready in same if took > ready.condition.above * usual]

    def _open(self, met: Iterable[tuple[_Ready, str]], ordinal: int) -> OpenedWindow | None:
        """Open one window for all conditions that are met, with the settings of the first condition that has some."""
        opening = {id(ready): (ready, text) for ready, text in met if ready.may(ordinal)}
        if not opening:
            return None
        conditions = [ready.condition for ready, _ in opening.values()]
        for ready, _ in opening.values():
            ready.open(ordinal)
        reasons = [f"{text} ({ready.condition})" for ready, text in opening.values()]
        overrides = next((condition.overrides for condition in conditions if condition.overrides), {})
        return OpenedWindow(max(condition.steps for condition in conditions), overrides, "; ".join(reasons))


class _Ready:
    """Condition, with the number of its windows and the end of its cool-down."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self._windows = 0
        self._quiet_until = 0

    @property
    def left(self) -> bool:
        return self._windows < self.condition.at_most

    def may(self, ordinal: int) -> bool:
        return self.left and ordinal > self._quiet_until

    def open(self, ordinal: int) -> None:
        self._windows += 1
        self._quiet_until = ordinal + self.condition.steps + self.condition.cool_down


class _UsualStep:
    """Usual duration of a step. Parts that most steps lack, such as validation and checkpoints, do not count."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Mapping[str, Union]]] = deque(maxlen=KEPT)
        self._had: Counter[str] = Counter()

    def compare(self, step: Measured) -> tuple[float, float, list[str]]:
        """Compare a step with the previous ones.

        Returns:
            The seconds of the step, the median of the previous ones (0 if they are too few), and the names of long
            parts that do not count.
        """
        parts: dict[str, Union] = defaultdict(Union)
        for name, start, end in step.parts:
            parts[name].add(max(start, step.start_ns), min(end, step.end_ns))
        length = step.end_ns - step.start_ns
        seen = len(self._steps)
        rare = {name for name in {*self._had, *parts} if 2 * self._had[name] <= seen}
        took = _without(length, parts, rare)
        usual = median(_without(*before, rare) for before in self._steps) if seen >= FEWEST else 0.0
        if seen == KEPT:
            self._had.subtract(self._steps[0][1].keys())
        self._had.update(parts.keys())
        self._steps.append((length, dict(parts)))
        left_out = sorted(name for name in rare & parts.keys() if parts[name].length() >= LEAST_SHARE * length)
        return took, usual, left_out


def _without(length: int, parts: Mapping[str, Union], rare: set[str]) -> float:
    """Return the seconds of a step without the rare parts, which may nest."""
    left_out = Union(piece for name in rare & parts.keys() for piece in parts[name].pieces())
    return (length - left_out.length()) / 1e9


def _slowest(times: Mapping[int, float]) -> tuple[int, float, float]:
    """Return the slowest worker, its seconds, and the median of the others. All are 0 if there are no others."""
    if len(times) < 2:
        return 0, 0.0, 0.0
    slowest = max(times, key=lambda worker: times[worker])
    return slowest, times[slowest], median(took for worker, took in times.items() if worker != slowest)
