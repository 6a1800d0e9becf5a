"""Comparison of a report with a trainer's own clock and with a planted cause, and the table of the results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.report.model import OTHER, OWN, Finding, RunFigures, StepRow
from tests.support.helpers import autoprof
from tests.support.verl_runs import VerlRun

# Name of the property of a test that is a row of the table.
PROPERTY = "truth"
HEAD = ("row", "expected", "got", "planted", "reported", "verdict")
# Limits of the difference between a stage in the report and in the trainer's own clock.
SHARE, LEAST_S = 0.01, 0.005
# Longest work of a trainer before its first step and after its last one.
AROUND_S = 0.02
# Timers of verl that are no parts of a step.
NO_STAGES = ("step", "start_profile", "stop_profile")
# Longest text of a cell.
MAX_CELL = 200
Record = Callable[[str, object], None]


def figures(run: Path) -> RunFigures:
    """Return the output of `autoprof report --json`."""
    return msgspec.json.decode(autoprof("report", str(run), "--json", cwd=run).stdout, type=RunFigures)


def by_stage(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the seconds of each stage. If stages overlap, a second counts for the latest to start."""
    spans = list(spans)
    points = sorted({point for _, begin, end in spans for point in (begin, end)})
    took: dict[str, float] = {}
    for begin, end in itertools.pairwise(points):
        open_spans = [(start, name) for name, start, stop in spans if start <= begin and end <= stop]
        if open_spans:
            name = max(open_spans)[1]
            took[name] = took.get(name, 0.0) + end - begin
    return took


def second_differences(what: str, got: float, expected: float, own: float = 0.0) -> list[str]:
    """Return a text if the seconds of a stage differ from a clock, which includes at most `own` seconds of autoprof."""
    allowed = max(LEAST_S, SHARE * expected)
    if expected - own - allowed <= got <= expected + allowed:
        return []
    return [f"{what} {got:.3f} s, not {expected:.3f} s"]


