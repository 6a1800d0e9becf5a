"""Findings of all rules, in order, with processes that died and samples that failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from autoprof.base import units
from autoprof.base.redact import writable
from autoprof.report.figures import words
from autoprof.report.figures.overview import MIN_STEPS, REGULAR, typical_steps, usual_stages
from autoprof.report.findings import rules, step_rules
from autoprof.report.findings.rules import CAPTURE_RULES, KINDS, ROW_RULES, STEP_RULES, Around
from autoprof.report.hangs import sentences
from autoprof.report.hangs.read import OpenSpans
from autoprof.report.model import Finding, StageShare, StepFigures, StepRow
from autoprof.rundir import deaths
from autoprof.rundir.records import RaisedLine
from autoprof.rundir.runs import Run

_KIND = "death"
KINDS.append(_KIND)


def deaths_of_run(run: Run) -> list[Finding]:
    """Return the finding about processes that died; none if no process did."""
    dead = deaths.of_run(run)
    if not dead:
        return []
    hosts = len(run.info.hosts)
    evidence = [writable(line) for line in deaths.evidence(dead, hosts)]
    text = writable(deaths.sentence(dead[0], hosts))
    return [Finding(kind=_KIND, text=text, evidence=evidence, seconds=0.0, file=dead[0].file or None)]


# The kind of `step_rules.failed_samples`, which counts the failures of a step in detail.
KIND = "failed_samples"
# Findings of this kind, and frames of each.
_MAX_FAILURES = 8


def failures_of_run(opened: OpenSpans) -> list[Finding]:
    """Return a finding for each exception that ended a sample. Equal ones give one finding, for the first."""
    first_seen: dict[str, tuple[RaisedLine, str]] = {}
    for state in opened.states:
        for line in state.lost:
            what = f"{line.span} {line.name} ended with {deaths.exception_words(line.exception)}"
            if what not in first_seen or line.unix_ns < first_seen[what][0].unix_ns:
                first_seen[what] = line, f"journal/{state.file.name}"
    earliest = sorted(first_seen.items(), key=lambda each: each[1][0].unix_ns)[:_MAX_FAILURES]
    return [_finding(what, line, file) for what, (line, file) in earliest]


def _finding(what: str, line: RaisedLine, file: str) -> Finding:
    step = f"step {line.step}: " if line.step is not None else ""
    return Finding(
        kind=KIND,
        text=writable(f"{step}{what}"),
        evidence=[
            writable(f"at {deaths.frame_words(each)}") for each in reversed(line.exception.frames[-_MAX_FAILURES:])
        ],
        seconds=0.0,
        step=line.step,
        file=writable(file),
    )


def with_places(findings: Iterable[Finding], lost: Sequence[Finding]) -> Iterator[Finding]:
    """Yield all findings. If one counts a step's failed samples, the places of the failures become its evidence."""
    counted = set()
    for finding in findings:
        if finding.kind == KIND:
            counted.add(finding.step)
            places = [each.text.partition(": ")[2] for each in lost if each.step == finding.step]
            text = ": ".join([finding.text, *places[:1]])
            yield msgspec.structs.replace(finding, text=text, evidence=[*places[1:], *finding.evidence])
        else:
            yield finding
    yield from (each for each in lost if each.step not in counted)


__all__ = ["KINDS", "abridged", "in_order", "of_run", "of_step", "overall", "unexplained", "verdict"]

# Findings of one kind that are listed, the costliest; the others are counted in the evidence.
_MAX_OF_KIND = 3
# Share of the step time from which weight sync is a finding.
SYNC_SHARE = 0.15
_SHARE = "weight_sync_share"
KINDS.append(_SHARE)
# Rules register themselves when they are imported.
_RULES = (rules, step_rules, rules)


def of_step(step: StepFigures) -> list[Finding]:
    """Return the findings of one step and its captures, the costliest first."""
    findings = [finding for rule in STEP_RULES for finding in rule(step)]
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for capture in step.captures:
        for rule in CAPTURE_RULES:
            for finding in rule(capture):
                by_kind[finding.kind].append(finding)
    for of_kind in by_kind.values():
        ordered = in_order(of_kind)
        names = [finding.file or "" for finding in ordered[_MAX_OF_KIND:]]
        findings += [_with_others(finding, "capture", names) for finding in ordered[:_MAX_OF_KIND]]
    return in_order(findings)


