"""Cost of a step's begin and end with more actors

A process with autoprof has a trainer with small Ray actors. The steps of the trainer do nothing. Therefore their time
is the time that autoprof adds at the begin and end of a step. This time is compared with the framework's own broadcast:
`ray.get` of an empty call to each actor. In a window, whole steps of all ranks are recorded
(`AUTOPROF_MODE=continuous`, `AUTOPROF_RANKS=all`), and autoprof calls each actor at the end of the step. Outside of
windows, autoprof calls no actor.
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
# With 256 actors on two cores, the start takes ten minutes, and each turn takes one minute.
TIMEOUT_S = 2400

# Prefix of the line in which a child prints its result.
FOUND = "found: "
BROADCAST, OUTSIDE, INSIDE = "ray.get of a call to each", "autoprof, no window", "autoprof, window"


class Grown(msgspec.Struct):
    """The measurements of the child process with one number of actors.

    Attributes:
        values: Milliseconds for each turn, by case.
        counts: Average counts of a step, by case: files made, looks at `control/`, entries written to Ray's store, and
            entries read from the store.
        worker_mb: Memory of an actor's process in MB, including the process's part of shared memory.
    """

    values: dict[str, list[float]]
    counts: dict[str, dict[str, float]]
    worker_mb: float


def run(turns: int) -> Findings:
    """Measure each number of actors in a separate process with a separate Ray cluster."""
    measurements = {count: _measure(count, turns) for count in (COUNTS if turns > QUICK else FEW)}
    min_actors, max_actors = min(measurements), max(measurements)
    tables = [
        Table(title=_title(count), unit="ms", base=BROADCAST, values=measurement.values)
        for count, measurement in measurements.items()
    ]
    values_by_case = {
        case: {_title(count): measurement.values[case] for count, measurement in measurements.items()}
        for case in (OUTSIDE, INSIDE)
    }
    tables += [
        Table(title=f"Growth, {case}", unit="ms", base=_title(min_actors), values=values)
        for case, values in values_by_case.items()
    ]
    remedy = "fewer calls at the end of a captured step; autoprof does nothing else for each actor."
    goals = [
        Goal(
            text=f"a step's begin and end with {max_actors} actors, {case}, at most the framework's own call to each",
            table=_title(max_actors),
            case=case,
            limit=1.0,
            remedy=remedy,
        )
        for case in (OUTSIDE, INSIDE)
    ]
    return Findings(tables=tables, goals=goals, notes=_notes(measurements))


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
        output = processes.run(
            [MAIN, CHILDREN / "growth.py", str(count), str(turns)], variables, timeout_s=TIMEOUT_S
        ).output
    # Ray may print lines after the result.
    (line,) = (line for line in output.splitlines() if line.startswith(FOUND))
    return msgspec.json.decode(line.removeprefix(FOUND), type=Grown)


def _title(count: int) -> str:
    return f"{count} actors" if count > 1 else "1 actor"


def _notes(measurements: dict[int, Grown]) -> list[str]:
    notes = []
    for case in (OUTSIDE, INSIDE):
        for count, measurement in measurements.items():
            counts_text = ", ".join(f"{amount:g} {kind}" for kind, amount in measurement.counts[case].items())
            notes.append(f"a step with {_title(count)}, {case}, in the driver: {counts_text}")
    count, largest = max(measurements.items())
    return [
        *notes,
        f"an actor's process takes {largest.worker_mb:.0f} MB with {_title(count)}, with its part of shared memory",
    ]
