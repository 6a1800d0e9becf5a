"""What every interpreter start runs when `AUTOPROF=1`: stdlib only, a few file names and one finder.

A cluster starts thousands of interpreters, and nearly all of them never import a target. So the boot reads no recipe:
a recipe's file name begins with the import name of its target (`verl.toml`, `verl.dapo.toml`), and the rest of
autoprof is imported when that name is.

Recipes may also come with other distributions, by entry point. Who starts a run looks for them, when it first imports
something that is not in the standard library, and hands on what it found in the environment.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any

ON = ("1", "true", "on", "yes")
ENABLE = "AUTOPROF"
RUN_ID = "AUTOPROF_RUN_ID"
RUN_INFO = "AUTOPROF_RUN_INFO"
# The `sys.prefix` for which somebody has looked, and the folders of recipes that distributions there declare.
FOUND = "AUTOPROF_RECIPES_FOUND"

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
# What starts the ranks of a run, each a process that runs the trainer, and waits for them. It imports no target.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_FOREIGN_TEXTS = (
    "multiprocessing.resource_tracker",
    "vllm.model_executor.models.registry",
)
_RAY_WORKER = "/ray/_private/workers/default_worker.py"

_activated = False


def enabled() -> bool:
    """Whether the environment asks for autoprof."""
    return os.environ.get(ENABLE, "").strip().lower() in ON


def activate() -> None:
    """Install the finder in this process, once, if the environment asks for it. Never raises."""
    global _activated
    if _activated or not enabled():
        return
    _activated = True
    try:
        _activate(getattr(sys, "orig_argv", None) or sys.argv)
    except BaseException as error:
        if not _ours(error):
            raise
        switch_off(f"could not start ({type(error).__name__}: {error})")


def switch_off(why: str) -> None:
    """Leave this process and its children to run without autoprof, and say why in one line on stderr."""
    os.environ[ENABLE] = "0"
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    _say(f"{why}; autoprof is off for this run")


def foreign(command: Sequence[str]) -> bool:
    """Whether a process with this command line (`sys.orig_argv`) is none that could ever be profiled."""
    kind, what = _runs(command)
    if kind == "-m":
        return what in _FOREIGN_MODULES or what in _FOREIGN_TEXTS
    if kind == "-c":
        return any(text in what for text in _FOREIGN_TEXTS)
    return what.rpartition("/")[2] in _FOREIGN_PROGRAMS or any(part in what for part in _FOREIGN_PATHS)


def launcher(command: Sequence[str]) -> bool:
    """Whether a process with this command line starts the ranks of a run: the run is its own, and ends with it."""
    kind, what = _runs(command)
    return what in _LAUNCHER_MODULES if kind == "-m" else kind == "" and what.rpartition("/")[2] in _LAUNCHERS


def _runs(command: Sequence[str]) -> tuple[str, str]:
    """What an interpreter runs: `-m` and a module, `-c` and code, or an empty text and a script."""
    arguments = iter(command[1:])
    for argument in arguments:
        if argument in ("-m", "-c"):
            return argument, next(arguments, "")
        if not argument.startswith("-"):
            return "", argument.replace(os.sep, "/")
        if argument in ("-X", "-W"):
            next(arguments, "")
    return "", ""


def ray_worker(command: Sequence[str]) -> bool:
    """Whether this is a worker process of Ray: it belongs to a run, it never starts one."""
    return any(_RAY_WORKER in argument for argument in command[1:4])


def recipe_files() -> dict[str, list[str]]:
    """The recipe files there are, by the import name of their target: autoprof's own, those of distributions, then
    `AUTOPROF_RECIPES`."""
    files: dict[str, list[str]] = {}
    for path in _recipe_paths():
        target = os.path.basename(path).split(".", 1)[0]
        files.setdefault(target, []).append(path)
    return files


def found() -> list[str] | None:
    """The folders of recipes that distributions declare, or None where nobody has looked in this environment yet."""
    prefix, *folders = os.environ.get(FOUND, "").split(os.pathsep)
    return folders if prefix == sys.prefix else None


def own_recipes() -> str:
    """The folder of autoprof's own recipes: inside the package in a wheel, beside it in a checkout."""
    package = os.path.dirname(os.path.abspath(__file__))
    inside = os.path.join(package, "recipes")
    return inside if os.path.isdir(inside) else os.path.join(os.path.dirname(package), "recipes")


