"""Seconds of steps by stage, each second counted once; and the shares of the stages in all steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from autoprof.base.intervals import Interval, Union, exclusive
from autoprof.config import kinds
from autoprof.report.figures.index import StepSpan
from autoprof.report.figures.step_kinds import typical
from autoprof.report.figures.words import OTHER, OWN
from autoprof.report.model.run import StageGap, StageShare, StepRow

# A step of which no stage covers more than this share has a finding.
NO_STAGE_SHARE = 0.2


def by_stage(
    span: StepSpan, timers: Iterable[tuple[str, int, int, int]], stages: dict[str, Union], profiling: Union
) -> dict[str, float]:
    """Sum the seconds of a step by stage, each second counted once: the most first, then `OTHER`, then `OWN`.

    Autoprof's own time in any process counts first. The driver's timers share the rest of the time. Time outside of all
    timers counts for the stages of all processes.
    """
    start, end = span.start_ns, span.end_ns
    sums = _owners(span, timers, stages, profiling, [(start, end)])
    own = profiling.length(start, end)
    # A timer may have that name, too.
    rest = max(0, end - start - own - sum(sums.values())) + sums.pop(OTHER, 0)
    found = {name: length / 1e9 for name, length in sorted(sums.items(), key=lambda item: -item[1])}
    found[OTHER] = rest / 1e9
    if own:
        found[OWN] = own / 1e9
    return found


def without_own(stages: Mapping[str, float]) -> dict[str, float]:
    """Return the stages of a step without autoprof's own time: their sum is the 100 %."""
    return {name: took for name, took in stages.items() if name != OWN}


def no_stage(
    span: StepSpan,
    parts: Mapping[str, float],
    timers: Iterable[tuple[str, int, int, int]],
    stages: Mapping[str, Union],
    autoprof: Iterable[Union],
) -> StageGap | None:
    """Return the time of a step in which no stage ran, if that is over a fifth of the step.

    Args:
        span: The step.
        parts: Its seconds by stage.
        timers: The timers of all processes.
        stages: The stages of all processes.
        autoprof: Autoprof's own time.
    """
    start, end = span.start_ns, span.end_ns
    whole = sum(without_own(parts).values())
    if parts[OTHER] <= NO_STAGE_SHARE * whole:
        return None
    named = [(name, low, high) for name, low, high, file in timers if file == span.file]
    named += [(name, low, high) for name, union in stages.items() for low, high in union.within(start, end)]
    own = [piece for union in autoprof for piece in union.pieces()]
    free = Union([*own, *((low, high) for _, low, high in named)]).without(start, end)
    took = sum(high - low for low, high in free) / 1e9
    if took <= NO_STAGE_SHARE * whole:
        return None
    low, high = max(free, key=lambda piece: piece[1] - piece[0])
    return StageGap(
        seconds=took,
        share=took / whole,
        start_s=(low - start) / 1e9,
        end_s=(high - start) / 1e9,
        after=max(((until, name) for name, _, until in named if start < until <= low), default=(0, ""))[1],
        before=min(((since, name) for name, since, _ in named if high <= since < end), default=(0, ""))[1],
    )


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
    """Return each stage over the typical steps, the most seconds first; then `OTHER`, then `OWN` over all steps."""
    told = {name: kind for row in rows for name, kind in row.kinds.items()}
    stages = [without_own(row.stages) for row in typical(rows)]
    found = _shares(stages, sum(sum(each.values()) for each in stages), lambda name: told.get(name) or kinds.of(name))
    own = [{OWN: row.stages[OWN]} for row in rows if OWN in row.stages]
    return [*sorted(found, key=lambda share: (share.name == OTHER, -share.seconds)), *_shares(own, None, lambda _: "")]


def shares_of_kinds(rows: Sequence[StepRow], stages: Iterable[StageShare]) -> list[StageShare]:
    """Return each kind of stage over the typical steps, the most seconds first, by the kinds of the stages."""
    of_stage = {stage.name: stage.kind for stage in stages if stage.kind}
    sums: list[dict[str, float]] = []
    whole = 0.0
    for row in typical(rows):
        whole += sum(without_own(row.stages).values())
        sums.append(defaultdict(float))
        for name, seconds in row.stages.items():
            if name in of_stage:
                sums[-1][of_stage[name]] += seconds
    return sorted(_shares(sums, whole, str), key=lambda share: -share.seconds)


def _shares(parts: Iterable[Mapping[str, float]], whole: float | None, kind: Callable[[str], str]) -> list[StageShare]:
    of_part: dict[str, list[float]] = defaultdict(list)
    for each in parts:
        for name, seconds in each.items():
            of_part[name].append(seconds)
    return [
        StageShare(
            name=name,
            seconds=sum(values),
            share=None if whole is None else sum(values) / whole if whole else 0.0,
            steps=sum(value > 0 for value in values),
            median_s=median(values),
            kind=kind(name),
        )
        for name, values in of_part.items()
    ]
