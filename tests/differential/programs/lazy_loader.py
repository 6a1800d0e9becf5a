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
