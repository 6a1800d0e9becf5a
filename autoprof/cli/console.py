"""Output of commands: messages, tables and progress, to a stream that may be full or closed.

Tables fit any width: text wraps at words, columns without room are dropped, names stay whole. rich draws progress bars
and is imported on a terminal only.
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
    """Standard output takes no more. No command catches it, as commands do errors of the files that they read."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Output(io.TextIOWrapper):
    """Standard output that raises `Lost` where it can't be written."""

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
    """Put an `Output` in the place of standard output, and return what was there.

    First whatever is closed is opened: the next file would get its number, and all that is printed. Commands that
    `autoprof run` becomes find it closed, since Python's files are not inherited.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            place = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(place, "r" if name == "stdin" else "w", encoding="utf-8"))
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
    """Write what is left, and put standard output back.

    Raises:
        Lost: It can't be written.
    """
    ours, sys.stdout = sys.stdout, real
    if isinstance(ours, Output):
        try:
            ours.flush()
        finally:
            ours.detach()


def lost_output(error: OSError) -> int:
    """Say why standard output is lost, if whoever reads it has not gone, and return the exit status."""
    # The interpreter tries again at its end, and would show a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0

    return complain(f"standard output: {error.strerror}", 1)


_GAP = "  "
# A column with longer cells than that, of several words, is text. It wraps, but not to less than the other.
_TEXT, _LEAST = 30, 24
_BETWEEN = re.compile(r"(?<=[ ,])(?=[^ ])")
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
        header: The names of the columns.
        rows: The cells.
        columns: The width of the terminal; None for no limit.
        drop: Columns that go first where there is no room, in this order; then the last ones, until one is left.
        colours: Whether states have colours, and the header is bold.
    """
    kept, widths = _fitting(header, rows, columns, drop)
    for place, row in enumerate([header, *rows]):
        cells = [_wrapped(row[column], widths[column]) for column in kept]
        for number in range(max(map(len, cells))):
            shown = []
            for column, cell in zip(kept, cells, strict=True):
                text = cell[number] if number < len(cell) else ""
                padded = text + " " * (widths[column] - width(text))
                style = _BOLD if place == 0 else _style(header[column], row[column])
                shown.append(styled(padded, style) if colours and style and text else padded)
            yield _GAP.join(shown).rstrip()
    if gone := [name for column, name in enumerate(header) if column not in kept]:
        for text in _wrapped(f"a wider terminal shows: {', '.join(gone)}", columns or 0):
            yield styled(text, _DIM) if colours else text


def styled(text: str, style: str) -> str:
    """Return a text with its colour; blanks at its end have none."""
    bare = text.rstrip()
    return f"\x1b[{style}m{bare}\x1b[0m{text[len(bare) :]}"


def width(text: str) -> int:
    """Return the number of a terminal's columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def _fitting(
    header: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None, drop: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Return the columns that are shown, and the width of each column."""
    cells = [[header[column], *(row[column] for row in rows)] for column in range(len(header))]
    widths = [max(map(width, column)) for column in cells]
    least = [_least(column, whole) for column, whole in zip(cells, widths, strict=True)]
    kept = list(range(len(header)))
    going = [*(header.index(name) for name in drop), *reversed(range(len(header)))]
    while columns is not None:
        gaps = len(_GAP) * (len(kept) - 1)
        over = sum(widths[column] for column in kept) + gaps - columns
        if over > sum(widths[column] - least[column] for column in kept) and len(kept) > 1:
            kept.remove(next(column for column in going if column in kept))
            continue
        for column in sorted(kept, key=lambda column: least[column] - widths[column]):
            less = max(0, min(over, widths[column] - least[column]))
            widths[column], over = widths[column] - less, over - less
        break
    return kept, widths


def _least(cells: Sequence[str], whole: int) -> int:
    """Return the width that a column needs at least."""
    words = [word for cell in cells for word in _BETWEEN.split(cell)]
    is_text = whole > _TEXT and len(words) > len(cells)
    return max(_LEAST, *(width(word.rstrip()) for word in words)) if is_text else whole


def _wrapped(cell: str, room: int) -> list[str]:
    found, line = [], ""
    for word in _BETWEEN.split(cell):
        if line and width(f"{line}{word}".rstrip()) > room:
            found.append(line.rstrip())
            line = ""
        line += word
    return [*found, line.rstrip()]


def _style(name: str, cell: str) -> str:
    return _STATES.get(cell.partition(" ")[0], "") if name in _STATE_COLUMNS else ""


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

    rows = [[plain(text) for text in row] for row in rows]
    for line in table_lines(header, rows, columns(sys.stdout), drop, coloured(sys.stdout)):
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
