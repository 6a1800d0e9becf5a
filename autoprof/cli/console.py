"""Output of commands: messages, tables and progress, to streams that may be full or closed.

Tables fit any width: text wraps at words, names are never split, and columns that do not fit are dropped. rich draws
the progress bars; it is imported on a terminal only.
"""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from autoprof.base.redact import plain

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import TextIO


class OutputLost(BaseException):
    """Standard output can't be written. Not an OSError, so that commands don't take it for an error of their files."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Output(io.TextIOWrapper):
    """Standard output that raises `OutputLost` if it can't be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputLost(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputLost(error) from None


def replace_output() -> TextIO:
    """Replace `sys.stdout` by an `Output`, and return the original.

    Standard streams that are closed are first opened to /dev/null. Otherwise the next file that is opened would get
    their descriptor, and printed text would go into it. A command that `autoprof run` executes still finds them closed,
    since Python's descriptors are not inherited.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", encoding="utf-8"))
    real = sys.stdout
    if type(real) is io.TextIOWrapper:
        sys.stdout = Output(
            real.buffer,
            encoding=real.encoding,
            errors=real.errors,
            line_buffering=real.line_buffering,
            write_through=real.write_through,
        )
    return real


def restore_output(real: TextIO) -> None:
    """Flush the `Output`, and make `real` the standard output again.

    Raises:
        OutputLost: The text can't be written.
    """
    ours, sys.stdout = sys.stdout, real
    if isinstance(ours, Output):
        try:
            ours.flush()
        finally:
            ours.detach()


def lost_output(error: OSError) -> int:
    """Print why standard output can't be written, and return the exit status; a closed pipe is no error."""
    # The interpreter flushes stdout again at exit; without this it would print a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0

    return complain(f"standard output: {error.strerror}", 1)


_GAP = "  "
# A column is text, and may wrap, if its cells are wider than this and have several words.
_MAX_UNWRAPPED = 30
# Narrowest width to which a column of text wraps.
_MIN_TEXT = 24
_BREAKS = re.compile(r"(?<=[ ,])(?=[^ ])")
_BOLD, _DIM, _RED, _GREEN, _YELLOW, _CYAN = "1", "2", "31", "32", "33", "36"
# Colours by the first word of a state.
_STATES = {
    **dict.fromkeys(("complete", "ended", "applied", "analysed", "yes", "here", "fetched"), _GREEN),
    **dict.fromkeys(("running", "going"), _CYAN),
    **dict.fromkeys(("unfinished", "truncated", "newer", "not"), _YELLOW),
    **dict.fromkeys(("failed", "damaged", "wrong", "lost"), _RED),
    **dict.fromkeys(("skipped", "absent"), _DIM),
}
_STATE_COLUMNS = ("state", "fits")


def table_lines(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int | None = None,
    drop: Sequence[str] = (),
    colours: bool = False,
) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        header: Names of the columns.
        rows: Cells, row by row.
        columns: Width of the terminal; None for no limit.
        drop: Columns to drop first in a narrow terminal, in this order; then the last ones, until one is left.
        colours: True to colour states and print the header in bold.
    """
    kept, widths = _fitting(header, rows, columns, drop)
    for row_index, row in enumerate([header, *rows]):
        cells = [_wrapped(row[column], widths[column]) for column in kept]
        for line in range(max(map(len, cells))):
            parts = []
            for column, cell in zip(kept, cells, strict=True):
                text = cell[line] if line < len(cell) else ""
                padded = text + " " * (widths[column] - width(text))
                style = _BOLD if row_index == 0 else _style(header[column], row[column])
                parts.append(styled(padded, style) if colours and style and text else padded)
            yield _GAP.join(parts).rstrip()
    if dropped := [name for column, name in enumerate(header) if column not in kept]:
        for text in _wrapped(f"a wider terminal shows: {', '.join(dropped)}", columns or 0):
            yield styled(text, _DIM) if colours else text


def styled(text: str, style: str) -> str:
    """Return a text with a style, except for the blanks at its end."""
    bare = text.rstrip()
    return f"\x1b[{style}m{bare}\x1b[0m{text[len(bare) :]}"


def width(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def _fitting(
    header: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None, drop: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Return the columns to show, and the width of every column."""
    cells = [[header[column], *(row[column] for row in rows)] for column in range(len(header))]
    widths = [max(map(width, column)) for column in cells]
    min_widths = [_min_width(column, full) for column, full in zip(cells, widths, strict=True)]
    kept = list(range(len(header)))
    drop_order = [*(header.index(name) for name in drop), *reversed(range(len(header)))]
    while columns is not None:
        gaps = len(_GAP) * (len(kept) - 1)
        excess = sum(widths[column] for column in kept) + gaps - columns
        if excess > sum(widths[column] - min_widths[column] for column in kept) and len(kept) > 1:
            kept.remove(next(column for column in drop_order if column in kept))
            continue
        for column in sorted(kept, key=lambda column: min_widths[column] - widths[column]):
            cut = max(0, min(excess, widths[column] - min_widths[column]))
            widths[column], excess = widths[column] - cut, excess - cut
        break
    return kept, widths


