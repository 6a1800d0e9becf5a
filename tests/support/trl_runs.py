"""Output and files of runs of TRL's and other trainers."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import engines, helpers
from tests.support.helpers import ROOT

SCRIPT = ROOT / "tests" / "engines" / "trl_scripts" / "trainers.py"
NAMES = [name for name in engines.NAMES if name.startswith("trl-")]


@dataclass(frozen=True)
class Ran:
    """Output and files of a run."""

    folder: Path
    output: str

    @property
    def said(self) -> dict[str, Any]:
        """Result that the script printed in its last line of JSON."""
        lines = [line for line in self.output.splitlines() if line.startswith("{") and '"global_step"' in line]
        return json.loads(lines[-1])

    @property
    def run(self) -> Path:
        """Path of the only run directory."""
        (path,) = self.folder.glob("autoprof_runs/[0-9]*")
        return path

    def steps(self) -> list[int]:
        return sorted(int(path.name.rpartition("_")[2]) for path in self.run.glob("global_step_*"))

    def of_step(self, step: int, loop: int = 1) -> Path:
        """Return the folder of a step."""
        return self.run / f"global_step_{step:06d}{f'.loop{loop}' if loop > 1 else ''}"

    def captures(self, step: int, loop: int = 1) -> dict[str, str]:
        """Return the state of each capture, by role, stage and rank."""
        metas = [json.loads(path.read_text()) for path in self.of_step(step, loop).glob("*.meta.json")]
        names = [path.name.partition(".rank")[0] for path in self.of_step(step, loop).glob("*.meta.json")]
        return {f"{name}@{meta['rank']}": meta["state"] for name, meta in zip(names, metas, strict=True)}

    def names(self, step: int) -> set[str]:
        """Assert that all captures of a step are complete, and return the names of the captures of rank 0."""
        assert set(self.captures(step).values()) <= {"complete"}
        return {name.removesuffix("@0") for name in self.captures(step) if name.endswith("@0")}

    def operators(self, step: int, name: str, loop: int = 1) -> Counter[str]:
        """Return the number of calls of each operator in a trace."""
        (path,) = self.of_step(step, loop).glob(f"{name}.rank0.*.pt.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        return Counter(event["name"] for event in events if event.get("cat") == "cpu_op")

    def spans(self, kind: str = "stage") -> list[dict[str, Any]]:
        return [span for span in helpers.spans(self.run) if span["kind"] == kind]

    def processes(self) -> list[dict[str, Any]]:
        return helpers.processes_of(self.run)
