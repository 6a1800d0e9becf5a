"""Activation at interpreter start if `AUTOPROF=1`. The boot uses only the standard library and installs one finder.

A cluster starts thousands of interpreters, and nearly all of them never import a target. So the boot reads only the
names of recipe files, not the recipes. The name of a recipe file begins with the import name of its target
(`verl.toml`, `verl.dapo.toml`). The rest of autoprof is imported when a process imports a target.

Installed distributions may declare more recipes by entry points. The process that starts a run searches for these
recipes when it first imports a module from outside the standard library. It passes the result to its children in the
environment.

`from __future__ import annotations` would import `__future__`, which takes 2 % of an interpreter start. So annotations
that Python would evaluate are strings.
"""

import os
import sys
import time

from autoprof._boot.finder import Finder, watch_runpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType
    from typing import Any


ON = ("1", "true", "on", "yes")
ENABLE = "AUTOPROF"
RUN_ID = "AUTOPROF_RUN_ID"
RUN_INFO = "AUTOPROF_RUN_INFO"
# `PID:FOLDER`: the process that started the run, and its working directory. The pid is empty if that process is not a
# program of the user. The first process that imports a target may be a child with another working directory. It reads
# the settings in FOLDER.
STARTER = "AUTOPROF_STARTER"
RECIPES = "AUTOPROF_RECIPES"
# The `sys.prefix` of the environment that was searched, and the recipe folders that its distributions declare.
FOUND = "AUTOPROF_RECIPES_FOUND"

# Variables that launchers set for each rank: Open MPI, `srun`, and torchrun with its imitators.
_RANKS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")

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

# Maximum length of a printed reason. A reason may quote an environment variable, which may have 128 kB.
_MAX_REASON_CHARS = 1000


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
COMMAND = Command(sys.orig_argv or getattr(sys, "argv", []))

_activated = False
# Function to call at the end of the process that started the run, after all other functions registered with `atexit`.
at_last: "Callable[[], None] | None" = None


def enabled() -> bool:
    """Return True if `AUTOPROF` is on in the environment."""
    return os.environ.get(ENABLE, "").strip().lower() in ON


def declared_folders() -> "list[str] | None":
    """Return the recipe folders that distributions declare, or None if this `sys.prefix` was not searched yet."""
    prefix, *folders = os.environ.get(FOUND, "").split(os.pathsep)
    return folders if prefix == sys.prefix else None


def starter() -> "int | None":
    """Return the pid of the user's program that started the run, or None if no program of the user started it.

    If no hook was applied in the run, this program reports the reason when it ends.
    """
    pid = os.environ.get(STARTER, "").partition(":")[0]
    return int(pid) if pid.isdecimal() else None


def started_in() -> str:
    """Return the folder in which the run was started, or the working directory if that folder does not exist."""
    folder = os.environ.get(STARTER, "").partition(":")[2]
    return folder if folder and os.path.isdir(folder) else os.getcwd()


def new_run_id() -> str:
    """Return a new run id: local time and six random hexadecimal digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def own_recipes() -> str:
    """Return the folder of autoprof's own recipes. It is inside the installed package, or beside it in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    inside = os.path.join(package, "recipes")
    return inside if os.path.isdir(inside) else os.path.join(os.path.dirname(package), "recipes")


def recipe_files(include_own: bool = True) -> "dict[str, list[str]]":
    """Return the paths of all recipe files, as a dict from the import name of a target to its files.

    autoprof's own recipes come first, then the recipes of distributions, then the ones in `AUTOPROF_RECIPES`.

    Args:
        include_own: False to leave out autoprof's own recipes. Their targets are never scripts; the targets of other
            recipes may be scripts.
    """
    files: dict[str, list[str]] = {}
    # The list may come from another node, so a folder may be missing or unreadable on this one.
    declared = [path for path in declared_folders() or () if os.access(path, os.R_OK | os.X_OK)]
    for path in [*([own_recipes()] if include_own else ()), *declared, *_extra_paths()]:
        if os.path.isdir(path):
            folder = os.path.join(path, "")
            paths = [folder + name for name in sorted(os.listdir(path)) if name.endswith(".toml")]
        else:  # config/settings.py reports a path that does not exist
            paths = [path] if os.path.isfile(path) else []
        for file in paths:
            for target in file.rpartition("/")[2].partition(".")[0].split("+"):
                files.setdefault(target, []).append(file)
    return files


