"""Runner of a real AsyncLLM, in this environment or one with another release, and reader of its run directory."""

from __future__ import annotations

import gzip
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.real.assets import tiny_model
from tests.support import processes
from tests.support.helpers import ROOT, clean_environment

SCRIPT = ROOT / "tests" / "real" / "vllm_scripts" / "engine.py"
FAULTS_SCRIPT = SCRIPT.with_name("faults.py")
# Fault of faults.py -> its step, and the start of the reason in the meta file, or of the start's answer if there is no
# meta file.
FAULTS = {
    "a file in place of the folder": (2, "FileExistsError"),
    "a file in place of the run": (3, "FileExistsError"),
    "no room for the trace": (4, "the trace could not be exported: torch could not write the whole trace"),
    "links in place of the files": (5, ""),
    "no room at all": (6, "[Errno 27] File too large"),
    "a profiler that does not start": (7, "the profiler did not start: RuntimeError: injected at the start"),
    "a stop that hangs": (8, "the engine's own stop did not reach the worker"),
    "nothing": (9, ""),
}
# Contents for the run of faults.py that torch supports on a CPU, and contents that vLLM does not support on a CPU.
KNOWN = ["cpu", "shapes", "stack"]
UNKNOWN = ["npu", "profile-by-stage"]
# A quiet machine needs 20 s, nearly all for imports.
TIMEOUT_S = 480


@dataclass(frozen=True)
class Driven:
    """Output and files of one run of the script."""

    folder: Path
    said: dict[str, Any]
    output: str

    def step(self, number: int) -> Path:
        """Return the folder of a step."""
        return self.folder / "autoprof_runs" / "latest" / f"global_step_{number:06d}"

    def meta(self, number: int) -> dict[str, Any]:
        """Return the meta file of the only worker of a step."""
        (path,) = self.step(number).glob("rollout.replica1.*rank*.meta.json")
        return json.loads(path.read_text())

    def metas(self, number: int) -> list[dict[str, Any]]:
        """Return all meta files of a step."""
        return [json.loads(path.read_text()) for path in self.step(number).glob("*.meta.json")]

    def events(self, number: int, part: str = "*rank*") -> list[dict[str, Any]]:
        """Return the events of the only trace of a step's worker, or of its `frontend`."""
        (path,) = self.step(number).glob(f"rollout.replica1.{part}.*.gz")
        return msgspec.json.decode(gzip.decompress(path.read_bytes()))["traceEvents"]

    def annotations(self, number: int, name: str) -> int:
        """Return the number of times that an annotation is in the front end's trace of a step."""
        return sum(event.get("name") == name for event in self.events(number, "frontend"))

    def passes(self, number: int) -> int:
        """Return the number of forward passes that vLLM itself annotated in the trace of a step."""
        return sum(str(event.get("name")).startswith("execute_") for event in self.events(number))

    def shapes(self, number: int) -> int:
        """Return the number of events with shapes of their arguments in the trace of a step."""
        return sum("Input Dims" in event.get("args", {}) for event in self.events(number))

    def stacks(self, number: int, part: str = "*rank*") -> int:
        """Return the number of calls of Python functions in the trace of a step's worker, or of its `frontend`."""
        return sum(event.get("cat") == "python_function" for event in self.events(number, part))


def drive_faults(folder: Path, python: str = sys.executable) -> Driven:
    """Run faults.py with supported and unsupported contents."""
    return drive(
        folder,
        python=python,
        script=FAULTS_SCRIPT,
        AUTOPROF_CONTENTS=",".join([*KNOWN, *UNKNOWN]),
        AUTOPROF_STOP_TIMEOUT_S="100",
        FAULTS="start-fails@7",
        PYTHONPATH=str(FAULTS_SCRIPT.parent.with_name("faults")),
    )


def recorded_what_was_asked_for(faulty: Driven, plain: Driven) -> None:
    """Assert that shapes and stacks are in the traces of the run that requested them, and not in the other's."""
    assert (plain.shapes(1), plain.stacks(1), plain.stacks(1, "frontend")) == (0, 0, 0)
    assert min(faulty.shapes(1), faulty.stacks(1), faulty.stacks(1, "frontend")) > 0
    assert (faulty.meta(1)["contents"], faulty.meta(1)["left_out"]) == (KNOWN, UNKNOWN)
    assert (
        faulty.output.count(f"torch does not support these contents here, so they are left out: {', '.join(UNKNOWN)}")
        == 1
    )


def survived(faulty: Driven, fault: str) -> None:
    """Assert that the engine works after a fault of faults.py, and that answers and meta files report the fault."""
    step, reason = FAULTS[fault]
    result = faulty.said[fault]
    assert result["step"] == step
    assert result["during"] == result["after"] == faulty.said["before"]
    assert not list(faulty.step(step).glob("*.gz")) or not reason or fault == "a stop that hangs"
    if fault == "a stop that hangs":
        assert (result["start"], result["stop"]) == (
            {"problem": ""},
            {"problem": "the engine's own stop did not end in time"},
        )
        assert sorted((meta["state"], meta["reason"]) for meta in faulty.metas(step)) == [
            ("complete", ""),
            ("truncated", reason),
        ]
    elif step in (2, 3):
        assert result["start"]["problem"].startswith(reason)
        assert result["stop"] == {"problem": "it was not recording"}
    elif fault == "no room at all":
        assert (result["start"]["problem"], reason in result["stop"]["problem"]) == ("", True)
        assert faulty.metas(step) == []
    else:
        assert result["start"] == result["stop"] == {"problem": ""}
        metas = faulty.metas(step)
        assert sorted(meta["part"] != "frontend" for meta in metas) == [False, True]
        assert {meta["state"] for meta in metas} == {"failed" if reason else "complete"}
        assert all(meta["reason"].startswith(reason) for meta in metas)


def drive(
    folder: Path, *arguments: str, python: str = sys.executable, script: Path = SCRIPT, **variables: str
) -> Driven:
    """Run a script with the tiny model and autoprof on, in the environment of `python`."""
    variables.setdefault("AUTOPROF_RANKS", "all")
    packages = [variables.pop("PYTHONPATH", ""), str(ROOT / "tests" / "real" / "import_probe")]
    environment = clean_environment(
        AUTOPROF="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        TORCH_COMPILE_DISABLE="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(filter(None, packages)),
        **variables,
    )
    command = [python, str(script), tiny_model(), *arguments]
    finished = processes.run(command, cwd=folder, env=environment, timeout_s=TIMEOUT_S)
    assert finished.status == 0, finished.output[-4000:]
    return Driven(folder, finished.result, finished.output)