def of_run(rows: Sequence[StepRow], files: Mapping[int, str]) -> list[Finding]:
    """Return the findings of steps that are compared with each other.

    Args:
        rows: The steps.
        files: The driver's journal of each step.
    """
    findings = []
    for place, row in enumerate(rows):
        around = Around(row=row, usual=usual_stages(rows, place), where_done=usual_stages(rows, place, where_done=True))
        for rule in ROW_RULES:
            findings += [msgspec.structs.replace(each, file=files.get(row.number)) for each in rule(around)]
    return in_order(findings)


def overall(rows: Sequence[StepRow], stages: Sequence[StageShare]) -> list[Finding]:
    """Return the findings about all steps together.

    Args:
        rows: The steps from which the shares were computed.
        stages: The shares of the stages.
    """
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


# Kinds of findings that are omitted if another finding of the step costs at least half as much, with the kinds that the
# other may have (empty for any).
_EXPLAINED: dict[str, tuple[str, ...]] = {
    "slow_step": (),
    "sample_tail": ("slow_replica",),
    "communication": ("slow_rank",),
}


# Kinds of findings that are never abridged.
_ALWAYS_LISTED = (sentences.HANG,)


def unexplained(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in order, without the ones that another finding of the same step explains."""
    # By step, because a long run has thousands of findings.
    of_step: dict[int | None, list[Finding]] = defaultdict(list)
    for finding in findings:
        of_step[finding.step].append(finding)

    def explained(finding: Finding) -> bool:
        by = _EXPLAINED.get(finding.kind)
        # Time without a stage is alike in most steps, so it does not explain why one is slow.
        own = finding.kind, "no_stage"
        return by is not None and any(
            other.seconds >= finding.seconds / 2 and (other.kind in by if by else other.kind not in own)
            for other in of_step[finding.step]
        )

    return in_order(finding for same in of_step.values() for finding in same if not explained(finding))


def abridged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in order. If many steps have one of the same kind, keep only the costliest steps.

    Stuck steps are all kept: each has its own cause, and they are few.
    """
    by_kind: dict[str, dict[int | None, list[Finding]]] = defaultdict(lambda: defaultdict(list))
    kept = []
    for finding in in_order(findings):
        if finding.kind in _ALWAYS_LISTED:
            kept.append(finding)
        else:
            by_kind[finding.kind][finding.step].append(finding)
    for steps in by_kind.values():
        omitted = sorted(step for step in list(steps)[_MAX_OF_KIND:] if step is not None)
        listed = [each for step, of_step in steps.items() if step not in omitted for each in of_step]
        kept += [_with_others(each, "step", [str(step) for step in omitted]) for each in listed]
    return in_order(kept)


def verdict(rows: Sequence[StepRow], unread: bool) -> str:
    """Return the sentences for a run without findings. They name the parts that could not be judged.

    Args:
        rows: Its steps.
        unread: True if a part of the run could not be read.
    """
    if not rows:
        return "No step has ended, so there is nothing to judge."
    raised = [f"step {row.number} ended with {row.error}" for row in rows if row.error]
    text = f"S{words.listed(raised, 3)[1:]}. No other findings" if raised else "No findings"
    text += ", but some data could not be read; see the notes." if unread else "."
    if len(typical_steps(rows)) <= MIN_STEPS:
        regular = sum(row.kind == REGULAR for row in rows)
        text += f" Slow-step detection needs {MIN_STEPS + 1} regular steps; this run has {regular}."
    return text


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings, the costliest first."""
    return sorted(findings, key=lambda finding: -finding.seconds)


def _with_others(finding: Finding, thing: str, names: list[str]) -> Finding:
    if not names:
        return finding
    also = f"also in {words.several(len(names), f'other {thing}')}: {words.listed(names, 10)}"
    return msgspec.structs.replace(finding, evidence=[*finding.evidence, also])