def _extra_paths() -> "list[str]":
    """Return the files and folders that `AUTOPROF_RECIPES` names."""
    paths_text = os.environ.get(RECIPES, "").replace(",", os.pathsep)
    return [os.path.expanduser(part.strip()) for part in paths_text.split(os.pathsep) if part.strip()]


def activate() -> None:
    """If `AUTOPROF` is on, install the finder in this process, once. An error in this code switches autoprof off."""
    global _activated
    if _activated or not enabled():
        return
    _activated = True
    _guarded("could not start", switch_off, _activate)


def switch_off(reason: str) -> None:
    """Disable autoprof in this process and its children, and print the reason as one line on stderr."""
    os.environ[ENABLE] = "0"
    uninstall()
    reason = reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]}..."
    _write_to_stderr(f"{reason}; autoprof is off for this run")


def _activate() -> None:
    if COMMAND.foreign or (RUN_ID not in os.environ and COMMAND.ray_worker):
        return
    starts = STARTER not in os.environ and not COMMAND.ray_worker
    if any(name in os.environ for name in _RANKS):
        from autoprof._boot import launch

        launch.note_launch(os.environ, COMMAND, starts)
    if starts:
        _start_run()
    if starter() == os.getpid():
        # `atexit` calls the function last that was registered first. If this program replaces itself by `exec`, the
        # new program has the same pid and registers the function again.
        import atexit

        atexit.register(_end, os.getpid())
    install()
    if COMMAND.launcher or (starts and _needs_settings()):
        agent().join()
    if COMMAND.kind != "-c" and enabled():
        for name in (
            {COMMAND.what.partition(".")[0], COMMAND.what.rpartition(".")[2]} if COMMAND.kind else (COMMAND.what,)
        ):
            run_script(name)


