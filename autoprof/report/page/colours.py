"""Colours and patterns of stages on a page.

A colour stands for a kind of work, and patterns tell stages of one kind apart, so nothing is said by colour alone. The
colours are tokens: the page's style sheet gives each its value in light and in dark. They are those of Okabe and Ito
(2008, Color Universal Design), which colour-blind people tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from autoprof.report.figures import words
from autoprof.report.figures.words import OTHER

_FAMILIES = {
    words.GENERATION: "generation",
    words.SCORING: "scoring",
    words.TRAINING: "training",
    words.SYNC: "weights",
    words.VALIDATION: "keeping",
    words.CHECKPOINT: "keeping",
    words.REWARD: "reward",
}
# Names of this page's own.
_OWN = {OTHER: "idle", "waiting": "idle", "turn": "generation", "samples": "generation", "requests": "generation"}
# What one name after the other of a kind gets.
PATTERNS = ("", "/", ".", "x", "\\", "-", "|", "+")
TOKEN = "@"


class Look(msgspec.Struct, frozen=True):
    """A colour as a token of the style sheet, and plotly's name of a pattern."""

    colour: str
    pattern: str


def family(name: str, stage_kind: str = "") -> str:
    """Return the style sheet's name for a stage's kind of work, by its kind, or else by the stage's name."""
    if name.startswith("tool "):
        return "tool"
    return _OWN.get(name) or _FAMILIES.get(words.meaning(name, stage_kind=stage_kind), "more")


def looks(names: Iterable[str], kinds: Mapping[str, str] | None = None) -> dict[str, Look]:
    """Return a look for each name: names of one kind share its colour, each with a pattern of its own.

    Args:
        names: The names.
        kinds: Kinds of stages by name, where the name does not tell.
    """
    known = kinds or {}
    given: dict[str, Look] = {}
    taken: dict[str, int] = {}
    for name in names:
        if name not in given:
            kind = family(name, known.get(name, ""))
            count = taken[kind] = taken.get(kind, -1) + 1
            given[name] = Look(f"{TOKEN}{kind}", PATTERNS[count % len(PATTERNS)])
    return given
