"""Activation at interpreter start, when `AUTOPROF=1`: standard library only, a few file names and one finder.

A cluster starts thousands of interpreters, and nearly all of them never import a target. So the boot reads no recipe:
a recipe's file name begins with the import name of its target (`verl.toml`, `verl.dapo.toml`), and the rest of
autoprof is imported when that name is.

Recipes may also come with other distributions, by entry point. Who starts a run looks for them, when it first imports
something that is not in the standard library, and hands on what it found in the environment.

`from __future__ import annotations` would import `__future__`, 2 % of an interpreter start. So the boot's annotations
are texts where Python would evaluate them.
"""

import os
import sys
import time

from autoprof._boot.command import THIS
from autoprof._boot.finder import Finder, watch_runpy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType


ON = ("1", "true", "on", "yes")
ENABLE = "AUTOPROF"
RUN_ID = "AUTOPROF_RUN_ID"
RUN_INFO = "AUTOPROF_RUN_INFO"
# The process that started the run, where that is a program of the user's, a colon, and the folder it was started in:
# settings are read there, in whatever process a target comes first.
STARTER = "AUTOPROF_STARTER"
RECIPES = "AUTOPROF_RECIPES"
# The `sys.prefix` for which somebody has looked, and the folders of recipes that distributions there declare.
FOUND = "AUTOPROF_RECIPES_FOUND"

# What says that a launcher has started several ranks: Open MPI, `srun`, torchrun and those that do as it does.
_RANKS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")

# Characters of a reason: a variable may have 128 kB, and names of files that are none may be quoted.
_MOST_SAID = 1000

_activated = False
_own_recipes = ""


def enabled() -> bool:
    """Return whether the environment asks for autoprof."""
    return os.environ.get(ENABLE, "").strip().lower() in ON


def found() -> "list[str] | None":
    """The folders of recipes that distributions declare, or None where nobody has looked in this environment yet."""
    prefix, *folders = os.environ.get(FOUND, "").split(os.pathsep)
    return folders if prefix == sys.prefix else None


def starter() -> "int | None":
    """The process that started the run, if it is a program that says at its end why no hook was applied."""
    pid = os.environ.get(STARTER, "").partition(":")[0]
    return int(pid) if pid.isdecimal() else None


def started_in() -> str:
    """The folder in which the run was started, or the working directory where the former is not there."""
    folder = os.environ.get(STARTER, "").partition(":")[2]
    return folder if folder and os.path.isdir(folder) else os.getcwd()


def new_run_id() -> str:
    """A run id: local time and six random hexadecimal digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def own_recipes() -> str:
    """The folder of autoprof's own recipes: inside the package in a wheel, beside it in a checkout."""
    global _own_recipes
    if not _own_recipes:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        inside = os.path.join(package, "recipes")
        _own_recipes = inside if os.path.isdir(inside) else os.path.join(os.path.dirname(package), "recipes")
    return _own_recipes


def recipe_files() -> "dict[str, list[str]]":
    """The recipe files there are, by the import name of their target: autoprof's own, those of distributions, then
    `AUTOPROF_RECIPES`."""
    files: dict[str, list[str]] = {}
    for path in _recipe_paths():
        for target in path.rpartition("/")[2].partition(".")[0].split("+"):
            files.setdefault(target, []).append(path)
    return files


def _recipe_paths() -> "Iterator[str]":
    # Folders that another node told of may be others here.
    told = [place for place in found() or () if os.access(place, os.R_OK | os.X_OK)]
    for place in [own_recipes(), *told, *_places()]:
        if os.path.isdir(place):
            yield from (os.path.join(place, name) for name in sorted(os.listdir(place)) if name.endswith(".toml"))
        elif os.path.isfile(place):  # a place that is not there is settings.py's to complain about
            yield place


def _places() -> "list[str]":
    """The files and folders of `AUTOPROF_RECIPES`."""
    extra = os.environ.get(RECIPES, "").replace(",", os.pathsep)
    return [os.path.expanduser(part.strip()) for part in extra.split(os.pathsep) if part.strip()]


def _of_others(files: "Mapping[str, Sequence[str]]") -> "set[str]":
    """Return the targets for which there are recipes besides autoprof's own: only those may be for scripts."""
    own = own_recipes()
    return {target for target, paths in files.items() if any(path.rpartition("/")[0] != own for path in paths)}


def activate() -> None:
    """Install the finder in this process, once, if the environment asks for it. Never raises."""
    global _activated
    if _activated or not enabled():
        return
    _activated = True
    try:
        _activate()
    except BaseException as error:
        if not _ours(error):
            raise
        switch_off(f"could not start ({type(error).__name__}: {error})")


def switch_off(why: str) -> None:
    """Leave this process and its children to run without autoprof, and say why in one line on stderr."""
    os.environ[ENABLE] = "0"
    uninstall()
    why = why if len(why) <= _MOST_SAID else f"{why[:_MOST_SAID]}..."
    _say(f"{why}; autoprof is off for this run")


def _activate() -> None:
    if THIS.foreign or (RUN_ID not in os.environ and THIS.ray_worker):
        return
    starts = STARTER not in os.environ and not THIS.ray_worker
    if any(name in os.environ for name in _RANKS):
        from autoprof._boot import command

        command.note_launch(os.environ, THIS, starts)
    if starts:
        _start_run()
    if starter() == os.getpid():
        # First of all, since it comes last then. `exec` leaves the pid as it is.
        import atexit

        atexit.register(_end, os.getpid())
    install()
    if THIS.launcher or (starts and _recipes_unknown()):
        agent().join()
    if THIS.kind != "-c" and enabled():
        for name in {THIS.what.partition(".")[0], THIS.what.rpartition(".")[2]} if THIS.kind else (THIS.what,):
            run_script(name)


