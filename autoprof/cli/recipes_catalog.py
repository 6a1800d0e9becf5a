"""The recipes of autoprof, of installed distributions and of `AUTOPROF_RECIPES`, and the code that they hook.

A recipe fits if its target is installed in a release for which the recipe was made. The modules, functions and classes
of a target are looked up in its source, which runs none of its code. An import takes seconds and may do anything.
Therefore a child process imports the modules.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autoprof import _boot
from autoprof._boot import entry_points
from autoprof.base import seam
from autoprof.base.units import did_you_mean
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, Hook, Recipe, RecipeError, exceeds, fits, installed_version, script

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A parsed Python module: its statements, and the names that they define or import, also in conditional blocks."""

    def __init__(self, name: str, source: str | bytes, is_package: bool) -> None:
        self.name = name
        package = name if is_package else name.rpartition(".")[0]
        self.defined: dict[str, Function | ast.ClassDef] = {}
        self.imported: dict[str, str] = {}
        # Names that assignments set.
        self.assigned: set[str] = set()
        # True if the module may have other names as well, because of `__getattr__` or `import *`.
        self.open = False
        self.body = ast.parse(source).body
        for node in statements(self.body):
            if isinstance(node, ast.ClassDef | Function):
                self.defined[node.name] = node
                self.open |= node.name == "__getattr__"
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                origin = ".".join([*parents, *filter(None, [node.module])])
                for alias in node.names:
                    self.open |= alias.name == "*"
                    self.imported[alias.asname or alias.name] = f"{origin}.{alias.name}"
            elif isinstance(node, ast.Import):
                self.imported.update({alias.asname: alias.name for alias in node.names if alias.asname})
            else:
                self.assigned.update(assigned(node))

    def full(self, node: ast.expr) -> str:
        """Return the full name of the class or function in an expression, such as a base class.

        The arguments of a call and the type arguments of a class are left out.
        """
        while isinstance(node, ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        head, dot, rest = ast.unparse(node).partition(".")
        origin = f"{self.name}.{head}" if head in self.defined else self.imported.get(head, head)
        return f"{origin}{dot}{rest}"


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, including those in `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for block in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)


def assigned(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement sets."""
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets: list[ast.expr] = [node.target]
    else:
        targets = node.targets if isinstance(node, ast.Assign) else []
    for target in targets:
        yield from (item.id for item in ast.walk(target) if isinstance(item, ast.Name))


class NotInSource(LookupError):
    """The module, class or function does not exist. The message explains it and may name a similar one."""


class Unknown(LookupError):
    """The source does not show whether the module, class or function exists. The message gives the reason."""


class Definition(NamedTuple):
    """A function or class, and the module in which it is defined."""

    node: Function | ast.ClassDef
    module: Module


class Sources:
    """Modules of installed packages, each parsed once."""

    def __init__(self) -> None:
        importlib.invalidate_caches()
        self._modules: dict[str, Module | None] = {}

    def installed(self, package: str) -> bool:
        """Return whether a top-level package or module is installed, or is in the working directory."""
        return _top_spec(package) is not None

    def module(self, name: str) -> Module:
        """Return a parsed module.

        Raises:
            NotInSource: There is no module of this name.
            Unknown: The module has no Python source, or its source can't be read.
        """
        if name not in self._modules:
            path = name if script(name) and os.path.isfile(name) else _path(script(name) or name)
            try:
                self._modules[name] = _parse(name, path) if path.endswith(".py") else None
            except (OSError, SyntaxError, ValueError, RecursionError) as error:
                raise Unknown(f"the source of {name} can't be read ({type(error).__name__})") from None
        module = self._modules[name]
        if module is None:
            raise Unknown(f"{name} has no Python source")
        return module

    def find(self, module: str, attribute: str) -> None:
        """Look up a function, class or method of a module, also if the module imports or inherits it from another one.

        Raises:
            NotInSource: There is no function or class of this name.
            Unknown: The source does not show whether it exists.
        """
        head, *members = attribute.split(".")
        definition = self._top(self.module(module), head)
        for name in members:
            if not isinstance(definition.node, ast.ClassDef):
                raise NotInSource(f"{module} has {head}, but it is not a class")
            definition = self._member(definition, name)

    def _top(self, module: Module, name: str) -> Definition:
        for _ in range(20):
            if name in module.defined:
                return Definition(module.defined[name], module)
            if name not in module.imported:
                break
            origin, _, name = module.imported[name].rpartition(".")
            try:
                module = self.module(origin)
            except NotInSource as error:
                raise Unknown(f"{module.name} imports it, but {error}") from None
        if name in module.assigned or module.open:
            raise Unknown(f"{module.name} makes {name} in a way that this check does not follow")
        raise NotInSource(f"{module.name} has no {name}{did_you_mean(name, module.defined)}")

    def _member(self, owner: Definition, name: str) -> Definition:
        member_names: list[str] = []
        for kind in self._lineage(owner):
            for node in statements(kind.node.body):
                if isinstance(node, ast.ClassDef | Function):
                    member_names.append(node.name)
                    if node.name == name:
                        return Definition(node, kind.module)
                elif name in assigned(node):
                    raise Unknown(f"{kind.node.name} sets {name} in a way that this check does not follow")
        raise NotInSource(f"{owner.node.name} has no {name}{did_you_mean(name, member_names)}")

    def _lineage(self, owner: Definition) -> Iterator[Definition]:
        """Yield a class and its base classes, depth first.

        Raises:
            Unknown: A base class was not found. This is raised only after all other classes were yielded.
        """
        queue, seen_ids = [owner], set()
        missing_base = ""
        while queue:
            kind = queue.pop(0)
            if not isinstance(kind.node, ast.ClassDef) or id(kind.node) in seen_ids:
                continue
            seen_ids.add(id(kind.node))
            yield kind
            bases = []
            for node in kind.node.bases:
                full_name = kind.module.full(node)
                origin, _, name = full_name.rpartition(".")
                try:
                    bases.append(self._top(self.module(origin) if origin else kind.module, name))
                except LookupError:
                    missing_base = missing_base or ("" if name in _EMPTY_BASES else full_name)
            queue = bases + queue
        if missing_base:
            raise Unknown(f"the base class {missing_base} of {owner.node.name} was not found")


# Base classes without methods that a hook could name.
_EMPTY_BASES = ("object", "ABC", "Generic", "Protocol", "Enum", "NamedTuple", "Exception")


def _parse(name: str, path: str) -> Module:
    with open(path, "rb") as file:
        return Module(name, file.read(), is_package=os.path.basename(path) == "__init__.py")


def _path(name: str) -> str:
    """Return the file of a module. For a namespace package, which has no file, return an empty text.

    The packages around the module are not imported.

    Raises:
        NotInSource: There is no module of this name.
    """
    top, *inner = name.split(".")
    spec = _top_spec(top)
    if spec is None:
        raise NotInSource(f"{top} is not installed here")
    package = top
    for part in inner:
        folders = [os.fspath(folder) for folder in spec.submodule_search_locations or ()]  # transformers has paths here
        spec = PathFinder.find_spec(f"{package}.{part}", folders)
        if spec is None:
            siblings = [module.name for module in pkgutil.iter_modules(folders)]
            raise NotInSource(f"there is no module {name}{did_you_mean(part, siblings)}")
        package = f"{package}.{part}"
    return spec.origin or ""


def _top_spec(top: str) -> ModuleSpec | None:
    """Return the spec of a top-level module, which is installed or in the working directory; None if it is neither."""
    spec: ModuleSpec | None
    # A finder of another package may raise anything.
    spec, _ = seam.attempt(lambda: find_spec(top) or PathFinder.find_spec(top, [os.getcwd()]))
    # A folder with the same name looks like a namespace package, but only a package contains modules.
    if spec is not None and spec.origin is None and not any(pkgutil.iter_modules(spec.submodule_search_locations)):
        return None
    return spec


_CHILD_TIMEOUT_S = 300


class ChildFailed(Exception):
    """The child process wrote no result. The message gives the reason."""


def run_module_in_child(module: str, *arguments: str, **variables: str) -> Any:
    """Run a module that imports targets in a child process, and return the document that it writes.

    Args:
        module: The module to run. Its first argument is the path of the JSON document to write.
        arguments: The arguments after the path.
        variables: Additional environment variables. AUTOPROF_DIR is a temporary folder.

    Raises:
        ChildFailed: The child process ended without a document, or took too long.
    """
    from rich.console import Console

    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("importing the targets"):
        output = os.path.join(folder, "result.json")
        inherited_variables = {
            name: value for name, value in os.environ.items() if name not in (_boot.RUN_ID, _boot.RUN_INFO)
        }
        try:
            child = subprocess.run(
                [sys.executable, "-m", module, output, *arguments],
                env=inherited_variables | {"AUTOPROF_DIR": folder} | variables,
                capture_output=True,
                text=True,
                timeout=_CHILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"importing the targets took more than {_CHILD_TIMEOUT_S} s") from None
        if not os.path.exists(output):
            last_line = (child.stderr.strip().splitlines() or ["no output"])[-1]
            raise ChildFailed(f"importing the targets ended the process (status {child.returncode}): {last_line}")
        return json.loads(Path(output).read_bytes())


def is_started(module: str) -> bool:
    """Return True if an import of the module would run a program: a script's file, or a `__main__` module."""
    return bool(script(module)) or module.rpartition(".")[2] == "__main__"


def import_problem(module: str) -> str:
    """Import a module. If that fails, return the reason. Otherwise return an empty string."""
    if is_started(module):
        return f"{module} was not imported, because an import would run it"
    try:
        importlib.import_module(module)
    except BaseException as error:
        missing_module = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing_module is not None and f"{module}.".startswith(f"{missing_module}."):
            return f"there is no module {missing_module} in this release"
        return f"importing {module} raised {type(error).__name__}: {error}"
    return ""


OWN = "autoprof"
SETTING = "AUTOPROF_RECIPES"


class RecipeFile(NamedTuple):
    """A recipe file and its origin: `autoprof`, `AUTOPROF_RECIPES`, or the name of a distribution."""

    path: str
    origin: str

    @property
    def name(self) -> str:
        """Return the recipe's name: the file's name without the ending."""
        return os.path.basename(self.path).removesuffix(".toml")

    @property
    def targets(self) -> list[str]:
        """Return the import names of the targets: `trl` and `swift` for a file called `trl+swift.toml`."""
        return self.name.partition(".")[0].split("+")


def recipe_files(extra: Iterable[str] = ()) -> list[RecipeFile]:
    """Return all recipe files in the order in which autoprof reads them.

    If two hooks have the same key, the hook that is read later is used.

    Args:
        extra: The files and folders that `AUTOPROF_RECIPES`, or `recipes` in the settings file, names.
    """
    files = [RecipeFile(path, OWN) for path in toml_files(_boot.own_recipes())]
    for entry in entry_points.declared(sys.path):
        if folder := entry.folder():
            files += [RecipeFile(path, entry.distribution) for path in toml_files(folder)]
    for place in extra:
        files += [RecipeFile(path, SETTING) for path in toml_files(place)]
    return list({file.path: file for file in files}.values())


def unreadable_places() -> Iterator[str]:
    """Yield a message for each entry point that declares recipes, but names no package with recipe files."""
    for entry in entry_points.declared(sys.path):
        subject = f"{entry.distribution}: entry point {entry.name!r} of {entry_points.GROUP} names {entry.value!r}"
        folder = entry.folder()
        if not folder:
            yield f"{subject}, but there is no such package here; name a package that contains *.toml files"
        elif not toml_files(folder):
            yield f"{subject}, but {folder} contains no *.toml files"


def toml_files(place: str) -> list[str]:
    """Return the `*.toml` files in the folder `place`, or `[place]` if it is a file.

    Return an empty list if the folder or file is missing or unreadable.
    """
    if os.path.isdir(place):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            return []
        return [os.path.join(place, name) for name in names if name.endswith(".toml")]
    return [place] if os.path.isfile(place) else []


# Values of `Entry.fits`.
FITS, NEWER, OLDER, ABSENT, WRONG = "yes", "newer than its range", "not in its range", "not installed", "wrong"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One recipe, and its fit to the target that is installed here.

    Attributes:
        name: The name of the recipe file without the ending.
        origin: `autoprof`, `AUTOPROF_RECIPES`, or the distribution whose entry point names the recipe.
        versions: The releases of the target for which the recipe was made; empty for all releases.
        installed: The installed version of the target; empty if the target has no version or is not installed.
        fits: `yes`, or the reason why the recipe does not fit the installed target.
        hooks: The hooks of the recipe.
        problem: The error in the recipe file; empty if the file has no error.
    """

    name: str
    target: str
    path: str
    origin: str
    versions: str = ""
    installed: str = ""
    fits: str = WRONG
    hooks: list[Hook] = []
    problem: str = ""


def entries(extra: Iterable[str]) -> list[Entry]:
    """Return an entry for each recipe. `extra` lists the files and folders that `AUTOPROF_RECIPES` names."""
    sources = Sources()
    return [entry for file in recipe_files(extra) for entry in _entries_of_file(file, sources)]


def named_entries(recipes: list[Entry], name: str) -> list[Entry]:
    """Return the entries of the recipes called `name`, or else of the recipes for the target `name`.

    Raises:
        LookupError: Neither a recipe nor a target has this name.
    """
    named = [entry for entry in recipes if entry.name == name] or [entry for entry in recipes if entry.target == name]
    if not named:
        names = sorted({entry.name for entry in recipes})
        hint = did_you_mean(name, {*names, *(entry.target for entry in recipes)})
        raise LookupError(f"there is no recipe {name!r}{hint}; the recipes are {', '.join(names)}")
    return named


def catalog_hooks(extra: Iterable[str], more: Iterable[str]) -> list[BoundHook]:
    """Return the hooks of all recipes without errors, including the recipes in the files and folders `more`."""
    hooks = []
    for path in [
        *(file.path for file in recipe_files(extra)),
        *(path for place in more for path in toml_files(place)),
    ]:
        with contextlib.suppress(RecipeError):
            hooks += recipe.load(path)
    return hooks


def own_hooks() -> list[BoundHook]:
    """Return the hooks of autoprof's own recipes."""
    return [hook for path in toml_files(_boot.own_recipes()) for hook in recipe.load(path)]


def by_recipe(hooks: Iterable[BoundHook]) -> list[tuple[Recipe, list[BoundHook]]]:
    """Return the recipes to which the hooks of a recipe file belong, each with its hooks."""
    by_target: dict[str, list[BoundHook]] = {}
    for hook in hooks:
        by_target.setdefault(hook.recipe.target, []).append(hook)
    return [(hooks[0].recipe, hooks) for hooks in by_target.values()]


def _entries_of_file(file: RecipeFile, sources: Sources) -> list[Entry]:
    fields: dict[str, Any] = {"name": file.name, "path": file.path, "origin": file.origin}
    target = ", ".join(file.targets)
    try:
        bound = recipe.load(file.path)
    except RecipeError as error:
        return [Entry(**fields, target=target, problem=str(error))]
    if not bound:
        return [Entry(**fields, target=target, fits="it has no hooks")]
    return [_entry(fields, content, hooks, sources) for content, hooks in by_recipe(bound)]


def _entry(fields: dict[str, Any], content: Recipe, bound: list[BoundHook], sources: Sources) -> Entry:
    version = installed_version(content)
    if not version and not sources.installed(content.target):
        state = ABSENT
    elif fits(version, content.versions):
        state = FITS
    else:
        state = NEWER if exceeds(version, content.versions) else OLDER
    hooks = [hook.hook for hook in bound]
    return Entry(**fields, target=content.target, versions=content.versions, installed=version, fits=state, hooks=hooks)
