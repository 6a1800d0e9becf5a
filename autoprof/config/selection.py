"""Selection of steps and ranks: the grammars of `AUTOPROF_STEPS` and `AUTOPROF_RANKS`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"[0-9]{1,12}")
_ORDINAL = re.compile(r"\+([0-9]{1,12})")
_SLOWEST = re.compile(r"slowest(?::([0-9]{1,4}))?")
_RANGE = re.compile(r"([0-9]{0,12}):([0-9]{0,12})(?::([0-9]{0,12}))?")

STEPS_TAKE = "a step (2), steps (2,5), a half-open range (10:13), every 50th (::50), the second step of this run (+2)"
RANKS_TAKE = "a rank (0), ranks (0,8), a half-open range (0:4), all, or slowest:2"
MINI_BATCHES_TAKE = "start:stop in mini-batches of a stage with start < stop (0:2), or all"
ITERATIONS_TAKE = "start:stop in forward passes of the engine with start < stop (0:100), or all"


@dataclass(frozen=True)
class _Span:
    """Half-open range of whole numbers. `stop=None` means that the range has no end."""

    start: int
    stop: int | None
    stride: int = 1

    def __contains__(self, number: int) -> bool:
        if number < self.start or (self.stop is not None and number >= self.stop):
            return False
        return (number - self.start) % self.stride == 0

    def any_after(self, number: int) -> bool:
        if self.stop is None:
            return True
        following = max(self.start, number + 1)
        following += (self.start - following) % self.stride
        return following < self.stop


@dataclass(frozen=True)
class Steps:
    """Steps to capture.

    A step is selected by its number in the trainer, or by its position in the order in which this run executes steps.
    """

    numbers: tuple[_Span, ...]
    ordinals: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Return the steps of `AUTOPROF_STEPS`. An empty text captures no step.

        Raises:
            ValueError: `text` is not in the grammar, or could never match a step.
        """
        numbers, ordinals = [], []
        for item in _items(text) if text.strip() else ():
            if ordinal := _ORDINAL.fullmatch(item):
                if int(ordinal[1]) < 1:
                    raise ValueError(f"{item} counts from +1")
                ordinals.append(int(ordinal[1]))
            else:
                numbers.append(_span(item))
        return cls(tuple(numbers), tuple(ordinals))

    def match(self, step: int, ordinal: int) -> bool:
        """Return True if `step` is to be captured.

        `ordinal` is the position of `step` in the order in which this run executes steps, from 1.
        """
        return ordinal in self.ordinals or any(step in span for span in self.numbers)

    @property
    def any(self) -> bool:
        """True if any steps are to be captured. Otherwise the run records only its timeline."""
        return bool(self.numbers or self.ordinals)

    def any_after(self, step: int, ordinal: int) -> bool:
        """Return True if a step after `step`, which is the `ordinal`-th step of this run, may match."""
        return any(n > ordinal for n in self.ordinals) or any(span.any_after(step) for span in self.numbers)


@dataclass(frozen=True)
class Ranks:
    """Global ranks to capture.

    Attributes:
        spans: Ranges of ranks; None for all ranks.
        slowest: Number of slowest ranks to capture; 0 for the ranks in `spans`. Once the slowest ranks are known, the
            settings of a window name them (`Settings.overridden`). Until then, rank 0 is captured.
    """

    spans: tuple[_Span, ...] | None
    slowest: int = 0

    @classmethod
    def parse(cls, text: str) -> Ranks:
        """Return the ranks of `AUTOPROF_RANKS`.

        Raises:
            ValueError: `text` is not in the grammar.
        """
        if text.strip().lower() == "all":
            return cls(None)
        if match := _SLOWEST.fullmatch(text.strip().lower()):
            if (count := int(match[1] or 1)) < 1:
                raise ValueError(f"{text.strip()} selects no rank")
            return cls((_Span(0, 1),), count)
        return cls(tuple(_span(item) for item in _items(text)))

    def __contains__(self, rank: int) -> bool:
        return self.spans is None or any(rank in span for span in self.spans)

    def any_in(self, ranks: range) -> bool:
        """Return True if one of `ranks` is captured."""
        return any(rank in self for rank in ranks)


def parse_iterations(text: str) -> tuple[int, int | None]:
    """Return the range of `AUTOPROF_ROLLOUT_ITERATIONS` or `AUTOPROF_MINI_BATCHES`.

    Returns:
        Number of the first forward pass or mini-batch to record, counted from 0, and number of the first one that is no
        longer recorded, or None if the range has no end.

    Raises:
        ValueError: `text` is not in the grammar, or the range is empty.
    """
    if text.strip().lower() == "all":
        return 0, None
    match = re.fullmatch(r"([0-9]{0,9}):([0-9]{1,9})", text.strip())
    if match is None:
        raise ValueError(f"{text.strip()!r} is not a range")
    start, stop = int(match[1] or 0), int(match[2])
    if start >= stop:
        raise ValueError(f"{text.strip()} is empty")
    return start, stop


def _items(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not any(items):
        raise ValueError("it is empty")
    if not all(items):
        raise ValueError("there is nothing between two commas")
    return items


def _span(item: str) -> _Span:
    if _NUMBER.fullmatch(item):
        return _Span(int(item), int(item) + 1)
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} is neither a number nor a range")
    start, stop, stride = int(match[1] or 0), int(match[2]) if match[2] else None, int(match[3] or 1)
    if stride == 0:
        raise ValueError(f"{item} has a stride of 0")
    if stop is not None and start >= stop:
        raise ValueError(f"{item} is an empty range")
    return _Span(start, stop, stride)
