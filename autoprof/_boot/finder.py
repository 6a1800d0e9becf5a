"""Import finder: loads a target's recipes when the target is imported, and calls hooks of modules.

It knows neither recipes nor the environment: whoever makes a finder says how recipes are loaded and looked for.
"""

import _imp
import sys
from _thread import get_ident

from autoprof._boot.pauses import Pauses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any

    # Loads the recipes for a target; returns whether autoprof is still on.
    Load = Callable[[str], bool]
    # Looks for recipes of distributions in folders of `sys.path`; returns their targets.
    Look = Callable[[list[str]], Iterable[str]]


_WATCHED = "autoprof_watched"


class Finder:
    """Loads a target's recipes when the target is first imported, and calls what waits for a module to be imported.

    The import system calls `find_spec` with its own lock held, for which the imports of all other threads wait (CPython
    3.11, `importlib._bootstrap._find_spec`). So `find_spec` imports no module and waits for no lock: it finds the
    module as the finders behind it do, and the rest comes when the module's loader creates and executes it.

    Attributes:
        targets: The import names of targets whose recipes are not loaded yet.
    """

    def __init__(self, targets: "Iterable[str]", load: "Load", look: "Look | None") -> None:
        self.targets = set(targets)
        self._load = load
        self._look = look
        self._seen: set[str] = set()
        # What distributions have recipes for, and the modules at whose import they are looked for.
        self._declared: set[str] = set()
        self._looks: set[str] = set()
        self._hooks: dict[str, list[Callable[[ModuleType], None]]] = {}
        # Targets whose recipes are being read, and the threads that do so; targets that autoprof itself imports
        # meanwhile; what a thread is looking for; what a `Loader` is executing.
        self._loading: set[str] = set()
        self._loaders: set[int] = set()
        self._late: set[str] = set()
        self._finding: set[tuple[int, str]] = set()
        self._executing: set[str] = set()
        # Specs of modules that another thread has imported while this one waited to create them.
        self._imported: dict[str, ModuleSpec | None] = {}
        self._pauses = Pauses()

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        top = fullname.partition(".")[0]
        looks = fullname == top and self._look is not None and self._due(fullname)
        ours = top in self.targets or fullname in self._hooks or top in self._loading
        if not (ours or looks or self._pauses.concern(fullname)):
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
        loader: Any = spec.loader if spec is not None else None
        if hasattr(loader, "exec_module") and getattr(loader, "name", None) == fullname and hasattr(loader, "__dict__"):
            if looks:
                self._looks.add(fullname)
            loader.exec_module = execution = _Execution(self, loader)
            if self._pauses.concern(fullname):
                loader.create_module = execution.create
            return spec
        if looks:
            self.look()
        if hasattr(loader, "exec_module") and (ours or top in self.targets):  # it is of no file, or of several modules
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
        """Create a module with its own loader, or return the module that another thread has imported meanwhile."""
        module: ModuleType | None = self._pauses.wait(spec.name)
        if not isinstance(module, type(sys)):
            return loader.create_module(spec)  # type: ignore[no-any-return]
        self._imported[spec.name] = getattr(module, "__spec__", None)
        return module

    def execute(self, module: "ModuleType", loader: "Any") -> None:
        """Execute a module with its own loader: the recipes of its target are loaded before, its hooks called after."""
        name = module.__spec__.name if module.__spec__ is not None else module.__name__
        if name in self._imported:
            module.__spec__ = self._imported.pop(name)  # the import system has replaced it
            return
        self._executing.add(name)
        try:
            if name in self._looks:
                self._looks.discard(name)
                self._pauses.during(self.look)
                self.targets.update({name} & self._declared)
            top = name.partition(".")[0]
            if top in self.targets:
                self._pauses.during(self.load, top)
            loader.exec_module(module)
        finally:
            self._executing.discard(name)
        for hook in list(self._hooks.get(name, ())):
            self._pauses.during(hook, sys.modules.get(name, module))

    def when_imported(self, name: str, hook: "Callable[[ModuleType], None]") -> None:
        """Call `hook` with the module `name` now if it is imported, and each time that it is executed from here on."""
        self._hooks.setdefault(name, []).append(hook)
        module = sys.modules.get(name)
        if module is not None and name not in self._executing:
            hook(module)

    def load(self, name: str) -> None:
        """Load the recipes for the target `name`, once."""
        here = get_ident()
        self._loading.add(name)
        self.targets.discard(name)
        if here in self._loaders:
            self._late.add(name)
            return
        self._loaders.add(here)
        try:
            on = self._load(name)
            while on and self._late:
                on = self._load(late := self._late.pop())
                self._loading.discard(late)
        except BaseException:
            self.targets.add(name)
            raise
        finally:
            self._loaders.discard(here)
            self._loading.discard(name)

    def _due(self, name: str) -> bool:
        """Return whether the import of a top-level module is a reason to look for recipes of distributions."""
        old = name in sys.stdlib_module_names or name in sys.modules or self._seen.issuperset(sys.path)
        return not old and not _starting()

    def look(self) -> None:
        """Look for recipes of distributions where `sys.path` has grown since the last time.

        A process that was told what there is does not look.
        """
        if not self._look:
            return
        _imp.acquire_lock()  # `os.fork` waits for it
        try:
            if places := [place for place in sys.path if place not in self._seen]:
                self._declared.update(self._look(places))
                self.add(self._declared)
                self._seen.update(places)
        finally:
            _imp.release_lock()

    def add(self, names: "Iterable[str]") -> None:
        """Have the recipes of these targets loaded too, but for those that are imported already."""
        self.targets.update(name for name in names if name not in sys.modules)


class _Execution:
    """Creates and executes a module, once, in place of a loader that is of this module alone."""

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

    # Loaders are compared by their attributes, and specs with their loaders can be pickled.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Execution)

    __hash__ = object.__hash__

    def __reduce__(self) -> "tuple[type, tuple[None, Any]]":
        return _Execution, (None, self._loader)


class Loader:
    """In the place of a module's own loader, until the module is executed."""

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
        # What has been imported has its own loader, as without autoprof.
        for holder, name in ((module, "__loader__"), (getattr(module, "__spec__", None), "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        self._finder.execute(module, self._loader)


def watch_runpy(runpy: "ModuleType", found: "Callable[[str], None]") -> None:
    """Call `found` with the path of a script when `runpy` has found its code, before it runs it."""

    def watched(function: "Callable[..., Any]") -> "Callable[..., Any]":
        def find(*arguments: "Any") -> "Any":
            result = function(*arguments)
            spec = result[1] if isinstance(result, tuple) else None
            found(str(getattr(spec, "origin", None) or arguments[-1]))
            return result

        find.__name__ = _WATCHED
        return find

    # (run_name, path) or (path) to (code, path), from 3.13 on to code; (name, ...) to (name, spec, code): CPython 3.10
    # to 3.13.
    for name in ("_get_code_from_file", "_get_module_details"):
        function = getattr(runpy, name, None)
        if function is not None and function.__name__ != _WATCHED:
            setattr(runpy, name, watched(function))


def _starting() -> bool:
    """Return whether `site` is at work, which imports what `.pth` files name in every interpreter."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "site":
            return True
        frame = frame.f_back
    return False
