"""Properties of a module: spec, loader, file, package, repr, and the hooks of sys.path."""

import sys

import tinyrl
import tinyrl.trainer

for module in (tinyrl, tinyrl.trainer):
    print(module.__name__, module.__package__, module.__file__, module.__spec__.name, module.__spec__.origin)
    print(repr(module), module.__spec__.submodule_search_locations, getattr(module, "__path__", None))
    print(module.__spec__.has_location, sorted(name for name in vars(module) if name != "__builtins__"))
print(len(sys.path_hooks), sys.meta_path[-1].__name__, tinyrl.Trainer().fit())
