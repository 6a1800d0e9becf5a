"""Output of the commands: messages, tables and progress. Standard output may be closed, or its disk full.

Tables fit any width: text wraps at words, names are never split, and columns that do not fit are dropped. The library
rich draws the progress bars. It is imported only if the output goes to a terminal.
"""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from autoprof.base.redact import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


class OutputLost(BaseException):
    """Standard output can't be written.

    This is not an OSError: a command that catches OSError would report this error as an error of the command's files.
    """

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

    A standard stream that is closed is first opened to /dev/null. Otherwise the next file that is opened would get the
    descriptor of the stream, and printed text would go into that file. A command that `autoprof run` executes still
    finds the stream closed, because programs do not inherit the descriptors that Python opens.
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
        OutputLost: The rest of the text can't be written.
    """
    ours, sys.stdout = sys.stdout, real
    if isinstance(ours, Output):
        try:
            ours.flush()
        finally:
            ours.detach()


def lost_output(error: OSError) -> int:
    """Print why standard output can't be written, and return the exit status 1.

    A closed pipe is no error: print nothing, and return 0.
    """
    # The interpreter flushes stdout again at exit. With the old descriptor, the interpreter would print a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0

    return complain(f"standard output: {error.strerror}", 1)


_GAP = "  "
# A column whose cells have several words is text, and may wrap, if it is wider than this number of characters.
_MAX_UNWRAPPED = 30
# Narrowest width to which a column of text wraps.
_MIN_TEXT = 24
_BREAKS = re.compile(r"(?<=[ ,])(?=[^ ])")
_BOLD, _DIM, _RED, _GREEN, _YELLOW, _CYAN = "1", "2", "31", "32", "33", "36"
# Colours of states, by the first word of the state.
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
        rows: Rows of the table, each with one cell per column.
        columns: Width of the terminal; None for no limit.
        drop: Names of the columns that a narrow terminal drops first, in the order of this list. If that is not enough,
            the last columns are dropped, until one column is left.
        colours: True to colour states and print the header in bold.
    """
    kept_columns, widths = _fitting(header, rows, columns, drop)
    for row_index, row in enumerate([header, *rows]):
        cells = [_wrapped(row[column], widths[column]) for column in kept_columns]
        for line in range(max(map(len, cells))):
            parts = []
            for column, cell in zip(kept_columns, cells, strict=True):
                text = cell[line] if line < len(cell) else ""
                padded = text + " " * (widths[column] - width(text))
                style = _BOLD if row_index == 0 else _style(header[column], row[column])
                parts.append(styled(padded, style) if colours and style and text else padded)
            yield _GAP.join(parts).rstrip()
    if dropped := [name for column, name in enumerate(header) if column not in kept_columns]:
        for text in _wrapped(f"a wider terminal shows: {', '.join(dropped)}", columns or 0):
            yield styled(text, _DIM) if colours else text


def styled(text: str, style: str) -> str:
    """Return a text with the escape sequences of a style. The blanks at the end of the text stay without style."""
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
    """Return the indexes of the columns to show, and a list with the width of every column.

    `table_lines` describes the arguments.
    """
    cells = [[header[column], *(row[column] for row in rows)] for column in range(len(header))]
    widths = [max(map(width, column)) for column in cells]
    min_widths = [_min_width(column, full) for column, full in zip(cells, widths, strict=True)]
    kept_columns = list(range(len(header)))
    drop_order = [*(header.index(name) for name in drop), *reversed(range(len(header)))]
    while columns is not None:
        gaps = len(_GAP) * (len(kept_columns) - 1)
        excess = sum(widths[column] for column in kept_columns) + gaps - columns
        if excess > sum(widths[column] - min_widths[column] for column in kept_columns) and len(kept_columns) > 1:
            kept_columns.remove(next(column for column in drop_order if column in kept_columns))
            continue
        for column in sorted(kept_columns, key=lambda column: min_widths[column] - widths[column]):
            cut = max(0, min(excess, widths[column] - min_widths[column]))
            widths[column], excess = widths[column] - cut, excess - cut
        break
    return kept_columns, widths


def _min_width(cells: Sequence[str], full_width: int) -> int:
    """Return the smallest width that a column can have. `full_width` is the width of the column without wrapping."""
    words = [word for cell in cells for word in _BREAKS.split(cell)]
    is_text = full_width > _MAX_UNWRAPPED and len(words) > len(cells)
    return max(_MIN_TEXT, *(width(word.rstrip()) for word in words)) if is_text else full_width


def _wrapped(cell: str, max_width: int) -> list[str]:
    lines, line = [], ""
    for word in _BREAKS.split(cell):
        if line and width(f"{line}{word}".rstrip()) > max_width:
            lines.append(line.rstrip())
            line = ""
        line += word
    return [*lines, line.rstrip()]


