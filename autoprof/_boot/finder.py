"""Import finder, which loads a target's recipes when the target is imported, and calls hooks of modules.

The finder knows neither recipes nor the environment. Its creator passes two functions: one loads the recipes of a
target, the other one searches for recipes.

While autoprof reads recipes or applies hooks, the import of a package pauses. During a pause, a second thread may
import a module of that package, and both threads may end in a deadlock. The second thread takes the module's lock, and
the module's code waits for the package's lock. The first thread holds the package's lock, and the package's code waits
for the module's lock. CPython ends this deadlock with an error in one of the threads (up to 3.14,
https://github.com/python/cpython/issues/83065). Without autoprof, the deadlock occurs only if both imports happen
within a few milliseconds of each other. A pause can last half a second.

So the second thread waits until the package's code has run for as long as it would have run without the pause. While it
waits, the second thread releases the module's lock, because the first thread may import the module, too.
"""

import _imp
import os
import sys
from _thread import get_ident
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any

    # The thread, the process and the start time on the monotonic clock.
    Pause = tuple[int, int, float]
    Pauses = Mapping[int, Pause]
    # Loads the recipes for a target. Returns True if autoprof is still on.
    Load = Callable[[str], bool]
    # Searches folders of `sys.path` for recipes of distributions. Returns their targets.
    Look = Callable[[list[str]], Iterable[str]]


_WATCHED = "autoprof_watched"


