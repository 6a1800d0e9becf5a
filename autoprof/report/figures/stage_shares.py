"""Seconds of steps by stage, each second counted once; and the shares of the stages in all steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from autoprof.base.intervals import Interval, Union, exclusive
from autoprof.config import kinds
from autoprof.report.figures.index import StepSpan
from autoprof.report.figures.words import OTHER, PROFILING
from autoprof.report.model.run import StageShare, StepRow


def by_stage(
    span: StepSpan, timers: Iterable[tuple[str, int, int, int]], stages: dict[str, Union], profiling: Union
) -> dict[str, float]:
    """Sum the seconds of a step by stage, each second counted once, the most first and uncovered time last.

    What autoprof itself took comes off first, whichever process waited for it. The driver's own timers have their time
    of what is left; what they leave has the stages of all processes.
    """
    start, end = span.start_ns, span.end_ns
    sums = _owners(span, timers, stages, profiling, [(start, end)])
    if cost := profiling.length(start, end):
        sums[PROFILING] = sums.get(PROFILING, 0) + cost
    # A timer may have that name, too.
    rest = max(0, end - start - sum(sums.values())) + sums.pop(OTHER, 0)
    found = {name: length / 1e9 for name, length in sorted(sums.items(), key=lambda item: -item[1])}
    found[OTHER] = rest / 1e9
    return found


def recorded_stages(
    span: StepSpan,
    timers: Iterable[tuple[str, int, int, int]],
    stages: dict[str, Union],
    profiling: Union,
    recorded: Sequence[Interval],
) -> dict[str, float]:
    """Sum the seconds of each stage of a step in which a profiler recorded, by the rules of `by_stage`."""
    if not recorded:
        return {}
    sums = _owners(span, timers, stages, profiling, recorded)
    sums[OTHER] = (
        sums.get(OTHER, 0)
        + sum(high - low - profiling.length(low, high) for low, high in recorded)
        - sum(sums.values())
    )
    return {name: length / 1e9 for name, length in sums.items() if length > 0}


def _owners(
    span: StepSpan,
    timers: Iterable[tuple[str, int, int, int]],
    stages: dict[str, Union],
    profiling: Union,
    within: Sequence[Interval],
) -> dict[str, int]:
    """Return how long each stage owns the time in some parts of a step, what autoprof took left out."""
    own = [(name, low, high) for name, low, high, file in timers if file == span.file]
    sums: dict[str, int] = {}
    for start, end in within:
        pieces = [(name, low, high) for name, union in stages.items() for low, high in union.within(start, end)]
        covered = Union([*((low, high) for _, low, high in own), *profiling.pieces()])
        free = profiling.without(start, end) if profiling.within(start, end) else [(start, end)]
        for spans, parts in ((own, free), (pieces, covered.without(start, end))):
            for low, high in parts:
                for name, length in exclusive(spans, low, high).items():
                    sums[name] = sums.get(name, 0) + length
    return sums


def shares(rows: Sequence[StepRow]) -> list[StageShare]:
    """Return each stage over all steps, the most seconds first, `other` last."""
    told = {name: kind for row in rows for name, kind in row.kinds.items()}
    found = _shares(rows, [row.stages for row in rows], lambda name: told.get(name) or kinds.of(name))
    return sorted(found, key=lambda share: (share.name == OTHER, -share.seconds))


def shares_of_kinds(rows: Sequence[StepRow], stages: Iterable[StageShare]) -> list[StageShare]:
    """Return each kind of stage over all steps, the most seconds first, by the kinds of the stages."""
    of_stage = {stage.name: stage.kind for stage in stages if stage.kind}
    sums: list[dict[str, float]] = []
    for row in rows:
        sums.append(defaultdict(float))
        for name, seconds in row.stages.items():
            if name in of_stage:
                sums[-1][of_stage[name]] += seconds
    return sorted(_shares(rows, sums, str), key=lambda share: -share.seconds)


def _shares(
    rows: Sequence[StepRow], parts: Iterable[Mapping[str, float]], kind: Callable[[str], str]
) -> list[StageShare]:
    whole = sum(row.seconds for row in rows)
    of_part: dict[str, list[float]] = defaultdict(list)
    for each in parts:
        for name, seconds in each.items():
            of_part[name].append(seconds)
    return [
        StageShare(
            name=name,
            seconds=sum(values),
            share=sum(values) / whole if whole else 0.0,
            steps=sum(value > 0 for value in values),
            median_s=median(values),
            kind=kind(name),
        )
        for name, values in of_part.items()
    ]
