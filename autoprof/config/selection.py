"""Selection of what to capture: grammars of steps, ranks and iterations, and of conditions that open windows.

The settings are `AUTOPROF_STEPS`, `AUTOPROF_RANKS`, `AUTOPROF_ROLLOUT_ITERATIONS`, `AUTOPROF_MINI_BATCHES`,
`AUTOPROF_WHEN` and `[[when]]`. A condition opens a window during the run, or is the limit after which a step counts as
hanging. `windows/detector.py` applies the conditions to steps, and `run/watcher.py` applies the limit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from autoprof.config import values

_NUMBER = re.compile(r"[0-9]{1,12}")
_ORDINAL = re.compile(r"\+([0-9]{1,12})")
_SLOWEST = re.compile(r"slowest(?::([0-9]{1,4}))?")
_RANGE = re.compile(r"([0-9]{0,12}):([0-9]{0,12})(?::([0-9]{0,12}))?")

STEPS_TAKE = "a step (2), steps (2,5), a half-open range (10:13), every 50th (::50), the second step of this run (+2)"
RANKS_TAKE = "a rank (0), ranks (0,8), a half-open range (0:4), all, or slowest:2"
MINI_BATCHES_TAKE = "start:stop in mini-batches of a stage with start < stop (0:2), or all"
ITERATIONS_TAKE = "start:stop in forward passes of the engine with start < stop (0:100), or all"

# Values of `Condition.what` that are not the name of a stage.
STEP, RANK, REPLICA, MEMORY, RESUME, OOM, HANG = OWN = ("step", "rank", "replica", "memory", "resume", "oom", "hang")
# Conditions on statistics that the run's processes report.
REPORTED = (RANK, REPLICA, MEMORY, OOM)
WHEN_TAKES = (
    "conditions such as step>2x, update_actor>1.5x, rank>1.3x, replica>1.3x, memory>0.9, resume:2, oom, hang>10m, "
    "hang>5x, hang:off"
)
# Seconds in each unit of time.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_OFF = "off"
_STAGE = r"[A-Za-z_][A-Za-z0-9_./-]{0,59}"
_LIMIT = r"[0-9]{1,4}(?:\.[0-9]{1,4})?"
_ABOVE = re.compile(rf"({_STAGE})\s*>\s*({_LIMIT})([a-z]{{0,12}})")
_TIME = re.compile(rf"({_LIMIT})\s*([smh])")
_RESUME = re.compile(rf"{RESUME}:([0-9]{{1,4}})")


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

    Attributes:
        numbers: Ranges of global steps.
        steps_in_run: Numbers of steps in this run, from 1. In a resumed run, they are lower than the global steps.
    """

    numbers: tuple[_Span, ...]
    steps_in_run: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Return the steps of `AUTOPROF_STEPS`. An empty text captures no step.

        Raises:
            ValueError: `text` is not in the grammar, or could never match a step.
        """
        numbers, steps_in_run = [], []
        for item in _split_items(text) if text.strip() else ():
            if match := _ORDINAL.fullmatch(item):
                if int(match[1]) < 1:
                    raise ValueError(f"{item} counts from +1")
                steps_in_run.append(int(match[1]))
            else:
                numbers.append(_parse_span(item))
        return cls(tuple(numbers), tuple(steps_in_run))

    def matches(self, step: int, step_in_run: int) -> bool:
        """Return True if `step` is to be captured.

        `step_in_run` is the number of the step in this run, from 1. In a resumed run, it is lower than `step`.
        """
        return step_in_run in self.steps_in_run or any(step in span for span in self.numbers)

    @property
    def any(self) -> bool:
        """True if any steps are to be captured. Otherwise the run records only its timeline."""
        return bool(self.numbers or self.steps_in_run)

    def any_after(self, step: int, step_in_run: int) -> bool:
        """Return True if a step after `step`, which is the `step_in_run`-th step of this run, may match."""
        return any(n > step_in_run for n in self.steps_in_run) or any(span.any_after(step) for span in self.numbers)


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
    @functools.lru_cache
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
        return cls(tuple(_parse_span(item) for item in _split_items(text)))

    def __contains__(self, rank: int) -> bool:
        return self.spans is None or any(rank in span for span in self.spans)

    def any_in(self, ranks: range) -> bool:
        """Return True if one of `ranks` is captured."""
        return any(rank in self for rank in ranks)


@functools.lru_cache
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


def _split_items(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not any(items):
        raise ValueError("it is empty")
    if not all(items):
        raise ValueError("there is nothing between two commas")
    return items


def _parse_span(item: str) -> _Span:
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


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition and the window that it opens. A `hang` condition opens no window: it is the limit for hanging steps.

    Attributes:
        what: One of `OWN`, or the name or kind of a stage or timer of the trainer's process.
        above: Limit: a share from 0 to 1 for `memory`, a time if `unit` is set, else a factor of the usual value. 0 for
            conditions without a limit.
        unit: Unit of `above` if `above` is a time, `s`, `m` or `h`; else empty.
        steps: Number of steps to capture, beginning with the next one.
        cool_down: Number of steps after the window in which the condition opens no other window.
        at_most: Maximum number of windows that the condition opens in a run. For `hang`, maximum number of times that
            all processes write their stacks.
        overrides: Settings of the condition's windows, by the names in `settings.WINDOW_FIELDS`.
    """

    what: str
    above: float = 0.0
    unit: str = ""
    steps: int = 1
    cool_down: int = 20
    at_most: int = 3
    overrides: dict[str, Any] = {}

    def __str__(self) -> str:
        """Return the condition as text in the grammar of `AUTOPROF_WHEN`."""
        if self.what == RESUME:
            return f"{RESUME}:{self.steps}"
        if self.what == OOM:
            return OOM
        if self.off:
            return f"{HANG}:{_OFF}"
        return f"{self.what}>{self.above:.9g}{'' if self.what == MEMORY else self.unit or 'x'}"

    @property
    def off(self) -> bool:
        """True for `hang:off`: no step counts as hanging."""
        return self.what == HANG and not self.above

    @property
    def seconds(self) -> float:
        """Time limit in seconds, or 0 if the condition has no time limit."""
        return self.above * _UNITS[self.unit] if self.unit else 0.0


