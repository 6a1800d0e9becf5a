"""Unions of intervals and owners of moments, compared with a simple computation for each moment."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from autoprof.base.intervals import Union, exclusive, segments

moments = st.integers(0, 30)
intervals = st.tuples(moments, moments)
spans = st.tuples(st.sampled_from("abcd"), moments, moments)


@given(st.lists(intervals, max_size=12), moments, moments)
def test_a_union_has_the_moments_that_any_interval_has(added: list[tuple[int, int]], start: int, end: int) -> None:
    union = Union(added)
    covered = {at for low, high in added for at in range(low, high)}
    pieces = union.pieces()
    assert {at for low, high in pieces for at in range(low, high)} == covered
    assert all(low < high for low, high in pieces)
    assert all(before[1] < after[0] for before, after in pairwise(pieces))
    assert union.length() == len(covered)
    asked = set(range(start, end))
    assert {at for low, high in union.within(start, end) for at in range(low, high)} == covered & asked
    assert {at for low, high in union.without(start, end) for at in range(low, high)} == asked - covered
    assert union.length(start, end) == len(covered & asked)


@given(st.lists(spans, max_size=10), moments, moments)
def test_each_moment_has_the_owner_that_began_last(added: list[tuple[str, int, int]], start: int, end: int) -> None:
    owners = {}
    for at in range(start, end):
        going = [span for span in added if span[1] <= at < span[2]]
        if going:
            latest = max(span[1] for span in going)
            soonest = min(span[2] for span in going if span[1] == latest)
            owners[at] = {name for name, low, high in going if (low, high) == (latest, soonest)}
    found = segments(added, start, end)
    assert all(before[2] <= after[1] for before, after in pairwise(found))
    said = {at: name for name, low, high in found for at in range(low, high)}
    assert said.keys() == owners.keys()
    assert all(name in owners[at] for at, name in said.items())
    assert sum(exclusive(added, start, end).values()) == len(owners)


def test_nested_timers_count_once() -> None:
    timers = [("step", 0, 100), ("gen", 10, 50), ("reward", 20, 30), ("gen", 60, 70)]
    assert exclusive(timers, 0, 90) == {"step": 40, "gen": 40, "reward": 10}
    assert segments([("a", 0, 5), ("a", 5, 9)], 0, 20) == [("a", 0, 9)]