def _start_run() -> None:
    """Put the id, the starter and absolute paths of the run into the environment, for children in other folders."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # the working directory was removed
        folder = ""
    os.environ.setdefault(RUN_ID, new_run_id())
    os.environ[STARTER] = f"{os.getpid() if COMMAND.program else ''}:{folder}"
    runs_folder = os.environ.get("AUTOPROF_DIR", "").strip()
    if runs_folder and not runs_folder.startswith("~"):
        os.environ["AUTOPROF_DIR"] = os.path.abspath(runs_folder)
    if paths := _extra_paths():
        os.environ[RECIPES] = os.pathsep.join(map(os.path.abspath, paths))


def _needs_settings() -> bool:
    """Return True if the settings must be read now.

    Reading them takes longer than the rest of the boot. It is necessary in two cases: if the settings file may name
    recipes, and if a path in the environment does not exist, because the user should see that error at the start.
    """
    named = os.path.expanduser(os.environ.get("AUTOPROF_CONFIG", "").strip())
    file = named or "autoprof.toml"
    if os.path.isfile(file) and os.access(file, os.R_OK):
        with open(file, "rb") as settings:
            if b"recipes" in settings.read(1 << 20):  # the maximum size that config/settings.py accepts
                return True
    return COMMAND.program and not all(map(os.path.exists, [*_extra_paths(), *filter(None, [named])]))


def _end(pid: int) -> None:
    """If no hook was applied in the run, report the reason. Then call `at_last`. Do nothing in a forked child."""
    if os.getpid() != pid:
        return
    # After Ctrl-C the user knows the reason. Besides, the imports below may `exec` code, and CPython then forgets that
    # it has to end the process by SIGINT (3.11, run_eval_code_obj).
    is_ctrl_c = issubclass(type(getattr(sys, "last_value", None)), KeyboardInterrupt)
    try:
        if enabled() and not is_ctrl_c:
            _guarded("could not find out why there is no profile", _write_to_stderr, _report_empty_run)
    finally:
        if at_last is not None:
            _guarded("could not keep the exit status", _write_to_stderr, at_last)


def _report_empty_run() -> None:
    from autoprof.hooks import empty_run

    empty_run.report()


def install() -> None:
    """Put the finder in front of all other finders. Load the recipes of targets that are already imported."""
    global _activated
    _activated = True
    finder = _new_finder(recipe_files())
    # A new list is necessary. CPython 3.11 keeps the first list, and everything in it, until the very end of the
    # interpreter. With the finder in the first list, the end takes longer by 1 % of an interpreter start.
    sys.meta_path = [finder, *sys.meta_path]
    # Launchers run scripts by `runpy`.
    if recipe_files(include_own=False):
        finder.when_imported("runpy", lambda runpy: watch_runpy(runpy, run_script))
    # An entry point may call this function during the import of its target. The finder no longer sees that import.
    if imported_targets := [name for name in finder.targets if name in sys.modules]:
        finder.look()
    for name in imported_targets:
        finder.load(name)


def uninstall() -> None:
    """Remove the finder."""
    global _activated
    _activated = False
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]


def when_imported(name: str, hook: "Callable[[ModuleType], None]") -> None:
    """Call `hook` with the module `name` now if the module is imported, and whenever the module is executed later.

    If the process has no finder yet, install a finder in front of all other finders.
    """
    finder = _finder()
    if finder is None:
        sys.meta_path.insert(0, finder := _new_finder(()))
    finder.when_imported(name, hook)


def run_script(script: str) -> None:
    """Load the recipes for a script that is about to run as `__main__`. Errors in this code are only printed."""
    _guarded(f"could not load the recipes for {script}", _write_to_stderr, _run_script, script)


def _run_script(script: str) -> None:
    name = os.path.basename(script).removesuffix(".py")
    finder = _finder()
    if finder is not None and name in finder.targets and name in recipe_files(include_own=False):
        finder.load(name)


def add_recipes() -> None:
    """If recipes were added to the environment after the finder was made, give the finder their targets."""
    if finder := _finder():
        finder.add(recipe_files())


def agent() -> "ModuleType":
    """Import and return `autoprof.agent`, which sets up autoprof's code in a process of a run."""
    from autoprof import agent

    return agent


def _finder() -> "Finder | None":
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def _new_finder(targets: "Iterable[str]") -> "Finder":
    return Finder(targets, _load, _look if declared_folders() is None else None)


def _load(target: str) -> bool:
    return _guarded(f"could not load the recipes for {target}", switch_off, _load_recipes, target) is True


def _load_recipes(target: str) -> bool:
    agent().load(target)
    return True


def _look(folders: "list[str]") -> "Iterable[str]":
    return _guarded("could not look for recipes of distributions", _write_to_stderr, _declared_targets, folders) or ()


def _declared_targets(folders: "list[str]") -> "Iterable[str]":
    """Return all targets if distributions in `folders` declare more recipes, else nothing."""
    from autoprof._boot import entry_points

    known_folders = declared_folders() or []
    new_folders = entry_points.new_folders(folders, known_folders)
    os.environ[FOUND] = os.pathsep.join([sys.prefix, *known_folders, *new_folders])
    return recipe_files() if new_folders else ()


def _guarded(what: str, report: "Callable[[str], None]", work: "Callable[..., Any]", *arguments: "Any") -> "Any":
    """Call `work`, and return its result. Root of the boot's code, where autoprof's errors end, as in `seam.guard`.

    Args:
        what: The failure if `work` raises an error, as text for the report: `could not start`.
        report: Function of the text of the report.
        work: Function of `arguments`.
    """
    try:
        return work(*arguments)
    except BaseException as error:
        from autoprof.base import seam  # only needed for an error

        if seam.error_for_user(error) is not None:
            raise
        report(f"{what} ({type(error).__name__}: {error})")


def _write_to_stderr(text: str) -> None:
    try:
        from autoprof.base.redact import hidden, plain
        from autoprof.base.seam import no_size_signal

        # stderr may be a file.
        no_size_signal(sys.stderr.write, plain(hidden(f"autoprof: {' '.join(text.split())}")) + "\n")
    except Exception:  # stderr can't be used, so the line is lost
        pass
