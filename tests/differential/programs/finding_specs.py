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
