#: captures: no
"""Objects that stages leave unreachable: no more than the user's functions do."""

import gc

from tinyrl import Trainer, evaluate

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