def stage_differences(report: RunFigures, clock: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Return the stages that differ from the trainer's own clock, by step, with both figures.

    A busy machine may stop the process between both clocks, so one stage in twenty may differ.
    """
    rows = {row.number: row for row in report.steps}
    if rows.keys() != clock.keys():
        return [f"steps {sorted(rows)} instead of {sorted(clock)}"]
    wrong, count = [], 0
    for number, expected in clock.items():
        stages = rows[number].stages
        for name in sorted({*expected, *stages} - {OWN, OTHER}):
            what, clocked = f"step {number} {name}", expected.get(name, 0.0)
            wrong += second_differences(what, stages.get(name, 0.0), clocked, stages.get(OWN, 0.0))
            count += 1
    return wrong if len(wrong) > max(1, count // 20) else []


def timer_differences(row: StepRow, printed: Mapping[str, float]) -> list[str]:
    """Return the timers of a step that differ from the trainer's log.

    A trainer's timer includes the start and stop of profilers, which the report counts apart.
    """
    own, wrong = row.stages.get(OWN, 0.0), []
    for name, seconds in printed.items():
        wrong += second_differences(f"step {row.number} {name}", row.stages.get(name, 0.0), seconds, own)
    return wrong


def sum_differences(report: RunFigures, seconds: float) -> list[str]:
    """Return the difference between all steps of a report and the whole training by the trainer's own clock.

    The trainer's clock also has its work before the first step and after the last one.
    """
    return second_differences("all steps", sum(row.seconds for row in report.steps), seconds, AROUND_S)


def verl_differences(run: VerlRun, report: RunFigures) -> list[str]:
    """Return the stages and generated tokens that differ from verl's log."""
    timers, wrong = [], []
    for row in report.steps:
        printed = {name: seconds for name, seconds in run.timed(row.number).items() if name not in NO_STAGES}
        timers += timer_differences(row, printed)
        count = round(float(run.metrics[row.number]["response_length/mean"]) * (row.samples or 0))
        if row.response_tokens != count:
            wrong.append(f"step {row.number} {row.response_tokens} tokens, not {count}")
    if [row.number for row in report.steps] != sorted(run.metrics):
        wrong.append(f"steps {[row.number for row in report.steps]}, not {sorted(run.metrics)}")
    # A busy machine may stop the process between both clocks, but not at several timers.
    return wrong + (timers if len(timers) > 1 else [])


def unconfirmed(report: RunFigures) -> list[str]:
    """Return the findings of a healthy run of a real trainer.

    Such a trainer needs time before its first stage. The report has to say this, so the finding is not false if it is
    about step 1 and the row of that step has the same seconds.
    """
    starts = {row.number: row.stages.get(OTHER, 0.0) for row in report.steps if row.kind == "warm-up"}
    return [
        f"{told(finding)}: {finding.text}"
        for finding in report.findings
        if finding.kind != "no_stage" or abs(finding.seconds - starts.get(finding.step or 0, 0.0)) > 0.1
    ]


def told(finding: Finding) -> str:
    """Return the kind and the step of a finding."""
    return finding.kind + (f" of step {finding.step}" if finding.step is not None else "")


def finding_differences(
    report: RunFigures, kind: str, step: int | None, words: Sequence[str], seconds: float, share: float = 0.1
) -> list[str]:
    """Return the differences between the first finding and a planted cause. Without a kind, there must be none.

    Args:
        report: The report.
        kind: Kind of the first finding.
        step: Step of the first finding.
        words: Words in its sentence or evidence.
        seconds: Planted seconds, 0 if the finding has no cost.
        share: Allowed share of the difference between the planted seconds and the cost.
    """
    if not kind:
        return [finding.text for finding in report.findings]
    if not report.findings:
        return ["no finding"]
    first = report.findings[0]
    if (first.kind, first.step) != (kind, step):
        return [f"{told(first)}: {first.text}"]
    text = "\n".join([first.text, *first.evidence])
    wrong = [f"{word!r} is missing in: {first.text}" for word in words if word not in text]
    if seconds and abs(first.seconds - seconds) > share * seconds:
        wrong.append(f"costs {first.seconds:.2f} s, not {seconds:.2f} s")
    return wrong


def row(
    record: Record,
    name: str,
    expected: str,
    wrong: Sequence[str],
    *,
    got: str = "",
    planted_s: float = 0.0,
    reported_s: float = 0.0,
    known: str = "",
) -> None:
    """Add a row to the table, and fail if anything is wrong.

    Args:
        record: The fixture `record_property`.
        name: Name of the row.
        expected: Expected statement of the report.
        wrong: Differences from this statement.
        got: Statement of the report. If anything is wrong, the table shows the differences instead.
        planted_s: Planted seconds.
        reported_s: Seconds of the finding.
        known: Reason why the row fails.

    Raises:
        AssertionError: Something is wrong.
    """
    if known:
        verdict = f"known: {known}" if wrong else "MENDED: delete its reason in the table"
    else:
        verdict = "WRONG" if wrong else "right"
    said = "; ".join(wrong[:3]) + (f"; {len(wrong) - 3} more" if len(wrong) > 3 else "")
    cells = [f"{number:.2f} s" if number else "" for number in (planted_s, reported_s)]
    record(PROPERTY, [name, expected, said or got or expected, *cells, verdict])
    assert not wrong, said


def crash(record: Record, name: str, expected: str, error: Exception) -> None:
    """Add a row whose program failed to the table."""
    record(PROPERTY, [name, expected, f"the program failed: {str(error).strip()[-200:]}", "", "", "WRONG"])


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."


def lines(reports: Iterable[Any]) -> list[str]:
    """Return the table of all rows in the reports of tests."""
    called = [report for report in reports if getattr(report, "when", "") == "call"]
    rows = [value for report in called for key, value in report.user_properties if key == PROPERTY]
    if not rows:
        return []
    rows.insert(0, HEAD)
    widths = [min(60, max(len(each[column]) for each in rows)) for column in range(len(HEAD))]
    rows[1:] = [[_short(cell) for cell in each] for each in rows[1:]]
    made = ["  ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)).rstrip() for each in rows]
    wrong = sum(each[-1].isupper() or each[-1].startswith("MENDED") for each in rows[1:])
    known = sum(each[-1].startswith("known") for each in rows[1:])
    return [*made, f"{len(rows) - 1} rows: {len(rows) - 1 - wrong - known} right, {known} known to fail, {wrong} wrong"]
