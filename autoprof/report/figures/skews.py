"""Skews of a step: ranks and replicas that were slower than their like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from autoprof.base.intervals import Interval
from autoprof.report.figures.lanes import LaneSpans
from autoprof.report.figures.overview import Recorded
from autoprof.report.figures.reading import Timeline
from autoprof.report.model import Skew, SkewRow

_MOST_ROWS = 64


class _Of(msgspec.Struct, frozen=True):
    """One rank or replica: its lane, the seconds by which it is compared, and its calls in their order.

    Attributes:
        recorded: Whether a profiler recorded in one of the calls.
    """

    lane: LaneSpans
    seconds: float
    calls: list[Interval]
    recorded: bool = False


def skews(lanes: Iterable[LaneSpans], timelines: Sequence[Timeline], recorded: Recorded) -> list[Skew]:
    """Compare the same stage in several ranks, and the requests of several replicas, the most waited for first.

    What was recorded ran slower, so it is held against others that were recorded only.
    """
    lanes = list(lanes)
    # A rank whose process was started anew has two lanes.
    by_stage: dict[tuple[str, str], dict[tuple[int | None, int | None], list[LaneSpans]]] = defaultdict(dict)
    for lane in lanes:
        if lane.rank is not None or lane.replica is not None:
            for stage in lane.stages:
                who = (None if lane.replica is not None else lane.rank, lane.replica)
                by_stage[lane.role, stage].setdefault(who, []).append(lane)
    found = []
    for (role, stage), by_rank in by_stage.items():
        rows = []
        for same in by_rank.values():
            # A profiler that starts inside of a stage is not the rank's fault.
            calls = sorted(
                (start, end - lane.profiling.length(start, end)) for lane in same for start, end in lane.stages[stage]
            )
            took = sum(end - start for start, end in calls) / 1e9
            was = any(_was_recorded(lane, lane.stages[stage], timelines, recorded) for lane in same)
            rows.append(_Of(same[-1], took, calls, was))
        found += _skew(stage, role, rows, timelines)
    served = [lane for lane in lanes if lane.replica is not None and lane.requests_s]
    # A long answer or a slow tool keep one replica busy for longer than others, which is not its fault: what it takes
    # for a token says whether it is slow.
    rows = [
        _Of(lane, took, [_whole(lane)], _was_recorded(lane, [_whole(lane)], timelines, recorded))
        for lane, took in zip(served, _weighed(served), strict=True)
    ]
    found += _skew("generate", "rollout", rows, timelines)
    return sorted(found, key=lambda skew: -skew.waited_s)


def _was_recorded(
    lane: LaneSpans, calls: Iterable[Interval], timelines: Sequence[Timeline], recorded: Recorded
) -> bool:
    times = recorded.of(timelines[lane.file], lane.replica)
    return any(times.within(start, end) for start, end in calls)


def _whole(lane: LaneSpans) -> Interval:
    pieces = lane.busy.pieces() or [(0, 0)]
    return pieces[0][0], pieces[-1][1]


def _weighed(lanes: Sequence[LaneSpans]) -> list[float]:
    """Return the seconds for which each replica is busy with as much to do as the median one has.

    By its typical request: seconds a token where tokens are known, else seconds.
    """
    if not lanes:
        return []
    by_token = all(lane.per_token_s for lane in lanes)
    typical = [median(lane.per_token_s if by_token else lane.requests_s) for lane in lanes]
    usual = median(typical)
    busy = median(lane.busy.length() for lane in lanes) / 1e9
    return [busy * each / usual if usual else busy for each in typical]


def _skew(stage: str, role: str, rows: list[_Of], timelines: Sequence[Timeline]) -> list[Skew]:
    order = sorted(rows, key=lambda row: -row.seconds)
    judged = [row for row in order if not row.recorded] if any(not row.recorded for row in order) else order
    if len(judged) < 2:
        return []
    slowest, *others = judged
    usual = median(row.seconds for row in others)
    return [
        Skew(
            stage=stage,
            role=role,
            of="rank" if slowest.lane.replica is None else "replica",
            count=len(order),
            median_s=usual,
            slowest=slowest.lane.label,
            slowest_s=slowest.seconds,
            waited_s=max(0.0, min(slowest.seconds - usual, _behind(slowest, others))),
            rows=[
                SkewRow(
                    label=row.lane.label,
                    seconds=row.seconds,
                    calls=len(row.lane.requests_s) if stage == "generate" and row.lane.requests_s else len(row.calls),
                    file=timelines[row.lane.file].name,
                    recorded=row.recorded,
                )
                for row in order[:_MOST_ROWS]
            ],
        )
    ]


def _behind(slowest: _Of, others: Sequence[_Of]) -> float:
    """Return the seconds that the others waited: by how much one ended after them, in each call where they match.

    Ranks wait for one another inside of a stage: who came first is in it for the longest time, and nobody waited for
    that one.
    """
    if any(len(row.calls) != len(slowest.calls) for row in others):
        return (slowest.calls[-1][1] - median(row.calls[-1][1] for row in others)) / 1e9
    ends = [median(row.calls[place][1] for row in others) for place in range(len(slowest.calls))]
    return sum(max(0.0, end - usual) for (_, end), usual in zip(slowest.calls, ends, strict=True)) / 1e9
