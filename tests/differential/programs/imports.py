#: functions:
"""Imports of hooked modules, finders, loaders and audit hooks."""

import sys


def finding_specs():
    """find_spec of existing and missing modules, before and after the import."""
    import importlib.util

    for name in ("tinyrl", "tinyrl.trainer", "tinyrl.nothing", "no_such_package"):
        spec = importlib.util.find_spec(name)
        print(name, spec and (spec.name, spec.origin, type(spec.loader).__name__))
    spec = importlib.util.find_spec("tinyrl")
    module = importlib.util.module_from_spec(spec)
    print(module.__name__, hasattr(module, "Trainer"))
    spec.loader.exec_module(module)
    print(module.Trainer().fit())


def loaders_as_they_are():
    """Loader of a hooked module: its type, its source, its resources."""
    import importlib.resources
    import inspect
    import pkgutil

    import tinyrl

    print(type(tinyrl.__loader__).__name__, tinyrl.__loader__ is tinyrl.__spec__.loader)
    print(isinstance(tinyrl.__spec__.loader, __import__("importlib.machinery").machinery.SourceFileLoader))
    print(tinyrl.__loader__.get_source("tinyrl")[:20], tinyrl.__loader__.is_package("tinyrl"))
    print(importlib.resources.files("tinyrl").joinpath("trainer.py").is_file())
    print([each.name for each in pkgutil.iter_modules(tinyrl.__path__)], len(inspect.getsource(tinyrl)))
    print(pkgutil.get_data("tinyrl", "__init__.py")[:10], tinyrl.Trainer().fit())


def modules_as_they_are():
    """Properties of a module: spec, loader, file, package, repr, and the hooks of sys.path."""
    import sys

    import tinyrl
    import tinyrl.trainer

    for module in (tinyrl, tinyrl.trainer):
        print(module.__name__, module.__package__, module.__file__, module.__spec__.name, module.__spec__.origin)
        print(repr(module), module.__spec__.submodule_search_locations, getattr(module, "__path__", None))
        print(module.__spec__.has_location, sorted(name for name in vars(module) if name != "__builtins__"))
    print(len(sys.path_hooks), sys.meta_path[-1].__name__, tinyrl.Trainer().fit())


def reloading():
    """importlib.reload of hooked modules, and their repeated import."""
    import importlib
    import sys

    import tinyrl
    import tinyrl.trainer

    before = tinyrl.trainer.Trainer
    again = importlib.reload(tinyrl.trainer)
    print(again is tinyrl.trainer, again.Trainer is before, tinyrl.Trainer is before, again.Trainer().fit())
    importlib.reload(tinyrl)
    print(tinyrl.Trainer is again.Trainer, before().fit())
    for name in [name for name in sys.modules if name.startswith("tinyrl")]:
        del sys.modules[name]
    from tinyrl import Trainer

    print(Trainer is before, Trainer().fit(), Trainer.__module__, sys.modules["tinyrl"] is tinyrl)
    print(Trainer.update.__qualname__, tinyrl.trainer is again)


def lazy_loader():
    """importlib.util.LazyLoader on a hooked module."""
    import importlib.util
    import sys

    def lazy(name):
        spec = importlib.util.find_spec(name)
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    module = lazy("tinyrl")
    print(type(module).__name__, "trainer" in object.__getattribute__(module, "__dict__"))
    print(module.Trainer().fit(), type(module).__name__)


def failing_imports():
    """Modules that raise on import, and are imported again."""
    import importlib
    import sys
    import traceback

    import tinyrl

    for name in ("tinyrl.nothing", "tinyrl.trainer.nothing", "no_such_package"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(type(error).__name__, error, error.name, error.path, repr(error.__context__))
            traceback.print_exc()
    try:
        from tinyrl import no_such_name
    except ImportError as error:
        print(error, error.name)
    try:
        from tinyrl.trainer import Trainer, no_such_name  # noqa: F401
    except ImportError as error:
        print(error, error.name)
    print("tinyrl.nothing" in sys.modules, tinyrl.Trainer().fit())


def import_hooks():
    """Finders of the user, before and after autoprof's, that log, make modules, or raise."""
    import importlib.abc
    import importlib.machinery
    import sys

    seen = []

    class Logs(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name.startswith(("tinyrl", "made", "raises")):
                seen.append((name, path is not None))

    class Makes(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path, target=None):
            if name == "raises":
                raise RuntimeError("raised by a finder")
            return importlib.machinery.ModuleSpec(name, self) if name == "made" else None

        def exec_module(self, module):
            from tinyrl import Trainer

            module.value = Trainer().fit()

    class Old:
        def find_spec(self, name, path=None, target=None):
            return None

    sys.meta_path.insert(0, Logs())
    sys.meta_path.append(Makes())
    sys.meta_path.insert(1, Old())
    import made

    print(made.value, type(made.__loader__).__name__)
    try:
        import raises
    except RuntimeError as error:
        print(error, error.__context__)
    print(seen)


#: hooks: none
def source_hooks():
    """Loader that changes the source of a hooked module, like beartype.claw, typeguard and pytest's assertions."""
    import importlib.machinery
    import sys

    class Loader(importlib.machinery.SourceFileLoader):
        def source_to_code(self, data, path, *, _optimize=-1):
            print("compiles", self.name)
            return super().source_to_code(data.replace(b'"done"', b'"changed"'), path, _optimize=_optimize)

        def get_code(self, name):
            return self.source_to_code(self.get_data(self.get_filename(name)), self.get_filename(name))

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and name.startswith("tinyrl"):
                spec.loader = Loader(spec.loader.name, spec.loader.path)
            return spec

    sys.meta_path.insert(0, Finder)
    from tinyrl import Trainer

    print(Trainer().fit(), type(sys.modules["tinyrl.trainer"].__loader__).__name__)


def audit_refuses():
    """Audit hook that forbids to open files, to import, and to compile."""
    import sys

    from tinyrl import Trainer

    Trainer().fit(1)
    refuse = False

    def hook(event, arguments):
        if refuse and event in ("open", "import", "compile", "exec", "os.mkdir", "os.listdir", "subprocess.Popen"):
            raise PermissionError(event)

    sys.addaudithook(hook)
    refuse = True
    found = Trainer().fit(), Trainer().update(lambda: 5)
    try:
        Trainer().update(open, "file")
    except PermissionError as error:
        found += (repr(error),)
    refuse = False
    print(found)


def auditing():
    """Audit hook of the user that forbids sockets and counts files opened for writing in the working directory."""
    import os
    import sys

    from tinyrl import Trainer

    seen = []
    here = os.getcwd()

    def hook(event, arguments):
        if event.startswith("socket."):
            raise RuntimeError(event)
        if event == "open" and str(arguments[0]).startswith(here):
            seen.append(arguments[0])

    Trainer().fit()
    sys.addaudithook(hook)
    print(Trainer().fit(), seen)


globals()[sys.argv[1]]()
