"""A target, and recipes for it, for tests of `recipes --check`."""

from __future__ import annotations

import json
from pathlib import Path

TRAINER = """
from abc import abstractmethod
from contextlib import contextmanager
from functools import cached_property, lru_cache

from .base import Base, Remote

class Trainer(Base):
    limit: int = 3

    def __init__(self):
        self.global_step = 0
        self.state, (self.first, _) = None, (1, 2)

    def train_step(self, batch, *, key=None): ...
    async def rollout(self, prompts, **more): ...
    def batches(self):
        yield 1
    @contextmanager
    def timer(self, name):
        yield name
    def uses(self):
        return [x for x in self.batches()], lambda: (yield)
    @property
    def rate(self): ...
    @cached_property
    def slow(self): ...
    @abstractmethod
    def loss(self): ...
    @lru_cache(maxsize=None)
    def kept(self): ...
    @staticmethod
    def advantage(values): ...
    made = Base.inherited

class Open:
    def here(self): ...
    def __getattr__(self, name): ...

if True:
    def advantage(values, gamma=1): ...
else:
    advantage = None
made = advantage
scored = Remote()
"""
BASE = """
class Root:
    def inherited(self): self.from_root = 1
class Base(Root): ...
class Remote: ...
"""


def write(folder: Path, *, name: str = "mytrainer.toml", top: str = "", **hook: str) -> Path:
    """Write a recipe with one valid hook, in which the given keys are replaced, and return its path."""
    known = {
        "name": "h",
        "module": "mytrainer.loop",
        "attribute": "Trainer.train_step",
        "behaviour": "step.wrap",
    } | hook
    options = known.pop("options", "{}")
    lines = [f"{key} = {json.dumps(value)}" for key, value in known.items()]
    path = folder / name
    path.write_text(
        f'target = "{name.split(".")[0]}"\n{top}\n[[hook]]\n' + "\n".join(lines) + f"\noptions = {options}\n"
    )
    return path
