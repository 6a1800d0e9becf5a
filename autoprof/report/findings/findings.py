"""Findings of all rules, in order, with processes that died and samples that failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from autoprof.base import units
from autoprof.base.redact import writable
from autoprof.report.figures import words
from autoprof.report.figures.overview import FEWEST, REGULAR, typical_steps, usual_stages
from autoprof.report.findings import rules, step_rules
from autoprof.report.findings.registry import CAPTURE_RULES, KINDS, ROW_RULES, STEP_RULES, Around
from autoprof.report.hangs import sentences
from autoprof.report.hangs.read import OpenSpans
from autoprof.report.model import Finding, StageShare, StepFigures, StepRow
from autoprof.rundir import deaths
from autoprof.rundir.records import RaisedLine
from autoprof.rundir.runs import Run

_KIND = "death"
KINDS.append(_KIND)


def deaths_of_run(run: Run) -> list[Finding]:
    """Return the finding of a run in which a process died; none of one without."""
    found = deaths.of_run(run)
    if not found:
        return []
    hosts = len(run.info.hosts)
    evidence = [writable(line) for line in deaths.evidence(found, hosts)]
    text = writable(deaths.sentence(found[0], hosts))
    return [Finding(kind=_KIND, text=text, evidence=evidence, seconds=0.0, file=found[0].file or None)]


# That of the rule on a step in detail, which counts them.
KIND = "failed_samples"
_MOST = 8


def failures_of_run(opened: OpenSpans) -> list[Finding]:
    """Return a finding for each place at which such an exception was raised, as it was seen first."""
    found: dict[str, tuple[RaisedLine, str]] = {}
    for state in opened.states:
        for line in state.lost:
            what = f"{line.span} {line.name} ended with {deaths.exception_words(line.exception)}"
            if what not in found or line.unix_ns < found[what][0].unix_ns:
                found[what] = line, f"timeline/{state.file.name}"
    first = sorted(found.items(), key=lambda each: each[1][0].unix_ns)[:_MOST]
    return [_finding(what, line, file) for what, (line, file) in first]


def _finding(what: str, line: RaisedLine, file: str) -> Finding:
    step = f"step {line.step}: " if line.step is not None else ""
    return Finding(
        kind=KIND,
        text=writable(f"{step}{what}"),
        evidence=[writable(f"at {deaths.frame_words(each)}") for each in reversed(line.exception.frames[-_MOST:])],
        seconds=0.0,
        step=line.step,
        file=writable(file),
    )


def with_places(findings: Iterable[Finding], lost: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, and those of lost samples: where a step's are counted, the places are its evidence."""
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


__all__ = ["KINDS", "abridged", "in_order", "of_run", "of_step", "overall", "settled", "verdict"]

# Of what many steps or captures have, so many are told, the costliest.
_MOST_ALIKE = 3
# Weight sync takes much from such a share of all steps on.
SYNC_SHARE = 0.15
_SHARE = "weight_sync_share"
KINDS.append(_SHARE)
# Rules register themselves when they are imported.
_RULES = (rules, step_rules, rules)


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
_EACH = (sentences.HANG,)


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
    if len(typical_steps(rows)) <= FEWEST:
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
