"""Cost of the commands, and of a run's end, with more ranks and steps

bench/large_runs.py makes run directories as verl writes them on hosts of 8 GPUs. Each rank has five stages in each
step. Two steps are captured on all ranks. The files of one host were never collected. The run was killed and resumed
once.

Each command runs in a new process. CPU time is the user and system time of all processes of the command. Memory is the
peak of its largest process. `report again` can use the index that the first report wrote. `end of the run` is the work,
without imports, that the process that started the run does at its exit.

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
# Bytes on disk, with a margin: for each step of a rank, and for all other files of a rank (hooks, captures, merged
# traces).
_STEP_BYTES, _RANK_BYTES = 2_000, 300_000


def run(turns: int) -> Findings:
    """Measure runs of 64 and of 512 ranks, and a run of 64 ranks with ten times as many steps."""
    few, _, _ = shapes = QUICK_SHAPES if turns <= QUICK else (FEW, MANY, LONG)
    measured_values, notes = _taken(shapes, turns)
    base = _title(few)
    tables = [
        Table(title=f"{name}: {quantity}", unit=unit, base=base, values=measured_values[f"{name}: {quantity}"])
        for quantity, unit in ((CPU, "s"), (PEAK, "MB"))
        for name in NAMES
    ]
    return Findings(tables=tables, goals=_goals(*shapes), notes=notes)


def run_thoroughly(turns: int) -> Findings:
    """Measure what `run` measures, and one turn with a run of 4,096 ranks."""
    findings = run(turns)
    measured_values, notes = _taken([HUGE], 1)
    for quantity, unit in ((CPU, "s"), (PEAK, "MB")):
        values = {name: measured_values[f"{name}: {quantity}"][_title(HUGE)] for name in NAMES}
        findings.tables.append(Table(title=f"{_title(HUGE)}: {quantity}", unit=unit, base=LS, values=values))
    findings.notes += [*notes, f"{_title(HUGE)}: one turn"]
    return findings


def _goals(few: Shape, many: Shape, long: Shape) -> list[Goal]:
    """Return the goals: more steps do not slow `ls`, and other commands cost at most proportionally to the ranks."""
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
    """Make a run of each shape, and measure. Return the measurements, and notes on the sizes of runs and outputs."""
    with tempfile.TemporaryDirectory() as place:
        _check_disk(Path(place), shapes)
        runs = {shape: _Run(shape, Path(place, f"{shape.ranks}-{shape.steps}")) for shape in shapes}
        values = in_turns({_title(shape): made_run.measure for shape, made_run in runs.items()}, turns, warm=0)
    return values, [line for made_run in runs.values() for line in made_run.notes]


def _title(shape: Shape) -> str:
    return f"{shape.ranks:,} ranks, {shape.steps:,} steps"


def _check_disk(place: Path, shapes: Iterable[Shape]) -> None:
    """Check that the disk has room for the runs.

    Raises:
        Failed: The free space is too small.
    """
    needed_bytes = sum(shape.ranks * (shape.steps * _STEP_BYTES + _RANK_BYTES) for shape in shapes)
    if (free_bytes := shutil.disk_usage(place).free) < needed_bytes:
        raise Failed(
            f"{place}: {free_bytes / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} GB needed; TMPDIR names another folder"
        )


class _Run:
    """A made run directory, and the commands that read it.

    Attributes:
        notes: Texts with the sizes of the run and of the commands' outputs.
    """

    def __init__(self, shape: Shape, parent: Path) -> None:
        self._shape = shape
        self._parent = parent
        self._folder = parent / RUN_ID
        size_options = ["--ranks", str(shape.ranks), "--steps", str(shape.steps), "--gpus", str(shape.gpus)]
        output = processes.run(
            [MAIN, "-m", "bench.large_runs", self._folder, *size_options], timeout_s=TIMEOUT_S
        ).output
        sizes = json.loads(output)
        self.notes = [f"{_title(shape)}: {sizes['files']:,} files, {sizes['bytes'] / 1e6:,.0f} MB"]

    def measure(self) -> dict[str, float]:
        """Run all commands. Return the CPU time and the peak of memory of each command, by table title."""
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
        usage_by_name = {name: self._command(command_arguments) for name, command_arguments in arguments.items()}
        usage_by_name[END] = self._end()
        sizes = {name: usage_by_name[name]["output"] for name in (LS, LS_RUN, DOCTOR)}
        sizes |= {REPORT: self._size(file_names.REPORT), MERGE: self._size(self._merged), END: self._size("run.json")}
        outputs = ", ".join(f"{name} {size / 1e3:,.1f} kB" for name, size in sizes.items())
        self.notes = [self.notes[0], f"{_title(self._shape)}, outputs: {outputs}"]
        titles = {CPU: "cpu", PEAK: "peak"}
        return {
            f"{name}: {title}": usage[key] for name, usage in usage_by_name.items() for title, key in titles.items()
        }

    @property
    def _merged(self) -> str:
        folder = RunDir(self._folder).step(self._shape.captured[0]).name
        return f"{folder}/{file_names.MERGED}{file_names.TRACE}"

    def _command(self, arguments: list[str]) -> dict[str, float]:
        """Run a command of autoprof.

        Raises:
            Failed: The exit status is not 0. Status 1 of doctor is accepted: doctor found a problem.
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
        output = processes.run(command, timeout_s=TIMEOUT_S).output
        usage: dict[str, float] = json.loads(output)
        if usage["status"] not in ((0, 1) if arguments[0] == "doctor" else (0,)):
            raise Failed(f"autoprof {arguments[0]}: status {usage['status']}: {usage['errors']}")
        return usage

    def _end(self) -> dict[str, float]:
        """End the run. No command has made a cache when a run ends."""
        (self._folder / file_names.CACHE).unlink(missing_ok=True)
        command: list[str | Path] = [MAIN, CHILDREN / "run_end.py", self._folder, *map(str, self._shape)]
        output = processes.run(command, {"PYTHONPATH": str(ROOT)}, timeout_s=TIMEOUT_S).output
        usage: dict[str, float] = json.loads(output)
        return usage

    def _remove_outputs(self) -> None:
        """Remove the files that the commands wrote in an earlier turn."""
        meta = self._merged.removesuffix(file_names.TRACE) + file_names.META
        for name in (file_names.REPORT, file_names.CACHE, self._merged, meta):
            (self._folder / name).unlink(missing_ok=True)

    def _size(self, name: str) -> int:
        return (self._folder / name).stat().st_size
