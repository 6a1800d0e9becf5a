"""How far something is, for who waits at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from autoprof.redaction import plain


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal, on stderr, and nothing elsewhere.

    Gives what is to be told how many more bytes are done.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.advance(task, done)


# Told what is going on, and how much of the total is done.
Show = Callable[[str, int], None]


@contextmanager
def lines(total: int) -> Iterator[Show]:
    """What is going on: a line that changes on a terminal, on stderr; elsewhere a line for each thing once, on stdout.

    Without a total nobody knows how much it will be.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        told: set[str] = set()

        def once(text: str, done: int) -> None:
            if text not in told:
                told.add(text)
                print(plain(text), flush=True)

        yield once
        return
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=total or None)
        yield lambda text, done: shown.update(task, description=plain(text), completed=done)
