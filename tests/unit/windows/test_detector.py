"""Conditions, applied to steps with invented times."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.config import selection
from autoprof.windows.detector import FEWEST, FIRST, Detector, Measured, OpenedWindow
from autoprof.windows.stats import HOST, RankStats, ReplicaStats


def step(number: int, seconds: float, **stages: float) -> Measured:
    """Return a step whose stages follow one another."""
    parts, at = [], 0
    for name, took in stages.items():
        parts.append((name, at, at + round(took * 1e9)))
        at = parts[-1][2]
    return Measured(number, 0, round(seconds * 1e9), parts)


def judged(when: str, steps: Iterable[Measured]) -> dict[int, OpenedWindow]:
    judge = Detector(selection.parse_conditions(when))
    found = {each.number: judge.compare_step(each, ordinal) for ordinal, each in enumerate(steps, 1)}
    return {number: opened for number, opened in found.items() if opened is not None}


def test_a_step_is_slow_by_the_running_median_and_the_reason_has_the_figures() -> None:
    opened = judged("step>2x", [*(step(number, 44.0) for number in range(30, 41)), step(41, 92.1)])
    assert opened == {41: OpenedWindow(1, {}, "step 41 took 92.1 s, 2.1 times the median of 44.0 s (step>2x)")}


def test_what_is_a_factor_of_the_median_is_not_above_it() -> None:
    assert judged("step>2x", [*(step(number, 4.0) for number in range(1, 11)), step(11, 8.0)]) == {}


@pytest.mark.parametrize("known", range(FIRST + FEWEST + 2))
def test_the_first_steps_are_not_compared_and_too_few_make_no_median(known: int) -> None:
    # The first two steps are usually slow; five more are needed.
    steps = [step(number, 90.0 if number <= FIRST else 1.0) for number in range(1, known + 1)]
    assert bool(judged("step>2x", [*steps, step(known + 1, 50.0)])) == (known >= FIRST + FEWEST)


def test_validation_and_checkpoints_do_not_make_a_step_slow() -> None:
    def one(number: int, gen: float = 8.0) -> Measured:
        rare = {"testing": 30.0} if number % 5 == 0 else {}
        rare |= {"save_checkpoint": 50.0} if number % 10 == 0 else {}
        return step(number, gen + 2 + sum(rare.values()), gen=gen, update_actor=2.0, **rare)

    assert judged("step>1.5x", map(one, range(1, 60))) == {}
    opened = judged("step>1.5x", [*map(one, range(1, 60)), one(60, gen=40.0)])
    assert opened[60].reason == (
        "step 60 took 42.0 s without save_checkpoint, testing, 4.2 times the median of 10.0 s (step>1.5x)"
    )


def test_a_stage_inside_a_rare_one_is_left_out_once() -> None:
    usual = [step(number, 10.0, gen=10.0) for number in range(1, 12)]
    parts = [("gen", 0, 10), ("testing", 10, 40), ("validate", 11, 39)]
    nested = Measured(12, 0, 40_000_000_000, [(name, a * 10**9, b * 10**9) for name, a, b in parts])
    assert judged("step>1.01x", [*usual, nested]) == {}


def test_a_stage_has_a_median_of_its_own_by_all_its_calls() -> None:
    steps = [step(number, 20.0, gen=10.0, update_actor=7.5) for number in range(30, 41)]
    twice = Measured(41, 0, 20 * 10**9, [("update_actor", 0, 6 * 10**9), ("update_actor", 7 * 10**9, 13 * 10**9)])
    opened = judged("update_actor>1.5x, gen>1.5x", [*steps, twice])
    reason = "update_actor took 12.0 s in step 41, 1.6 times the median of 7.50 s (update_actor>1.5x)"
    assert opened == {41: OpenedWindow(1, {}, reason)}


def test_a_stage_that_is_nothing_beside_its_step_opens_no_window() -> None:
    steps = [step(number, 100.0, adv=0.1) for number in range(1, 12)]
    assert judged("adv>1.5x", [*steps, step(12, 100.0, adv=2.9)]) == {}
    assert judged("adv>1.5x", [*steps, step(12, 100.0, adv=3.2)]) != {}


def test_one_window_for_all_conditions_that_a_step_meets() -> None:
    own = selection.Condition(what="gen", above=2.0, steps=3, overrides={"contents": ("cpu",)})
    judge = Detector([*selection.parse_conditions("step>2x"), own])
    steps = [*(step(number, 10.0, gen=8.0) for number in range(1, 12)), step(12, 50.0, gen=48.0)]
    *_, opened = [judge.compare_step(each, ordinal) for ordinal, each in enumerate(steps, 1)]
    assert opened is not None
    assert (opened.steps, opened.overrides) == (3, {"contents": ("cpu",)})
    assert opened.reason.count(";") == 1
    assert "(step>2x)" in opened.reason
    assert "(gen>2x)" in opened.reason


def test_cool_down_and_the_most_windows() -> None:
    condition = selection.Condition(what="step", above=2.0, steps=2, cool_down=5, at_most=2)
    judge = Detector([condition])
    opened = []
    for number in range(1, 60):
        captured = opened and opened[-1] < number <= opened[-1] + condition.steps
        if not captured and judge.compare_step(step(number, 50.0 if number > 10 and number % 3 == 0 else 1.0), number):
            opened.append(number)
    # Step 12; then not the two captured steps, nor the five steps of the cool-down.
    assert opened == [12, 21]
    assert not judge.any_left


def test_a_stage_that_no_step_has_is_named() -> None:
    judge = Detector(selection.parse_conditions("update_actr>2x, gen>2x, step>2x"))
    said = []
    for number in range(1, 20):
        judge.compare_step(step(number, 10.0, gen=8.0, update_actor=1.0), number)
        said += [text] if (text := judge.unknown_names(step(number, 10.0, gen=8.0, update_actor=1.0), number)) else []
    assert said == [
        "AUTOPROF_WHEN: no step had a stage update_actr in the trainer's process; there are gen, update_actor"
    ]


def ranks(number: int, *seconds: float, stage: str = "update_actor") -> list[RankStats]:
    took = [{"actor": {stage: each}} for each in seconds]
    return [
        RankStats(role="actor", rank=rank, host="node1", step=number, stages=each, ends=each)
        for rank, each in enumerate(took)
    ]


def test_a_rank_is_slow_beside_the_median_of_the_others() -> None:
    judge = Detector(selection.parse_conditions("rank>1.3x"))
    assert judge.compare_ranks(step(40, 20.0), ranks(40, 8.0, 9.0, 8.6, 11.0), 40) is None
    assert judge.compare_ranks(step(40, 20.0), ranks(40, 9.0), 40) is None
    opened = judge.compare_ranks(step(41, 20.0), ranks(41, 8.0, 9.0, 8.6, 12.0), 41)
    assert opened is not None
    assert opened.reason == (
        "actor rank 3 took 12.0 s for update_actor in step 41, 1.4 times the median of the others, 8.60 s (rank>1.3x)"
    )


def test_a_rank_that_waits_for_a_slow_rank_is_not_slow() -> None:
    """Rank 1 is slow in `collect`, so rank 0 waits for it in the collective of `update_actor`."""
    entries = [
        RankStats(role="actor", rank=rank, host="node1", step=9, stages={"actor": stages}, ends={"actor": ends})
        for rank, stages, ends in (
            (0, {"collect": 0.5, "update_actor": 3.2}, {"collect": 0.5, "update_actor": 3.71}),
            (1, {"collect": 3.5, "update_actor": 0.2}, {"collect": 3.5, "update_actor": 3.7}),
        )
    ]
    opened = Detector(selection.parse_conditions("rank>1.3x")).compare_ranks(step(9, 3.8), entries, 9)
    assert opened is not None
    assert opened.reason.startswith("actor rank 1 took 3.50 s for collect in step 9, 7.0 times the median")


def test_a_rank_that_is_slow_in_next_to_nothing_opens_no_window() -> None:
    judge = Detector(selection.parse_conditions("rank>1.3x"))
    assert judge.compare_ranks(step(41, 100.0), ranks(41, 0.1, 0.1, 0.5), 41) is None


def test_a_replica_is_slow_by_what_a_token_takes_it() -> None:
    judge = Detector(selection.parse_conditions("replica>1.3x"))
    busy = [
        ReplicaStats(replica=0, requests=9, seconds=90, tokens=9000),
        ReplicaStats(replica=1, requests=1, seconds=9, tokens=900),
    ]
    assert judge.compare_replicas(step(41, 20.0), busy, 41) is None
    busy[1].seconds = 18
    opened = judge.compare_replicas(step(41, 20.0), busy, 41)
    assert opened is not None
    assert opened.reason == (
        "replica 1 took 20.0 ms a token in step 41, 2.0 times the median of the others, 10.0 ms (replica>1.3x)"
    )


def test_memory_that_grows_opens_a_window_and_a_peak_that_stays_no_other() -> None:
    judge = Detector([selection.Condition(what="memory", above=0.9, cool_down=0)])
    told = RankStats(role="actor", rank=3, host="node1", step=41, memory=0.93, memory_of="device")
    opened = judge.check_memory(41, [told], 41)
    assert opened is not None
    assert opened.reason == "actor rank 3 had reserved up to 93 % of its device's memory by step 41 (memory>0.9)"
    assert judge.check_memory(44, [told], 44) is None
    told.memory = 0.95
    assert judge.check_memory(45, [told], 45) is not None
    assert (
        judge.check_memory(48, [RankStats(role="trainer", rank=0, host="node1", memory=0.8, memory_of=HOST)], 48)
        is None
    )


def test_running_out_of_memory_opens_a_window_once() -> None:
    judge = Detector([selection.Condition(what="oom", cool_down=0, at_most=9)])
    told = ranks(41, 1.0)[0]
    assert judge.check_memory(41, [told], 41) is None
    told.oom = "actor rank 0 ran out of memory in update_actor of step 41"
    opened = judge.check_memory(41, [told], 41)
    assert opened is not None
    assert opened.reason == "actor rank 0 ran out of memory in update_actor of step 41 (oom)"
    assert judge.check_memory(44, [told], 44) is None


@given(
    st.lists(st.floats(0.01, 1e4), min_size=1, max_size=120), st.integers(0, 5), st.integers(1, 4), st.floats(1.01, 5)
)
def test_windows_are_no_more_and_no_closer_than_asked(
    seconds: list[float], cool_down: int, at_most: int, factor: float
) -> None:
    judge = Detector([selection.Condition(what="step", above=factor, cool_down=cool_down, at_most=at_most)])
    opened = [
        number for number, took in enumerate(seconds, 1) if judge.compare_step(step(number, took, gen=took / 2), number)
    ]
    assert len(opened) <= at_most
    assert all(later - earlier > 1 + cool_down for earlier, later in pairwise(opened))


def test_a_condition_on_a_kind_holds_all_its_stages_together() -> None:
    kinds = {"sampler": "generate", "drafts": "generate"}
    usual = [step(number, 10.0, sampler=2.0, drafts=2.0, update=6.0)._replace(kinds=kinds) for number in range(1, 11)]
    slow = step(11, 14.0, sampler=4.0, drafts=4.0, update=6.0)._replace(kinds=kinds)
    assert list(judged("generate>1.5x", [*usual, slow])) == [11]
    assert judged("sampler>3x", [*usual, slow]) == {}


def test_a_word_that_is_neither_a_stage_nor_a_kind_is_named_with_those_that_there_are() -> None:
    judge = Detector(selection.parse_conditions("generat>1.5x,generate>2x"))
    for number in range(1, 11):
        each = step(number, 10.0, sampler=4.0)._replace(kinds={"sampler": "generate"})
        judge.compare_step(each, number)
    said = judge.unknown_names(each, 10)
    assert said == (
        "AUTOPROF_WHEN: no step had a stage generat in the trainer's process; there are sampler, of kinds generate"
    )
