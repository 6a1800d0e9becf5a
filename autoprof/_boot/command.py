"""Command line of this interpreter: the program that it runs, and the part of the program in a run."""

import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Sequence


# Programs that are never profiled: file names, parts of paths, modules, and parts of code.
# Ray starts each worker's interpreter twice in one pid. Only the second start (default_worker.py) has the environment
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
# Programs that start the ranks of a run, one trainer process each, and wait for them. They import no target.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_RAY_WORKER = "/ray/_private/workers/default_worker.py"


class Command:
    """The command line of an interpreter (`sys.orig_argv`).

    Attributes:
        kind: `-m` for a module, `-c` for code, or an empty text for a script.
        what: Module, code, or path of the script; empty if the interpreter reads stdin.
        name: File name of the script, or name of the module; empty for code.
        ray_worker: True for a worker process of Ray, which belongs to a run and never starts one.
    """

    def __init__(self, words: "Sequence[str]") -> None:
        self.kind, self.what = _runs(words)
        self.name = {"-m": self.what, "-c": ""}.get(self.kind, self.what.rpartition("/")[2])
        self.ray_worker = any(_RAY_WORKER in word for word in words[1:4])
        self._asks = any(word in words for word in ("-h", "--help", "--version"))

    @property
    def foreign(self) -> bool:
        """True for a program that is never profiled."""
        if self.kind == "-m":
            return self.what in _FOREIGN_MODULES or self.what in _FOREIGN_TEXTS
        if self.kind == "-c":
            return any(text in self.what for text in _FOREIGN_TEXTS)
        return self.name in _FOREIGN_PROGRAMS or any(part in self.what for part in _FOREIGN_PATHS)

    @property
    def launcher(self) -> bool:
        """True for a program that starts the ranks of a run. The run ends when this program ends."""
        return self.name in (_LAUNCHER_MODULES if self.kind == "-m" else _LAUNCHERS)

    @property
    def program(self) -> bool:
        """True for a program that the user may want to profile.

        False for code on the command line or on stdin, because shell scripts run many such snippets. Also False for
        modules of the standard library, and for programs with the argument `--help` or `--version`.
        """
        library = self.kind == "-m" and self.what.partition(".")[0] in sys.stdlib_module_names
        return self.what != "" and self.kind != "-c" and not library and not self._asks


def _runs(words: "Sequence[str]") -> "tuple[str, str]":
    """Return the program of an interpreter: `-m` and a module, `-c` and code, or an empty text and a script's path.

    If the interpreter reads its program from stdin, both texts are empty.
    """
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