def _start_run() -> None:
    """Name the run, and where it begins: it may be a child that imports a target, and works elsewhere."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        here = ""
    os.environ.setdefault(RUN_ID, new_run_id())
    os.environ[STARTER] = f"{os.getpid() if THIS.program else ''}:{here}"
    folder = os.environ.get("AUTOPROF_DIR", "").strip()
    if folder and not folder.startswith("~"):
        os.environ["AUTOPROF_DIR"] = os.path.abspath(folder)
    if places := _places():
        os.environ[RECIPES] = os.pathsep.join(map(os.path.abspath, places))


def _recipes_unknown() -> bool:
    """Return whether recipes can't be known without reading the settings, which costs more than all else here: the
    settings file names some, or something that the environment names is not there, which had better be said now."""
    named = os.path.expanduser(os.environ.get("AUTOPROF_CONFIG", "").strip())
    file = named or "autoprof.toml"
    if os.path.isfile(file) and os.access(file, os.R_OK):
        with open(file, "rb") as settings:
            if b"recipes" in settings.read(1 << 20):  # settings.py takes no more
                return True
    return THIS.program and not all(map(os.path.exists, [*_places(), *filter(None, [named])]))


def _end(pid: int) -> None:
    """Have it said, at the end of the process that started the run, why no hook was applied, where none was."""
    # Whoever pressed Ctrl-C knows why. What is imported here may `exec` a text, after which CPython forgets that it has
    # to end by the signal (3.11, run_eval_code_obj).
    if os.getpid() != pid or not enabled() or issubclass(type(getattr(sys, "last_value", None)), KeyboardInterrupt):
        return
    try:
        from autoprof.hooks import empty_run

        empty_run.tell()
    except BaseException as error:
        if not _ours(error):
            raise
        _say(f"why there is no profile could not be found out ({type(error).__name__}: {error})")


def install() -> None:
    """Put a finder in front of all others, and load the recipes of targets that are imported already."""
    global _activated
    _activated = True
    files = recipe_files()
    sys.meta_path.insert(0, finder := _new_finder(files))
    # Launchers run scripts by `runpy`.
    if _of_others(files):
        finder.when_imported("runpy", lambda runpy: watch_runpy(runpy, run_script))
    # An entry point runs while its target is already being imported: those are too late for the finder.
    if late := [name for name in finder.targets if name in sys.modules]:
        finder.look()
    for name in late:
        finder.load(name)


def uninstall() -> None:
    """Take the finder away."""
    global _activated
    _activated = False
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]


def when_imported(name: str, hook: "Callable[[ModuleType], None]") -> None:
    """Call `hook` with the module `name` now if it is imported, and each time that it is executed from here on.

    A process that has no finder yet gets one, in front of all others.
    """
    finder = _finder()
    if finder is None:
        sys.meta_path.insert(0, finder := _new_finder(()))
    finder.when_imported(name, hook)


def run_script(script: str) -> None:
    """Load the recipes for a script that is about to run as `__main__`. Raises nothing of autoprof's own."""
    try:
        name = os.path.basename(script).removesuffix(".py")
        finder = _finder()
        if finder is not None and name in finder.targets and name in _of_others(recipe_files()):
            finder.load(name)
    except BaseException as error:
        if not _ours(error):
            raise
        _say(f"could not load the recipes for {script} ({type(error).__name__}: {error})")


def add_recipes() -> None:
    """Have the recipes loaded that the environment has named meanwhile, too."""
    if finder := _finder():
        finder.add(recipe_files())


def agent() -> "ModuleType":
    """Import the part that runs inside of a run, and return it: nothing below it imports it otherwise."""
    from autoprof import agent

    return agent


def _finder() -> "Finder | None":
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)


def _new_finder(targets: "Iterable[str]") -> "Finder":
    return Finder(targets, _load, _look if found() is None else None)


def _load(target: str) -> bool:
    try:
        agent().load(target)
    except BaseException as error:
        if not _ours(error):
            raise
        switch_off(f"could not load the recipes for {target} ({type(error).__name__}: {error})")
        return False
    return True


def _look(places: "list[str]") -> "Iterable[str]":
    try:
        from autoprof._boot import entry_points

        known = found() or []
        new = entry_points.look(places, known)
        os.environ[FOUND] = os.pathsep.join([sys.prefix, *known, *new])
        return recipe_files() if new else ()
    except BaseException as error:
        if not _ours(error):
            raise
        _say(f"could not look for recipes of distributions ({type(error).__name__}: {error})")
        return ()


def _ours(error: BaseException) -> bool:
    """Return whether an exception in autoprof's code is an error of autoprof's: no signal's, and no signal
    handler's."""
    from autoprof.base import interrupts

    return interrupts.of_user(error) is None


def _say(text: str) -> None:
    try:
        from autoprof.base.redact import hidden, plain
        from autoprof.base.size_limits import no_size_signal

        # stderr may be a file.
        no_size_signal(sys.stderr.write, plain(hidden(f"autoprof: {' '.join(text.split())}")) + "\n")
    except Exception:  # no usable stderr: there is nobody to tell
        pass
