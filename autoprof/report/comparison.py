"""Comparison of two steps, or of two runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

import msgspec

from autoprof.base.units import number, seconds
from autoprof.config import kinds
from autoprof.config.kinds import KINDS
from autoprof.report.figures.captures import place_of
from autoprof.report.figures.overview import typical_steps
from autoprof.report.figures.words import OWN
from autoprof.report.findings.findings import in_order
from autoprof.report.model import CaptureFigures, Comparison, ComparisonRow, Finding, RunFigures, StepFigures

# Share of the step from which a stage has a row.
_ROW_SHARE = 0.0005
# Share of the step, or of the capture, from which a change is a finding.
FINDING_SHARE = 0.03
# Ratio from which a stage or an operator is slower.
FINDING_RATIO = 1.1
# Rows of operators.
_MAX_OPERATOR_ROWS = 60
# Operators of each trace that are compared: far more than are shown, because each side lists its own longest ones.
MAX_OPERATORS = 2000
# Name of a stage's time outside of all operators. In traces this is the range with the stage's own name.
REST = "rest of the stage"


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two sides of a comparison. `stages` are seconds a step, `operators` own seconds a capture.

    Attributes:
        recorded: The seconds of each stage in which a profiler recorded.
        kinds: The kinds of stages, by name, and of captures, by place.
        basis: The steps of a run from which the figures were computed.
    """

    label: str
    step_s: float | None
    stages: dict[str, float]
    tokens_per_s: float | None
    samples: dict[str, float]
    operators: dict[tuple[str, str], float]
    step: int | None
    recorded: dict[str, float] = {}
    kinds: dict[str, str] = {}
    basis: str = ""


def side(run: RunFigures, step: int | None, with_run: bool) -> Side:
    """Return one side of a comparison: a step of a run, or the run.

    Args:
        run: The run.
        step: The step, which must be among the run's details; None for the run.
        with_run: True to put the run's id into the label of a step.
    """
    if step is None:
        return _of_run(run)
    details = next(each for each in run.details if each.number == step)
    row = next((row for row in run.steps if row.number == step), None)
    return Side(
        label=f"{run.id} step {step}" if with_run else f"step {step}",
        step_s=details.seconds,
        stages=details.stages,
        tokens_per_s=row.tokens_per_s if row else None,
        samples=_samples(details),
        operators=_operators(details.captures),
        step=step,
        recorded=row.recorded if row else {},
        kinds=_kinds(run, details.captures),
    )


def _of_run(run: RunFigures) -> Side:
    """Return the side of a whole run: medians of its typical steps, and the captures of its steps in detail."""
    rows = typical_steps(run.steps)
    names = {name for row in rows for name in row.stages}
    return Side(
        label=run.id,
        step_s=run.median_s,
        stages={name: _typical([row.stages.get(name, 0.0) for row in rows]) for name in names},
        tokens_per_s=run.tokens_per_s,
        samples={},
        operators=_operators(capture for step in run.details for capture in step.captures),
        step=None,
        kinds=_kinds(run, [capture for step in run.details for capture in step.captures]),
        basis=run.basis,
    )


def _kinds(run: RunFigures, captures: Iterable[CaptureFigures]) -> dict[str, str]:
    by_name = {stage.name: stage.kind for stage in run.stages}
    by_name |= {name: kinds.of(name) for step in run.details for name in step.stages if name not in by_name}
    # A front end does none of its workers' computing, so it has no kind.
    return by_name | {place_of(each): "" if each.part == "frontend" else each.stage_kind for each in captures}