def parse_conditions(value: object) -> tuple[Condition, ...]:
    """Return the conditions of `AUTOPROF_WHEN`, from text or from a list.

    Raises:
        ValueError: A condition is not in the grammar.
    """
    if isinstance(value, str) and not value.strip():
        return ()
    return tuple(_parse_condition(word) for word in values.words(value))


def condition_of(table: dict[str, Any]) -> Condition:
    """Return the condition of a `[[when]]` table.

    Args:
        table: Values that are already checked: the fields in `CONDITION_PARSERS`, and settings of the window.

    Raises:
        ValueError: Fields are missing, or don't fit together.
    """
    fields = {name: table[name] for name in table if name in CONDITION_PARSERS}
    what = fields.pop("what", None)
    if what is None:
        raise ValueError("what is missing")
    share, factor = fields.pop("above", None), fields.pop("factor", None)
    if what == HANG:
        return _parse_hang(table, share, factor)
    if isinstance(share, tuple):
        raise ValueError(f"{what}: above takes a share; a time is for {HANG} only")
    limit_field = {MEMORY: "above", RESUME: "", OOM: ""}.get(what, "factor")
    for name, value in (("above", share), ("factor", factor)):
        if (value is None) == (name == limit_field):
            raise ValueError(f"{name} is missing" if name == limit_field else f"{what} takes no {name}")
    if what == RESUME and ("cool_down" in fields or "at_most" in fields):
        raise ValueError("resume takes neither cool_down nor at_most, because a run is resumed only once")
    above = share if share is not None else factor or 0.0
    overrides = {name: value for name, value in table.items() if name not in CONDITION_PARSERS}
    return _check_limit(Condition(what=what, above=above, overrides=overrides, **fields))


