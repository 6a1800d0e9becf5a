"""Comparison of two steps, or of two runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

import msgspec

from autoprof.base.units import number, seconds
from autoprof.config import values
from autoprof.config.values import KINDS
from autoprof.report.details import place_of
from autoprof.report.findings import costliest_first
from autoprof.report.model import (
    OTHER,
    OWN,
    CaptureFigures,
    Comparison,
    ComparisonRow,
    Finding,
    RunFigures,
    StepFigures,
    several,
)
from autoprof.report.overview import typical_steps
from autoprof.traces.flame import REST

# Smallest share of the step for which a stage gets a row.
_ROW_SHARE = 0.0005
# Smallest change that is a finding, as a share of the step or of the capture.
FINDING_SHARE = 0.03
# Smallest ratio of side `b` to side `a` at which a stage or an operator counts as slower.
FINDING_RATIO = 1.1
# Maximum number of rows for operators.
_MAX_OPERATOR_ROWS = 60
# Maximum number of operators of each trace that are compared. It is much larger than the number of rows, because the
# longest operators of one side may not be among the longest operators of the other side.
MAX_OPERATORS = 2000


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two sides of a comparison: the times of a step or of a run.

    Attributes:
        label: The name of the side in the report.
        step_s: Seconds of the step; for a run, the median of its typical steps. None if unknown.
        stages: Seconds of each stage; for a run, the median of the typical steps that have the stage.
        tokens_per_s: Generated tokens per second. None if unknown.
        samples: Seconds of the median sample, of the sample at the 95th percentile and of the longest sample, by name.
        operators: Own seconds of each operator per capture, by (stage and process of the capture, name).
        step: The number of the step. None for a run.
        recorded: Seconds of each stage in which a profiler recorded.
        own_shares: The stages in which autoprof's own time is over a fifth. For a run, in most of its typical steps.
        kinds: Kinds of stages, by the name of a stage or by the stage and process of a capture.
        steps: For a run, the number of typical steps that have each stage.
        step_count: The number of the typical steps of a run.
        basis: For a run, a text that names the steps from which the times were computed.
    """

    label: str
    step_s: float | None
    stages: dict[str, float]
    tokens_per_s: float | None
    samples: dict[str, float]
    operators: dict[tuple[str, str], float]
    step: int | None
    recorded: dict[str, float] = {}
    own_shares: dict[str, float] = {}
    kinds: dict[str, str] = {}
    steps: dict[str, int] = {}
    step_count: int = 0
    basis: str = ""

    def share_of_steps(self, stage: str) -> float:
        """Return the share of the steps that have a stage."""
        return self.steps.get(stage, 0) / self.step_count if self.step_count else 1.0

    def steps_text(self, stage: str) -> str:
        """Return a text such as `3 of 20 steps`. If all steps of a run have the stage, return an empty text."""
        count = self.steps.get(stage, 0)
        return "" if count == self.step_count else f"{count} of {several(self.step_count, 'step')}"


def side(run: RunFigures, step: int | None, with_run: bool) -> Side:
    """Return one side of a comparison for a step of a run or for the whole run.

    Args:
        run: The data of the run.
        step: The number of the step, which must be among the details of the run. None for the whole run.
        with_run: True to put the run's id into the label of a step.
    """
    if step is None:
        return _side_of_run(run)
    details = next(each for each in run.details if each.number == step)
    row = next((row for row in run.steps if row.number == step), None)
    return Side(
        label=_label(run, step) if with_run else f"step {step}",
        step_s=details.seconds,
        stages=details.stages,
        tokens_per_s=row.tokens_per_s if row else None,
        samples=_samples(details),
        operators=_operators(details.captures),
        step=step,
        recorded=row.recorded if row else {},
        own_shares=details.own_shares,
        kinds=_kinds(run, details.captures),
    )


def _label(run: RunFigures, step: int | None = None) -> str:
    """Return a text that names a run or its step, such as `step 3 of loop 2 of 20261120-101010-aaaaaa`."""
    if run.loop:
        return f"{'' if step is None else f'step {step} of '}{run.title} of {run.id}"
    return run.id if step is None else f"{run.id} step {step}"


