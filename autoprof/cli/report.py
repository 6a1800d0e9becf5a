"""`autoprof report`: reports where the time of a run's steps went, or shows several runs beside each other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from autoprof.base import files
from autoprof.base.redact import plain
from autoprof.base.units import moment, number, seconds, share
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.report import beside, build, html, markdown
from autoprof.report.beside import RunTable
from autoprof.report.build import ReportRequest
from autoprof.report.model import (
    NOTHING_COMMON,
    NOTHING_SLOWER,
    OTHER,
    OWN,
    Finding,
    RunFigures,
    StepFigures,
    listed,
    several,
)
from autoprof.report.overview import without_autoprof
from autoprof.rundir import runs
from autoprof.rundir.file_names import REPORT, RUN, is_whole_run, same_place
from autoprof.rundir.runs import Run

_MAX_FINDINGS, _MAX_STAGES, _MAX_NOTES = 12, 15, 5
_COSTS = "costs"
# Name of the page, in the folder of the first run.
RUNS_PAGE = "runs.html"
# Maximum number of columns of stages in the terminal, and of runs whose versions and commands are printed.
_MAX_STAGE_COLUMNS, _MAX_DIFFERENT = 4, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "names", nargs="*", metavar="RUN", help="a run, as for ls (default: latest); several runs or a folder: a table"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="the step to show in detail (default: slow and captured ones)"
    )
    arguments.add_loop(parser, "the loop to show (default: all)")
    parser.add_argument("--against", metavar="RUN|N|RUN:N", help="compare with a run, a step, or another run's step")
    text = f"output file (default: {REPORT} in the run's folder; its name contains --loop, --step and --against)"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=text)
    parser.add_argument("--md", metavar="FILE", help="write Markdown; - for standard output")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    try:
        named_runs = _several_runs(parsed)
        request = None if named_runs else _request(parsed)
    except ValueError as error:
        return complain(f"report: {error}", 2)
    try:
        with console.reading() as progress:
            figures = build.report_figures(request, progress) if request else beside.table(named_runs, progress)
        path = Path(request.run.path if request else named_runs[0].path)
        files.open_as(path)
        return _write_outputs(parsed, figures, request.page if request else path.parent / RUNS_PAGE)
    except OSError as error:
        return complain(f"report: {f'{error.filename}: {error.strerror}' if error.filename else error}", 1)


def _request(parsed: argparse.Namespace) -> ReportRequest:
    """Return the `ReportRequest` that the arguments of the command describe.

    Raises:
        NotFound: No run matches, or several do.
        ValueError: The arguments contradict each other.
    """
    if parsed.json and parsed.md == "-":
        raise ValueError("--json and --md can't both go to standard output")
    run = runs.find(arguments.parent(parsed), parsed.names[0] if parsed.names else "latest")
    against, against_step = _run_to_compare(parsed, run)
    request = ReportRequest(run=run, loop=parsed.loop, step=parsed.step, against=against, against_step=against_step)
    if against_step is not None and request.step is None:
        raise ValueError(f"--against {parsed.against} is a step; name with --step the step to compare with it")
    for option, path in (("-o", parsed.output), ("--md", parsed.md)):
        if not path:
            continue
        is_whole_report = (
            path is parsed.output and same_place(path, request.page) and request.page == ReportRequest(run=run).page
        )
        if is_whole_run(Path(path)) and not is_whole_report:
            raise ValueError(
                f"{option} {path}: this name is reserved for the report of the whole run; give another one"
            )
    return request


def _run_to_compare(parsed: argparse.Namespace, run: Run) -> tuple[Run | None, int | None]:
    """Return the run and the step that `--against` names. Return None for each of them that it does not name.

    Raises:
        NotFound: No run matches, or several do.
        ValueError: The text after the colon is not a step.
    """
    value = parsed.against
    if value is None:
        return None, None
    # A longer number is the date with which the id of a run begins.
    if value.isdecimal() and len(value) < 8:
        return run, int(value)
    name, colon, step = value.rpartition(":")
    if not colon:
        name = value
    elif not step.isdecimal():
        raise ValueError(f"--against {value}: {step!r} is not a step; it takes RUN, a step, or RUN:STEP")
    return runs.find(arguments.parent(parsed), name), int(step) if colon else None


def show(figures: RunFigures, chosen: int | None = None) -> None:
    """Print the step time, the stages and the findings: for the step `chosen`, or for the whole run.

    The text is about the whole run if no step is chosen, or if the figures have no details of the step.
    """
    for part in figures.loops:
        show(part)
        print()
    if figures.loops:
        _print_notes(figures.notes)
        return
    step = next((step for step in figures.details if step.number == chosen), None)
    if step is None:
        _print_run(figures)
    else:
        _print_step(figures, step)
    if figures.comparison is not None:
        print(plain(f"{figures.comparison.b} against {figures.comparison.a}"))
        for line in figures.comparison.basis:
            print(*console.wrapped(plain(line)), sep="\n")
        text_without_findings = NOTHING_SLOWER if figures.comparison.rows else NOTHING_COMMON
        _print_findings(figures.comparison.findings, text_without_findings)
        print()
    if step is None:
        _print_findings(figures.findings, figures.verdict)
    else:
        end = "" if any(row.number == step.number for row in figures.steps) else ", which has no end"
        _print_findings(step.findings, figures.verdict or f"No findings in step {step.number}{end}.")
    print()
    notes = [
        f"step {detail.number} was captured for: {condition}"
        for detail in figures.details
        for condition in detail.captured_for
    ]
    _print_notes([*notes, *figures.notes], _MAX_NOTES + len(notes))


def _print_notes(notes: Sequence[str], most: int = _MAX_NOTES) -> None:
    for note in notes[:most]:
        print(*console.wrapped(plain(note)), sep="\n")
    if len(notes) > most:
        print(f"and {several(len(notes) - most, 'more note')} in the page")


def _subject(figures: RunFigures) -> str:
    """Return the id of the run, and the loop if the data is about one of several loops."""
    return f"{figures.id}, {figures.title}" if figures.loop else figures.id


def _print_run(figures: RunFigures) -> None:
    if figures.steps:
        rate = f", {number(figures.tokens_per_s)} generated tokens/s" if figures.tokens_per_s is not None else ""
        state = "" if figures.state == "ended" else f"; {figures.state}"
        line = f"{_subject(figures)}: {seconds(figures.median_s)} a step ({figures.basis}){rate}{state}"
        print(*console.wrapped(plain(line)), "", sep="\n")
    rows = [
        [stage.name, seconds(stage.seconds), share(stage.share), seconds(stage.median_s)] for stage in figures.stages
    ]
    _print_stages(rows)
    if figures.validations:
        lines = [validation.text for validation in figures.validations]
        print(*console.wrapped(plain(f"outside of steps: {listed(lines)}")), "", sep="\n")


def _print_step(figures: RunFigures, step: StepFigures) -> None:
    medians = {stage.name: stage.median_s for stage in figures.stages}
    row = next((row for row in figures.steps if row.number == step.number), None)
    usual_text = f", usually {seconds(row.usual_s)}" if row is not None and row.usual_s != row.seconds else ""
    took = seconds(step.seconds) if row is not None else f"at least {seconds(step.seconds)}"
    print(plain(f"{_subject(figures)}, step {step.number} ({step.kind}): {took}{usual_text}"))
    print()
    total_s = sum(without_autoprof(step.stages).values()) or 1.0
    _print_stages(
        [
            [name, seconds(took_s), share(None if name == OWN else took_s / total_s), seconds(medians.get(name))]
            for name, took_s in step.stages.items()
        ]
    )


def _print_stages(rows: list[list[str]]) -> None:
    """Print the table of stages: the first rows, and always the rows of the time without a stage and of autoprof."""
    last_rows = [row for row in rows[_MAX_STAGES:] if row[0] in (OTHER, OWN)]
    shown_rows = rows[:_MAX_STAGES] + last_rows
    if shown_rows:
        console.show(["stage", "seconds", "share", "median"], shown_rows)
        if len(shown_rows) < len(rows):
            print(f"and {several(len(rows) - len(shown_rows), 'more stage')}")
        print()


def _print_findings(findings: Sequence[Finding], text_without_findings: str) -> None:
    """Print findings as wrapped sentences, because a table is too narrow for them.

    If there are no findings, print `text_without_findings`.
    """
    if not findings:
        print(*console.wrapped(plain(text_without_findings)), sep="\n")
        return
    costs = [seconds(finding.seconds) if finding.seconds else "-" for finding in findings[:_MAX_FINDINGS]]
    width = max(map(len, [*costs, _COSTS]))
    print(f"{_COSTS.ljust(width)}  finding")
    printed_evidence: set[str] = set()
    printed_remedies: set[str] = {""}
    for cost, finding in zip(costs, findings, strict=False):
        new_evidence = [
            line for line in finding.evidence if line.startswith("also in ") and line not in printed_evidence
        ]
        printed_evidence.update(new_evidence)
        lines = console.wrapped(plain("; ".join([finding.text, *new_evidence])), width + 2, plain(finding.file or ""))
        print(cost.ljust(width) + lines[0][width:], *lines[1:], sep="\n")
        if finding.remedy not in printed_remedies:
            print(*console.wrapped(plain(finding.remedy), width + 2), sep="\n")
        # A command is not wrapped, so that it can be copied.
        if finding.command and finding.command not in printed_remedies:
            print(" " * (width + 2) + plain(finding.command))
        printed_remedies |= {finding.remedy, finding.command}
    if len(findings) > _MAX_FINDINGS:
        print(f"and {several(len(findings) - _MAX_FINDINGS, 'more finding')}")


def _several_runs(parsed: argparse.Namespace) -> list[Run]:
    """Return the runs that the arguments name: several runs, or a folder with runs. Return an empty list for one run.

    Raises:
        NotFound: No run matches a name, or several do.
        ValueError: Another argument needs a single run.
    """
    names = parsed.names
    folders = [name for name in names if _is_folder_of_runs(Path(name))]
    if len(names) < 2 and not folders:
        return []
    for option, value in (("--step", parsed.step), ("--loop", parsed.loop), ("--against", parsed.against)):
        if value is not None:
            raise ValueError(f"{option} takes one run; got {', '.join(names)}")
    found: list[Run] = []
    for name in names:
        found += runs.runs(Path(name)) if name in folders else [runs.find(arguments.parent(parsed), name)]
    return found


def _is_folder_of_runs(path: Path) -> bool:
    return path.is_dir() and not (path / RUN).is_file() and bool(runs.runs(path))


def _write_outputs(parsed: argparse.Namespace, figures: RunFigures | RunTable, default_page: Path) -> int:
    """Write a report in the formats that the arguments name, and return the exit status.

    Args:
        parsed: The arguments. If they name no format, the page `default_page` is written.
        figures: The data of the report.
        default_page: The path of the page, unless `-o` names another one.

    Raises:
        OSError: A file can't be written.
    """
    page = parsed.output or (None if parsed.json or parsed.md else default_page)
    if parsed.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(figures), indent=1).decode() + "\n")
    if parsed.md:
        text = markdown.text_of_runs(figures) if isinstance(figures, RunTable) else markdown.text(figures)
        if parsed.md == "-":
            sys.stdout.write(text)
        else:
            files.write(parsed.md, text.encode("utf-8", "backslashreplace"))
    out = sys.stderr if parsed.json or parsed.md == "-" else sys.stdout
    if out is sys.stdout:
        show_runs(figures) if isinstance(figures, RunTable) else show(figures, parsed.step)
    status = 0
    if page is not None:
        try:
            html.write(figures, page)
            print(f"report: {page}", file=out)
        except html.MissingExtra as error:
            status = complain(f"report: {error}", 1)
    if parsed.md and parsed.md != "-" and (page is not None or out is sys.stdout):
        print(f"written: {parsed.md}", file=out)
    return status


def show_runs(table: RunTable) -> None:
    """Print a table of the runs, and their different versions and commands."""
    stages = table.stages[:_MAX_STAGE_COLUMNS]
    header = ["run", "started", "steps", "median step", "tokens/s", *stages]
    rows = [
        [
            row.label,
            moment(row.started_ns).removesuffix(" UTC"),
            str(row.steps),
            seconds(row.median_s),
            number(row.tokens_per_s),
            *(seconds(row.stages.get(stage)) for stage in stages),
        ]
        for row in table.runs
    ]
    console.show(header, rows, drop=("started", *reversed(stages), "steps"))
    print("the seconds of a stage are the mean of the same steps")
    if len(table.runs) > _MAX_DIFFERENT:
        print("", "the page and the JSON have the different versions and commands", "", sep="\n")
        return
    if table.versions:
        print()
        versions = [[row.label, *(row.versions.get(name, "-") for name in table.versions)] for row in table.runs]
        console.show(["run", *table.versions], versions)
    if any(row.words for row in table.runs):
        print()
        for row in table.runs:
            print(*console.wrapped(plain(f"{row.label}: {' '.join(row.words) or '-'}")), sep="\n")
    print()
