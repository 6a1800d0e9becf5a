"""Workbench of a row: starts programs with this tree's autoprof, within the row's time, and keeps their output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from bench.gpu.captures import Capture, captures
from bench.gpu.facts import FAIL, PASS, SKIPPED, Fact, Failed

ROOT = Path(__file__).resolve().parents[2]
_FOREIGN = ("AUTOPROF", "PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")
# Prefix of the line with a program's result.
SAID = "RESULT "


@dataclass(frozen=True)
class Ran:
    """Program that has ended."""

    folder: Path
    output: str

    @property
    def said(self) -> dict[str, Any]:
        """Return the printed result.

        Raises:
            Failed: The program printed no result.
        """
        lines = [line for line in self.output.splitlines() if line.startswith(SAID)]
        if not lines:
            raise Failed("the program printed no result")
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(SAID))
        return found

    @property
    def run(self) -> Path:
        """Return the run directory of the program.

        Raises:
            Failed: It made no run directory, or several.
        """
        found = sorted(self.folder.glob("autoprof_runs/[0-9]*"))
        if len(found) != 1:
            raise Failed(f"the program left {len(found)} run directories in {self.folder}, not one")
        return found[0]

    def captures(self, role: str = "") -> list[Capture]:
        """Return the captures of the run, in order. With `role`, only captures whose names begin with it.

        Raises:
            Failed: The run has no such capture.
        """
        found = [capture for capture in captures(self.run) if capture.name.startswith(role)]
        if not found:
            raise Failed(f"the run has no captures{f' of {role}' if role else ''}: {self.run}")
        return found


def absent(modules: Sequence[str], packages: Sequence[Path]) -> list[str]:
    """Return the modules that neither this interpreter nor the folders of packages have."""
    places = [*map(str, packages), *sys.path]
    return [name for name in modules if PathFinder.find_spec(name, places) is None]


class Workbench:
    """Programs of one row.

    Attributes:
        device: `cuda` (also for ROCm) or `cpu`.
        machine: The description of the machine, when its row has run.
        out: The folder of the results, with `logs/`.
        logs: The logs of this row.
    """

    def __init__(self, name: str, device: str, work: Path, out: Path, packages: Sequence[Path], limit_s: float) -> None:
        self.name, self.device, self.out = name, device, out
        self.machine: dict[str, Any] = {}
        self.logs: list[str] = []
        self._work, self._packages = work / name, packages
        self._deadline = time.monotonic() + limit_s

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    def lacks(self, *modules: str) -> list[str]:
        """Return the modules that neither the machine nor the unpacked wheels have."""
        return absent(modules, self._packages)

    def environment(self) -> dict[str, str]:
        """Return the machine's environment, with this tree and the unpacked wheels on Python's path."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        path = [ROOT / "sitecustomize", ROOT, *self._packages]
        kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
        kept |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONUNBUFFERED": "1"}
        if not self.gpu:
            kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return kept

    def folder(self, label: str) -> Path:
        """Create and return a folder of the row."""
        folder = self._work / label
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def program(
        self,
        name: str,
        *arguments: str,
        on: bool = True,
        front: Sequence[str] = (),
        label: str = "",
        environment: Mapping[str, str] | None = None,
        **settings: str,
    ) -> Ran:
        """Run one of `programs/`, with `--device` and these arguments, and autoprof's settings in lower case.

        Args:
            on: True if autoprof is on.
            front: A command in front of Python, such as nsys.
            label: Name of this run within the row.
            environment: Further variables.
        """
        variables = {f"AUTOPROF_{key.upper()}": value for key, value in settings.items()}
        variables |= {"AUTOPROF": "1"} if on else {}
        command = [*front, sys.executable, "-m", f"bench.gpu.programs.{name}", "--device", self.device, *arguments]
        return self.run(command, label=label or name, environment=variables | dict(environment or {}))

    def autoprof(self, *arguments: str, folder: Path) -> dict[str, Any]:
        """Run a command of autoprof with `--json` and return its document."""
        command = [sys.executable, "-m", "autoprof", *arguments, "--json"]
        output = self.run(command, label=arguments[0], folder=folder).output
        # Messages on standard error may come first.
        found: dict[str, Any] = json.JSONDecoder().raw_decode(output, output.index("{\n"))[0]
        return found

    def run(
        self,
        command: Sequence[str],
        *,
        label: str,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run a command to its end in a separate folder, or in `folder`.

        Raises:
            Failed: Its exit status is not 0, or the row's time is over. The log has its output.
        """
        folder = folder or self.folder(label)
        log = self.out / "logs" / f"{self.name}.{label}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.logs.append(str(log.relative_to(self.out)))
        with log.open("w") as file:
            child = subprocess.Popen(
                command,
                cwd=folder,
                env=self.environment() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = self._wait(child)
        output = log.read_text(errors="replace")
        if status is None:
            raise Failed(f"{label}: it was ended, since the row's time was over")
        if status:
            last = [line for line in output.splitlines() if line.strip()] or ["it printed nothing"]
            raise Failed(f"{label}: exit status {status}: {last[-1][:300]}")
        return Ran(folder, output)

    def _wait(self, child: subprocess.Popen[bytes]) -> int | None:
        """Wait for a program and end its remaining processes. Return None if the time is over."""
        try:
            return child.wait(max(1.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its ranks, engines and servers are in its session.
            for number in (signal.SIGTERM, signal.SIGKILL):
                if child.poll() is not None:
                    break
                os.killpg(child.pid, number)
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    continue

    def fact(self, text: str, held: object, figure: object = "") -> Fact:
        """Return a fact with its figure."""
        return Fact(text, PASS if held else FAIL, str(figure))

    def on_gpu(self, text: str, held: object, figure: object = "") -> Fact:
        """Return a fact that needs a GPU; it is skipped on the CPU."""
        return self.fact(text, held, figure) if self.gpu else Fact(text, SKIPPED, "the CPU has no kernels")

    def shown(self, text: str, figure: object, held: object = True) -> Fact:
        """Return a fact on a time, which is judged only on a GPU."""
        return self.fact(text, held or not self.gpu, figure)

    def keep(self, path: Path, name: str) -> None:
        """Copy a file to the results."""
        shutil.copyfile(path, self.out / name)
