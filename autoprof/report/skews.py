"""Who of several ranks or replicas was slower than its like."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from autoprof.report.figures import Skew, SkewRow
from autoprof.report.lanes import LaneSpans
from autoprof.report.reading import Timeline

_MOST_ROWS = 64


def skews(lanes: Iterable[LaneSpans], timelines: Sequence[Timeline]) -> list[Skew]:
    """The same stage in several ranks, and the requests of several replicas, the most waited for first."""
    lanes = list(lanes)
    by_rank: dict[tuple[str, str], list[tuple[LaneSpans, Sequence[tuple[int, int]]]]] = defaultdict(list)
    for lane in lanes:
        if lane.rank is not None or lane.replica is not None:
            for stage, calls in lane.stages.items():
                by_rank[lane.role, stage].append((lane, calls))
    found = []
    for (role, stage), of_stage in by_rank.items():
        rows = [
            (lane, sum(end - start for start, end in calls) / 1e9, len(calls), calls[-1][1]) for lane, calls in of_stage
        ]
        found += _skew(stage, role, rows, timelines)
    served = [lane for lane in lanes if lane.replica is not None and lane.requests_s]
    # A long answer or a slow tool keep one replica busy for longer than others, which is not its fault: what it takes
    # for a token says whether it is slow.
    rows = [(lane, _weighed(lane, served), len(lane.requests_s), lane.busy.pieces()[-1][1]) for lane in served]
    found += _skew("generate", "rollout", rows, timelines)
    return sorted(found, key=lambda skew: -skew.waited_s)


def _weighed(lane: LaneSpans, lanes: Sequence[LaneSpans]) -> float:
    """The seconds for which a replica was busy, or would have been with as much to do as the median one had.

    Both by its typical request: seconds a token where tokens are known, else seconds.
    """
    if all(each.per_token_s for each in lanes):
        typical = {id(each): median(each.per_token_s) for each in lanes}
    else:
        typical = {id(each): median(each.requests_s) for each in lanes}
    usual = median(typical.values())
    busy = median(each.busy.length() for each in lanes) / 1e9
    return busy * typical[id(lane)] / usual if usual else busy


def _skew(
    stage: str, role: str, rows: list[tuple[LaneSpans, float, int, int]], timelines: Sequence[Timeline]
) -> list[Skew]:
    if len({lane.label for lane, *_ in rows}) < 2:
        return []
    order = sorted(rows, key=lambda row: -row[1])
    slowest = order[0]
    usual = median(seconds for _, seconds, _, _ in order[1:])
    # Ranks wait for one another inside of a stage: who came first is in it for the longest time, and nobody waited for
    # that one. So it also counts by how much it ended after the others.
    behind = (slowest[3] - median(end for *_, end in order[1:])) / 1e9
    return [
        Skew(
            stage=stage,
            role=role,
            of="rank" if slowest[0].replica is None else "replica",
            count=len(order),
            median_s=usual,
            slowest=slowest[0].label,
            slowest_s=slowest[1],
            waited_s=max(0.0, min(slowest[1] - usual, behind)),
            rows=[
                SkewRow(label=lane.label, seconds=seconds, calls=calls, file=timelines[lane.file].name)
                for lane, seconds, calls, _ in order[:_MOST_ROWS]
            ],
        )
    ]