def _style(name: str, cell: str) -> str:
    return _STATES.get(cell.partition(" ")[0], "") if name in _STATE_COLUMNS else ""


def complain(text: str, status: int) -> int:
    """Print a message to stderr, and return `status`, so that a command can write `return complain(...)`."""
    # If stderr can't be written, for example because the disk is full, the command still returns the exit status.
    with suppress(OSError):
        print(f"autoprof: {plain(text)}", file=sys.stderr)
    return status


def print_json(document: object) -> None:
    """Print a document as JSON, with the field `schema` first."""
    import json

    import msgspec

    content = msgspec.to_builtins(document)
    print(json.dumps({"schema": content.pop("schema")} | content, indent=1))


@contextmanager
def _progress(title: str, total: int | None, *columns: str) -> Iterator[Callable[..., object]]:
    """Show a progress bar on stderr if it is a terminal; otherwise show nothing.

    Args:
        title: Text in front of the bar.
        total: Amount of all work; None if it is unknown.
        columns: The columns of the bar: names of classes of `rich.progress`.

    Yields:
        A function that updates the bar, as `rich.progress.Progress.update` does.
    """
    if not _supports_escapes(sys.stderr):
        yield lambda **changes: None
        return
    from rich import progress
    from rich.console import Console

    text = progress.TextColumn("{task.description}", markup=False)
    shown_columns = [text if name == "TextColumn" else getattr(progress, name)() for name in columns]
    with progress.Progress(*shown_columns, console=Console(stderr=True), transient=True) as display:
        yield partial(display.update, display.add_task(title, total=total))


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on stderr if it is a terminal; otherwise show nothing.

    Args:
        title: Text in front of the bar.
        total: Number of all bytes.

    Yields:
        A function to call with the number of bytes that were done since the last call.
    """
    columns = ("TextColumn", "BarColumn", "DownloadColumn", "TimeRemainingColumn")
    with _progress(title, total, *columns) as update:
        yield lambda done: update(advance=done)


# A function that is called before each file is read. Its arguments are the number of files that were read, the number
# of all files (None if it is unknown), and the name of the file.
Reading = Callable[[int, "int | None", str], object]


@contextmanager
def reading(verb: str = "reading") -> Iterator[Reading]:
    """Show on stderr which file is being read, if stderr is a terminal; otherwise show nothing.

    Yields a function to call before each file is read.
    """
    with _progress("", None, "TextColumn", "BarColumn", "MofNCompleteColumn") as update:
        yield lambda done, total, name: update(completed=done, total=total, description=f"{verb} {plain(name[:60])}")


# A function that shows a status. Its arguments are the text, and the amount of work that is done.
Show = Callable[[str, int], object]


@contextmanager
def lines(total: int, keep_stdout: bool = False) -> Iterator[Show]:
    """Show a status. Yields a function to call with each new status.

    On a terminal, the status is one changing line on stderr. Otherwise, each new text is one line on stdout.

    Args:
        total: Amount of all work; 0 if it is unknown.
        keep_stdout: True to print the lines to stderr instead of stdout.
    """
    if not _supports_escapes(sys.stderr):
        printed: set[str] = set()

        def once(text: str, done: int) -> None:
            if text not in printed:
                printed.add(text)
                print(plain(text), file=sys.stderr if keep_stdout else sys.stdout, flush=True)

        yield once
        return
    columns = ("SpinnerColumn", "BarColumn", "TextColumn", "TimeElapsedColumn")
    with _progress("", total or None, *columns) as update:
        yield lambda text, done: update(description=plain(text), completed=done)


def show(header: Sequence[str], rows: Sequence[Sequence[str]], drop: Sequence[str] = ()) -> None:
    """Print a table to stdout, fitted to the terminal's width if stdout is a terminal.

    `drop` lists the names of the columns that a narrow terminal drops first, in the order of the list.
    """
    rows = [[plain(text) for text in row] for row in rows]
    for line in table_lines(header, rows, columns(sys.stdout), drop, uses_colours(sys.stdout)):
        print(line)


def wrapped(text: str, indent: int = 0, more: str = "") -> list[str]:
    """Return a text wrapped to the width of the terminal, or in one line if stdout is not a terminal.

    Args:
        text: The text to wrap.
        indent: Number of spaces in front of each line.
        more: A name to put after the text. If the name does not fit into the last line, it gets a separate line.
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
    """Return the width of a stream's terminal; None if the stream is not a terminal, or the width is unknown."""
    if not stream.isatty():
        return None
    try:
        return int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def uses_colours(stream: TextIO) -> bool:
    """Return True if text that goes to a stream is to be coloured.

    NO_COLOR switches colours off, and FORCE_COLOR switches them on. Without both variables, a terminal gets colours.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _supports_escapes(stream)


def _supports_escapes(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that supports escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"
