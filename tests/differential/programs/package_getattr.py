"""Package that loads its modules on first use, as transformers and TRL do."""

import pathlib
import sys

pathlib.Path("lazypkg").mkdir()
pathlib.Path("lazypkg/__init__.py").write_text(
    """
import importlib
def __getattr__(name):
    if name in ("Trainer", "score"):
        print("loads", name)
        return getattr(importlib.import_module("tinyrl.trainer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
def __dir__():
    return ["Trainer", "score"]
"""
)
sys.path.insert(0, ".")
import lazypkg
from lazypkg import Trainer

print("tinyrl.trainer" in sys.modules, dir(lazypkg), Trainer().fit(), lazypkg.score(["a"]))
try:
    lazypkg.nothing
except AttributeError as error:
    print(error)
print(hasattr(lazypkg, "no"), lazypkg.Trainer is Trainer)
