#: hooks: none
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
