"""Findings of all rules in order, including findings about processes that died and samples that failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

import msgspec

from autoprof.base import units
from autoprof.base.redact import writable
from autoprof.report import hangs, model
from autoprof.report.hang_state import OpenSpans
from autoprof.report.model import Finding, RunFigures, StageShare, StepFigures, StepRow
from autoprof.report.overview import MIN_STEPS, REGULAR, own_seconds, own_stages, typical_steps, usual_stages
from autoprof.report.rules import CAPTURE_RULES, KINDS, ROW_RULES, STEP_RULES, Around, matters
from autoprof.rundir import deaths
from autoprof.rundir.records import ENGINE, Death, RaisedLine
from autoprof.rundir.runs import Run

DEATH = "death"
KINDS.append(DEATH)


def deaths_of_run(run: Run, dead: Sequence[Death], loop: int) -> list[Finding]:
    """Return a list with the finding about processes that died: `dead`, at least one.

    The finding has the step of the first death if the step belongs to the loop with the number `loop`.
    """
    hosts = len(run.info.hosts)
    evidence = [writable(line) for line in deaths.evidence(dead, hosts)]
    text = writable(deaths.sentence(dead[0], hosts))
    step = dead[0].step if dead[0].loop == loop and not dead[0].earlier else None
    return [Finding(kind=DEATH, text=text, evidence=evidence, step=step, file=dead[0].file or None)]


# Kind of the findings about failed samples. The rule `rules.failed_samples`, which counts the failed samples of a
# step in detail, has the same kind.
KIND = "failed_samples"
# Maximum number of findings that `failures_of_run` returns.
_MAX_FAILURES = 8


def failures_of_run(opened: OpenSpans) -> list[Finding]:
    """Return findings about exceptions that ended samples. Equal exceptions give one finding, for the first."""
    first_seen: dict[str, tuple[RaisedLine, str]] = {}
    for state in opened.states:
        for line in [line for line in state.lost if line.span != ENGINE]:
            text = f"{line.span} {line.name} ended with {deaths.exception_words(line.exception)}"
            if text not in first_seen or line.unix_ns < first_seen[text][0].unix_ns:
                first_seen[text] = line, state.file
    earliest_failures = sorted(first_seen.items(), key=lambda each: each[1][0].unix_ns)[:_MAX_FAILURES]
    return [
        Finding(
            kind=KIND,
            text=writable(f"step {line.step}: {text}" if line.step is not None else text),
            evidence=[writable(each) for each in deaths.stack_lines(line.exception.frames)],
            step=line.step,
            file=writable(file),
        )
        for text, (line, file) in earliest_failures
    ]


def with_places(findings: Iterable[Finding], lost: Sequence[Finding]) -> Iterator[Finding]:
    """Yield all findings, and merge the findings about failed samples of the same step.

    If a finding counts the failed samples of a step, the exceptions of this step become part of its text and evidence.

    Args:
        findings: The findings of the rules.
        lost: The findings of `failures_of_run`.
    """
    counted_steps = set()
    for finding in findings:
        if finding.kind == KIND:
            counted_steps.add(finding.step)
            failures = [each.text.partition(": ")[2] for each in lost if each.step == finding.step]
            text = ": ".join([finding.text, *failures[:1]])
            yield msgspec.structs.replace(finding, text=text, evidence=[*failures[1:], *finding.evidence])
        else:
            yield finding
    yield from (each for each in lost if each.step not in counted_steps)


# Maximum number of findings of one kind that are listed. The costliest are listed; their evidence counts the others.
_MAX_OF_KIND = 3
# Smallest share of the step time at which weight sync is a finding.
SYNC_SHARE = 0.15
_SHARE = "weight_sync_share"
KINDS.append(_SHARE)


def findings_of_step(step: StepFigures) -> list[Finding]:
    """Return the findings about one step in detail and its captures, the costliest first."""
    findings = [msgspec.structs.replace(finding, step=step.number) for rule in STEP_RULES for finding in rule(step)]
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for capture in step.captures:
        for rule in CAPTURE_RULES:
            for finding in rule(capture):
                located = msgspec.structs.replace(finding, step=capture.step, file=capture.file)
                by_kind[finding.kind].append(located)
    for of_kind in by_kind.values():
        ordered = costliest_first(of_kind)
        names = [finding.file or "" for finding in ordered[_MAX_OF_KIND:]]
        findings += [_mention_others(finding, "capture", names) for finding in ordered[:_MAX_OF_KIND]]
    return costliest_first(findings)


def findings_of_run(rows: Sequence[StepRow], files: Mapping[int, str]) -> list[Finding]:
    """Return the findings about steps, each of which is compared with the steps around it. The costliest comes first.

    Args:
        rows: The rows of all steps.
        files: Dict from the number of each step to the name of the driver's journal.
    """
    findings = []
    for index, row in enumerate(rows):
        step_and_usual = Around(
            row=row, usual=usual_stages(rows, index), where_done=usual_stages(rows, index, only_steps_with_stage=True)
        )
        for rule in ROW_RULES:
            findings += [
                msgspec.structs.replace(each, step=row.number, file=files.get(row.number))
                for each in rule(step_and_usual)
            ]
    return costliest_first(findings)


# Steps grow if their median in the second half of the run is at least this number of times that in the first half.
GROWTH_RATIO = 1.2
# Smallest number of steps, and smallest share of growing minus shrinking pairs of steps, at which steps grow.
MIN_GROWING, MIN_TREND = 8, 0.7
# Number of groups of steps whose medians are compared in a long run.
_MAX_GROUPS = 100
_GROWTH = "growth"
KINDS.append(_GROWTH)


def growth(rows: Sequence[StepRow]) -> list[Finding]:
    """Return the finding that steps take longer and longer. If they don't, return an empty list.

    Args:
        rows: The rows of the steps that are compared, in order.
    """
    if len(rows) < MIN_GROWING or _trend([own_seconds(row) for row in rows]) < MIN_TREND:
        return []
    halves = rows[: len(rows) // 2], rows[-(len(rows) // 2) :]
    before_s, after_s = (median(own_seconds(row) for row in half) for half in halves)
    if after_s < GROWTH_RATIO * before_s or not matters(after_s - before_s, before_s):
        return []
    names = {name for row in rows for name in own_stages(row)}
    usual_s = [{name: median(own_stages(row).get(name, 0.0) for row in half) for name in names} for half in halves]
    by_excess = sorted(names, key=lambda name: (usual_s[0][name] - usual_s[1][name], name))
    excess = units.seconds(usual_s[1][by_excess[0]] - usual_s[0][by_excess[0]])
    place = "outside of all stages" if by_excess[0] == model.OTHER else f"in {by_excess[0]}"
    return [
        Finding(
            kind=_GROWTH,
            text=f"steps take longer and longer: {units.seconds(before_s)} in the first half of the run, "
            f"{units.seconds(after_s)} in the second: {excess} more {place}",
            evidence=[
                f"{name}: {units.seconds(usual_s[0][name])}, then {units.seconds(usual_s[1][name])}"
                for name in by_excess[:3]
                if usual_s[1][name] > usual_s[0][name]
            ]
            + [f"step {row.number}: {units.seconds(own_seconds(row))}" for row in (rows[0], rows[-1])],
            seconds=after_s - before_s,
        )
    ]


def _trend(values: Sequence[float]) -> float:
    """Return the share of growing minus shrinking pairs of values: 1 if all later values are larger (Kendall's tau)."""
    size = -(-len(values) // _MAX_GROUPS)
    groups = [median(values[first : first + size]) for first in range(0, len(values), size)]
    signs = [(b > a) - (b < a) for place, a in enumerate(groups) for b in groups[place + 1 :]]
    return sum(signs) / len(signs)


def overall(rows: Sequence[StepRow], stages: Sequence[StageShare]) -> list[Finding]:
    """Return the findings about all steps together.

    Args:
        rows: The rows of the steps from which `stages` was computed.
        stages: The time of each stage and its share of the step time.
    """
    sync_stages = [stage for stage in stages if model.meaning(stage.name, stage_kind=stage.kind) == model.SYNC]
    sync_share = sum(stage.share or 0.0 for stage in sync_stages)
    found = growth(rows)
    if not rows or sync_share < SYNC_SHARE:
        return found
    s_per_step = sum(stage.seconds for stage in sync_stages) / len(rows)
    return [
        *found,
        Finding(
            kind=_SHARE,
            text=f"weight sync takes {units.share(sync_share)} of the step time, {units.seconds(s_per_step)} a step",
            evidence=[f"{stage.name}: {units.seconds(stage.median_s)} in the median" for stage in sync_stages],
            seconds=s_per_step,
        ),
    ]


# Kinds of findings that are omitted if another finding of the same step explains them. The other finding must cost at
# least half as much, and have a kind in the tuple. If the tuple is empty, the other finding may have any kind.
_EXPLAINED: dict[str, tuple[str, ...]] = {
    "slow_step": (),
    "sample_tail": ("slow_replica",),
    "communication": ("slow_rank",),
}


def _explains_sync(other: Finding, sync: Finding) -> bool:
    """Return True if a rank that was slow in the weight sync explains a long weight sync."""
    stages = [line.partition(":")[0] for line in sync.evidence]
    is_rank = other.kind == "slow_rank" and other.seconds >= sync.seconds / 2
    return is_rank and any(f" was slow in {stage}:" in other.text for stage in stages)


def unexplained(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in order, without findings that another finding of the same step explains."""
    # Compare only findings of the same step: a long run has thousands of findings.
    findings_of_step: dict[int | None, list[Finding]] = defaultdict(list)
    for finding in findings:
        findings_of_step[finding.step].append(finding)

    # The last steps of a run whose steps grow are slow compared with the steps before.
    growth_s = GROWTH_RATIO * sum(finding.seconds for finding in findings_of_step[None] if finding.kind == _GROWTH)

    def is_explained(finding: Finding) -> bool:
        if finding.kind == "slow_step" and finding.seconds <= growth_s:
            return True
        if finding.kind == "weight_sync":
            return any(_explains_sync(other, finding) for other in findings_of_step[finding.step])
        explaining_kinds = _EXPLAINED.get(finding.kind)
        # The time without a stage is similar in most steps. So it does not explain why one of the steps is slow.
        excluded_kinds = finding.kind, "no_stage"
        return explaining_kinds is not None and any(
            other.seconds >= finding.seconds / 2
            and (other.kind in explaining_kinds if explaining_kinds else other.kind not in excluded_kinds)
            for other in findings_of_step[finding.step]
        )

    return costliest_first(
        finding for step_findings in findings_of_step.values() for finding in step_findings if not is_explained(finding)
    )


def abridged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in order. If many steps have findings of the same kind, keep only the costliest steps.

    Findings about stuck steps are all kept: each stuck step has its own cause, and a run has few of them.
    """
    by_kind: dict[str, dict[int | None, list[Finding]]] = defaultdict(lambda: defaultdict(list))
    kept_findings = []
    for finding in costliest_first(findings):
        if finding.kind == hangs.HANG:
            kept_findings.append(finding)
        else:
            by_kind[finding.kind][finding.step].append(finding)
    for steps in by_kind.values():
        omitted_steps = sorted(step for step in list(steps)[_MAX_OF_KIND:] if step is not None)
        listed_findings = [
            each for step, findings_of_step in steps.items() if step not in omitted_steps for each in findings_of_step
        ]
        kept_findings += [
            _mention_others(each, "step", [str(step) for step in omitted_steps]) for each in listed_findings
        ]
    return costliest_first(kept_findings)


def findings_of_loops(loops: Iterable[RunFigures]) -> list[Finding]:
    """Return the findings of several loops, each with the title of its loop, the costliest first."""
    return costliest_first(
        msgspec.structs.replace(finding, text=f"{loop.title}: {finding.text}")
        for loop in loops
        for finding in loop.findings
    )


def verdict(rows: Sequence[StepRow], has_unread_files: bool) -> str:
    """Return the text for a run without findings. It names the parts of the run that could not be judged.

    Args:
        rows: The rows of all steps.
        has_unread_files: True if some data of the run could not be read.
    """
    if not rows:
        return "No step has ended, so there is nothing to judge."
    failed_steps = [f"step {row.number} ended with {row.error}" for row in rows if row.error]
    text = f"S{model.listed(failed_steps, 3)[1:]}. No other findings" if failed_steps else "No findings"
    text += ", but some data could not be read; see the notes." if has_unread_files else "."
    if len(typical_steps(rows)) <= MIN_STEPS:
        regular_count = sum(row.kind == REGULAR for row in rows)
        text += f" Slow-step detection needs {MIN_STEPS + 1} regular steps; this run has {regular_count}."
    return text


def costliest_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings ordered by their cost, the costliest first."""
    return sorted(findings, key=lambda finding: -finding.seconds)


def _mention_others(finding: Finding, thing: str, names: list[str]) -> Finding:
    if not names:
        return finding
    others_text = f"also in {model.several(len(names), f'other {thing}')}: {model.listed(names, 10)}"
    return msgspec.structs.replace(finding, evidence=[*finding.evidence, others_text])
