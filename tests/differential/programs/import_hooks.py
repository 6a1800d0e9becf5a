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
