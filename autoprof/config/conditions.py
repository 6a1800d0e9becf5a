"""Conditions that open a window during the run, and the limit after which a step counts as hanging.

This is the grammar of `AUTOPROF_WHEN` and of `[[when]]`. `windows/detector.py` applies the conditions to steps, and
`run/watcher.py` applies the limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from autoprof.config import parsers

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
_NAME = r"[A-Za-z_][A-Za-z0-9_./-]{0,59}"
_NUMBER = r"[0-9]{1,4}(?:\.[0-9]{1,4})?"
_ABOVE = re.compile(rf"({_NAME})\s*>\s*({_NUMBER})([a-z]{{0,12}})")
_TIME = re.compile(rf"({_NUMBER})\s*([smh])")
_RESUME = re.compile(rf"{RESUME}:([0-9]{{1,4}})")


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
        overrides: Settings of the condition's windows, by the names in `values.WINDOW_FIELDS`.
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


def parse(value: object) -> tuple[Condition, ...]:
    """Return the conditions of `AUTOPROF_WHEN`, from text or from a list.

    Raises:
        ValueError: A condition is not in the grammar.
    """
    if isinstance(value, str) and not value.strip():
        return ()
    return tuple(_parsed(word) for word in parsers.words(value))


def from_table(table: dict[str, Any]) -> Condition:
    """Return the condition of a `[[when]]` table.

    Args:
        table: Values that are already checked: the fields in `PARSERS`, and settings of the window.

    Raises:
        ValueError: Fields are missing, or don't fit together.
    """
    fields = {name: table[name] for name in table if name in PARSERS}
    what = fields.pop("what", None)
    if what is None:
        raise ValueError("what is missing")
    share, factor = fields.pop("above", None), fields.pop("factor", None)
    if what == HANG:
        return _hang(table, share, factor)
    if isinstance(share, tuple):
        raise ValueError(f"{what}: above takes a share; a time is for {HANG} only")
    limit_field = {MEMORY: "above", RESUME: "", OOM: ""}.get(what, "factor")
    for name, value in (("above", share), ("factor", factor)):
        if (value is None) == (name == limit_field):
            raise ValueError(f"{name} is missing" if name == limit_field else f"{what} takes no {name}")
    if what == RESUME and ("cool_down" in fields or "at_most" in fields):
        raise ValueError("resume takes neither cool_down nor at_most, because a run is resumed only once")
    above = share if share is not None else factor or 0.0
    overrides = {name: value for name, value in table.items() if name not in PARSERS}
    return _checked(Condition(what=what, above=above, overrides=overrides, **fields))


def _hang(table: dict[str, Any], above: object, factor: float | None) -> Condition:
    for name in table:
        if name not in ("what", "above", "factor", "at_most"):
            raise ValueError(f"{HANG} opens no window: it takes no {name}")
    if (above is None) == (factor is None):
        raise ValueError(f"{HANG} takes either above, a time, or factor")
    if factor is None and not isinstance(above, tuple):
        raise ValueError(f"{HANG}: above takes a time such as 10m, 90s or 1.5h, or {_OFF}")
    number, unit = above if isinstance(above, tuple) else (factor, "")
    fields = {"at_most": table["at_most"]} if "at_most" in table else {}
    return _checked(Condition(what=HANG, above=number, unit=unit, **fields))


def _parsed(text: str) -> Condition:
    if text == OOM:
        return Condition(what=OOM)
    if text == f"{HANG}:{_OFF}":
        return Condition(what=HANG)
    if match := _RESUME.fullmatch(text):
        return _checked(Condition(what=RESUME, steps=parsers.count(match[1])))
    match = _ABOVE.fullmatch(text)
    if match is None or match[1] in (RESUME, OOM):
        hint = f"; {HANG} takes a time such as 10m, a factor such as 5x, or {HANG}:{_OFF}" if HANG in text else ""
        raise ValueError(f"{text!r} is not a condition{hint}")
    what, unit = match[1], match[3]
    if what == HANG and unit not in (*_UNITS, "x"):
        raise ValueError(f"{text!r}: {HANG} takes a time in s, m or h such as 10m, or a factor such as 5x")
    if what != HANG and unit in _UNITS:
        raise ValueError(f"{text!r}: a time such as 10m is for {HANG} only")
    if what != HANG and unit != ("" if what == MEMORY else "x"):
        raise ValueError(f"{text!r}: memory takes a share such as 0.9, the others a factor such as 2x")
    return _checked(Condition(what=what, above=float(match[2]), unit=unit if unit in _UNITS else ""), written=True)


def _checked(condition: Condition, written: bool = False) -> Condition:
    """Return the condition if its limit is allowed.

    Args:
        condition: The condition.
        written: True if the condition comes from text with a limit, such as `hang>10m`. `hang:off` has no limit.

    Raises:
        ValueError: The limit is not allowed.
    """
    if condition.unit or condition.off:
        if written and condition.off:
            raise ValueError(f"{HANG}>0{condition.unit or 'x'}: it must be above 0; {HANG}:{_OFF} switches it off")
        return condition
    if condition.what == MEMORY and not 0 < condition.above < 1:
        raise ValueError(f"{condition}: a share must be between 0 and 1")
    if condition.what not in (MEMORY, RESUME, OOM) and condition.above <= 1:
        raise ValueError(f"{condition}: a factor must be above 1")
    return condition


def _name(value: object) -> str:
    name = parsers.text(value)
    if not re.fullmatch(_NAME, name):
        raise ValueError("")
    return name


def _share_or_time(value: object) -> float | tuple[float, str]:
    """Return a share, or a pair of a time and its unit. For `off`, the time is 0 and the unit is empty."""
    if isinstance(value, str) and value.strip() == _OFF:
        return 0.0, ""
    if isinstance(value, str) and (match := _TIME.fullmatch(value.strip())) and float(match[1]):
        return float(match[1]), match[2]
    return parsers.positive(value)


def _not_negative(value: object) -> int:
    return 0 if value in (0, "0") and not isinstance(value, bool) else parsers.count(value)


# Fields of `[[when]]` besides the settings of a window.
PARSERS: dict[str, tuple[Callable[[object], Any], str]] = {
    "what": (_name, f"one of {', '.join(OWN)}, or the name or kind of a stage or timer of the trainer's process"),
    "factor": (parsers.positive, "a factor above 1"),
    "above": (_share_or_time, f"a share between 0 and 1, or for {HANG} a time such as 10m, or {_OFF}"),
    "steps": (parsers.count, "a number of steps above 0"),
    "cool_down": (_not_negative, "a number of steps"),
    "at_most": (parsers.count, "a number of windows above 0"),
}
