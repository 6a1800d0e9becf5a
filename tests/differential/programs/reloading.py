"""importlib.reload of hooked modules, and their repeated import."""

import importlib
import sys

import tinyrl
import tinyrl.trainer

before = tinyrl.trainer.Trainer
again = importlib.reload(tinyrl.trainer)
print(again is tinyrl.trainer, again.Trainer is before, tinyrl.Trainer is before, again.Trainer().fit())
importlib.reload(tinyrl)
print(tinyrl.Trainer is again.Trainer, before().fit())
for name in [name for name in sys.modules if name.startswith("tinyrl")]:
    del sys.modules[name]
from tinyrl import Trainer

print(Trainer is before, Trainer().fit(), Trainer.__module__, sys.modules["tinyrl"] is tinyrl)
print(Trainer.update.__qualname__, tinyrl.trainer is again)
