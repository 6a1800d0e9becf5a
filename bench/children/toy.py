"""Trainer and model that do nothing; toy.toml is their recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Model:
    """Model whose forward pass is the hot function."""

    def forward(self, x: int) -> int:
        return x

    async def forward_async(self, x: int) -> int:
        return x


class Stage:
    """Worker whose two methods are stages."""

    def forward(self, x: int) -> int:
        return x

    async def forward_async(self, x: int) -> int:
        return x


class Trainer:
    """Trainer whose step and stages call a given function."""

    global_step = 0

    def step(self, work: Callable[[], T]) -> T:
        return work()

    def update(self, work: Callable[[], T]) -> T:
        return work()

    def generate(self, work: Callable[[], T]) -> T:
        return work()
