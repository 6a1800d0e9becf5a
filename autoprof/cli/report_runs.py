"""`autoprof report` with several runs: shows them beside each other. Also writes the outputs of all reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from autoprof.base import files
from autoprof.base.redact import plain
from autoprof.base.units import moment, number, seconds
from autoprof.cli import arguments, console
from autoprof.cli.console import complain
from autoprof.report import beside, html, markdown
from autoprof.report.beside import RunTable
from autoprof.rundir import runs
from autoprof.rundir.file_names import RUN
from autoprof.rundir.runs import Run

# Name of the page, in the folder of the first run.
RUNS_PAGE = "runs.html"
# Maximum number of columns of stages in the terminal, and of runs whose versions and commands are printed.
_MAX_STAGES, _MAX_DIFFERENT = 4, 20


def several(parsed: argparse.Namespace) -> list[Run]:
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


def write(parsed: argparse.Namespace, named_runs: Sequence[Run]) -> int:
    """Report several runs, and return the exit status.

    Raises:
        OSError: A file can't be written.
    """
    with console.reading() as progress:
        table = beside.table(named_runs, progress)
    folder = Path(named_runs[0].path).parent
    files.open_as(named_runs[0].path)
    return write_outputs(
        parsed,
        table,
        lambda: markdown.text_of_runs(table),
        lambda: show(table),
        partial(html.write_runs, table),
        folder / RUNS_PAGE,
    )


def write_outputs(
    parsed: argparse.Namespace,
    document: msgspec.Struct,
    markdown_text: Callable[[], str],
    show_text: Callable[[], None],
    write_page: Callable[[Path], None],
    default_page: Path,
) -> int:
    """Write a report in the formats that the arguments name, and return the exit status.

    Args:
        parsed: The arguments. If they name no format, the page `default_page` is written.
        document: The data of the report, for `--json`.
        markdown_text: Function that returns the report as Markdown.
        show_text: Function that prints the report.
        write_page: Function that writes the page.
        default_page: The path of the page, unless `-o` names another one.

    Raises:
        OSError: A file can't be written.
    """
    page = parsed.output or (None if parsed.json or parsed.md else default_page)
    if parsed.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n")
    if parsed.md == "-":
        sys.stdout.write(markdown_text())
    elif parsed.md:
        files.write(parsed.md, markdown_text().encode("utf-8", "backslashreplace"))
    out = sys.stderr if parsed.json or parsed.md == "-" else sys.stdout
    if out is sys.stdout:
        show_text()
    status = 0
    if page is not None:
        try:
            write_page(page)
            print(f"report: {page}", file=out)
        except html.MissingExtra as error:
            status = complain(f"report: {error}", 1)
    if parsed.md and parsed.md != "-" and (page is not None or out is sys.stdout):
        print(f"written: {parsed.md}", file=out)
    return status


def show(table: RunTable) -> None:
    """Print a table of the runs, and their different versions and commands."""
    stages = table.stages[:_MAX_STAGES]
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
