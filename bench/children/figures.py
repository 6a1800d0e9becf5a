"""Prints figures of a process with autoprof as JSON: `figures.py WAY [ARGUMENTS...]`.

`uncaptured`, `captured`: calls of one stage of the toy trainer; the steps to capture are set by the environment.
`files`: the files of the process that starts a run and of a worker that it starts.
`command ARGUMENTS...`: modules of the command line with these arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import autoprof

FOLDER = os.path.dirname(autoprof.__file__) + os.sep
# Functions of `posix` that take a path or a descriptor.
FILE_FUNCTIONS = frozenset(
    (
        *("access", "chmod", "close", "dup", "dup2", "fchmod", "fdatasync", "fstat", "fsync", "ftruncate", "link"),
        *("listdir", "lseek", "lstat", "mkdir", "open", "pread", "pwrite", "read", "readlink", "remove", "rename"),
        *("replace", "rmdir", "scandir", "stat", "statvfs", "symlink", "truncate", "unlink", "utime", "write"),
    )
)
STEPS = 10


class Counter:
    """A profile function that counts the calls of autoprof's functions, and their file operations.

    Attributes:
        files: The file of each called function, in order. Comprehensions, generator expressions and lambdas are left
            out: some releases of Python inline them.
        operations: The number of file operations.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.operations = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(FOLDER):
            return
        if event == "call" and not code.co_name.startswith("<"):
            self.files.append(code.co_filename)
        elif event == "c_call":
            self.operations += _is_operation(argument)

    def figures(self) -> dict[str, int]:
        """Return the counts, by name."""
        changes = sum(after != before for before, after in zip(["", *self.files], self.files, strict=False))
        return {
            "calls": len(self.files),
            "files": len(set(self.files)),
            "file changes": changes,
            "file operations": self.operations,
        }


def _is_operation(function: Any) -> bool:
    module = getattr(function, "__module__", None)
    if module == "posix":
        return function.__name__ in FILE_FUNCTIONS
    return module in ("fcntl", "_io") or type(getattr(function, "__self__", None)).__module__ == "_io"


def counted(work: Callable[[], object]) -> dict[str, int]:
    """Call `work`, and return the counts of this call, by name."""
    counter = Counter()
    sys.setprofile(counter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counter.figures()


def stage(captured: bool) -> dict[str, int]:
    """Count the same stage in several steps, and return the smallest count.

    The first stage imports modules. Later stages differ by flushes of the timeline, which depend on the time.
    """
    import toy

    from autoprof.capture import writer
    from autoprof.run import end, runtime

    if captured:
        import torch  # noqa: F401  # torch's profiler is used only in processes that have imported torch
    trainer, worker = toy.Trainer(), toy.Stage()
    found = []
    for step in range(1, STEPS + 1):
        trainer.global_step = step
        trainer.step(lambda: found.append(counted(lambda: worker.forward(1))))
        run = runtime.current()
        assert run is not None, "autoprof did not apply the recipe"
        end.wait_for_files(run)
        writer.wait(run.settings.stop_timeout_s)
        traces = list(run.rundir.step(step).glob("*.pt.trace.json.gz"))
        assert bool(traces) == captured, f"step {step} has {len(traces)} traces"
    return min(found, key=lambda each: each["calls"])


def files(role: str = "first") -> dict[str, list[str]]:
    """Return the files of this process, by role. The process that starts the run also returns the files of a worker."""
    import toy

    from autoprof.run import runtime

    trainer, worker = toy.Trainer(), toy.Stage()
    trainer.global_step = 1
    found: dict[str, list[str]] = {}

    def work() -> None:
        worker.forward(1)
        if role == "first":
            said = subprocess.run([sys.executable, __file__, "files", "worker"], stdout=subprocess.PIPE, check=True)
            found.update(json.loads(said.stdout))
        run = runtime.current()
        assert run is not None, "autoprof did not apply the recipe"
        own = f"-{os.getpid()}."
        found[role] = sorted(path.parent.name for path in run.rundir.path.rglob("*") if own in path.name)

    trainer.step(work)
    return found


def command(arguments: list[str]) -> dict[str, int]:
    """Run a command; return how many modules of autoprof it imports, and how many have a function that it calls."""
    from autoprof.cli import main

    counter = Counter()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        sys.setprofile(counter)
        try:
            main.main(arguments)
        finally:
            sys.setprofile(None)
    imported = [name for name in sys.modules if name == "autoprof" or name.startswith("autoprof.")]
    return {"imported": len(imported), "called": len(set(counter.files))}


def main(way: str, arguments: list[str]) -> Any:
    """Return the counts of one way, which the docstring of the module describes."""
    if way == "command":
        return command(arguments)
    return files(*arguments) if way == "files" else stage(way == "captured")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    print(json.dumps(main(sys.argv[1], sys.argv[2:])))
