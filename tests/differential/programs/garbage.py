#: captures: no
"""Objects, which are freed as early as without autoprof, with nothing left for the garbage collector."""

import gc
import sys
import weakref

from tinyrl import Trainer, evaluate, score


class Model:
    pass


gc.collect()
gc.disable()
gc.set_debug(0)
model, batch = Model(), Model()
references = [weakref.ref(model), weakref.ref(batch)]
trainer = Trainer()
trainer.model = model
print(sys.getrefcount(model), sys.getrefcount(batch))
trainer.update(lambda *args: None, batch)
evaluate(lambda *args, **kwargs: None, batch, key=model)
score(["a"])
print(sys.getrefcount(model), sys.getrefcount(batch))
try:
    trainer.update(lambda batch: 1 / 0, batch)
except ZeroDivisionError:
    pass
print(sys.getrefcount(model), sys.getrefcount(batch))
of_trainer = weakref.ref(trainer)
del trainer, model, batch
print([reference() for reference in references], of_trainer())
inside = []


def collect():
    inside.append(gc.isenabled())
    return len(gc.garbage)


print(Trainer().update(collect), inside, gc.get_threshold(), gc.callbacks, gc.get_freeze_count())
