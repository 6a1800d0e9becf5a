"""Places in code, as they stand in a snapshot: bounded, and without secrets and autoprof's own wrappers."""

from __future__ import annotations

from types import CodeType
from typing import TypeAlias

from autoprof.base.redact import hidden, writable
from autoprof.run.watch import owners
from autoprof.rundir.stacks import Frame

# Of a stack so many functions are told: those outside first, then the innermost.
_OUTER, _INNER = 20, 120
# So many are looked at.
MOST_DEEP = 3_000
_LONGEST = 300

# Code, and the line that it is at.
Place: TypeAlias = "tuple[CodeType, int]"


class Names:
    """Names of code for one snapshot, in which most of them stand often."""

    def __init__(self) -> None:
        self._known: dict[CodeType, tuple[str, str]] = {}

    def frames(self, places: list[Place]) -> list[Frame]:
        """Return a stack, from the innermost place to the outermost, as it is told: the outermost first.

        autoprof's functions around those of the user are left out, but for innermost ones: it works there itself.
        """
        inside = 0
        while inside < len(places) and owners.is_own(places[inside][0]):
            inside += 1
        kept = places[:inside] + [place for place in places[inside:] if not owners.is_around(place[0])]
        cut = len(kept) - _OUTER - _INNER
        if cut <= 1:
            return [self._frame(place) for place in reversed(kept)]
        more = "at least " if len(places) >= MOST_DEEP else ""
        inner, outer = kept[:_INNER], kept[len(kept) - _OUTER :]
        left_out = Frame(f"... {more}{cut} more functions ...")
        return [*map(self._frame, reversed(outer)), left_out, *map(self._frame, reversed(inner))]

    def _frame(self, place: Place) -> Frame:
        code, line = place
        known = self._known.get(code)
        if known is None:
            function = getattr(code, "co_qualname", code.co_name)
            known = self._known[code] = text(function), text(code.co_filename)
        return Frame(*known, line)


def text(name: str) -> str:
    """Return a name that the user's code has given, as a file may hold it."""
    return writable(hidden(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."))