def _side_of_run(run: RunFigures) -> Side:
    """Return the side of a whole run.

    The times are medians over the typical steps. The operators come from the captures of the steps in detail.
    """
    rows = typical_steps(run.steps)
    took_s: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, took in row.stages.items():
            took_s[name].append(took)
    own_counts = Counter(name for row in rows for name in row.own_shares)
    return Side(
        label=_label(run),
        step_s=run.median_s,
        stages={name: median(each) for name, each in took_s.items()},
        steps={name: len(each) for name, each in took_s.items()},
        step_count=len(rows),
        tokens_per_s=run.tokens_per_s,
        samples={},
        own_shares={name: 1.0 for name, count in own_counts.items() if 2 * count > len(rows)},
        operators=_operators(capture for step in run.details for capture in step.captures),
        step=None,
        kinds=_kinds(run, [capture for step in run.details for capture in step.captures]),
        basis=run.basis,
    )


def _kinds(run: RunFigures, captures: Iterable[CaptureFigures]) -> dict[str, str]:
    by_name = {stage.name: stage.kind for stage in run.stages}
    by_name |= {name: values.kind_of(name) for step in run.details for name in step.stages if name not in by_name}
    # The front end of an engine does not do the computing of its workers. So the captures of a front end have no kind.
    return by_name | {place_of(each): "" if each.part == "frontend" else each.stage_kind for each in captures}


def compare(a: Side, b: Side) -> Comparison:
    """Compare side `a` with side `b`.

    The rows for the step and its tokens come first. The other rows follow, the largest slowdown first.
    """
    # Runs without a timeline have only captures.
    whole_s = max(a.step_s or 0.0, b.step_s or 0.0) or max(_captured_s(a), _captured_s(b))
    a, b, merged_names = _merge_stages_of_kinds(a, b)
    where = _where_of_stages(a, b, merged_names)
    # Compare only stages and processes that both sides captured. Otherwise a missing capture would look like work that
    # one side does not do.
    places = {place for place, _ in a.operators} & {place for place, _ in b.operators}
    operators_of_both = [{key: took for key, took in each.operators.items() if key[0] in places} for each in (a, b)]
    rows = [
        *_rows(
            "stage",
            _values_by_place(a.stages, where),
            _values_by_place(b.stages, where),
            _ROW_SHARE * whole_s,
        ),
        *_rows("samples", _values_by_place(a.samples), _values_by_place(b.samples), 0.0),
        *_rows("operator", operators_of_both[0], operators_of_both[1], 0.0)[:_MAX_OPERATOR_ROWS],
    ]
    rows.sort(key=lambda row: -row.change)
    first_rows = []
    if a.step_s is not None and b.step_s is not None:
        first_rows.append(_row("step", "", "step", a.step_s, b.step_s))
    if a.tokens_per_s is not None and b.tokens_per_s is not None:
        rate = _row("rate", "", "generated tokens", a.tokens_per_s, b.tokens_per_s)
        first_rows.append(msgspec.structs.replace(rate, unit="1/s", worse=b.tokens_per_s < a.tokens_per_s))
    findings = costliest_first(_findings(a, b, [*first_rows, *rows], whole_s))
    if any(each.kind in ("slower_stage", "no_stage") for each in findings):
        findings = [each for each in findings if each.kind != "slower_step"]
    basis = [f"{each.label}: {each.basis}" for each in (b, a) if each.basis]
    return Comparison(a=a.label, b=b.label, rows=[*first_rows, *rows], findings=findings, basis=basis)


