"""What `autoprof report` does: makes the figures, says what was found, and writes what was asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from autoprof import _files, listing, tables
from autoprof.listing import Run
from autoprof.redaction import plain
from autoprof.report import build, comparison
from autoprof.report.command import REPORT
from autoprof.report.figures import Finding, RunFigures
from autoprof.rundir import tidy
from autoprof.units import number, seconds

_MOST_SHOWN = 12


def run(parsed: argparse.Namespace, parent: Path) -> int:
    """Run the command and return its exit status.

    Raises:
        NotFound: There is no such run or step.
    """
    if parsed.json == "-" and parsed.md == "-":
        return _complain("--json and --md can't both go to standard output", 2)
    found = listing.find(parent, parsed.name)
    try:
        other = _other(parsed.against, found, parent)
    except ValueError as error:
        return _complain(str(error), 2)
    if other is not None and other[1] is not None and parsed.step is None:
        return _complain(f"--against {parsed.against} is a step; say with --step which one to hold against it", 2)
    own = Path(found.path, REPORT)
    name = _name(parsed.step, other)
    page = parsed.output or own.with_name(name)
    if name != REPORT and os.path.realpath(page) == os.path.realpath(own):
        return _complain(f"-o {page}: this name is kept for the report of the whole run; give another one", 2)
    figures = make(found, parsed.step, other)
    try:
        return _write(figures, found, parsed, page)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)


def make(run: Run, step: int | None = None, other: tuple[Run, int | None] | None = None) -> RunFigures:
    """The figures of a run, with a progress bar on a terminal.

    Args:
        run: The run.
        step: The only step in detail; without it those that are worth it.
        other: What to hold it against: a run, or a step of one.

    Raises:
        NotFound: There is no such step.
    """
    chosen = None if step is None else [step]
    if other is None:
        return _with_bar(run, chosen)
    against, number = other
    if number is None and step is not None:
        number = step
    if against.path == run.path and number is not None and step is not None:
        figures = _with_bar(run, [step, number], comparison.OPERATORS)
        sides = [comparison.of_step(figures, each, False) for each in (number, step)]
    else:
        figures = _with_bar(run, chosen, comparison.OPERATORS)
        theirs = _with_bar(against, None if number is None else [number], comparison.OPERATORS)
        if number is not None and step is not None:
            sides = [comparison.of_step(theirs, number, True), comparison.of_step(figures, step, True)]
        else:
            sides = [comparison.of_run(theirs), comparison.of_run(figures)]
    return msgspec.structs.replace(build.trimmed(figures), comparison=comparison.compared(*sides))


def _other(said: str | None, run: Run, parent: Path) -> tuple[Run, int | None] | None:
    """The run and the step that `--against` names.

    Raises:
        NotFound: There is no such run.
        ValueError: It names no step after its colon.
    """
    if said is None:
        return None
    if said.isdecimal() and len(said) < 8:
        return run, int(said)
    name, colon, step = said.rpartition(":")
    if not colon:
        return listing.find(parent, said), None
    if not step.isdecimal():
        raise ValueError(f"--against {said}: {step!r} is no step; it takes RUN, a step, or RUN:STEP")
    return listing.find(parent, name), int(step)


def _with_bar(run: Run, chosen: Sequence[int] | None, operators: int = build.OPERATORS) -> RunFigures:
    console = Console(stderr=True)
    if not console.is_terminal:
        return build.figures(run, chosen, operators=operators)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading the timeline", total=None)

        def told(done: int, of: int, name: str) -> None:
            progress.update(task, completed=done, total=of, description=f"reading {plain(name[:60])}")

        return build.figures(run, chosen, told, operators)


def _name(step: int | None, other: tuple[Run, int | None] | None) -> str:
    """What the page is called: `autoprof open` shows the one of this name as the run's."""
    words = [] if step is None else [f"step{step}"]
    if other is not None:
        run, number = other
        words += ["against", tidy(run.id), *([] if number is None else [f"step{number}"])]
    return ".".join([*REPORT.split(".")[:1], *words, *REPORT.split(".")[1:]])


def _write(figures: RunFigures, run: Run, parsed: argparse.Namespace, page: Path) -> int:
    from autoprof.report import markdown

    _files.open_as(run.path)
    pages = not (parsed.json or parsed.md) or parsed.output is not None
    if parsed.json:
        _put(parsed.json, msgspec.json.format(msgspec.json.encode(figures), indent=1).decode() + "\n")
    if parsed.md:
        _put(parsed.md, markdown.text(figures))
    if "-" in (parsed.json, parsed.md) and not pages:
        return 0
    out = sys.stderr if "-" in (parsed.json, parsed.md) else sys.stdout
    if out is sys.stdout:
        show(figures)
    status = 0
    if pages:
        status = _page(figures, page, out)
    for path in (parsed.json, parsed.md):
        if path and path != "-":
            print(f"written: {path}", file=out)
    return status


def _page(figures: RunFigures, path: Path, out: Any) -> int:
    from autoprof.report import html

    try:
        html.write(figures, path)
    except html.MissingExtra as error:
        return _complain(str(error), 1)
    print(f"report: {path}", file=out)
    return 0


def _put(path: str, content: str) -> None:
    if path == "-":
        sys.stdout.write(content)
    else:
        _files.write(path, content.encode("utf-8", "backslashreplace"))


def show(figures: RunFigures) -> None:
    """Print what the run is like, and what was found."""
    if figures.steps:
        rate = f", {number(figures.tokens_per_s)} generated tokens/s" if figures.tokens_per_s is not None else ""
        print(f"{figures.id}: {len(figures.steps)} steps, {seconds(figures.median_s)} in the median{rate}")
    if figures.comparison is not None:
        print(f"{plain(figures.comparison.b)} against {plain(figures.comparison.a)}")
        _table(figures.comparison.findings, "nothing became slower by much")
        print()
    _table(figures.findings, "nothing stands out")
    for step in figures.details:
        for reason in step.captured_for:
            print(plain(f"step {step.number} was captured for: {reason}"))
    for note in figures.notes[:5]:
        print(plain(note))


def _table(found: Sequence[Finding], nothing: str) -> None:
    if not found:
        print(nothing)
        return
    rows = [[seconds(each.seconds), each.text, each.file or "-"] for each in found[:_MOST_SHOWN]]
    tables.show(["costs", "finding", "seen in"], rows)
    if len(found) > _MOST_SHOWN:
        print(f"and {len(found) - _MOST_SHOWN} more")


def _complain(text: str, status: int) -> int:
    print(f"autoprof: report: {plain(text)}", file=sys.stderr)
    return status
