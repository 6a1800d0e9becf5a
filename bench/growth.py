"""Cost of a step's begin and end with more actors

A trainer with small Ray actors, in one process with autoprof. Its steps do nothing, so their time is the time that
autoprof adds at their begin and end. It is compared with the framework's own broadcast: `ray.get` of an empty call to
each actor. In a window, whole steps of all ranks are recorded (`AUTOPROF_MODE=continuous`, `AUTOPROF_RANKS=all`), and
autoprof calls each actor at the end of the step. Outside of windows it calls no actor.
"""

from __future__ import annotations

import tempfile

import msgspec

from bench import processes
from bench.paired import Goal, Table
from bench.processes import CHILDREN, MAIN
from bench.results import Findings

TURNS, QUICK = 8, 3
COUNTS, FEW = (1, 8, 64, 256), (1, 8)
# With 256 actors on two cores, the start takes ten minutes and each turn one.
TIMEOUT_S = 2400

# Prefix of the line in which a child prints its result.
FOUND = "found: "
BROADCAST, OUTSIDE, INSIDE = "ray.get of a call to each", "autoprof, no window", "autoprof, window"


class Grown(msgspec.Struct):
    """The child's answer for one number of actors.

    Attributes:
        values: Milliseconds for each turn, by case.
        counts: Average counts of a step, by case: files made, looks at `control/`, entries written to Ray's store and
            read from it.
        worker_mb: Memory of an actor's process in MB, with its part of shared memory.
    """

    values: dict[str, list[float]]
    counts: dict[str, dict[str, float]]
    worker_mb: float


def run(turns: int) -> Findings:
    """Measure each number of actors in a process with its own cluster."""
    grown = {count: _measure(count, turns) for count in (COUNTS if turns > QUICK else FEW)}
    first, last = min(grown), max(grown)
    tables = [
        Table(title=_title(count), unit="ms", base=BROADCAST, values=found.values) for count, found in grown.items()
    ]
    growth = {case: {_title(count): found.values[case] for count, found in grown.items()} for case in (OUTSIDE, INSIDE)}
    tables += [
        Table(title=f"Growth, {case}", unit="ms", base=_title(first), values=each) for case, each in growth.items()
    ]
    remedy = "fewer calls at the end of a captured step; autoprof does nothing else for each actor."
    goals = [
        Goal(
            text=f"a step's begin and end with {last} actors, {case}, at most the framework's own call to each",
            table=_title(last),
            case=case,
            limit=1.0,
            remedy=remedy,
        )
        for case in (OUTSIDE, INSIDE)
    ]
    return Findings(tables=tables, goals=goals, notes=_notes(grown))


def _measure(count: int, turns: int) -> Grown:
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "AUTOPROF": "1",
            "AUTOPROF_DIR": folder,
            "AUTOPROF_MODE": "continuous",
            "AUTOPROF_RANKS": "all",
            "AUTOPROF_CONTENTS": "cpu",
            "AUTOPROF_STEPS": "::2",
            "AUTOPROF_MAX_STEPS": "1000000",
            "AUTOPROF_RECIPES": str(CHILDREN / "growing.toml"),
            "PYTHONPATH": str(CHILDREN),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
        }
        said = processes.run(
            [MAIN, CHILDREN / "growth.py", str(count), str(turns)], variables, timeout_s=TIMEOUT_S
        ).output
    # Ray may print lines after it.
    (line,) = (line for line in said.splitlines() if line.startswith(FOUND))
    return msgspec.json.decode(line.removeprefix(FOUND), type=Grown)


def _title(count: int) -> str:
    return f"{count} actors" if count > 1 else "1 actor"


def _notes(grown: dict[int, Grown]) -> list[str]:
    notes = []
    for case in (OUTSIDE, INSIDE):
        for count, found in grown.items():
            did = ", ".join(f"{amount:g} {what}" for what, amount in found.counts[case].items())
            notes.append(f"a step with {_title(count)}, {case}, in the driver: {did}")
    count, last = max(grown.items())
    return [
        *notes,
        f"an actor's process takes {last.worker_mb:.0f} MB with {_title(count)}, with its part of shared memory",
    ]