def _merge_stages_of_kinds(a: Side, b: Side) -> tuple[Side, Side, dict[str, str]]:
    """Merge the stages of one kind, and their captures, if the sides have different names for them.

    Two trainers have different names for the same kind of stage. A kind is merged if each side has a name for the kind
    that the other side lacks.

    Returns:
        The two sides with merged stages and captures, and a dict from each merged kind to the names of its stages as a
        text. The names of side `a` come first.
    """
    names_by_kind = {
        kind: [[name for name in each.stages if each.kinds.get(name) == kind] for each in (a, b)] for kind in KINDS
    }
    extended_kind = ""
    if all(names_by_kind["update_actor"]) and len([each for each in names_by_kind["optimizer"] if each]) == 1:
        # One trainer runs the optimizer within the stage `update_actor`, the other trainer after this stage.
        extended_kind = "update_actor"
        names_by_kind[extended_kind] = [
            update + optimizer
            for update, optimizer in zip(names_by_kind[extended_kind], names_by_kind.pop("optimizer"), strict=True)
        ]
    merged_names = {
        kind: names
        for kind, names in names_by_kind.items()
        if kind == extended_kind or (set(names[0]) - set(names[1]) and set(names[1]) - set(names[0]))
    }
    kind_of = [{name: kind for kind, names in merged_names.items() for name in names[number]} for number in (0, 1)]
    labels = {kind: " | ".join(", ".join(each) for each in names) for kind, names in merged_names.items()}
    return _with_stages_of_kinds(a, b, kind_of[0]), _with_stages_of_kinds(b, a, kind_of[1]), labels


def _where_of_stages(a: Side, b: Side, merged_names: Mapping[str, str]) -> dict[str, str]:
    """Return the text of `ComparisonRow.where` for each stage: merged names, or steps if some steps lack the stage."""
    where = dict(merged_names)
    for name in a.stages | b.stages:
        texts = [each.steps_text(name) or "all steps" for each in (a, b)]
        if name not in where and any(0 < each.steps.get(name, 0) < each.step_count for each in (a, b)):
            where[name] = " | ".join(dict.fromkeys(texts))
    return where


def _with_stages_of_kinds(side: Side, other: Side, kind_of: Mapping[str, str]) -> Side:
    """Return a side whose stages are renamed by `kind_of`. Stages that get the same name are added up."""
    sums: dict[str, dict[str, float]] = {}
    for field in ("stages", "recorded", "own_shares"):
        sums[field] = defaultdict(float)
        for name, took in getattr(side, field).items():
            sums[field][kind_of.get(name, name)] += took
    steps: dict[str, int] = defaultdict(int)
    for name, count in side.steps.items():
        steps[kind_of.get(name, name)] = max(steps[kind_of.get(name, name)], count)
    own_places, other_places = ({place for place, _ in each.operators} for each in (side, other))
    other_kinds = {other.kinds.get(place) for place in other_places - own_places} - {""}
    kind_of_place = {
        place: side.kinds[place] for place in own_places - other_places if side.kinds.get(place) in other_kinds
    }
    places_of_kind = Counter(kind_of_place.values())
    operators: dict[tuple[str, str], float] = defaultdict(float)
    for (place, name), took in side.operators.items():
        merged_place = kind_of_place.get(place, place)
        operators[merged_place, name] += took / max(1, places_of_kind[merged_place])
    return msgspec.structs.replace(side, operators=dict(operators), steps=dict(steps), **sums)


def _findings(a: Side, b: Side, rows: Sequence[ComparisonRow], whole_s: float) -> Iterable[Finding]:
    slowed_s = _delays_by_recording(a, b)
    own_cost_s = b.stages.get(OWN, 0.0) - a.stages.get(OWN, 0.0) + sum(slowed_s.values())
    for row in rows:
        if row.kind == "rate":
            share = 1 - max(0.0, own_cost_s) / b.step_s if b.step_s else 1.0
            if row.a and row.b is not None and row.b * FINDING_RATIO < row.a * share:
                yield Finding(
                    kind="fewer_tokens",
                    text=f"{b.label} generates {number(row.b)} tokens/s, {a.label} {number(row.a)}",
                    evidence=[],
                    step=b.step,
                )
            continue
        row_cost_s = {"step": own_cost_s, "stage": slowed_s.get(row.name, 0.0)}.get(row.kind, 0.0)
        change = row.change - row_cost_s
        # A stage that few steps have costs little.
        share_of_steps = b.share_of_steps(row.name) if row.kind == "stage" else 1.0
        if (
            row.kind == "samples"
            or (row.kind, row.name) == ("stage", OWN)
            or change <= 0
            or change * share_of_steps < FINDING_SHARE * whole_s
            or (row.b or 0.0) - row_cost_s < FINDING_RATIO * (row.a or 0.0)
        ):
            continue
        subject = "the step" if row.kind == "step" else f"the {REST}" if row.name == REST else row.name
        outside = (row.kind, row.name) == ("stage", OTHER)
        subject = "work outside of all stages" if outside else subject
        # The sentence names side `b` first, but `row.where` names side `a` first.
        where = " | ".join(reversed(row.where.split(" | ")))
        a_text = f"{a.label} has none" if row.a is None else f"{seconds(row.a)} in {a.label}"
        yield Finding(
            kind="no_stage" if outside else f"slower_{row.kind}",
            text=f"{subject} takes {seconds(row.b)} in {b.label}, {a_text}" + (f" ({where})" if where else ""),
            evidence=[f"{seconds(row.change)} more"] + ([f"{row.b / row.a:.2f} times"] if row.a and row.b else []),
            seconds=row.change * share_of_steps,
            step=b.step,
        )