def _parse_hang(table: dict[str, Any], above: object, factor: float | None) -> Condition:
    for name in table:
        if name not in ("what", "above", "factor", "at_most"):
            raise ValueError(f"{HANG} opens no window: it takes no {name}")
    if (above is None) == (factor is None):
        raise ValueError(f"{HANG} takes either above, a time, or factor")
    if factor is None and not isinstance(above, tuple):
        raise ValueError(f"{HANG}: above takes a time such as 10m, 90s or 1.5h, or {_OFF}")
    number, unit = above if isinstance(above, tuple) else (factor, "")
    fields = {"at_most": table["at_most"]} if "at_most" in table else {}
    return _check_limit(Condition(what=HANG, above=number, unit=unit, **fields))


def _parse_condition(text: str) -> Condition:
    if text == OOM:
        return Condition(what=OOM)
    if text == f"{HANG}:{_OFF}":
        return Condition(what=HANG)
    if match := _RESUME.fullmatch(text):
        return _check_limit(Condition(what=RESUME, steps=values.count(match[1])))
    match = _ABOVE.fullmatch(text)
    if match is None or match[1] in (RESUME, OOM):
        hint = f"; {HANG} takes a time such as 10m, a factor such as 5x, or {HANG}:{_OFF}" if HANG in text else ""
        raise ValueError(f"{text!r} is not a condition{hint}")
    what, unit = match[1], match[3]
    if what == HANG and unit not in (*_UNITS, "x"):
        raise ValueError(f"{text!r}: {HANG} takes a time in s, m or h such as 10m, or a factor such as 5x")
    if what == HANG and not float(match[2]):
        raise ValueError(f"{HANG}>0{unit}: it must be above 0; {HANG}:{_OFF} switches it off")
    if what != HANG and unit in _UNITS:
        raise ValueError(f"{text!r}: a time such as 10m is for {HANG} only")
    if what != HANG and unit != ("" if what == MEMORY else "x"):
        raise ValueError(f"{text!r}: memory takes a share such as 0.9, the others a factor such as 2x")
    return _check_limit(Condition(what=what, above=float(match[2]), unit=unit if unit in _UNITS else ""))


def _check_limit(condition: Condition) -> Condition:
    """Return the condition if its limit is allowed.

    Raises:
        ValueError: The limit is not allowed.
    """
    if condition.what == MEMORY and not 0 < condition.above < 1:
        raise ValueError(f"{condition}: a share must be between 0 and 1")
    has_factor = not (condition.unit or condition.off or condition.what in (MEMORY, RESUME, OOM))
    if has_factor and condition.above <= 1:
        raise ValueError(f"{condition}: a factor must be above 1")
    return condition


def _name(value: object) -> str:
    name = values.text(value)
    if not re.fullmatch(_STAGE, name):
        raise ValueError("")
    return name


def _share_or_time(value: object) -> float | tuple[float, str]:
    """Return a share, or a pair of a time and its unit. For `off`, the time is 0 and the unit is empty."""
    if isinstance(value, str) and value.strip() == _OFF:
        return 0.0, ""
    if isinstance(value, str) and (match := _TIME.fullmatch(value.strip())) and float(match[1]):
        return float(match[1]), match[2]
    return values.positive(value)


def _not_negative(value: object) -> int:
    return 0 if value in (0, "0") and not isinstance(value, bool) else values.count(value)


# Fields of `[[when]]` besides the settings of a window.
CONDITION_PARSERS: dict[str, tuple[Callable[[object], Any], str]] = {
    "what": (_name, f"one of {', '.join(OWN)}, or the name or kind of a stage or timer of the trainer's process"),
    "factor": (values.positive, "a factor above 1"),
    "above": (_share_or_time, f"a share between 0 and 1, or for {HANG} a time such as 10m, or {_OFF}"),
    "steps": (values.count, "a number of steps above 0"),
    "cool_down": (_not_negative, "a number of steps"),
    "at_most": (values.count, "a number of windows above 0"),
}


def steps_in_words(steps: str, when: Iterable[Condition]) -> str:
    """Return a text with the settings `AUTOPROF_STEPS` and `AUTOPROF_WHEN`, which choose the steps to capture."""
    conditions = ", ".join(map(str, when))
    chosen = [steps and f"steps {steps}", conditions and f"when {conditions}"]
    return ", ".join(filter(None, chosen)) or "the timeline alone"
