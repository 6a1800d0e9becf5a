"""Calls with wrong arguments, which raise the same errors at the same place."""

import traceback

from tinyrl import Trainer, evaluate, score

trainer = Trainer()
for call in (
    lambda: score(),
    lambda: score(["a"], 2),
    lambda: score(["a"], scale=1, other=2),
    lambda: score(1),
    lambda: trainer.train_step(1, 2),
    lambda: Trainer.update(),
    lambda: Trainer.reward(),
    lambda: Trainer.build(1, 2),
    lambda: evaluate(inside=None),
    lambda: trainer.update(key=1),
):
    try:
        print(call())
    except Exception:
        traceback.print_exc()