def _delays_by_recording(a: Side, b: Side) -> dict[str, float]:
    """Return the seconds by which each stage took longer on side `b`, for stages that were recorded on side `b` only.

    At most the recorded seconds of a stage count, because recording may have caused only these. If autoprof's own time
    is over a fifth of the stage on one of the sides, all seconds count.
    """
    limits_s = {name: took for name, took in b.recorded.items() if a.stages.get(name) and not a.recorded.get(name)}
    limits_s |= dict.fromkeys([*a.own_shares, *b.own_shares], float("inf"))
    more_s = {name: b.stages.get(name, 0.0) - a.stages.get(name, 0.0) for name in limits_s}
    return {name: min(limit, more_s[name]) for name, limit in limits_s.items() if more_s[name] > 0}


def _captured_s(side: Side) -> float:
    """Return the seconds of the longest capture. They are computed as the sum of the capture's operators."""
    sums: dict[str, float] = defaultdict(float)
    for (place, _), seconds_of in side.operators.items():
        sums[place] += seconds_of
    return max(sums.values(), default=0.0)


def _rows(
    kind: str, a: Mapping[tuple[str, str], float], b: Mapping[tuple[str, str], float], least_s: float
) -> list[ComparisonRow]:
    """Return a row for each number that is at least `least_s` on one of the sides, the largest change first."""
    rows = []
    for where, name in {**a, **b}:
        old_value, new_value = a.get((where, name)), b.get((where, name))
        if max(old_value or 0.0, new_value or 0.0) >= least_s:
            rows.append(_row(kind, where, name, old_value, new_value))
    return sorted(rows, key=lambda row: -abs(row.change))


def _row(kind: str, where: str, name: str, old_value: float | None, new_value: float | None) -> ComparisonRow:
    change = (new_value or 0.0) - (old_value or 0.0)
    return ComparisonRow(
        kind=kind, name=name, unit="s", a=old_value, b=new_value, change=change, worse=change > 0, where=where
    )


def _operators(captures: Iterable[CaptureFigures]) -> dict[tuple[str, str], float]:
    """Return the own seconds of operators and kernels, by (stage and process of the captures, name).

    If the same process captured the same stage several times, the seconds are the mean over these captures.
    """
    sums_by_stage: dict[str, list[dict[str, float]]] = defaultdict(list)
    for capture in captures:
        sums: dict[str, float] = defaultdict(float)
        for each in (*capture.operators, *capture.kernels):
            if not each.aside:
                sums[each.name] += each.self_us / 1e6
        if sums:
            sums_by_stage[place_of(capture)].append(sums)
    return {
        (place, name): fmean(sums.get(name, 0.0) for sums in of_place)
        for place, of_place in sums_by_stage.items()
        for name in dict.fromkeys(name for sums in of_place for name in sums)
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


def _values_by_place(
    values: Mapping[str, float], where: Mapping[str, str] | None = None
) -> dict[tuple[str, str], float]:
    return {((where or {}).get(name, ""), name): value for name, value in values.items()}