def _min_width(cells: Sequence[str], full: int) -> int:
    """Return the smallest width of a column; `full` is its width without wrapping."""
    words = [word for cell in cells for word in _BREAKS.split(cell)]
    is_text = full > _MAX_UNWRAPPED and len(words) > len(cells)
    return max(_MIN_TEXT, *(width(word.rstrip()) for word in words)) if is_text else full


def _wrapped(cell: str, room: int) -> list[str]:
    lines, line = [], ""
    for word in _BREAKS.split(cell):
        if line and width(f"{line}{word}".rstrip()) > room:
            lines.append(line.rstrip())
            line = ""
        line += word
    return [*lines, line.rstrip()]


def _style(name: str, cell: str) -> str:
    return _STATES.get(cell.partition(" ")[0], "") if name in _STATE_COLUMNS else ""


def complain(text: str, status: int) -> int:
    """Print a message to stderr, and return the exit status that was passed."""
    # If stderr can't be written, for example on a full disk, the exit status stays the same.
    with suppress(OSError):
        print(f"autoprof: {plain(text)}", file=sys.stderr)
    return status


def print_json(document: object) -> None:
    """Print a document as JSON, with its `schema` first."""
    import json

    import msgspec

    content = msgspec.to_builtins(document)
    print(json.dumps({"schema": content.pop("schema")} | content, indent=1))


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on stderr if it is a terminal; otherwise show nothing.

    Args:
        title: Text in front of the bar.
        total: Number of bytes in all.

    Yields:
        A function that takes the number of bytes done since its last call.
    """
    if not _draws(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)


# Callback before each file is read: the number of files read, the number of files or None, the file's name.
Reading = Callable[[int, "int | None", str], object]


@contextmanager
def reading(verb: str = "reading") -> Iterator[Reading]:
    """Show the file that is being read on stderr if it is a terminal; otherwise show nothing."""
    if not _draws(sys.stderr):
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, name: progress.update(
            task, completed=done, total=total, description=f"{verb} {plain(name[:60])}"
        )


# Callback that shows a status: its text, and how much of the total is done.
Show = Callable[[str, int], None]


@contextmanager
def lines(total: int, keep_stdout: bool = False) -> Iterator[Show]:
    """Show a status: on a terminal as one changing line on stderr, elsewhere as one line on stdout per new text.

    Args:
        total: Amount of work in all; 0 if it is not known.
        keep_stdout: True to print nothing to stdout; lines go to stderr instead.
    """
    if not _draws(sys.stderr):
        printed: set[str] = set()

        def once(text: str, done: int) -> None:
            if text not in printed:
                printed.add(text)
                print(plain(text), file=sys.stderr if keep_stdout else sys.stdout, flush=True)

        yield once
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total or None)
        yield lambda text, done: progress.update(task, description=plain(text), completed=done)


def show(header: Sequence[str], rows: Sequence[Sequence[str]], drop: Sequence[str] = ()) -> None:
    """Print a table to stdout, fitted to the terminal's width if stdout is a terminal.

    `drop` lists the columns to drop first in a narrow terminal, in this order.
    """
    rows = [[plain(text) for text in row] for row in rows]
    for line in table_lines(header, rows, columns(sys.stdout), drop, coloured(sys.stdout)):
        print(line)


def wrapped(text: str, indent: int = 0, more: str = "") -> list[str]:
    """Return a text wrapped to the width of the terminal, or in one line if stdout is not a terminal.

    Args:
        text: A sentence.
        indent: Number of spaces in front of each line.
        more: A name after the text; it gets its own line if it does not fit.
    """
    margin = " " * indent
    width = columns(sys.stdout)
    if width is None:
        return [margin + "  ".join(filter(None, [text, more]))]
    import textwrap

    room = max(20, width - indent)
    lines = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    if more and len(lines[-1]) + 2 + len(more) <= room:
        lines[-1] += f"  {more}"
    elif more:
        lines.append(more)
    return [margin + line for line in lines]


def columns(stream: TextIO) -> int | None:
    """Return the width of a stream's terminal; None if it is not a terminal, or its width is not known."""
    if not stream.isatty():
        return None
    try:
        return int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def coloured(stream: TextIO) -> bool:
    """Return whether to print colours to a stream: yes for a terminal, unless NO_COLOR or FORCE_COLOR decides."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _draws(stream)


def _draws(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that supports escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"
