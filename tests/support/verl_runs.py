"""Runner of verl, and reader of its output and run directory."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from autoprof.rundir import file_names, layout
from autoprof.rundir.records import RunFile
from tests.support import processes
from tests.support.helpers import ROOT, assert_no_failure, clean_environment, processes_of, spans

# A quiet machine needs 70 to 90 s, nearly all for imports. The limit is needed because an error in vLLM's weight update
# hangs verl's trainer (verl 0.9.1).
TIMEOUT_S = 600

_STEP = re.compile(r"step:(\d+) - (.*)")
_TIMED = re.compile(r"timing|time|throughput|mfu|memory|idle|bubble")


@dataclass(frozen=True)
class Ask:
    """Call of `autoprof trigger`, or of another command, made once `after` steps have ended.

    With `after` 0, it is made when the run begins.
    """

    options: str
    after: int = 0
    command: str = "trigger"


@dataclass(frozen=True)
class VerlRun:
    """Files and output of one run of verl."""

    folder: Path
    finished: processes.Finished
    probe: Path

    @cached_property
    def directory(self) -> Path:
        return (self.folder / "autoprof_runs" / "latest").resolve()

    @cached_property
    def info(self) -> RunFile:
        return layout.read_json(self.directory / file_names.RUN, RunFile)

    @cached_property
    def processes(self) -> list[dict[str, Any]]:
        return processes_of(self.directory)

    @cached_property
    def spans(self) -> list[dict[str, Any]]:
        return [span for path in sorted(self.directory.glob("journal/*.jsonl")) for span in self.spans_of(path)]

    def spans_of(self, path: Path) -> list[dict[str, Any]]:
        """Return the spans in the timeline file of one process."""
        return spans(path)

    def lines_of(self, path: Path) -> list[dict[str, Any]]:
        """Return all lines of a timeline file, including the first, which describes the process."""
        return [json.loads(line) for line in path.read_text().splitlines()]

    def timed(self, number: int) -> dict[str, float]:
        """Return the seconds of each part of a step, as verl printed them."""
        (line,) = [line for step, line in _STEP.findall(self.finished.output) if int(step) == number]
        return {name: float(seconds) for name, seconds in re.findall(r"timing_s/(\w+):([0-9.eE+-]+)", line)}

    @cached_property
    def metrics(self) -> dict[int, dict[str, str]]:
        """Metrics of each step that don't depend on time, as verl printed them."""
        found: dict[int, dict[str, str]] = {}
        for number, line in _STEP.findall(self.finished.output):
            pairs = (pair.partition(":") for pair in line.strip().split(" - "))
            found[int(number)] = {name: value for name, _, value in pairs if not _TIMED.search(name)}
        return found

    def of(self, kind: str, step: int | None = None, **ids: Any) -> list[dict[str, Any]]:
        """Return the spans of a kind and a step, in order. Only `validate=True` returns spans of validations."""
        wanted = {"validate": None} | ids
        found = [span for span in self.spans if span["kind"] == kind and step in (None, span["step"])]
        found = [span for span in found if all(span.get("ids", {}).get(key) == wanted[key] for key in wanted)]
        return sorted(found, key=lambda span: span["start_ns"])

    def step_window(self, number: int) -> tuple[int, int]:
        """Return begin and end of a step, in nanoseconds since the epoch."""
        (span,) = [span for span in self.spans if span["kind"] == "step" and span["step"] == number]
        return span["start_ns"], span["end_ns"]

    def assert_sound(self) -> None:
        """Assert that the run ended, without a failure or message of autoprof, and without incomplete files."""
        assert_no_failure(self.directory)
        assert self.finished.left_behind == []
        assert self.info.state == "ended"
        assert "autoprof: " not in self.finished.output

    def step_folder(self, number: int) -> Path:
        return self.directory / f"global_step_{number:06d}"

    def trace(self, number: int, beginning: str) -> dict[str, Any]:
        """Return the only trace of a step whose file name starts with `beginning`."""
        (path,) = self.step_folder(number).glob(f"{beginning}*.pt.trace.json.gz")
        # msgspec, because json takes half a minute for a trace with stacks.
        return msgspec.json.decode(gzip.decompress(path.read_bytes()))

    def probed(self) -> dict[str, list[str]]:
        """Return the modules that each started interpreter imported, as recorded by the import probe."""
        starts: dict[str, list[str]] = {}
        for path in self.probe.iterdir():
            start = ""
            for line in path.read_text(errors="replace").splitlines():
                kind, _, rest = line.partition(" ")
                if kind == "start":
                    start = f"{path.stem} {rest}"
                    starts[start] = []
                else:
                    starts[start].append(rest)
        return starts


def verl_run(
    folder: Path,
    *overrides: str,
    asks: Sequence[Ask] = (),
    script: str = "run_grpo.sh",
    packages: Sequence[Path] = (),
    status: int = 0,
    **variables: str,
) -> VerlRun:
    """Run verl's GRPO, or another script of the example, and assert that it ends with `status`.

    Args:
        folder: Working directory.
        overrides: Arguments of the script.
        asks: Commands to call during the run.
        script: Name of the script in `examples/verl_cpu`.
        packages: Further folders for PYTHONPATH.
        status: Expected exit status.
        variables: Further environment variables.
    """
    probe = folder / "probe"
    probe.mkdir()
    environment = clean_environment(
        PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join(map(str, [ROOT / "tests" / "real" / "import_probe", *packages])),
        IMPORT_PROBE=str(probe),
        DETERMINISTIC="1",
        **variables,
    )
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [str(ROOT / "examples" / "verl_cpu" / script), *overrides]
    asking = threading.Thread(target=_trigger, args=(folder, asks))
    if asks:
        asking.start()
    finished = processes.run_framework(command, cwd=folder, env=environment, timeout_s=TIMEOUT_S)
    if asks:
        asking.join()
    assert finished.status == status, "\n".join(finished.output.splitlines()[-60:])
    return VerlRun(folder, finished, probe)


def _trigger(folder: Path, asks: Sequence[Ask]) -> None:
    """Call the commands in turn. The run directory exists long before the run's first step."""
    run = folder / "autoprof_runs" / "latest"
    deadline = time.monotonic() + TIMEOUT_S
    with (folder / "trigger.txt").open("w") as output:
        for ask in asks:
            while not ((run / "run.json").exists() and _steps(run) >= ask.after) and time.monotonic() < deadline:
                time.sleep(0.2)
            command = [sys.executable, "-m", "autoprof", ask.command, *ask.options.split()]
            asked = subprocess.run(command, cwd=folder, env=clean_environment(), stdout=output, stderr=output)
            output.write(f"status {asked.returncode}\n")
            output.flush()


def _steps(run: Path) -> int:
    """Return the number of ended steps."""
    return sum(path.read_text().count('"kind":"step"') for path in run.glob("journal/*.jsonl"))


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["start_ns"] <= inner["start_ns"] <= inner["end_ns"] <= outer["end_ns"])


OPERATORS = ("cpu_op", "user_annotation")


def operators(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in OPERATORS]


def window(trace: dict[str, Any]) -> tuple[float, float]:
    """Return begin and end of a trace's operators, in nanoseconds since the epoch."""
    base, events = trace["baseTimeNanoseconds"], operators(trace)
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    return base + begin * 1000, base + end * 1000


def metas(run: VerlRun, step: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.step_folder(step).glob("*.meta.json"))]
