"""Which colour and pattern a stage has on a page.

A colour stands for a kind of work, and patterns tell stages of one kind apart, so nothing is said by colour alone. The
colours are tokens: the page's style sheet gives each its value in light and in dark. They are those of Okabe and Ito
(2008, Color Universal Design), which colour-blind people tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from autoprof.report.figures import OTHER

# Names are those of verl's timers, and of the stages that recipes wrap. The first that fits is taken.
_FAMILIES = (
    ("idle", re.compile(rf"^({OTHER}|idle|waiting)$")),
    ("weights", re.compile(r"weight|sync|broadcast")),
    ("keeping", re.compile(r"checkpoint|valid|test|eval|dump")),
    ("reward", re.compile(r"reward|score|^rm")),
    ("training", re.compile(r"update|train|backward|optim")),
    ("scoring", re.compile(r"log_?prob|ref|value|adv|critic")),
    ("tool", re.compile(r"^tool")),
    ("generation", re.compile(r"gen|rollout|turn|request|window|sample|sequence")),
)
PATTERNS = ("", "/", ".", "x", "\\", "-", "|", "+")
TOKEN = "@"


class Look(msgspec.Struct, frozen=True):
    """A colour as a token of the style sheet, and plotly's name of a pattern."""

    colour: str
    pattern: str


def family(name: str) -> str:
    """The kind of work that a stage does, by its name."""
    lower = name.lower()
    return next((kind for kind, words in _FAMILIES if words.search(lower)), "more")


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name: names of one kind share its colour, each with a pattern of its own."""
    given: dict[str, Look] = {}
    taken: dict[str, int] = {}
    for name in names:
        if name not in given:
            kind = family(name)
            count = taken[kind] = taken.get(kind, -1) + 1
            given[name] = Look(f"{TOKEN}{kind}", PATTERNS[count % len(PATTERNS)])
    return given
