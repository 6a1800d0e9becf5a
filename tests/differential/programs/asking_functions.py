"""Attributes of a function, which some frameworks read directly instead of through inspect."""

import asyncio
import typing

from tinyrl import Trainer, score

for function in (score, Trainer.generate, Trainer.agenerate):
    print(function.__annotations__, typing.get_type_hints(function), asyncio.iscoroutinefunction(function))
    print(callable(function), hasattr(function, "__get__"), function.__class__, isinstance(function, type(lambda: 0)))
score.note = "mine"
print(score.note, vars(score)["note"])
del score.note
print(hasattr(score, "note"), score(["a"]))