class Finder:
    """Finder that loads a target's recipes when the target is first imported, and calls the hooks of modules.

    The import system holds its own lock while it calls `find_spec`, and the imports of all other threads wait for that
    lock (CPython 3.11, `importlib._bootstrap._find_spec`). So `find_spec` imports no module and waits for no lock. It
    only asks the finders after this finder for the module. Recipes are loaded and hooks are called later, when the
    module's loader creates and executes the module.

    Attributes:
        targets: Import names of targets whose recipes are not loaded yet.
    """

    def __init__(self, targets: "Iterable[str]", load: "Load", look: "Look | None") -> None:
        self.targets = set(targets)
        self._load = load
        self._look = look
        self._seen: set[str] = set()
        # Targets of the recipes that distributions declare, and modules whose import starts a search for such recipes.
        self._declared: set[str] = set()
        self._looks: set[str] = set()
        self._hooks: dict[str, list[Callable[[ModuleType], None]]] = {}
        # Targets whose recipes are being read, the threads that read them, and targets that these threads import
        # meanwhile.
        self._loading: set[str] = set()
        self._loaders: set[int] = set()
        self._late: set[str] = set()
        # Modules that a thread is searching for, and modules that are being executed.
        self._finding: set[tuple[int, str]] = set()
        self._executing: set[str] = set()
        # Specs of modules that another thread imported while this thread waited to create them.
        self._imported: dict[str, ModuleSpec | None] = {}
        # Pauses of imports, by thread.
        self._pauses: dict[int, Pause] = {}

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        top = fullname.partition(".")[0]
        starts_search = fullname == top and self._look is not None and self._must_search_for_recipes(fullname)
        is_watched = top in self.targets or fullname in self._hooks or top in self._loading
        if not (is_watched or starts_search or self._may_wait(fullname)):
            return None
        # Another finder, such as wrapt's, may restart the search at the first finder.
        search = (get_ident(), fullname)
        if search in self._finding:
            return None
        self._finding.add(search)
        try:
            spec = self._find_behind(fullname, path, target)
        finally:
            self._finding.discard(search)
        loader: Any = spec.loader if spec is not None else None
        if hasattr(loader, "exec_module") and getattr(loader, "name", None) == fullname and hasattr(loader, "__dict__"):
            if starts_search:
                self._looks.add(fullname)
            loader.exec_module = execution = _Execution(self, loader)
            if self._may_wait(fullname):
                loader.create_module = execution.create
            return spec
        if starts_search:
            self.look()
        if hasattr(loader, "exec_module") and (
            is_watched or top in self.targets
        ):  # the loader has no file, or has several modules
            spec.loader = Loader(self, loader)  # type: ignore[union-attr]
        return spec

    def _find_behind(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None

    def create(self, spec: "ModuleSpec", loader: "Any") -> "ModuleType | None":
        """Wait for a pause, if necessary, and return a new module that the module's own loader creates.

        If another thread has imported the module meanwhile, return that module instead.
        """
        module = None
        if self._may_wait(spec.name):
            module = _wait(spec.name, self._pauses)
        if not isinstance(module, type(sys)):
            return loader.create_module(spec)  # type: ignore[no-any-return]
        self._imported[spec.name] = getattr(module, "__spec__", None)
        return module

    def execute(self, module: "ModuleType", loader: "Any") -> None:
        """Load the recipes of a module's target. Execute the module by its own loader. Then call the module's hooks."""
        name = module.__spec__.name if module.__spec__ is not None else module.__name__
        if name in self._imported:
            module.__spec__ = self._imported.pop(name)  # the import system has replaced the spec
            return
        self._executing.add(name)
        try:
            if name in self._looks:
                self._looks.discard(name)
                self._pause(self.look)
                self.targets.update({name} & self._declared)
            top = name.partition(".")[0]
            if top in self.targets:
                self._pause(self.load, top)
            loader.exec_module(module)
        finally:
            self._executing.discard(name)
        for hook in list(self._hooks.get(name, ())):
            self._pause(hook, sys.modules.get(name, module))

    def when_imported(self, name: str, hook: "Callable[[ModuleType], None]") -> None:
        """Call `hook` with the module `name` now if it is imported already, and whenever it is executed later."""
        self._hooks.setdefault(name, []).append(hook)
        module = sys.modules.get(name)
        if module is not None and name not in self._executing:
            hook(module)

    def load(self, name: str) -> None:
        """Load the recipes for the target `name`, once."""
        thread = get_ident()
        self._loading.add(name)
        self.targets.discard(name)
        if thread in self._loaders:
            self._late.add(name)
            return
        self._loaders.add(thread)
        loaded = False
        try:
            is_on = self._load(name)
            while is_on and self._late:
                is_on = self._load(late_target := self._late.pop())
                self._loading.discard(late_target)
            loaded = True
        finally:
            if not loaded:  # an exception of the user, such as Ctrl-C
                self.targets.add(name)
            self._loaders.discard(thread)
            self._loading.discard(name)

    def _pause(self, work: "Callable[..., None]", *arguments: "Any") -> None:
        """Call `work`, a function of autoprof, in the middle of an import, which pauses meanwhile."""
        thread = get_ident()
        if thread in self._pauses:
            work(*arguments)
            return
        self._pauses[thread] = (thread, os.getpid(), monotonic())
        try:
            work(*arguments)
        finally:
            del self._pauses[thread]

    def _may_wait(self, name: str) -> bool:
        """Return True if this thread may have to wait for a pause before it imports the module `name`.

        Imports of autoprof's own modules never wait.
        """
        if not self._pauses or "." not in name or name.startswith("autoprof."):
            return False
        return get_ident() not in self._pauses

    def _must_search_for_recipes(self, name: str) -> bool:
        """Return True if the import of `name` must start a search for the recipes that installed packages contain.

        `name` is the name of a top-level module.
        """
        is_excluded = name in sys.stdlib_module_names or name in sys.modules or self._seen.issuperset(sys.path)
        return not is_excluded and not _site_is_running()

    def look(self) -> None:
        """Search the folders that were added to `sys.path` since the last search for recipes of distributions.

        Do nothing if the process has found the result of a search in its environment.
        """
        if not self._look:
            return
        _imp.acquire_lock()  # `os.fork` waits for it
        try:
            if folders := [folder for folder in sys.path if folder not in self._seen]:
                self._declared.update(self._look(folders))
                self.add(self._declared)
                self._seen.update(folders)
        finally:
            _imp.release_lock()

    def add(self, names: "Iterable[str]") -> None:
        """Load the recipes of the targets `names`, too, when these targets are imported. Ignore imported targets."""
        self.targets.update(name for name in names if name not in sys.modules)


class _Execution:
    """Replacement of a loader's methods. It lets the finder create and execute the only module of the loader, once."""

    def __init__(self, finder: "Finder | None", loader: "Any") -> None:
        self._finder = finder
        self._loader = loader

    def create(self, spec: "ModuleSpec") -> "ModuleType | None":
        vars(self._loader).pop("create_module", None)
        if self._finder is not None:
            return self._finder.create(spec, self._loader)
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def __call__(self, module: "ModuleType") -> None:
        vars(self._loader).pop("exec_module", None)
        if self._finder is not None:
            self._finder.execute(module, self._loader)
        else:
            self._loader.exec_module(module)

    # Programs compare loaders, which compares their attributes. Programs also pickle specs, with their loaders.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Execution)

    __hash__ = object.__hash__

    def __reduce__(self) -> "tuple[type, tuple[None, Any]]":
        return _Execution, (None, self._loader)


class Loader:
    """Loader that replaces a module's own loader until the module is executed."""

    def __init__(self, finder: "Finder", loader: "Any") -> None:
        self._finder = finder
        self._loader = loader

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._loader)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._finder.create(spec, self._loader)

    def exec_module(self, module: "ModuleType") -> None:
        # The program must find the module's own loader in the imported module, as without autoprof.
        for holder, name in ((module, "__loader__"), (getattr(module, "__spec__", None), "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        self._finder.execute(module, self._loader)


def watch_runpy(runpy: "ModuleType", hook: "Callable[[str], None]") -> None:
    """Make `runpy` call `hook` with the path of each script. `runpy` has read the code then, but has not run it yet."""

    def watched(function: "Callable[..., Any]") -> "Callable[..., Any]":
        def find(*arguments: "Any") -> "Any":
            result = function(*arguments)
            spec = result[1] if isinstance(result, tuple) else None
            hook(str(getattr(spec, "origin", None) or arguments[-1]))
            return result

        find.__name__ = _WATCHED
        return find

    # CPython 3.10 to 3.13: the first function maps (run_name, path) or (path) to (code, path), from 3.13 on to code.
    # The second one maps (name, ...) to (name, spec, code).
    for name in ("_get_code_from_file", "_get_module_details"):
        function = getattr(runpy, name, None)
        if function is not None and function.__name__ != _WATCHED:
            setattr(runpy, name, watched(function))


def _site_is_running() -> bool:
    """Return True if `site` is running. In every interpreter, `site` imports the modules that `.pth` files name."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "site":
            return True
        frame = frame.f_back
    return False


_POLL_S = 0.002
# Maximum wait. CPython does not detect deadlocks with other kinds of locks, which the waiting thread may hold.
_MAX_WAIT_S = 30.0


def _wait(name: str, pauses: "Pauses") -> "Any":
    """Wait before the module `name` is created, if the import of one of the module's packages pauses.

    Returns:
        The module if another thread imported it meanwhile, else None.
    """
    package = name
    while "." in package:
        package = package.rpartition(".")[0]
        lock: Any = _lock_of(package)
        pause = pauses.get(getattr(lock, "owner", None))  # type: ignore[arg-type]
        if pause is not None and pause[1] == os.getpid():
            return _wait_without_module_lock(name, pause, pauses, lock)
    return None


def _sit_out(pause: "Pause", pauses: "Pauses", package: "Any") -> None:
    """Wait for the end of a pause. Then wait as long as the pause had already lasted when this function was called.

    The wait ends early if the import of the package is complete, or if that import waits for this thread.

    Args:
        pause: The pause to wait for: the thread that imports the package, its process, and the start of the pause.
        pauses: All pauses. A pause has ended when it is no longer in this dict.
        package: The lock of the package whose import pauses.
    """
    call_time, (thread, _, pause_start) = monotonic(), pause
    is_paused, deadline = True, call_time + _MAX_WAIT_S
    while package.owner == thread and monotonic() < deadline and not package.has_deadlock():
        if is_paused and pauses.get(thread) is not pause:
            is_paused, deadline = False, min(deadline, monotonic() + call_time - pause_start)
        sleep(_POLL_S)


def _wait_without_module_lock(name: str, pause: "Pause", pauses: "Pauses", package: "Any") -> "Any":
    """Wait for a pause as `_sit_out` does, but meanwhile release the lock of the module that this thread imports.

    This thread is registered as waiting for that lock. Then CPython notices a deadlock if the thread that takes the
    lock needs another module that this thread is importing.

    Returns:
        The module if another thread imported it meanwhile, else None.
    """
    lock, thread = _lock_of(name), get_ident()
    if lock.owner != thread:  # the module is only searched for, not imported
        _sit_out(pause, pauses, package)
        return None
    with _Entry(thread, lock):
        lock.release()
        try:
            _sit_out(pause, pauses, package)
        finally:
            _acquire(lock)
    return sys.modules.get(name)


def _acquire(lock: "Any") -> None:
    """Acquire a lock, which the caller releases.

    If a signal handler raises meanwhile, the exception is raised again once the lock is acquired.
    """
    interrupt = None
    while lock.owner != get_ident():
        try:
            lock.acquire()
        except _importing._DeadlockError:
            raise
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class _WaitEntry:
    """Context manager in which CPython lists a thread as waiting for a module's lock. Only used up to Python 3.11."""

    def __init__(self, thread: int, lock: "Any") -> None:
        self._thread = thread
        self._lock = lock

    def __enter__(self) -> None:
        _importing._blocking_on[self._thread] = self._lock

    def __exit__(self, *exception: object) -> None:
        _importing._blocking_on.pop(self._thread, None)


# CPython 3.10 to 3.14, importlib/_bootstrap.py: a lock's `owner` is the thread that holds it. `has_deadlock` returns
# True if that thread waits for this thread, directly or through other threads. It looks at the registered waits.
_importing: "Any" = sys.modules["_frozen_importlib"]
_known = hasattr(getattr(_importing, "_ModuleLock", None), "has_deadlock") and hasattr(_importing, "_blocking_on")
_Entry: "Any" = getattr(_importing, "_BlockingOnManager", _WaitEntry)
# In an interpreter whose module locks autoprof does not know, no thread waits.
_get_lock = getattr(_importing, "_get_module_lock", None) if _known else None
_lock_of: "Callable[[str], Any]" = _get_lock or (lambda name: None)
