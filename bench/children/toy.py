"""A trainer and a model that do nothing, with a recipe of their own (toy.toml)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Model:
    """A model whose forward pass is the hot function."""

    def forward(self, x: int) -> int:
        return x

    async def forward_async(self, x: int) -> int:
        return x


class Stage:
    """A worker whose two calls are stages."""

    def forward(self, x: int) -> int:
        return x

    async def forward_async(self, x: int) -> int:
        return x


class Trainer:
    """A trainer whose step and stages do what they are told."""

    global_step = 0

    def step(self, work: Callable[[], T]) -> T:
        return work()

    def update(self, work: Callable[[], T]) -> T:
        return work()

    def generate(self, work: Callable[[], T]) -> T:
        return work()
