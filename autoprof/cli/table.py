"""Tables for a terminal of any width: text wraps at words, columns go where there is no room, names stay whole."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

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


def lines(
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
