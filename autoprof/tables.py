"""Tables on a terminal, plain aligned lines in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoprof.redaction import plain


def show(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under a header."""
    rows = [[plain(text) for text in row] for row in rows]
    console = Console(highlight=False)
    if console.is_terminal:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def size(number: int) -> str:
    """A number of bytes as people read it."""
    amount = float(number)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"