def new_run_id() -> str:
    """A run id: local time and six random hexadecimal digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def _recipe_paths() -> Iterator[str]:
    extra = os.environ.get("AUTOPROF_RECIPES", "").replace(",", os.pathsep)
    # Folders that another node told of may be others here.
    told = [place for place in found() or () if os.access(place, os.R_OK | os.X_OK)]
    for place in [own_recipes(), *told, *filter(None, (part.strip() for part in extra.split(os.pathsep)))]:
        if os.path.isdir(place):
            yield from (os.path.join(place, name) for name in sorted(os.listdir(place)) if name.endswith(".toml"))
        elif os.path.isfile(place):  # a place that is not there is settings.py's to complain about
            yield place


def _activate(command: Sequence[str]) -> None:
    if foreign(command):
        return
    if RUN_ID not in os.environ:
        if ray_worker(command):
            return
        os.environ[RUN_ID] = new_run_id()
        # The run begins where its first process does; it may be a child that imports a target, and works elsewhere.
        folder = os.environ.get("AUTOPROF_DIR", "").strip()
        if folder and not folder.startswith("~"):
            os.environ["AUTOPROF_DIR"] = os.path.abspath(folder)
    finder = Finder(set(recipe_files()))
    sys.meta_path.insert(0, finder)
    if launcher(command):
        from autoprof import importing

        importing.join()
    # An entry point runs while its target is already being imported: those are too late for the finder.
    if late := [name for name in finder.targets if name in sys.modules]:
        finder.look()
    for name in late:
        finder.load(name)


def _starting() -> bool:
    """Whether `site` is at work, which imports what `.pth` files name in every interpreter."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "site":
            return True
        frame = frame.f_back
    return False


def finder() -> Finder:
    """The finder of this process, which is put in front of all others where there is none yet."""
    for each in sys.meta_path:
        if isinstance(each, Finder):
            return each
    sys.meta_path.insert(0, first := Finder(set()))
    return first


def _ours(error: BaseException) -> bool:
    """Whether an exception in autoprof's code is an error of autoprof's: no signal's, and no signal handler's."""
    from autoprof import interrupts

    return interrupts.of_user(error) is None


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"autoprof: {text}\n")
    except Exception:  # no usable stderr: there is nobody to tell
        pass


