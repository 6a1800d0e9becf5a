"""Stages that begin with few frames left: any RecursionError is the program's own."""

import sys

from tinyrl import Trainer

trainer = Trainer()
trainer.fit()
sys.setrecursionlimit(300)


def deep(depth):
    if depth == 0:
        return trainer.update(lambda: "bottom")
    return deep(depth - 1)


good = 0
for depth in range(200, 310):
    try:
        good += deep(depth) == "bottom"
    except RecursionError as error:
        last = error
print(good > 60, type(last).__name__, trainer.fit(1)[-1])
