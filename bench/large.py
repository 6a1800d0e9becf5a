"""Cost of the commands, and of a run's end, with more ranks and steps

Run directories as verl writes them on hosts of 8 GPUs, made by bench/large_runs.py: five stages of each rank in each
step, two captured steps of all ranks, one host whose files were never collected, and a run that was killed and resumed
once. Each command runs in a new process. CPU time is the user and system time of all its processes; memory is the peak
of the largest process. `report again` can use the index that the first report wrote. `end of the run` is the work of
the process that started the run at its exit, without imports.

`make bench BENCH="large --thorough"` also measures 4,096 ranks.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from autoprof.rundir import file_names
from autoprof.rundir.layout import RunDir
from bench import processes
from bench.large_runs import RUN_ID
from bench.large_shapes import Shape
from bench.paired import Goal, Table, Taken, in_turns
from bench.processes import CHILDREN, MAIN, ROOT, Failed
from bench.results import Findings

TURNS, QUICK = 2, 1
FEW, MANY, LONG, HUGE = Shape(64), Shape(512), Shape(64, steps=3000), Shape(4096)
QUICK_SHAPES = (Shape(16, steps=30), Shape(32, steps=30), Shape(16, steps=300))

LS, LS_RUN, DOCTOR, REPORT, AGAIN, MERGE = "ls", "ls RUN", "doctor RUN", "report", "report again", "merge --step"
END = "end of the run"
NAMES = (LS, LS_RUN, DOCTOR, REPORT, AGAIN, MERGE, END)
CPU, PEAK = "CPU time", "peak of memory"
TIMEOUT_S = 3600
# Bytes on disk, with a margin: for each step of a rank, and for its other files (hooks, captures, merged traces).
_STEP_BYTES, _RANK_BYTES = 2_000, 300_000


def run(turns: int) -> Findings:
    """Measure 64 and 512 ranks, and 64 ranks with ten times as many steps."""
    few, _, _ = shapes = QUICK_SHAPES if turns <= QUICK else (FEW, MANY, LONG)
    taken, notes = _taken(shapes, turns)
    base = _title(few)
    tables = [
        Table(title=f"{name}: {quantity}", unit=unit, base=base, values=taken[f"{name}: {quantity}"])
        for quantity, unit in ((CPU, "s"), (PEAK, "MB"))
        for name in NAMES
    ]
    return Findings(tables=tables, goals=_goals(*shapes), notes=notes)


def run_thoroughly(turns: int) -> Findings:
    """Measure also 4,096 ranks, once."""
    findings = run(turns)
    taken, notes = _taken([HUGE], 1)
    for quantity, unit in ((CPU, "s"), (PEAK, "MB")):
        values = {name: taken[f"{name}: {quantity}"][_title(HUGE)] for name in NAMES}
        findings.tables.append(Table(title=f"{_title(HUGE)}: {quantity}", unit=unit, base=LS, values=values))
    findings.notes += [*notes, f"{_title(HUGE)}: one turn"]
    return findings


def _goals(few: Shape, many: Shape, long: Shape) -> list[Goal]:
    """Return the goals: steps cost `ls` nothing, and the cost of ranks is at most proportional."""
    goals = [
        Goal(
            text=f"{name}, {_title(long)}: at most 1.1 of {_title(few)}",
            table=f"{name}: {CPU}",
            case=_title(long),
            limit=1.1,
            within_noise=True,
            remedy="no reading of timelines.",
        )
        for name in (LS, LS_RUN)
    ]
    ratio = many.collected / few.collected
    return goals + [
        Goal(
            text=f"{name}, {many.collected:,} ranks with files: at most {ratio:g} times {few.collected:,} ranks",
            table=f"{name}: {CPU}",
            case=_title(many),
            limit=ratio,
            remedy="one reading of each timeline.",
        )
        for name in (DOCTOR, REPORT, MERGE, END)
    ]


def _taken(shapes: Sequence[Shape], turns: int) -> tuple[Taken, list[str]]:
    """Make the runs and measure; return the measurements, and notes on the sizes of runs and outputs."""
    with tempfile.TemporaryDirectory() as place:
        _check_disk(Path(place), shapes)
        runs = {shape: _Run(shape, Path(place, f"{shape.ranks}-{shape.steps}")) for shape in shapes}
        taken = in_turns({_title(shape): each.measure for shape, each in runs.items()}, turns, warm=0)
    return taken, [line for each in runs.values() for line in each.notes]


def _title(shape: Shape) -> str:
    return f"{shape.ranks:,} ranks, {shape.steps:,} steps"


def _check_disk(place: Path, shapes: Iterable[Shape]) -> None:
    """Check that the disk has room for the runs.

    Raises:
        Failed: The free space is too small.
    """
    needed = sum(shape.ranks * (shape.steps * _STEP_BYTES + _RANK_BYTES) for shape in shapes)
    if (free := shutil.disk_usage(place).free) < needed:
        raise Failed(f"{place}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed; TMPDIR names another folder")


class _Run:
    """A made run, and the commands on it.

    Attributes:
        notes: The sizes of the run and of the outputs of commands.
    """

    def __init__(self, shape: Shape, parent: Path) -> None:
        self._shape = shape
        self._parent = parent
        self._folder = parent / RUN_ID
        size = ["--ranks", str(shape.ranks), "--steps", str(shape.steps), "--gpus", str(shape.gpus)]
        said = processes.run([MAIN, "-m", "bench.large_runs", self._folder, *size], timeout_s=TIMEOUT_S).output
        made = json.loads(said)
        self.notes = [f"{_title(shape)}: {made['files']:,} files, {made['bytes'] / 1e6:,.0f} MB"]

    def measure(self) -> dict[str, float]:
        """Run all commands; return CPU time and peak of memory of each."""
        step = str(self._shape.captured[0])
        arguments = {
            LS: ["ls"],
            LS_RUN: ["ls", RUN_ID],
            DOCTOR: ["doctor", RUN_ID],
            REPORT: ["report", RUN_ID],
            AGAIN: ["report", RUN_ID],
            MERGE: ["merge", RUN_ID, "--step", step],
        }
        self._remove_outputs()
        used = {name: self._command(given) for name, given in arguments.items()}
        used[END] = self._end()
        sizes = {name: used[name]["output"] for name in (LS, LS_RUN, DOCTOR)}
        sizes |= {REPORT: self._size(file_names.REPORT), MERGE: self._size(self._merged), END: self._size("run.json")}
        outputs = ", ".join(f"{name} {size / 1e3:,.1f} kB" for name, size in sizes.items())
        self.notes = [self.notes[0], f"{_title(self._shape)}, outputs: {outputs}"]
        titles = {CPU: "cpu", PEAK: "peak"}
        return {f"{name}: {title}": each[key] for name, each in used.items() for title, key in titles.items()}

    @property
    def _merged(self) -> str:
        folder = RunDir(self._folder).step(self._shape.captured[0]).name
        return f"{folder}/{file_names.MERGED}{file_names.TRACE}"

    def _command(self, arguments: list[str]) -> dict[str, float]:
        """Run a command of autoprof.

        Raises:
            Failed: The exit status is not 0. Status 1 of doctor is accepted: it found a problem.
        """
        command: list[str | Path] = [
            MAIN,
            CHILDREN / "usage.py",
            MAIN,
            "-m",
            "autoprof",
            *arguments,
            "--dir",
            self._parent,
        ]
        said = processes.run(command, timeout_s=TIMEOUT_S).output
        used: dict[str, float] = json.loads(said)
        if used["status"] not in ((0, 1) if arguments[0] == "doctor" else (0,)):
            raise Failed(f"autoprof {arguments[0]}: status {used['status']}: {used['errors']}")
        return used

    def _end(self) -> dict[str, float]:
        command: list[str | Path] = [MAIN, CHILDREN / "run_end.py", self._folder, *map(str, self._shape)]
        said = processes.run(command, {"PYTHONPATH": str(ROOT)}, timeout_s=TIMEOUT_S).output
        used: dict[str, float] = json.loads(said)
        return used

    def _remove_outputs(self) -> None:
        """Remove the outputs of an earlier turn."""
        meta = self._merged.removesuffix(file_names.TRACE) + file_names.META
        for name in (file_names.REPORT, file_names.CACHE, self._merged, meta):
            (self._folder / name).unlink(missing_ok=True)

    def _size(self, name: str) -> int:
        return (self._folder / name).stat().st_size
