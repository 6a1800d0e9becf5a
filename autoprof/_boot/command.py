"""Command line of an interpreter: a script, a module or code, and its part in a run."""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


# Scripts and modules that are no business of ours, by how their command line begins or what their path contains.
# Ray starts each worker's interpreter twice in one pid; only the second start (default_worker.py) has the environment
# of the job (Ray 2.60, ray/_private/workers/setup_worker.py).
_FOREIGN_PROGRAMS = (
    *("pip", "pip3", "pipx", "uv", "conda", "mamba", "setup.py", "autoprof", "ray", "nsys"),
    *("cython", "cythonize", "cmake", "ninja", "meson"),
)
_FOREIGN_PATHS = (
    "/ray/dashboard/",
    "/ray/autoscaler/",
    "/ray/_private/log_monitor.py",
    "/ray/_private/runtime_env/",
    "/ray/_private/workers/setup_worker.py",
    "/torch/_inductor/compile_worker/",
)
_FOREIGN_MODULES = ("pip", "ensurepip", "venv", "virtualenv", "build", "autoprof", "ray.scripts.scripts")
_FOREIGN_TEXTS = (
    "multiprocessing.resource_tracker",
    "vllm.model_executor.models.registry",
)
# What starts the ranks of a run, each a process that runs the trainer, and waits for them. It imports no target.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_RAY_WORKER = "/ray/_private/workers/default_worker.py"


class Command:
    """The command line of an interpreter (`sys.orig_argv`), read once.

    Attributes:
        kind: `-m`, `-c`, or an empty text for a script.
        what: The module, the code or the path of the script; empty where the interpreter reads stdin.
        name: The script or module, as its user calls it; empty for code.
        ray_worker: Whether this is a worker process of Ray: it belongs to a run, it never starts one.
    """

    def __init__(self, words: "Sequence[str]") -> None:
        self.kind, self.what = _runs(words)
        self.name = {"-m": self.what, "-c": ""}.get(self.kind, self.what.rpartition("/")[2])
        self.ray_worker = any(_RAY_WORKER in word for word in words[1:4])
        self._asks = any(word in words for word in ("-h", "--help", "--version"))

    @property
    def foreign(self) -> bool:
        """Whether this process is none that could ever be profiled."""
        if self.kind == "-m":
            return self.what in _FOREIGN_MODULES or self.what in _FOREIGN_TEXTS
        if self.kind == "-c":
            return any(text in self.what for text in _FOREIGN_TEXTS)
        return self.name in _FOREIGN_PROGRAMS or any(part in self.what for part in _FOREIGN_PATHS)

    @property
    def launcher(self) -> bool:
        """Whether this process starts the ranks of a run: the run is its own, and ends with it."""
        return self.name in (_LAUNCHER_MODULES if self.kind == "-m" else _LAUNCHERS)

    @property
    def program(self) -> bool:
        """Whether this is a program that may be meant to be profiled.

        Code on a command line or on stdin is not: scripts ask Python many a small thing. Nor are modules of the
        standard library, and a program that is asked for its usage.
        """
        library = self.kind == "-m" and self.what.partition(".")[0] in sys.stdlib_module_names
        return self.what != "" and self.kind != "-c" and not library and not self._asks


def _runs(words: "Sequence[str]") -> "tuple[str, str]":
    """Return what an interpreter runs: `-m` and a module, `-c` and code, or an empty text and a script."""
    arguments = iter(words[1:])
    for argument in arguments:
        if argument in ("-m", "-c"):
            return argument, next(arguments, "")
        if not argument.startswith("-"):
            return "", argument.replace(os.sep, "/")
        if argument in ("-X", "-W"):
            next(arguments, "")
    return "", ""


# The command line of this process.
THIS = Command(sys.orig_argv or getattr(sys, "argv", []))
