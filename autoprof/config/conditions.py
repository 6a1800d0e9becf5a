"""Conditions that open a window while the run goes on: the grammar of `AUTOPROF_WHEN` and of `[[when]]`.

They are data; `windows/detector.py` compares steps with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from autoprof.config import parsers

# Names that no stage has.
STEP, RANK, REPLICA, MEMORY, RESUME, OOM = OWN = ("step", "rank", "replica", "memory", "resume", "oom")
# Conditions on statistics that the run's processes report.
TOLD = (RANK, REPLICA, MEMORY, OOM)
WHEN_TAKES = "conditions such as step>2x, update_actor>1.5x, rank>1.3x, replica>1.3x, memory>0.9, resume:2, oom"
_NAME = r"[A-Za-z_][A-Za-z0-9_./-]{0,59}"
_ABOVE = re.compile(rf"({_NAME})\s*>\s*([0-9]{{1,4}}(?:\.[0-9]{{1,4}})?)(x?)")
_RESUME = re.compile(rf"{RESUME}:([0-9]{{1,4}})")


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition, and the window that it opens.

    Attributes:
        what: One of `OWN`, or the name or kind of a stage or timer of the trainer's process.
        above: The factor of what is usual that must be passed; with `memory` the share. 0 where there is none.
        steps: How many steps are captured, from the next that begins on.
        cool_down: For so many steps after them the condition opens no other window.
        at_most: So many windows it opens in the run.
        overrides: Settings of its windows: those of `settings.WINDOW_FIELDS`.
    """

    what: str
    above: float = 0.0
    steps: int = 1
    cool_down: int = 20
    at_most: int = 3
    overrides: dict[str, Any] = {}

    def __str__(self) -> str:
        """Return its text in `AUTOPROF_WHEN`."""
        if self.what == RESUME:
            return f"{RESUME}:{self.steps}"
        if self.what == OOM:
            return OOM
        return f"{self.what}>{self.above:g}{'' if self.what == MEMORY else 'x'}"


def parse(value: object) -> tuple[Condition, ...]:
    """Read `AUTOPROF_WHEN`, or a list of its conditions.

    Raises:
        ValueError: One is not in the grammar.
    """
    if isinstance(value, str) and not value.strip():
        return ()
    return tuple(_parsed(word) for word in parsers.words(value))


def from_table(table: dict[str, Any]) -> Condition:
    """Return the condition of a `[[when]]` table: `PARSERS` has read its own fields, the others are its window's.

    Raises:
        ValueError: Fields are missing, or don't belong together.
    """
    own = {name: table[name] for name in table if name in PARSERS}
    what = own.pop("what", None)
    if what is None:
        raise ValueError("what is missing")
    share, factor = own.pop("above", None), own.pop("factor", None)
    takes = {MEMORY: "above", RESUME: "", OOM: ""}.get(what, "factor")
    for name, given in (("above", share), ("factor", factor)):
        if (given is None) == (name == takes):
            raise ValueError(f"{name} is missing" if name == takes else f"{what} takes no {name}")
    if what == RESUME and ("cool_down" in own or "at_most" in own):
        raise ValueError("a run is resumed once: resume takes neither cool_down nor at_most")
    above = share if share is not None else factor or 0.0
    overrides = {name: value for name, value in table.items() if name not in PARSERS}
    return _checked(Condition(what=what, above=above, overrides=overrides, **own))


def _parsed(text: str) -> Condition:
    if text == OOM:
        return Condition(what=OOM)
    if match := _RESUME.fullmatch(text):
        return _checked(Condition(what=RESUME, steps=parsers.count(match[1])))
    match = _ABOVE.fullmatch(text)
    if match is None or match[1] in (RESUME, OOM):
        raise ValueError(f"{text!r} is no condition")
    if bool(match[3]) == (match[1] == MEMORY):
        raise ValueError(f"{text!r}: memory takes a share such as 0.9, the others a factor such as 2x")
    return _checked(Condition(what=match[1], above=float(match[2])))


def _checked(condition: Condition) -> Condition:
    if condition.what == MEMORY and not 0 < condition.above < 1:
        raise ValueError(f"{condition}: a share lies between 0 and 1")
    if condition.what not in (MEMORY, RESUME, OOM) and condition.above <= 1:
        raise ValueError(f"{condition}: a factor is above 1")
    return condition


def _name(value: object) -> str:
    name = parsers.text(value)
    if not re.fullmatch(_NAME, name):
        raise ValueError("")
    return name


def _not_negative(value: object) -> int:
    return 0 if value in (0, "0") and not isinstance(value, bool) else parsers.count(value)


# The fields of `[[when]]` besides those of a window.
PARSERS: dict[str, tuple[Callable[[object], Any], str]] = {
    "what": (_name, f"one of {', '.join(OWN)}, or the name or kind of a stage or timer of the trainer's process"),
    "factor": (parsers.positive, "a factor above 1"),
    "above": (parsers.positive, "a share between 0 and 1"),
    "steps": (parsers.count, "a number of steps above 0"),
    "cool_down": (_not_negative, "a number of steps"),
    "at_most": (parsers.count, "a number of windows above 0"),
}
