"""Findings of all rules, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from autoprof.base import units
from autoprof.report.figures import words
from autoprof.report.figures.slow_steps import FEWEST, usual_stages
from autoprof.report.figures.step_kinds import REGULAR, typical
from autoprof.report.findings import capture_rules, hang_rules, skew_rules, step_rules
from autoprof.report.findings.registry import CAPTURE_RULES, KINDS, ROW_RULES, STEP_RULES, Around
from autoprof.report.model.run import Finding, StageShare, StepFigures, StepRow

__all__ = ["KINDS", "abridged", "in_order", "of_run", "of_step", "overall", "settled", "verdict"]

# Of what many steps or captures have, so many are told, the costliest.
_MOST_ALIKE = 3
# Weight sync takes much from such a share of all steps on.
SYNC_SHARE = 0.15
_SHARE = "weight_sync_share"
KINDS.append(_SHARE)
# Rules register themselves when they are imported.
_RULES = (capture_rules, step_rules, skew_rules)


def of_step(step: StepFigures) -> list[Finding]:
    """Return the findings of a step and its captures by themselves, the costliest first."""
    found = [finding for rule in STEP_RULES for finding in rule(step)]
    alike: dict[str, list[Finding]] = defaultdict(list)
    for capture in step.captures:
        for rule in CAPTURE_RULES:
            for finding in rule(capture):
                alike[finding.kind].append(finding)
    for same in alike.values():
        found += _costliest(same, "capture", [finding.file or "" for finding in in_order(same)])
    return in_order(found)


def of_run(rows: Sequence[StepRow], files: Mapping[int, str]) -> list[Finding]:
    """Return the findings of steps beside one another; `files` has the driver's timeline of each step."""
    found = []
    for place, row in enumerate(rows):
        around = Around(row=row, usual=usual_stages(rows, place), where_done=usual_stages(rows, place, where_done=True))
        for rule in ROW_RULES:
            found += [msgspec.structs.replace(each, file=files.get(row.number)) for each in rule(around)]
    return in_order(found)


def overall(rows: Sequence[StepRow], stages: Sequence[StageShare]) -> list[Finding]:
    """Return the findings that all steps have in common. `rows` are those that the shares of the stages are of."""
    shares = [stage for stage in stages if words.meaning(stage.name, stage_kind=stage.kind) == words.SYNC]
    share = sum(stage.share or 0.0 for stage in shares)
    if not rows or share < SYNC_SHARE:
        return []
    each = sum(stage.seconds for stage in shares) / len(rows)
    return [
        Finding(
            kind=_SHARE,
            text=f"weight sync takes {units.share(share)} of the step time, {units.seconds(each)} a step",
            evidence=[f"{stage.name}: {units.seconds(stage.median_s)} in the median" for stage in shares],
            seconds=each,
        )
    ]


# What need not be told where something else says why: kinds, and of what kind that must be (empty for any). It must
# cost half as much at least.
_EXPLAINED: dict[str, tuple[str, ...]] = {
    "slow_step": (),
    "sample_tail": ("slow_replica",),
    "communication": ("slow_rank",),
}


# Kinds of findings that are all told.
_EACH = (hang_rules.HANG,)


def settled(findings: Iterable[Finding]) -> list[Finding]:
    """Return all findings in order, without those that others of the same step explain."""
    # A long run has thousands.
    of_step: dict[int | None, list[Finding]] = defaultdict(list)
    for finding in findings:
        of_step[finding.step].append(finding)

    def explained(finding: Finding) -> bool:
        by = _EXPLAINED.get(finding.kind)
        # Time without a stage is the same in most steps.
        own = finding.kind, "no_stage"
        return by is not None and any(
            other.seconds >= finding.seconds / 2 and (other.kind in by if by else other.kind not in own)
            for other in of_step[finding.step]
        )

    return in_order(finding for same in of_step.values() for finding in same if not explained(finding))


def abridged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in order; of those that many steps have alike, those of the costliest steps.

    Steps that stood have a cause of their own each, and they are few.
    """
    alike: dict[str, dict[int | None, list[Finding]]] = defaultdict(lambda: defaultdict(list))
    kept = []
    for finding in in_order(findings):
        if finding.kind in _EACH:
            kept.append(finding)
        else:
            alike[finding.kind][finding.step].append(finding)
    for steps in alike.values():
        rest = sorted(step for step in list(steps)[_MOST_ALIKE:] if step is not None)
        told = [each for step, same in steps.items() if step not in rest for each in same]
        kept += [_with_others(each, "step", [str(step) for step in rest]) for each in told]
    return in_order(kept)


def verdict(rows: Sequence[StepRow], unread: bool) -> str:
    """Return the sentence for a run without findings, which says what could not be judged.

    Args:
        rows: Its steps.
        unread: Whether something of the run could not be read.
    """
    if not rows:
        return "No step has ended, so there is nothing to judge."
    raised = [f"step {row.number} ended with {row.error}" for row in rows if row.error]
    said = f"S{words.listed(raised, 3)[1:]}. No other findings" if raised else "No findings"
    said += " in what could be read; the notes name the rest." if unread else "."
    if len(typical(rows)) <= FEWEST:
        regular = sum(row.kind == REGULAR for row in rows)
        said += f" Slow-step detection needs {FEWEST + 1} regular steps; this run has {regular}."
    return said


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings, the costliest first."""
    return sorted(findings, key=lambda finding: -finding.seconds)


def _costliest(alike: list[Finding], what: str, names: list[str]) -> list[Finding]:
    """Return the first few of findings of one kind, which tell of the others; `names` are their subjects, in order."""
    return [_with_others(each, what, names[_MOST_ALIKE:]) for each in in_order(alike)[:_MOST_ALIKE]]


def _with_others(finding: Finding, what: str, names: list[str]) -> Finding:
    if not names:
        return finding
    also = f"also in {words.several(len(names), f'other {what}')}: {words.listed(names, 10)}"
    return msgspec.structs.replace(finding, evidence=[*finding.evidence, also])
