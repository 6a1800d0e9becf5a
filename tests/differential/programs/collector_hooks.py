#: captures: no
"""Callbacks of the garbage collector and of weak references that call stages."""

import gc
import weakref

from tinyrl import Trainer

gc.disable()  # collect only in calls of gc.collect()
said = []
gc.callbacks.append(lambda phase, info: said.append(phase) or Trainer().update(lambda: said.append("in a callback")))


class Model:
    pass


model = Model()
weakref.finalize(model, Trainer().fit, 1, lambda: said.append("finalized"))
reference = weakref.ref(model, lambda _: Trainer().update(lambda: said.append("weak")))
del model
Trainer().update(gc.collect)
print(said)
gc.callbacks.clear()


class Dies:
    def __del__(self):
        said.append(Trainer().update(lambda: "in a destructor"))


Trainer().update(lambda: Dies() and None)
print(said[-1])
