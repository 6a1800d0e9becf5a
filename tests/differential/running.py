"""Runner of programs without autoprof and with it, which compares their observable results.

Lines `#: key: value` at the top of a program are directives. Those after a line `python` or `shell` are only for its
run. With `functions`, those above a public function are for its run:

    python: -O {script} a    arguments of the interpreter, by default `{script}`; each such line makes a run
    shell: $PYTHON {script}  command of `sh` to run instead; each such line makes a run
    functions:               each public function makes a run with its name as the argument; with `functions: together`,
                             one run calls all functions without own directives
    alone:                   a run calls this function alone, because it changes the process or ends it
    stdin: text              standard input; `{script}` is the program itself
    set: NAME=value          set an environment variable; `unset: NAME` removes one
    steps: 1                 value of AUTOPROF_STEPS, by default every step or none
    captures: yes            always run with captures; without this line, only with --thorough. `no`: never run with
                             captures, because they change the memory, time or garbage that the program measures
    hooks: none              expect that no hook is called, for example without `site`; `unseen`: don't check hooks
    files: no                don't compare files, because they differ between runs
    needs: dill              skip the program if this module is not installed
    ignore: REGEX            ignore lines of output that differ between runs
    slow:                    run only with --thorough
    differs: REASON          known difference, a strict xfail; `sometimes: REASON` is an xfail that is not strict
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

from tests.support.helpers import ROOT, clean_environment, processes_of

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
LIBRARY = HERE / "library"
# Folder into which `make differential` installs tests/differential/requirements.txt.
TOOLS = [str(Path(place).resolve()) for place in [os.environ.get("DIFFERENTIAL", "")] if place]
# Longer than any program takes, so that only hanging programs are ended.
HANGS_S = 120
_DIRECTIVE = re.compile(r"#: ?([a-z]+): ?(.*)")
_FUNCTION = re.compile(r"(?:async )?def ([a-z]\w*)\(")
# Lines that torch 2.13's profiler writes to stderr, also if its first recording is not in the main thread.
KINETO = ("USDT:", "ERROR: External init callback must run in same thread")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
# Files made by the import of torch, and by the processes that finish traces.
_BYPRODUCTS = {"__pycache__", f"torchinductor_{getpass.getuser()}", f"autoprof-{os.getuid()}"}
_OWN_FRAME = re.compile(rf'^[ |]*File "{re.escape(str(ROOT))}/autoprof/')
_KEYS = {
    "python",
    "shell",
    "functions",
    "alone",
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


def _runs(text: str) -> list[dict[str, list[str]]]:
    """Return the directives of each run of a program."""
    shared: list[tuple[str, str]] = []
    own: list[tuple[str, str]] = []
    runs: list[list[tuple[str, str]]] = []
    together: list[str] = []
    header = True
    for line in text.splitlines():
        if found := _DIRECTIVE.fullmatch(line):
            key, value = found.groups()
            assert key in _KEYS, f"{key} is not a directive; use one of {', '.join(sorted(_KEYS))}"
            if key in ("python", "shell"):
                runs.append([])
            (own if not header else runs[-1] if runs else shared).append((key, value))
        elif "functions" not in dict(shared):
            break
        else:
            header = False
            if found := _FUNCTION.match(line):
                if own or dict(shared)["functions"] != "together":
                    runs.append([("python", f"{{script}} {found[1]}"), *own])
                else:
                    together.append(found[1])
                own = []
    if together:
        runs.append([("python", f"{{script}} {','.join(together)}")])
    made: list[dict[str, list[str]]] = []
    for run in runs or [[]]:
        made.append(defaultdict(list))
        for key, value in [*shared, *run]:
            made[-1][key].append(value)
    return made


class Program:
    """Run of a program of the suite, which is a file in `programs/`, or a folder with a `main.py`."""

    def __init__(self, path: Path, directives: dict[str, list[str]], label: bool) -> None:
        self.path = path
        self.script = "main.py" if path.is_dir() else path.name
        self.directives = directives
        before, _, after = self.directive("python", self.directive("shell")).partition("{script}")
        after = "together" if "," in after else after
        self.name = (
            f"{path.stem} {before.removeprefix('exec $PYTHON').strip() or after.strip()}" if label else path.stem
        )

    def directive(self, key: str, default: str = "") -> str:
        return self.directives[key][0] if key in self.directives else default

    def lacks(self) -> str:
        """Return the needed modules that are not installed, separated by commas."""
        places = [*TOOLS, *sys.path]
        return ", ".join(name for name in self.directives["needs"] if PathFinder.find_spec(name, places) is None)

    @property
    def captures(self) -> bool:
        """True if the program always runs with captures."""
        return self.directive("captures", "no") != "no"

    def run(self, folder: Path, on: bool, recording: bool) -> Outcome:
        """Run the program in `folder/cwd`, and rename that folder afterwards, so that both runs have the same paths.

        Args:
            folder: Folder of both runs.
            on: True to run with autoprof.
            recording: True to capture all steps, unless the program has a directive `steps`.
        """
        cwd = folder / "cwd"
        if self.path.is_dir():
            shutil.copytree(self.path, cwd, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            cwd.mkdir(parents=True)
            shutil.copy(self.path, cwd)
        for name in ("home", "tmp"):
            (cwd / name).mkdir()
        if "shell" in self.directives:
            command = ["/bin/sh", "-c", self.directive("shell").replace("{script}", self.script)]
        else:
            words = self.directive("python", "{script}").split()
            command = [sys.executable, *(word.replace("{script}", self.script) for word in words)]
        given = self.directive("stdin").encode()
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
            process.returncode, self._seen(out), self._seen(err), [] if "files" in self.directives else _left(cwd)
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
                "AUTOPROF_LOG": "notice",
                "AUTOPROF_RECIPES": str(LIBRARY / "tinyrl.toml"),
                "AUTOPROF_STEPS": self.directive("steps", "::1" if recording else ""),
                "AUTOPROF_DIR": str(runs),
                "AUTOPROF_MIN_FREE_MB": "1",
            }
        variables |= dict(pair.split("=", 1) for pair in self.directives["set"])
        environment = clean_environment(**variables)
        for name in self.directives["unset"]:
            environment.pop(name, None)
        return environment

    def _seen(self, output: bytes) -> list[str]:
        """Return the lines of an output, without lines and frames of autoprof and lines of Kineto (torch 2.13)."""
        lines: list[str] = []
        within = -1
        for line in output.decode(errors="backslashreplace").splitlines(keepends=True):
            # Each line of an exception group begins with `|`.
            depth = len(line) - len(line.lstrip(" |"))
            if 0 <= within < depth:
                continue
            within = -1
            if _OWN_FRAME.match(line):
                within = depth
            elif not line.startswith(("autoprof:", *KINETO)) and not any(
                re.search(each, line) for each in self.directives["ignore"]
            ):
                lines.append(_ADDRESS.sub("0x", line))
        return lines


class Outcome(NamedTuple):
    """Result of a run of a program."""

    status: int
    stdout: list[str]
    stderr: list[str]
    files: list[str]


def programs() -> list[Program]:
    """Return all programs, sorted by name."""
    found = []
    for path in sorted(PROGRAMS.iterdir()):
        main = path / "main.py" if path.is_dir() else path
        if main.suffix == ".py" and main.is_file():
            runs = _runs(main.read_text(errors="replace"))
            found += [Program(path, directives, len(runs) > 1) for directives in runs]
    return found


def hooks_called(runs: Path) -> int:
    """Return the number of hooks called in all processes of a run; 0 without a run."""
    if not runs.is_dir():
        return 0
    processes = [process for folder in runs.iterdir() if folder.is_dir() for process in processes_of(folder)]
    return sum(hook["called"] for process in processes for hook in process["hooks"].values())


def captures(runs: Path) -> list[str]:
    """Return the states of the captures of a run."""
    return [json.loads(path.read_text())["state"] for path in sorted(runs.glob("*/global_step_*/*.meta.json"))]


def _left(cwd: Path) -> list[str]:
    """Return a line for each file in the program's working directory, home and folder for temporary files."""
    found = []
    for path in sorted(cwd.rglob("*")):
        # Sockets of multiprocessing have random names.
        if _BYPRODUCTS.intersection(path.parts) or any(part.startswith("pymp-") for part in path.parts):
            continue
        content = zlib.crc32(path.read_bytes()) if path.is_file() else None
        found.append(f"{path.relative_to(cwd)} {path.lstat().st_mode:o} {content}")
    return found
