"""Programs that know nothing of autoprof, run without it and with it, and what of them a user could observe.

A program says in lines `#: key: value` at its top how it is run:

    python: -O {script} a    what follows the interpreter; `{script}` alone without it. Each such line is a run
    shell: $PYTHON a.py      a command of `sh` in its place
    stdin: text              what it reads; `{script}` is the program itself
    set: NAME=value          a variable of its environment; `unset: NAME` takes one away
    steps: 1                 AUTOPROF_STEPS, in place of every step or none
    captures: yes            it is there for its captures. Others are tried with captures too with --thorough, if it is
                             not `no`: captures cost memory, time and garbage, which some programs measure
    hooks: none              no hook applies, as where `site` is not imported; `unseen`: nothing can be left by them
    files: no                what it leaves is not compared: no two runs leave the same
    needs: dill              modules without which it is skipped
    ignore: REGEX            lines of its output that no two runs have alike
    slow:                    only with --thorough
    differs: REASON          it is known to differ, and must until that is mended; `sometimes: REASON`: it may
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import defaultdict
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from tests.support.helpers import ROOT, clean_environment

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
LIBRARY = HERE / "library"
# Where tests/differential/requirements.txt is installed, with `make differential`.
TOOLS = [str(Path(place).resolve()) for place in [os.environ.get("DIFFERENTIAL", "")] if place]
# Longer than any takes: it only ends what hangs.
HANGS_S = 90
_DIRECTIVE = re.compile(rb"#: ?([a-z]+): ?(.*)")
# What torch 2.13's own profiler says on stderr, and where it first records in another thread than the main one.
KINETO = ("USDT:", "ERROR: External init callback must run in same thread")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
# Of an import of torch, and of the processes that finish traces.
_BYPRODUCTS = {"__pycache__", f"torchinductor_{getpass.getuser()}", f"autoprof-{os.getuid()}"}
_OWN_FRAME = re.compile(rf'^[ |]*File "{re.escape(str(ROOT))}/autoprof/')
_KEYS = {
    "python",
    "shell",
    "stdin",
    "set",
    "unset",
    "steps",
    "captures",
    "hooks",
    "files",
    "needs",
    "ignore",
    "slow",
    "differs",
    "sometimes",
}


class Program:
    """A file in `programs/`, or a folder there with a `main.py`; `variant` says which of several `python:` lines."""

    def __init__(self, path: Path, variant: int = 0) -> None:
        self.path = path
        self.variant = variant
        self.script = "main.py" if path.is_dir() else path.name
        self.says: dict[str, list[str]] = defaultdict(list)
        for line in (path / "main.py" if path.is_dir() else path).read_bytes().splitlines():
            found = _DIRECTIVE.fullmatch(line)
            if found is None:
                break
            key, value = (part.decode() for part in found.groups())
            assert key in _KEYS, f"{path}: {key} is none of {', '.join(sorted(_KEYS))}"
            self.says[key].append(value)
        several = len(self.says["python"]) > 1
        self.name = path.stem + (f" {self.says['python'][variant].partition(' {')[0]}" if several else "")

    def said(self, key: str, default: str = "") -> str:
        return self.says[key][0] if key in self.says else default

    def lacks(self) -> str:
        """The modules that it needs and that are not there."""
        places = [*TOOLS, *sys.path]
        return ", ".join(name for name in self.says["needs"] if PathFinder.find_spec(name, places) is None)

    @property
    def captures(self) -> bool:
        """Return whether it is there for its captures."""
        return self.said("captures", "no") != "no"

    def run(self, folder: Path, on: bool, recording: bool) -> Outcome:
        """Run it in `folder/cwd`, which is then moved away: both runs have the same paths.

        Args:
            on: Whether autoprof is.
            recording: Whether all steps are captured then, if the program says nothing of steps.
        """
        cwd = folder / "cwd"
        if self.path.is_dir():
            shutil.copytree(self.path, cwd, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            cwd.mkdir(parents=True)
            shutil.copy(self.path, cwd)
        for name in ("home", "tmp"):
            (cwd / name).mkdir()
        if "shell" in self.says:
            command = ["/bin/sh", "-c", self.said("shell")]
        else:
            words = ([*self.says["python"], "{script}"][self.variant]).split()
            command = [sys.executable, *(word.replace("{script}", self.script) for word in words)]
        given = self.said("stdin").encode()
        if given == b"{script}":
            given = (cwd / self.script).read_bytes()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=self._environment(cwd, folder / "runs", on, recording),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(given, timeout=HANGS_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
            err += b"\nIT HANGS\n"
        outcome = Outcome(
            process.returncode, self._seen(out), self._seen(err), [] if "files" in self.says else _left(cwd)
        )
        cwd.rename(folder / ("on" if on else "off"))
        return outcome

    def _environment(self, cwd: Path, runs: Path, on: bool, recording: bool) -> dict[str, str]:
        variables = {
            "PYTHONPATH": os.pathsep.join([str(LIBRARY), *TOOLS]),
            "LIBRARY": str(LIBRARY),
            "PYTHON": sys.executable,
            "HOME": str(cwd / "home"),
            "TMPDIR": str(cwd / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if on:
            variables |= {
                "AUTOPROF": "1",
                "AUTOPROF_RECIPES": str(LIBRARY / "tinyrl.toml"),
                "AUTOPROF_STEPS": self.said("steps", "::1" if recording else ""),
                "AUTOPROF_DIR": str(runs),
                "AUTOPROF_MIN_FREE_MB": "1",
            }
        variables |= dict(pair.split("=", 1) for pair in self.says["set"])
        environment = clean_environment(**variables)
        for name in self.says["unset"]:
            environment.pop(name, None)
        return environment

    def _seen(self, output: bytes) -> list[str]:
        """The lines of an output, but for autoprof's own lines and frames, and those of Kineto (torch 2.13)."""
        lines: list[str] = []
        within = -1
        for line in output.decode(errors="backslashreplace").splitlines(keepends=True):
            # Of exception groups each line begins with a `|`.
            depth = len(line) - len(line.lstrip(" |"))
            if 0 <= within < depth:
                continue
            within = -1
            if _OWN_FRAME.match(line):
                within = depth
            elif not line.startswith(("autoprof:", *KINETO)) and not any(
                re.search(each, line) for each in self.says["ignore"]
            ):
                lines.append(_ADDRESS.sub("0x", line))
        return lines


