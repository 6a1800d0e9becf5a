"""All forms of import of hooked modules."""

import sys

import tinyrl as renamed
import tinyrl.trainer as deep
from tinyrl import *
from tinyrl import Trainer as Mine
from tinyrl.trainer import score as scoring

print(sorted(name for name in globals() if not name.startswith("__")), renamed.trainer is deep, Mine is Trainer)
print(__import__("tinyrl.trainer").__name__, __import__("tinyrl", fromlist=["trainer"]).trainer is deep)
exec("from tinyrl import evaluate as e\nprint(e())")


def lazily():
    import tinyrl.trainer
    from tinyrl.trainer import Trainer

    return Trainer().fit(), sys.getrefcount(tinyrl) > 2


print(lazily(), scoring(["a"]))
