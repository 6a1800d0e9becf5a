"""Paired runs: in each turn every case runs once, and a ratio is taken within the turn.

What slows the machine down for a while slows all cases of a turn down, and leaves their ratios alone. The cases of a
turn run in another order each time, so that none of them always follows the same one.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

# One run of a case: what was measured, each under the name of its table.
Case = Callable[[], Mapping[str, float]]
# By table, by case: a value for each turn.
Taken = dict[str, dict[str, list[float]]]


class Spread(NamedTuple):
    """The middle of some values, and the range of their middle half; of all where there are fewer than four."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


class Table(msgspec.Struct, kw_only=True):
    """One quantity of several cases, turn by turn.

    Attributes:
        base: The case that the others are compared with.
        differences: Whether the difference to the base is told too.
    """

    title: str
    unit: str
    base: str
    values: dict[str, list[float]]
    differences: bool = False

    def spread(self, case: str) -> Spread:
        """Return the spread of a case."""
        return Spread.of(self.values[case])

    def ratio(self, case: str, base: str = "") -> Spread:
        """Return a case to another, or to the table's base, within the turns."""
        pairs = zip(self.values[case], self.values[base or self.base], strict=True)
        return Spread.of([value / other for value, other in pairs])

    def difference(self, case: str) -> Spread:
        """Return how much more than the base a case is, within the turns."""
        pairs = zip(self.values[case], self.values[self.base], strict=True)
        return Spread.of([value - other for value, other in pairs])

    def noise(self, case: str) -> float | None:
        """Return how much a case differs between turns, as a part of it; None of a single turn."""
        values = self.values[case]
        return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None


class Goal(msgspec.Struct, kw_only=True):
    """A case is to be at most `limit` times another.

    Attributes:
        table: The title of the table in which both are.
        base: The other case, where it is not the table's base.
        within_noise: Whether what the base differs from itself by is allowed on top.
        remedy: What would close it.
    """

    text: str
    table: str
    case: str
    limit: float
    remedy: str
    base: str = ""
    within_noise: bool = False


class Verdict(NamedTuple):
    """The verdict on a goal. `met` is None if the measurements don't tell."""

    ratio: Spread
    met: bool | None
    noise: float | None


def judge(goal: Goal, tables: Sequence[Table]) -> Verdict | None:
    """Judge a goal by the middle of the ratios; None if one of its cases was not measured."""
    table = next((table for table in tables if table.title == goal.table), None)
    if table is None or not {goal.case, goal.base or table.base} <= table.values.keys():
        return None
    ratio = table.ratio(goal.case, goal.base)
    if not goal.within_noise:
        return Verdict(ratio, ratio.middle <= goal.limit, None)
    noise = table.noise(goal.base or table.base)
    return Verdict(ratio, None if noise is None else ratio.middle <= goal.limit + noise, noise)


def in_turns(cases: Mapping[str, Case], turns: int, *, warm: int = 1) -> Taken:
    """Run every case once a turn. The first `warm` turns are for caches, and are not kept."""
    taken: Taken = {}
    for turn in range(-warm, turns):
        order = list(cases)
        random.Random(turn).shuffle(order)
        for case in order:
            measured = cases[case]()
            for table, value in measured.items() if turn >= 0 else ():
                taken.setdefault(table, {}).setdefault(case, []).append(value)
    return {table: {case: by_case[case] for case in cases if case in by_case} for table, by_case in taken.items()}
