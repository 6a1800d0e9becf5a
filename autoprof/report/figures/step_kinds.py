"""Kinds of steps, and the choice of the steps that give the medians, shares and rates of a run."""

from __future__ import annotations

from collections.abc import Sequence

from autoprof.report.figures.words import several
from autoprof.report.model.run import StepRow

# The first step of each start of the trainer: it fills caches, compiles kernels and waits for late processes.
WARM_UP = "warm-up"
# A step in which a profiler recorded in some process, which makes it slower.
CAPTURED = "captured"
REGULAR = "regular"


def kind(first: bool, captured: bool) -> str:
    """Return the kind of a step. A captured first step is a warm-up."""
    return WARM_UP if first else CAPTURED if captured else REGULAR


def typical(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return the regular steps; without any the captured ones, else the warm-ups."""
    return next((found for of in (REGULAR, CAPTURED) if (found := _of(rows, of))), list(rows))


def basis(rows: Sequence[StepRow]) -> str:
    """Return which steps `typical` chooses, and the others: `1 regular step; 1 warm-up, 2 captured`."""
    counts = {of: len(_of(rows, of)) for of in (REGULAR, CAPTURED, WARM_UP)}
    rest: tuple[str, ...] = ()
    if counts[REGULAR]:
        chosen, rest = several(counts[REGULAR], "regular step"), (WARM_UP, CAPTURED)
    elif counts[CAPTURED]:
        chosen, rest = f"no regular step; of {several(counts[CAPTURED], 'captured step')}", (WARM_UP,)
    else:
        chosen = f"no regular step; of {several(counts[WARM_UP], 'warm-up step')}"
    others = ", ".join(f"{counts[of]} {of}" for of in rest if counts[of])
    return f"{chosen}; {others}" if others else chosen


def _of(rows: Sequence[StepRow], of: str) -> list[StepRow]:
    return [row for row in rows if row.kind == of]
