"""Skews of a step: ranks and replicas that were slower than the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from autoprof.base.intervals import Interval
from autoprof.report.figures.lanes import LaneSpans
from autoprof.report.figures.overview import Recorded
from autoprof.report.model import Skew, SkewRow
from autoprof.rundir.journal import Journal

_MAX_ROWS = 64


class _Member(msgspec.Struct, frozen=True):
    """One rank or replica.

    Attributes:
        lane: Its lane.
        seconds: The seconds by which it is compared.
        calls: Its calls in their order.
        recorded: True if a profiler recorded during one of the calls.
    """

    lane: LaneSpans
    seconds: float
    calls: list[Interval]
    recorded: bool = False


def skews(lanes: Iterable[LaneSpans], journals: Sequence[Journal], recorded: Recorded) -> list[Skew]:
    """Compare the same stage in several ranks, and the requests of several replicas. The longest wait comes first.

    Recording slows a rank down, so recorded ranks are not judged if others were not recorded.
    """
    lanes = list(lanes)
    # A rank whose process was restarted has two lanes.
    by_stage: dict[tuple[str, str], dict[tuple[int | None, int | None], list[LaneSpans]]] = defaultdict(dict)
    for lane in lanes:
        if lane.rank is not None or lane.replica is not None:
            for stage in lane.stages:
                member = (None if lane.replica is not None else lane.rank, lane.replica)
                by_stage[lane.role, stage].setdefault(member, []).append(lane)
    found = []
    for (role, stage), by_rank in by_stage.items():
        rows = []
        for of_rank in by_rank.values():
            # Subtract the start of a profiler within the stage, which is not the rank's fault.
            calls = sorted(
                (start, end - lane.profiling.length(start, end))
                for lane in of_rank
                for start, end in lane.stages[stage]
            )
            took = sum(end - start for start, end in calls) / 1e9
            was = any(_was_recorded(lane, lane.stages[stage], journals, recorded) for lane in of_rank)
            rows.append(_Member(of_rank[-1], took, calls, was))
        found += _skew(stage, role, rows, journals)
    served = [lane for lane in lanes if lane.replica is not None and lane.requests_s]
    # A long answer or a slow tool keeps a replica busy longer, which is not its fault. Compare the time per token.
    rows = [
        _Member(lane, took, [_whole(lane)], _was_recorded(lane, [_whole(lane)], journals, recorded))
        for lane, took in zip(served, _weighed(served), strict=True)
    ]
    found += _skew("generate", "rollout", rows, journals)
    return sorted(found, key=lambda skew: -skew.waited_s)


def _was_recorded(lane: LaneSpans, calls: Iterable[Interval], journals: Sequence[Journal], recorded: Recorded) -> bool:
    times = recorded.of(journals[lane.file], lane.replica)
    return any(times.within(start, end) for start, end in calls)


def _whole(lane: LaneSpans) -> Interval:
    pieces = lane.busy.pieces() or [(0, 0)]
    return pieces[0][0], pieces[-1][1]


def _weighed(lanes: Sequence[LaneSpans]) -> list[float]:
    """Return the seconds that each replica would need for the work of the median replica.

    They are computed from its median request: seconds per token if tokens are known, else seconds.
    """
    if not lanes:
        return []
    by_token = all(lane.per_token_s for lane in lanes)
    typical = [median(lane.per_token_s if by_token else lane.requests_s) for lane in lanes]
    usual = median(typical)
    busy = median(lane.busy.length() for lane in lanes) / 1e9
    return [busy * each / usual if usual else busy for each in typical]


def _skew(stage: str, role: str, rows: list[_Member], journals: Sequence[Journal]) -> list[Skew]:
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
                    file=journals[row.lane.file].name,
                    recorded=row.recorded,
                )
                for row in order[:_MAX_ROWS]
            ],
        )
    ]


def _behind(slowest: _Member, others: Sequence[_Member]) -> float:
    """Return the seconds that the others waited: the delay of the slowest one's ends after the median end.

    The delays of all calls are added if all ranks have the same number of calls; else the last ends are compared. Ends
    count because ranks wait for each other within a stage: the first to enter takes longest, and no rank waits for it.
    """
    if any(len(row.calls) != len(slowest.calls) for row in others):
        return (slowest.calls[-1][1] - median(row.calls[-1][1] for row in others)) / 1e9
    ends = [median(row.calls[place][1] for row in others) for place in range(len(slowest.calls))]
    return sum(max(0.0, end - usual) for (_, end), usual in zip(slowest.calls, ends, strict=True)) / 1e9