class Finder:
    """Loads a target's recipes when the target is first imported, and calls what waits for a module to be imported.

    The import system calls `find_spec` with its own lock held, for which the imports of all other threads wait (CPython
    3.11, `importlib._bootstrap._find_spec`). So `find_spec` imports no module and waits for no lock: it finds the
    module as the finders behind it do, and the rest comes when the module's loader executes it.
    """

    def __init__(self, targets: set[str]) -> None:
        self.targets = targets
        self._looks = found() is None
        self._seen: set[str] = set()
        self._hooks: dict[str, list[Callable[[ModuleType], None]]] = {}
        # Targets whose recipes are being read, and the threads that do so; targets that autoprof itself imports
        # meanwhile; what a thread is looking for; what a `Loader` is executing.
        self._loading: set[str] = set()
        self._loaders: set[int] = set()
        self._late: set[str] = set()
        self._finding: set[tuple[int, str]] = set()
        self._executing: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if self._looks and fullname == top and fullname not in sys.stdlib_module_names and not _starting():
            self.look()
        if not (top in self.targets or fullname in self._hooks or top in self._loading):
            return None
        # Another finder, as wrapt's, may search anew from the first finder on.
        search = (get_ident(), fullname)
        if search in self._finding:
            return None
        self._finding.add(search)
        try:
            spec = self._find_behind(fullname, path, target)
        finally:
            self._finding.discard(search)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            if getattr(spec.loader, "name", None) == fullname and hasattr(spec.loader, "__dict__"):
                spec.loader.exec_module = _Execution(self, spec.loader)  # type: ignore[method-assign, union-attr]
            else:  # it is of no file, or of several modules
                spec.loader = Loader(self, spec.loader)  # type: ignore[assignment]
        return spec

    def _find_behind(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None

    def execute(self, module: ModuleType, loader: Any) -> None:
        """Execute a module with its own loader: the recipes of its target are loaded before, its hooks called after."""
        name = module.__spec__.name if module.__spec__ is not None else module.__name__
        self._executing.add(name)
        try:
            top = name.partition(".")[0]
            if top in self.targets:
                self.load(top)
            loader.exec_module(module)
        finally:
            self._executing.discard(name)
        for hook in list(self._hooks.get(name, ())):
            hook(sys.modules.get(name, module))

    def when_imported(self, name: str, hook: Callable[[ModuleType], None]) -> None:
        """Call `hook` with the module `name` now if it is imported, and each time that it is executed from here on."""
        self._hooks.setdefault(name, []).append(hook)
        module = sys.modules.get(name)
        if module is not None and name not in self._executing:
            hook(module)

    def load(self, name: str) -> None:
        """Load the recipes for the target `name`, once. Raises nothing of autoprof's own."""
        here = get_ident()
        self._loading.add(name)
        self.targets.discard(name)
        if here in self._loaders:
            self._late.add(name)
            return
        self._loaders.add(here)
        try:
            from autoprof import importing

            importing.load(name)
            while self._late:
                importing.load(late := self._late.pop())
                self._loading.discard(late)
        except BaseException as error:
            if not _ours(error):
                self.targets.add(name)
                raise
            switch_off(f"could not load the recipes for {name} ({type(error).__name__}: {error})")
        finally:
            self._loaders.discard(here)
            self._loading.discard(name)

    def look(self) -> None:
        """Look for recipes of distributions where `sys.path` has grown since the last time. Raises nothing of
        autoprof's own.

        A process that was told what there is does not look.
        """
        places = [place for place in sys.path if place not in self._seen]
        if not self._looks or not places:
            return
        self._seen.update(places)
        try:
            from autoprof import _entry_points

            if _entry_points.look(places):
                self.add(recipe_files())
        except BaseException as error:
            if not _ours(error):
                self._seen.difference_update(places)
                raise
            _say(f"could not look for recipes of distributions ({type(error).__name__}: {error})")

    def add(self, names: Iterable[str]) -> None:
        """Have the recipes of these targets loaded too, but for those that are imported already."""
        self.targets.update(name for name in names if name not in sys.modules)


class _Execution:
    """Executes a module in the place of a loader that is of this module alone, once."""

    def __init__(self, finder: Finder | None, loader: Any) -> None:
        self._finder = finder
        self._loader = loader

    def __call__(self, module: ModuleType) -> None:
        vars(self._loader).pop("exec_module", None)
        if self._finder is not None:
            self._finder.execute(module, self._loader)
        else:
            self._loader.exec_module(module)

    # Loaders are compared by their attributes, and specs with their loaders can be pickled.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Execution)

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type, tuple[None, Any]]:
        return _Execution, (None, self._loader)


class Loader:
    """In the place of a module's own loader, until the module is executed."""

    def __init__(self, finder: Finder, loader: Any) -> None:
        self._finder = finder
        self._loader = loader

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # What has been imported has its own loader, as without autoprof.
        for holder, name in ((module, "__loader__"), (getattr(module, "__spec__", None), "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        self._finder.execute(module, self._loader)