def compare(a: Side, b: Side) -> Comparison:
    """Compare `a` with `b`. The step and its tokens come first, then the other rows, the largest slowdown first."""
    # Without a timeline, only captures are known.
    whole = max(a.step_s or 0.0, b.step_s or 0.0) or max(_captured_s(a), _captured_s(b))
    a, b, both = _by_kind(a, b)
    # Compare only places that both sides captured: a missing capture would look like work that a side does not do.
    places = {place for place, _ in a.operators} & {place for place, _ in b.operators}
    captured = [{key: took for key, took in each.operators.items() if key[0] in places} for each in (a, b)]
    rows = [
        *_rows("stage", _placed(a.stages, both), _placed(b.stages, both), _ROW_SHARE * whole),
        *_rows("samples", _placed(a.samples), _placed(b.samples), 0.0),
        *_rows("operator", captured[0], captured[1], 0.0)[:_MAX_OPERATOR_ROWS],
    ]
    rows.sort(key=lambda row: -row.change)
    head = []
    if a.step_s is not None and b.step_s is not None:
        head.append(_row("step", "", "step", a.step_s, b.step_s))
    if a.tokens_per_s is not None and b.tokens_per_s is not None:
        rate = _row("rate", "", "generated tokens", a.tokens_per_s, b.tokens_per_s)
        head.append(msgspec.structs.replace(rate, unit="1/s", worse=b.tokens_per_s < a.tokens_per_s))
    findings = in_order(_findings(a, b, [*head, *rows], whole))
    if any(each.kind == "slower_stage" for each in findings):
        findings = [each for each in findings if each.kind != "slower_step"]
    basis = [f"{each.label}: {each.basis}" for each in (b, a) if each.basis]
    return Comparison(a=a.label, b=b.label, rows=[*head, *rows], findings=findings, basis=basis)


def _by_kind(a: Side, b: Side) -> tuple[Side, Side, dict[str, str]]:
    """Merge stages and captures by kind if the two sides have different names for them, as two trainers do.

    A kind is merged if each side has names for it that the other lacks.

    Returns:
        The sides, and the stage names of each merged kind, the names of `a` first.
    """
    named = {
        kind: [[name for name in each.stages if each.kinds.get(name) == kind] for each in (a, b)] for kind in KINDS
    }
    whole = ""
    if all(named["update_actor"]) and len([each for each in named["optimizer"] if each]) == 1:
        # One trainer runs the optimizer inside of the update, the other after it.
        whole = "update_actor"
        named[whole] = [
            update + optimizer for update, optimizer in zip(named[whole], named.pop("optimizer"), strict=True)
        ]
    both = {
        kind: names
        for kind, names in named.items()
        if kind == whole or (set(names[0]) - set(names[1]) and set(names[1]) - set(names[0]))
    }
    kind_of = [{name: kind for kind, names in both.items() for name in names[number]} for number in (0, 1)]
    labels = {kind: " | ".join(", ".join(each) for each in names) for kind, names in both.items()}
    return _merged(a, b, kind_of[0]), _merged(b, a, kind_of[1]), labels


def _merged(side: Side, other: Side, kind_of: Mapping[str, str]) -> Side:
    sums: dict[str, dict[str, float]] = {}
    for field in ("stages", "recorded"):
        sums[field] = defaultdict(float)
        for name, took in getattr(side, field).items():
            sums[field][kind_of.get(name, name)] += took
    own_places, other_places = ({place for place, _ in each.operators} for each in (side, other))
    other_kinds = {other.kinds.get(place) for place in other_places - own_places} - {""}
    placed = {place: side.kinds[place] for place in own_places - other_places if side.kinds.get(place) in other_kinds}
    count = Counter(placed.values())
    operators: dict[tuple[str, str], float] = defaultdict(float)
    for (place, name), took in side.operators.items():
        at = placed.get(place, place)
        operators[at, name] += took / max(1, count[at])
    return msgspec.structs.replace(side, operators=dict(operators), **sums)


