#: functions:
#: captures: no
"""Objects, which are freed as early as without autoprof."""

import gc
import sys
import weakref

from tinyrl import Trainer, evaluate, score


def collector_hooks():
    """Callbacks of the garbage collector and of weak references that call stages."""
    gc.disable()  # collect only in calls of gc.collect()
    said = []
    gc.callbacks.append(
        lambda phase, info: said.append(phase) or Trainer().update(lambda: said.append("in a callback"))
    )

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


def cycles():
    """Objects that stages leave unreachable: no more than the user's functions do."""
    Trainer().fit()
    evaluate()
    try:
        Trainer().fit(inside=lambda: 1 / 0)
    except ZeroDivisionError:
        pass
    gc.collect()
    gc.disable()

    def cycle():
        found = []
        found.append(found)

    for call in (Trainer().update, evaluate):
        call(lambda: None)
        print(gc.collect())
        call(cycle)
        print(gc.collect())
        try:
            call(lambda: 1 / 0)
        except ZeroDivisionError:
            pass
        print(gc.collect())
    for _ in range(50):
        Trainer().fit()
    print(gc.collect(), gc.garbage)


def garbage():
    """Objects, which are freed as early as without autoprof, with nothing left for the garbage collector."""

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


globals()[sys.argv[1]]()