class Outcome(NamedTuple):
    """The result of a run of a program."""

    status: int
    stdout: list[str]
    stderr: list[str]
    files: list[str]


def programs() -> list[Program]:
    """All of them, in the order of their names."""
    found = [path for path in sorted(PROGRAMS.iterdir()) if path.suffix == ".py" or (path / "main.py").is_file()]
    return [Program(path, number) for path in found for number in range(max(1, len(Program(path).says["python"])))]


def hooks_called(runs: Path) -> int:
    """Return how many hooks were called, in all processes of a run."""
    count = 0
    for path in runs.glob("*/hooks/*.json"):
        said = json.loads(path.read_text())
        count += sum(1 for hook in said["hooks"].values() if hook["called"])
    return count


def captures(runs: Path) -> list[str]:
    """The states of the captures of a run."""
    return [json.loads(path.read_text())["state"] for path in sorted(runs.glob("*/global_step_*/*.meta.json"))]


def _left(cwd: Path) -> list[str]:
    """Return what a program left in its working directory, its home and its folder for temporary files."""
    found = []
    for path in sorted(cwd.rglob("*")):
        # Sockets of multiprocessing have names made up anew.
        if _BYPRODUCTS.intersection(path.parts) or any(part.startswith("pymp-") for part in path.parts):
            continue
        content = zlib.crc32(path.read_bytes()) if path.is_file() else None
        found.append(f"{path.relative_to(cwd)} {path.lstat().st_mode:o} {content}")
    return found
