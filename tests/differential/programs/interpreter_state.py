"""State of the interpreter: excepthooks, displayhook, codecs, standard modules in sys.modules."""

import builtins
import sys
import threading

from tinyrl import Trainer

before = {name: getattr(sys, name) for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")}
imports, names = builtins.__import__, set(dir(builtins))
Trainer().fit()
print({name: getattr(sys, name) is found for name, found in before.items()}, builtins.__import__ is imports)
print(set(dir(builtins)) == names, threading.excepthook is threading.__excepthook__, sys.getswitchinterval())
print(sys.path[0] != "", sys.path_importer_cache is not None, sys.argv, __name__, __file__.endswith("state.py"))
print(sorted(vars()))
