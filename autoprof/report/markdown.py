"""The report as Markdown, for a pull request or a chat."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from autoprof.base.redact import plain
from autoprof.base.units import change, moment, number, seconds, share
from autoprof.report import model
from autoprof.report.beside import RunTable
from autoprof.report.details import place_of
from autoprof.report.hang_state import open_for
from autoprof.report.model import (
    NOTHING_COMMON,
    NOTHING_SLOWER,
    CaptureFigures,
    Comparison,
    Finding,
    RunFigures,
    StepFigures,
    several,
)

# Maximum numbers of slow steps, of rows in a table, and of captures of a step. They are small, because GitHub limits a
# pull request to 65,536 characters.
_MAX_STEPS = 15
_MAX_ROWS = 15
_MAX_CAPTURES = 8
# Characters that are markup in GitHub's Markdown. An underscore between letters is not markup.
_SPECIAL = re.compile(r"([\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_]))")


def text(figures: RunFigures) -> str:
    """Return the report as Markdown."""
    return "".join(f"{block}\n\n" for block in _blocks(figures))


def text_of_runs(table: RunTable) -> str:
    """Return a report on several runs as Markdown."""
    stages = table.stages[: _MAX_ROWS // 2]
    rows = [
        [
            _safe(row.label),
            moment(row.started_ns),
            seconds(row.median_s),
            row.basis or "-",
            number(row.tokens_per_s),
            *(seconds(row.stages.get(stage)) for stage in stages),
        ]
        for row in table.runs
    ]
    blocks = [
        f"# autoprof: {several(table.count, 'run')}",
        _table(["run", "started", "median step", "of", "tokens/s", *map(_safe, stages)], rows),
        "The seconds of a stage are the mean of the same steps.",
    ]
    if table.versions:
        versions = [
            [_safe(row.label), *(_safe(row.versions.get(name, "-")) for name in table.versions)] for row in table.runs
        ]
        blocks += ["## Different versions", _table(["run", *map(_safe, table.versions)], versions)]
    if any(row.words for row in table.runs):
        commands = [[_safe(row.label), _safe(" ".join(row.words)) or "-"] for row in table.runs]
        blocks += ["## Different commands", _table(["run", "words"], commands)]
    return "".join(f"{block}\n\n" for block in blocks)


def _blocks(run: RunFigures) -> Iterable[str]:
    """Yield the blocks of the report: titles, paragraphs, lists and tables. A blank line follows each block."""
    yield f"# autoprof: {_safe(run.id)}"
    if run.command:
        yield f"{_code(run.command[:300])}, {_safe(run.state)}."
    for part in run.loops:
        yield f"# {_safe(part.title[:1].upper() + part.title[1:])}"
        yield from _loop_blocks(part)
    if not run.loops:
        yield from _loop_blocks(run)
    elif run.open:
        yield from _open_spans_lines(run)
    if run.notes:
        yield "## Notes"
        yield "\n".join(f"- {_safe(note)}" for note in run.notes[:_MAX_ROWS])


def _loop_blocks(run: RunFigures) -> Iterable[str]:
    """Yield the blocks about the steps of one loop."""
    if run.steps:
        rate = f", {number(run.tokens_per_s)} generated tokens/s" if run.tokens_per_s is not None else ""
        yield f"{seconds(run.median_s)} a step ({run.basis}){rate}."
    if run.comparison is not None:
        yield from _comparison(run.comparison)
    yield "## Findings"
    yield _findings(run.findings, run.verdict)
    if run.stages:
        yield "## Where the time goes"
        rows = [
            [_safe(each.name), each.kind, seconds(each.seconds), share(each.share), seconds(each.median_s)]
            for each in run.stages
        ]
        yield _table(["stage", "kind", "seconds", "share", "median"], rows)
    if run.validations:
        yield "\n".join(f"- {_safe(validation.text)}" for validation in run.validations[:_MAX_ROWS])
    slow_rows = sorted((row for row in run.steps if row.slow), key=lambda row: row.usual_s - row.seconds)[:_MAX_STEPS]
    if slow_rows:
        yield "## Slow steps"
        table = [[str(row.number), seconds(row.seconds), seconds(row.usual_s)] for row in slow_rows]
        yield _table(["step", "took", "usually"], table)
    if run.open:
        yield from _open_spans_lines(run)
    for step in run.details:
        yield from _step(step)
    if run.loop and run.notes:
        yield "\n".join(f"- {_safe(note)}" for note in run.notes[:_MAX_ROWS])


def _open_spans_lines(run: RunFigures) -> Iterable[str]:
    yield f"## {model.open_title(run.going_on)}"
    rows = [
        [
            f"{_safe(each.kind)} {_safe(each.name)}" if each.kind != each.name else _safe(each.name),
            "" if each.step is None else str(each.step),
            _safe(each.where),
            _safe(each.process),
            open_for(each, run.going_on),
        ]
        for each in run.open[:_MAX_ROWS]
    ]
    yield _table(["span", "step", "of", "process", "open for"], rows)
    if others := len(run.open) - len(rows) + run.open_left_out:
        yield f"{several(others, 'other span')} {'is' if others == 1 else 'are'} open."


def _step(step: StepFigures) -> Iterable[str]:
    yield f"## Step {step.number} ({step.kind}): {seconds(step.seconds)}"
    for reason in step.captured_for:
        yield f"Captured for: {_safe(reason)}"
    if step.stages:
        stage_rows = [[_safe(name), seconds(value)] for name, value in step.stages.items()]
        yield _table(["stage", "seconds"], stage_rows)
    if step.no_stage is not None and step.no_stage.places:
        places = [[_safe(each.place), seconds(each.seconds)] for each in step.no_stage.places]
        yield _table(["the driver without a stage", "about"], places)
    if step.samples is not None:
        samples, quantiles = step.samples, step.samples.quantiles_s
        yield (
            f"{samples.count} samples, {seconds(quantiles['0.5'])} in the median, "
            f"{seconds(quantiles['0.95'])} at the 95th percentile, {seconds(quantiles['1'])} at most."
        )
        rows = [
            [_safe(row.label), seconds(row.seconds), _safe(row.held_by), _safe(row.lane)] for row in samples.longest[:5]
        ]
        yield _table(["longest samples", "took", "held by", "in"], rows)
    late_skews = [skew for skew in step.skews if skew.waited_s >= 0.01 * step.seconds][:5]
    if late_skews:
        rows = [[_safe(s.stage), _safe(s.slowest), seconds(s.slowest_s), seconds(s.median_s)] for s in late_skews]
        yield _table(["stage", "slowest", "took", "median"], rows)
    shown_captures = _first_of_each(step.captures)
    for capture in shown_captures:
        yield from _capture(capture)
    if others := len(step.captures) - len(shown_captures):
        verb = "is" if others == 1 else "are"
        yield f"{several(others, 'other capture')} of this step {verb} in the page and the JSON."
    if unread_count := step.captures_left_out:
        yield f"{several(unread_count, 'capture')} of further ranks {'was' if unread_count == 1 else 'were'} not read."


def _first_of_each(captures: Sequence[CaptureFigures]) -> list[CaptureFigures]:
    """Return the captures to list, at most `_MAX_CAPTURES`, in the order of `captures`.

    The first capture of each stage is preferred, then the second capture of each stage, and so on.
    """
    counts: Counter[tuple[str, str]] = Counter()
    ranked_captures = []
    for index, capture in enumerate(captures):
        stage = capture.role, capture.stage
        ranked_captures.append((counts[stage], index, capture))
        counts[stage] += 1
    return [capture for _, _, capture in sorted(sorted(ranked_captures)[:_MAX_CAPTURES], key=lambda each: each[1])]


def _capture(capture: CaptureFigures) -> Iterable[str]:
    yield f"### {_safe(place_of(capture))}, step {capture.step}: {_safe(capture.state)}"
    facts = [f"{seconds(capture.seconds)}"] if capture.seconds is not None else []
    facts += [f"{_safe(capture.bound)}-bound" if capture.bound else "", _safe(capture.reason)]
    facts += [_safe(capture.opens_with), _safe(capture.slowest)]
    facts += [
        f"{_safe(each.device)}: compute {share(each.compute)}, communication {share(each.communication)}, "
        f"copies {share(each.copy)}, idle {share(each.idle)}"
        for each in capture.devices
    ]
    if capture.engine is not None:
        engine = capture.engine
        kinds = {"prefill": engine.prefill, "decode": engine.decode, "mixed": engine.mixed, "other": engine.other}
        facts += [
            f"{name}: {each.passes} passes, {seconds(each.seconds)}" for name, each in kinds.items() if each.passes
        ]
    yield f"{_code(capture.file)}: {'; '.join(filter(None, facts))}"
    top_operators = sorted((*capture.operators, *capture.kernels), key=lambda each: (each.aside, -each.self_us))[:8]
    if top_operators:
        rows = [
            [_code(each.name[:80]), _safe(each.category + each.remark), number(each.calls), seconds(each.self_us / 1e6)]
            for each in top_operators
        ]
        yield _table(["operator", "kind", "calls", "own time"], rows)


def _comparison(comparison: Comparison) -> Iterable[str]:
    yield f"## {_safe(comparison.b)} against {_safe(comparison.a)}"
    for line in comparison.basis:
        yield _safe(line)
    yield _findings(comparison.findings, NOTHING_SLOWER if comparison.rows else NOTHING_COMMON)
    rows = []
    for row in comparison.rows[:_MAX_ROWS]:
        show_value = number if row.unit == "1/s" else seconds
        change_text = f"{row.change:+,.0f}" if row.unit == "1/s" else change(row.change)
        rows.append([row.kind, _safe(row.name), _safe(row.where), show_value(row.a), show_value(row.b), change_text])
    yield _table(["", "name", "where", comparison.a, comparison.b, "change"], rows)


def _findings(findings: Sequence[Finding], nothing: str) -> str:
    """Return the findings as a list. Without a finding, return the sentence `nothing`."""
    lines = [] if findings else [f"{_safe(nothing[:1].upper() + nothing[1:].rstrip('.'))}."]
    for each in findings:
        cost = f"**{seconds(each.seconds)}**: " if each.seconds else ""
        lines.append(f"- {cost}{_safe(each.text)}")
        lines += [f"  - {_safe(line)}" for line in each.evidence]
        if each.file:
            lines.append(f"  - in {_code(each.file)}")
        if each.remedy:
            lines.append(f"  - {_safe(each.remedy)}")
        if each.command:
            lines.append(f"  - {_code(each.command)}")
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(_safe, header))} |", f"|{' --- |' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _safe(raw: str) -> str:
    """Return an escaped text, which viewers show as it is, without markup of Markdown or HTML."""
    escaped = _SPECIAL.sub(r"\\\1", plain(raw))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@\u200b")


def _code(raw: str) -> str:
    """Return a text as inline code. The code can be part of a table."""
    code = plain(raw).replace("`", "'").replace("|", "¦")
    return f"`{code}`"
