"""`autoprof report`: says where the time of a run's steps went."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from autoprof.base import files
from autoprof.base.redact import plain
from autoprof.base.units import number, seconds, share
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.report import build, markdown
from autoprof.report.build import Request
from autoprof.report.comparison import NOTHING_COMMON
from autoprof.report.figures.overview import without_own
from autoprof.report.figures.words import OTHER, OWN, several
from autoprof.report.model import Finding, RunFigures, StepFigures
from autoprof.report.page import html
from autoprof.rundir import runs
from autoprof.rundir.file_names import REPORT, is_whole_run, same_place
from autoprof.rundir.runs import Run

_MOST_SHOWN, _MOST_STAGES, _MOST_NOTES = 12, 15, 5
_COSTS = "costs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    arguments.add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the step in detail (default: slow and captured ones)")
    parser.add_argument("--against", metavar="RUN|N|RUN:N", help="hold it against a run, a step, or another run's step")
    text = f"(default: {REPORT} in the run's folder; with --step and --against a name with these in it)"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=text)
    parser.add_argument("--md", metavar="FILE", help="write Markdown; - for standard output")
    arguments.add_dir(parser)
    arguments.add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    try:
        request = _request(parsed)
    except ValueError as error:
        return complain(f"report: {error}", 2)
    with console.reading() as progress:
        figures = build.report_figures(request, progress)
    try:
        files.open_as(request.run.path)
        return _write(figures, parsed, request.page)
    except BrokenPipeError:
        raise
    except OSError as error:
        return complain(f"report: {f'{error.filename}: {error.strerror}' if error.filename else error}", 1)


def _request(parsed: argparse.Namespace) -> Request:
    """Read what is asked for.

    Raises:
        NotFound: There is no such run.
        ValueError: It can't be asked for.
    """
    if parsed.json and parsed.md == "-":
        raise ValueError("--json and --md can't both go to standard output")
    run = arguments.find_run(parsed)
    against, against_step = _against(parsed, run)
    request = Request(run=run, step=parsed.step, against=against, against_step=against_step)
    if against_step is not None and request.step is None:
        raise ValueError(f"--against {parsed.against} is a step; say with --step which one to hold against it")
    for option, path in (("-o", parsed.output), ("--md", parsed.md)):
        if not path:
            continue
        whole = path is parsed.output and same_place(path, request.page) and request.page == Request(run=run).page
        if is_whole_run(Path(path)) and not whole:
            raise ValueError(f"{option} {path}: this name is kept for the report of the whole run; give another one")
    return request


def _against(parsed: argparse.Namespace, run: Run) -> tuple[Run | None, int | None]:
    """Return the run and the step that `--against` names.

    Raises:
        NotFound: There is no such run.
        ValueError: It names no step after its colon.
    """
    said = parsed.against
    if said is None:
        return None, None
    if said.isdecimal() and len(said) < 8:
        return run, int(said)
    name, colon, step = said.rpartition(":")
    if not colon:
        name = said
    elif not step.isdecimal():
        raise ValueError(f"--against {said}: {step!r} is no step; it takes RUN, a step, or RUN:STEP")
    return runs.find(arguments.parent(parsed), name), int(step) if colon else None


def _write(figures: RunFigures, parsed: argparse.Namespace, own: Path) -> int:
    """Write what was asked for, its page to `own` where no other place was named, and return the exit status."""
    texts = [(path, text) for path, text in (("-" if parsed.json else "", _json), (parsed.md, markdown.text)) if path]
    page = parsed.output or (None if texts else own)
    for path, text in texts:
        _put(path, text(figures))
    out = sys.stderr if parsed.json or parsed.md == "-" else sys.stdout
    if out is sys.stdout:
        show(figures, parsed.step)
    elif page is None:
        return 0
    status = 0
    if page is not None:
        try:
            html.write(figures, page)
            print(f"report: {page}", file=out)
        except html.MissingExtra as error:
            status = complain(f"report: {error}", 1)
    for path, _ in texts:
        if path != "-":
            print(f"written: {path}", file=out)
    return status


def _json(figures: RunFigures) -> str:
    return msgspec.json.format(msgspec.json.encode(figures), indent=1).decode() + "\n"


def _put(path: str, content: str) -> None:
    if path == "-":
        sys.stdout.write(content)
    else:
        files.write(path, content.encode("utf-8", "backslashreplace"))


def show(figures: RunFigures, chosen: int | None = None) -> None:
    """Print the step time, the stages and the findings of a run, or of one of its steps."""
    step = next((step for step in figures.details if step.number == chosen), None)
    if step is None:
        _run(figures)
    else:
        _step(figures, step)
    if figures.comparison is not None:
        print(plain(f"{figures.comparison.b} against {figures.comparison.a}"))
        for line in figures.comparison.basis:
            print(*console.wrapped(plain(line)), sep="\n")
        nothing = "nothing became slower by much" if figures.comparison.rows else NOTHING_COMMON
        _findings(figures.comparison.findings, nothing)
        print()
    if step is None:
        _findings(figures.findings, figures.verdict)
    else:
        _findings(step.findings, figures.verdict or f"No findings in step {step.number}.")
    print()
    notes = [f"step {each.number} was captured for: {why}" for each in figures.details for why in each.captured_for]
    for note in [*notes, *figures.notes[:_MOST_NOTES]]:
        print(*console.wrapped(plain(note)), sep="\n")
    if len(figures.notes) > _MOST_NOTES:
        print(f"and {several(len(figures.notes) - _MOST_NOTES, 'more note')} in the page")


def _run(figures: RunFigures) -> None:
    if figures.steps:
        rate = f", {number(figures.tokens_per_s)} generated tokens/s" if figures.tokens_per_s is not None else ""
        state = "" if figures.state == "ended" else f"; {figures.state}"
        said = f"{figures.id}: {seconds(figures.median_s)} a step ({figures.basis}){rate}{state}"
        print(*console.wrapped(plain(said)), "", sep="\n")
    _stages([[each.name, seconds(each.seconds), share(each.share), seconds(each.median_s)] for each in figures.stages])


def _step(figures: RunFigures, step: StepFigures) -> None:
    usual = {each.name: each.median_s for each in figures.stages}
    row = next((row for row in figures.steps if row.number == step.number), None)
    most = f", usually {seconds(row.usual_s)}" if row is not None and row.usual_s != row.seconds else ""
    print(plain(f"{figures.id}, step {step.number} ({step.kind}): {seconds(step.seconds)}{most}"))
    print()
    whole = sum(without_own(step.stages).values()) or 1.0
    _stages(
        [
            [name, seconds(took), share(None if name == OWN else took / whole), seconds(usual.get(name))]
            for name, took in step.stages.items()
        ]
    )


def _stages(rows: list[list[str]]) -> None:
    """Print the stages by seconds, of very many the first ones, with the time without a stage and autoprof's own."""
    last = [row for row in rows[_MOST_STAGES:] if row[0] in (OTHER, OWN)]
    shown = rows[:_MOST_STAGES] + last
    if shown:
        console.show(["stage", "seconds", "share", "median"], shown)
        if len(shown) < len(rows):
            print(f"and {several(len(rows) - len(shown), 'more stage')}")
        print()


def _findings(found: Sequence[Finding], nothing: str) -> None:
    """Print findings one below the other, the costliest first; their texts are sentences, and no table has room."""
    if not found:
        print(*console.wrapped(plain(nothing)), sep="\n")
        return
    costs = [seconds(each.seconds) if each.seconds else "-" for each in found[:_MOST_SHOWN]]
    wide = max(map(len, [*costs, _COSTS]))
    print(f"{_COSTS.ljust(wide)}  finding")
    told: set[str] = set()
    for cost, each in zip(costs, found, strict=False):
        also = [line for line in each.evidence if line.startswith("also in ") and line not in told]
        told.update(also)
        lines = console.wrapped(plain("; ".join([each.text, *also])), wide + 2, plain(each.file or ""))
        print(cost.ljust(wide) + lines[0][wide:], *lines[1:], sep="\n")
    if len(found) > _MOST_SHOWN:
        print(f"and {several(len(found) - _MOST_SHOWN, 'more finding')}")
