"""Output of commands: complaints, tables, and progress for whoever waits at a terminal.

rich draws bars, and is imported on a terminal only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from autoprof.base.redact import plain


def complain(text: str, status: int) -> int:
    """Say on stderr what is wrong, and return the exit status."""
    # A full disk behind stderr changes no exit status.
    with suppress(OSError):
        print(f"autoprof: {plain(text)}", file=sys.stderr)
    return status


def print_json(document: object) -> None:
    """Print a document of `--json`."""
    import json

    import msgspec

    content = msgspec.to_builtins(document)
    print(json.dumps({"schema": content.pop("schema")} | content, indent=1))


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on a terminal, on stderr, and nothing elsewhere.

    Gives a function to tell how many more bytes are done.
    """
    if not _drawing(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.advance(task, done)


# Told how many are read, of how many where that is known, and the name of the next one.
Reading = Callable[[int, "int | None", str], object]


@contextmanager
def reading(what: str = "reading") -> Iterator[Reading]:
    """Show on a terminal, on stderr, what is read now, and nothing elsewhere."""
    if not _drawing(sys.stderr):
        yield lambda done, of, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, of, name: shown.update(
            task, completed=done, total=of, description=f"{what} {plain(name[:60])}"
        )


# Told what is going on, and how much of the total is done.
Show = Callable[[str, int], None]


@contextmanager
def lines(total: int, aside: bool = False) -> Iterator[Show]:
    """Show what is going on: on a terminal a line that changes, on stderr; elsewhere each thing once, on stdout.

    Without a total nobody knows how much it will be. `aside` leaves stdout to something else.
    """
    if not _drawing(sys.stderr):
        told: set[str] = set()

        def once(text: str, done: int) -> None:
            if text not in told:
                told.add(text)
                print(plain(text), file=sys.stderr if aside else sys.stdout, flush=True)

        yield once
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total or None)
        yield lambda text, done: shown.update(task, description=plain(text), completed=done)


def show(header: Sequence[str], rows: Sequence[Sequence[str]], drop: Sequence[str] = ()) -> None:
    """Print rows of text under a header: all of it, and as wide as the terminal where there is one.

    `drop` are columns that a narrow terminal goes without, in this order.
    """
    from autoprof.cli import table

    rows = [[plain(text) for text in row] for row in rows]
    for line in table.lines(header, rows, columns(sys.stdout), drop, coloured(sys.stdout)):
        print(line)


def wrapped(text: str, indent: int = 0, more: str = "") -> list[str]:
    """Return a text as lines that a terminal takes whole, and one line elsewhere.

    Args:
        text: A sentence.
        indent: The spaces in front of each line.
        more: A name that comes behind the text, on a line of its own where there is no room.
    """
    front = " " * indent
    width = columns(sys.stdout)
    if width is None:
        return [front + "  ".join(filter(None, [text, more]))]
    import textwrap

    room = max(20, width - indent)
    lines = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    if more and len(lines[-1]) + 2 + len(more) <= room:
        lines[-1] += f"  {more}"
    elif more:
        lines.append(more)
    return [front + line for line in lines]


def columns(stream: TextIO) -> int | None:
    """Return the width of the terminal behind a stream; None where there is none."""
    if not stream.isatty():
        return None
    try:
        return int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def coloured(stream: TextIO) -> bool:
    """Return whether a stream takes colours: a terminal does; NO_COLOR and FORCE_COLOR decide otherwise."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _drawing(stream)


def _drawing(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that obeys escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"
