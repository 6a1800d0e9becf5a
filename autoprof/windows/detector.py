"""Detector of outliers: slow steps, stages, ranks and replicas, and memory, by the conditions of `AUTOPROF_WHEN`.

It reads figures only; `stats.py` and `monitor.py` supply them.
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

# By the mean of so many steps.
KEPT_STEPS = 5
_ROLLOUT = "rollout"


class Slowest:
    """The times of the last steps that were not captured."""

    def __init__(self) -> None:
        # By role and rank.
        self._ranks: dict[str, deque[Mapping[int, float]]] = defaultdict(lambda: deque(maxlen=KEPT_STEPS))
        self._replicas: deque[Mapping[int, float]] = deque(maxlen=KEPT_STEPS)
        # Of what these are the times.
        self._unit = ""

    def note(self, ranks: Sequence[RankStats], replicas: Sequence[ReplicaStats]) -> None:
        """Note the statistics of a step."""
        times: dict[str, dict[int, float]] = defaultdict(dict)
        for each in ranks:
            for role, stages in each.stages.items():
                times[role][each.rank] = times[role].get(each.rank, 0.0) + sum(stages.values())
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
        """Return the slowest ranks for a window, by role, in the grammar of `AUTOPROF_RANKS`, and why.

        Args:
            settings: Those of the window.
            first: The first global rank that each replica owns.
        """
        found = {}
        for role in {*self._ranks, _ROLLOUT}:
            count = Ranks.parse(settings.for_role(role).ranks).slowest
            if not count:
                continue
            if role == _ROLLOUT and self._replicas and first:
                chosen, why = _chosen("replica", self._unit, self._replicas, count)
                ranks = [first[replica] for replica in chosen if replica in first]
            elif role in self._ranks:
                ranks, why = _chosen("rank", "step", self._ranks[role], count)
            else:
                continue
            if ranks:
                found[role] = ",".join(map(str, sorted(ranks))), f"slowest:{count}: {why}"
        return found


def _chosen(what: str, unit: str, steps: Sequence[Mapping[int, float]], count: int) -> tuple[list[int], str]:
    """Return those that took longest on average, of all that the last of the steps had, and why."""
    times = {who: mean(step[who] for step in steps if who in step) for who in steps[-1]}
    chosen = sorted(times, key=lambda who: -times[who])[:count]
    took = ", ".join(f"{what} {who} {seconds(times[who])}" for who in chosen)
    compared = f"in the last {len(steps)} steps that were compared" if len(steps) > 1 else "in the last step compared"
    return chosen, f"{took} a {unit} {compared}; the median of {len(times)} is {seconds(median(times.values()))}"


# So many steps make a median, which is that of the last `KEPT`; the first of a run are like no others.
FEWEST, KEPT, FIRST = 5, 100, 2
# What a stage, a rank or a replica takes too long matters from such a share of the step on.
LEAST_SHARE = 0.03
# A stage that no step had after so many is not known to the trainer.
_UNKNOWN = 10


class Measured(NamedTuple):
    """A step as the process that drives it had it. `parts` are its stages and timers: names, starts and ends in ns;
    `kinds` are the kinds of stages by name.
    """

    number: int
    start_ns: int
    end_ns: int
    parts: Sequence[tuple[str, int, int]] = ()
    kinds: Mapping[str, str] = {}

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Opened(NamedTuple):
    """A window: for how many steps, with which settings of its own, for what."""

    steps: int
    overrides: dict[str, Any]
    reason: str


class Detector:
    """The outliers of one run's steps. One thread at a time may ask it."""

    def __init__(self, conditions: Iterable[Condition]) -> None:
        self._ready = [_Ready(condition) for condition in conditions if condition.what not in (RESUME, HANG)]
        self._usual = _Usual()
        names = {ready.condition.what for ready in self._ready} - set(OWN)
        self._stages: dict[str, deque[float]] = {name: deque(maxlen=KEPT) for name in names}
        self._fullest: dict[str, float] = {}
        self._ran_out: set[str] = set()

    @property
    def any_left(self) -> bool:
        """Return whether a condition may still open a window."""
        return any(ready.left for ready in self._ready)

    def step(self, step: Measured, ordinal: int) -> Opened | None:
        """Judge a step by the times of the process that drives it; `ordinal` counts the run's steps from 1.

        A step that was captured, or that raised, is none to judge or to go by.
        """
        if ordinal <= FIRST:
            return None
        whys: dict[str, tuple[float, float, str]] = {}
        took, usual, without = self._usual.compare(step)
        if usual:
            but_for = f" without {', '.join(without)}" if without else ""
            whys[STEP] = took, usual, f"step {step.number} took {in_words(took)}{but_for}"
        for name, before in self._stages.items():
            spans = ((start, end) for each, start, end in step.parts if name in (each, step.kinds.get(each)))
            took = Union(spans).length() / 1e9
            if took and len(before) >= FEWEST and took - median(before) >= LEAST_SHARE * step.seconds:
                whys[name] = took, median(before), f"{name} took {in_words(took)} in step {step.number}"
            if took:
                before.append(took)
        found = []
        for ready in self._ready:
            took, usual, text = whys.get(ready.condition.what, (0.0, 0.0, ""))
            if usual and took > ready.condition.above * usual:
                found.append((ready, f"{text}, {took / usual:.1f} times the median of {in_words(usual)}"))
        return self._open(found, ordinal)

    def unknown(self, step: Measured, ordinal: int) -> str:
        """Return the stages and kinds that conditions name and no step has had, once that can be told; or an empty
        text.
        """
        missing = [name for name, before in self._stages.items() if not before]
        if ordinal != _UNKNOWN or not missing:
            return ""
        names = sorted({name for name, _, _ in step.parts})
        kinds = sorted({step.kinds[name] for name in names if name in step.kinds})
        there = f"{', '.join(names) or 'none'}{f', of kinds {listed}' if (listed := ', '.join(kinds)) else ''}"
        return f"AUTOPROF_WHEN: no step had a stage {', '.join(missing)} in the trainer's process; there are {there}"

    def ranks(self, step: Measured, told: Sequence[RankStats], ordinal: int) -> Opened | None:
        """Judge the ranks' statistics of a step: one may have been slower than the others."""
        by_stage: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for each in told:
            for role, stages in each.stages.items():
                for stage, took in stages.items():
                    by_stage[role, stage][each.rank] = took
        found = []
        for (role, stage), times in by_stage.items():
            rank, took, usual = _slowest(times)
            if took - usual >= LEAST_SHARE * step.seconds:
                text = f"{role} rank {rank} took {in_words(took)} for {stage} in step {step.number}"
                found.append((took, usual, text))
        return self._open(self._above(RANK, found), ordinal)

    def replicas(self, step: Measured, told: Sequence[ReplicaStats], ordinal: int) -> Opened | None:
        """Judge what the replicas have generated in a step, by the seconds for a token, or for a request."""
        if any(each.seconds < LEAST_SHARE * step.seconds for each in told):
            return None
        unit, times = per_unit(told)
        replica, took, usual = _slowest(times)
        text = f"replica {replica} took {in_words(took)} a {unit} in step {step.number}"
        return self._open(self._above(REPLICA, [(took, usual, text)]), ordinal)

    def states(self, number: int, told: Iterable[RankStats], ordinal: int) -> Opened | None:
        """Judge by the step `number` how full memory is, and whether somebody ran out of it since the last time."""
        found = []
        for each in told:
            if each.oom and each.oom not in self._ran_out:
                self._ran_out.add(each.oom)
                found += [(ready, each.oom) for ready in self._ready if ready.condition.what == OOM]
            on_host = each.memory_of == HOST
            who = each.host if on_host else f"{each.role} rank {each.rank}"
            # A peak stays: it says something new where it is higher than before.
            if each.memory <= self._fullest.get(who, 0.0):
                continue
            full = [each.condition.above for each in self._ready if each.condition.what == MEMORY]
            if each.memory > min(full, default=1.0):
                self._fullest[who] = each.memory
            said = f"{who} had {percent(each.memory)} of its memory in use after step {number}"
            if not on_host:
                said = f"{who} had reserved up to {percent(each.memory)} of its device's memory by step {number}"
            found += [
                (ready, said)
                for ready in self._ready
                if ready.condition.what == MEMORY and each.memory > ready.condition.above
            ]
        return self._open(found, ordinal)

    def _above(self, what: str, found: Iterable[tuple[float, float, str]]) -> list[tuple[_Ready, str]]:
        """Return the conditions of a kind that the worst of those who took so long, and the others so long, meets."""
        worst = max((each for each in found if each[1]), key=lambda each: each[0] / each[1], default=None)
        if worst is None:
            return []
        took, usual, text = worst
        text = f"{text}, {took / usual:.1f} times the median of the others, {in_words(usual)}"
        same = [ready for ready in self._ready if ready.condition.what == what]
        return [(ready, text) for ready in same if took > ready.condition.above * usual]

    def _open(self, found: Iterable[tuple[_Ready, str]], ordinal: int) -> Opened | None:
        """Open one window for all conditions that are met now, with the settings of the first that has some."""
        met = {id(ready): (ready, text) for ready, text in found if ready.may(ordinal)}
        if not met:
            return None
        conditions = [ready.condition for ready, _ in met.values()]
        for ready, _ in met.values():
            ready.open(ordinal)
        reasons = [f"{text} ({ready.condition})" for ready, text in met.values()]
        overrides = next((each.overrides for each in conditions if each.overrides), {})
        return Opened(max(each.steps for each in conditions), overrides, "; ".join(reasons))


class _Ready:
    """A condition, and when it may open a window."""

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


class _Usual:
    """The usual length of a step. Validation, checkpoints and the like, which most steps lack, are left out of each."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Mapping[str, Union]]] = deque(maxlen=KEPT)
        self._had: Counter[str] = Counter()

    def compare(self, step: Measured) -> tuple[float, float, list[str]]:
        """Return what the step took, the median of those before (0 where they are too few), and what was left out."""
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
    """Return the seconds of a step without those parts, which may nest."""
    left_out = Union(piece for name in rare & parts.keys() for piece in parts[name].pieces())
    return (length - left_out.length()) / 1e9


def _slowest(times: Mapping[int, float]) -> tuple[int, float, float]:
    """Return who takes longest, for how long, and the median of the others: 0 where there are none."""
    if len(times) < 2:
        return 0, 0.0, 0.0
    slowest = max(times, key=lambda who: times[who])
    return slowest, times[slowest], median(took for who, took in times.items() if who != slowest)