def _findings(a: Side, b: Side, rows: Sequence[ComparisonRow], whole: float) -> Iterable[Finding]:
    slowed = _slowed(a, b)
    cost = b.stages.get(OWN, 0.0) - a.stages.get(OWN, 0.0) + sum(slowed.values())
    for row in rows:
        if row.kind == "rate":
            share = 1 - max(0.0, cost) / b.step_s if b.step_s else 1.0
            if row.a and row.b is not None and row.b * FINDING_RATIO < row.a * share:
                yield Finding(
                    kind="fewer_tokens",
                    text=f"{b.label} generates {number(row.b)} tokens/s, {a.label} {number(row.a)}",
                    evidence=[],
                    seconds=0.0,
                    step=b.step,
                )
            continue
        own = {"step": cost, "stage": slowed.get(row.name, 0.0)}.get(row.kind, 0.0)
        change = row.change - own
        if (
            row.kind == "samples"
            or (row.kind, row.name) == ("stage", OWN)
            or change <= 0
            or change < FINDING_SHARE * whole
            or (row.b or 0.0) - own < FINDING_RATIO * (row.a or 0.0)
        ):
            continue
        subject = "the step" if row.kind == "step" else f"the {REST}" if row.name == REST else row.name
        # The sentence names `b` first.
        where = " | ".join(reversed(row.where.split(" | ")))
        before = f"{a.label} has none" if row.a is None else f"{seconds(row.a)} in {a.label}"
        yield Finding(
            kind=f"slower_{row.kind}",
            text=f"{subject} takes {seconds(row.b)} in {b.label}, {before}" + (f" ({where})" if where else ""),
            evidence=[f"{seconds(row.change)} more"] + ([f"{row.b / row.a:.2f} times"] if row.a and row.b else []),
            seconds=row.change,
            step=b.step,
        )


def _slowed(a: Side, b: Side) -> dict[str, float]:
    """Return the seconds by which stages took longer in `b`, if they were recorded in `b` only.

    At most the recorded seconds count.
    """
    return {
        name: min(took, more)
        for name, took in b.recorded.items()
        if a.stages.get(name) and not a.recorded.get(name) and (more := b.stages.get(name, 0.0) - a.stages[name]) > 0
    }


def _captured_s(side: Side) -> float:
    """Return the seconds of the longest capture, as the sum of its operators."""
    sums: dict[str, float] = defaultdict(float)
    for (place, _), seconds_of in side.operators.items():
        sums[place] += seconds_of
    return max(sums.values(), default=0.0)


def _rows(
    kind: str, a: Mapping[tuple[str, str], float], b: Mapping[tuple[str, str], float], least: float
) -> list[ComparisonRow]:
    """Return a row for each figure that reaches `least` on a side, the largest change first."""
    rows = []
    for where, name in {**a, **b}:
        old, new = a.get((where, name)), b.get((where, name))
        if max(old or 0.0, new or 0.0) >= least:
            rows.append(_row(kind, where, name, old, new))
    return sorted(rows, key=lambda row: -abs(row.change))


def _row(kind: str, where: str, name: str, old: float | None, new: float | None) -> ComparisonRow:
    change = (new or 0.0) - (old or 0.0)
    return ComparisonRow(kind=kind, name=name, unit="s", a=old, b=new, change=change, worse=change > 0, where=where)


def _operators(captures: Iterable[CaptureFigures]) -> dict[tuple[str, str], float]:
    """Return the own seconds of operators and kernels by place and name, the mean over a place's captures."""
    by_place: dict[str, list[dict[str, float]]] = defaultdict(list)
    for capture in captures:
        sums: dict[str, float] = defaultdict(float)
        own = f"{capture.role}.{capture.stage}"
        for each in (*capture.operators, *capture.kernels):
            sums[REST if each.name == own else each.name] += each.self_us / 1e6
        if sums:
            by_place[place_of(capture)].append(sums)
    return {
        (place, name): fmean(sums.get(name, 0.0) for sums in of_place)
        for place, of_place in by_place.items()
        for name in {name for sums in of_place for name in sums}
    }


def _samples(step: StepFigures) -> dict[str, float]:
    if step.samples is None:
        return {}
    quantiles = step.samples.quantiles_s
    return {
        "median sample": quantiles["0.5"],
        "sample at the 95th percentile": quantiles["0.95"],
        "longest sample": quantiles["1"],
    }


def _typical(values: Sequence[float]) -> float:
    """Return the median. If it is 0, because most steps lack the stage, return the mean."""
    return median(values) or fmean(values)


def _placed(values: Mapping[str, float], where: Mapping[str, str] | None = None) -> dict[tuple[str, str], float]:
    return {((where or {}).get(name, ""), name): value for name, value in values.items()}
