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
