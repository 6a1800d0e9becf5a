"""Slow steps, and the usual seconds of the steps around one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from autoprof.report.figures.step_kinds import CAPTURED, REGULAR, WARM_UP
from autoprof.report.figures.words import OWN
from autoprof.report.model.run import StepRow

# A step is slow that takes so much longer than the median of the steps around it, and so many seconds.
SLOW_RATIO, SLOW_S = 1.2, 1.0
# The steps around it: this many before and after. With fewer than FEWEST of one kind no step is slow.
AROUND, FEWEST = 10, 3


def own_seconds(row: StepRow) -> float:
    """Return the seconds of a step without autoprof's own, and without those by which what it recorded was slower."""
    return row.seconds - row.stages.get(OWN, 0.0) - sum(row.slowed.values())


def own_stages(row: StepRow) -> dict[str, float]:
    """Return the seconds of a step by stage, likewise."""
    return {name: took - row.slowed.get(name, 0.0) for name, took in row.stages.items() if name != OWN}


def mark_slow(rows: list[StepRow]) -> list[StepRow]:
    """Return the rows with the usual seconds around each, and whether it is slow."""
    rows = [msgspec.structs.replace(row, slowed=_slowed(rows, place)) for place, row in enumerate(rows)]
    marked = []
    for place, row in enumerate(rows):
        around = _around(rows, place)
        if len(around) >= FEWEST:
            usual, own = median(map(own_seconds, around)), own_seconds(row)
            slow = own > SLOW_RATIO * usual and own - usual > SLOW_S
            row = msgspec.structs.replace(row, usual_s=usual, slow=slow)
        marked.append(row)
    return marked


def _slowed(rows: Sequence[StepRow], place: int) -> dict[str, float]:
    """Return by how much stages of a step took longer than where they were not recorded, as far as they were."""
    row = rows[place]
    if not row.recorded or any(each.recorded for each in _around(rows, place)):
        return {}
    usual = usual_stages(rows, place, where_done=True)
    longer = {name: min(took, row.stages.get(name, 0.0) - usual.get(name, 0.0)) for name, took in row.recorded.items()}
    return {name: more for name, more in longer.items() if more > 0 and usual.get(name)}


def _around(rows: Sequence[StepRow], place: int) -> list[StepRow]:
    """Return the steps to compare the one at `place` with: regular ones, or none for a warm-up or if they are too few.

    A captured step is compared with other captured ones, if they are enough.
    """
    own = rows[place].kind
    if own == WARM_UP:
        return []
    near = [*rows[max(0, place - AROUND) : place], *rows[place + 1 : place + 1 + AROUND]]
    for kind in (CAPTURED, REGULAR) if own == CAPTURED else (REGULAR,):
        if len(alike := [row for row in near if row.kind == kind]) >= FEWEST:
            return alike
    return []


def usual_stages(rows: Sequence[StepRow], place: int, where_done: bool = False) -> dict[str, float]:
    """Return the median seconds of each stage around the step at `place`; nothing for a warm-up, or of too few steps.

    With `where_done` of those steps that have the stage, else of all.
    """
    around = _around(rows, place)
    if len(around) < FEWEST:
        return {}
    stages = [own_stages(row) for row in around]
    names = {name for each in stages for name in each}
    if where_done:
        return {name: median(each[name] for each in stages if name in each) for name in names}
    return {name: median(each.get(name, 0.0) for each in stages) for name in names}
