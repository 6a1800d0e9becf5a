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
