"""Paired measurements: in each turn every case runs once, and ratios are taken within the turn.

If the machine is slow for a while, all cases of a turn are slow, and their ratios do not change. The order of the cases
changes with each turn, so that no case always follows the same other case.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

# A function that runs a case once. It returns the measured values, by the title of their table.
Case = Callable[[], Mapping[str, float]]
# Measured values: dict from table title to dict from case to one value per turn.
Taken = dict[str, dict[str, list[float]]]


class Spread(NamedTuple):
    """The median of values, and the range of their middle half. With fewer than four values, it is the range of all."""

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
    """One measured quantity of several cases, with a value for each turn.

    Attributes:
        base: The case with which the other cases are compared.
        differences: True if the table also shows differences from the base.
    """

    title: str
    unit: str
    base: str
    values: dict[str, list[float]]
    differences: bool = False

    def spread(self, case: str) -> Spread:
        """Return the spread of a case's values."""
        return Spread.of(self.values[case])

    def ratio(self, case: str, base: str = "") -> Spread:
        """Return the spread of the ratios, one per turn, of a case to the case `base`, or to the table's base."""
        pairs = zip(self.values[case], self.values[base or self.base], strict=True)
        return Spread.of([value / base_value for value, base_value in pairs])

    def difference(self, case: str) -> Spread:
        """Return the spread of the differences, one per turn, of a case from the table's base."""
        pairs = zip(self.values[case], self.values[self.base], strict=True)
        return Spread.of([value - base_value for value, base_value in pairs])

    def noise(self, case: str) -> float | None:
        """Return the range of a case's values, divided by their median. Return None if there is only one turn."""
        values = self.values[case]
        return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None


class Goal(msgspec.Struct, kw_only=True):
    """A goal: the values of a case should be at most `limit` times the values of another case.

    Attributes:
        table: Title of the table that has both cases.
        base: The other case; empty for the table's base.
        within_noise: True if the noise of the base may be added to the limit.
        remedy: A change that would reach the goal.
    """

    text: str
    table: str
    case: str
    limit: float
    remedy: str
    base: str = ""
    within_noise: bool = False


class Verdict(NamedTuple):
    """Verdict on a goal. `met` is True, False, or None for an undecided goal."""

    ratio: Spread
    met: bool | None
    noise: float | None


def judge(goal: Goal, tables: Sequence[Table]) -> Verdict | None:
    """Judge a goal by the median of the ratios. Return None if one of its cases was not measured."""
    table = next((table for table in tables if table.title == goal.table), None)
    if table is None or not {goal.case, goal.base or table.base} <= table.values.keys():
        return None
    ratio = table.ratio(goal.case, goal.base)
    if not goal.within_noise:
        return Verdict(ratio, ratio.middle <= goal.limit, None)
    noise = table.noise(goal.base or table.base)
    return Verdict(ratio, None if noise is None else ratio.middle <= goal.limit + noise, noise)


def in_turns(cases: Mapping[str, Case], turns: int, *, warm: int = 1) -> Taken:
    """Run every case once per turn, and return the measured values.

    Before that, run `warm` turns that only fill caches. Their values are not kept.
    """
    kept_values: Taken = {}
    for turn in range(-warm, turns):
        order = list(cases)
        random.Random(turn).shuffle(order)
        for case in order:
            values_by_table = cases[case]()
            for table, value in values_by_table.items() if turn >= 0 else ():
                kept_values.setdefault(table, {}).setdefault(case, []).append(value)
    return {table: {case: by_case[case] for case in cases if case in by_case} for table, by_case in kept_values.items()}
