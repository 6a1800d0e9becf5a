"""Steps and stages in functions of every kind. Each function calls `inside` with its own arguments."""

import asyncio


def nothing(*args, **kwargs):
    return "done"


class Trainer:
    """Trainer; `global_step` is the number of the current step, from 1."""

    instances = 0

    def __init__(self, name="trainer"):
        self.name = name
        self.global_step = 0
        self.seen = []

    def fit(self, steps=2, inside=nothing):
        """Train for `steps` steps."""
        for self.global_step in range(1, steps + 1):
            self.train_step(inside)
        return self.seen

    def train_step(self, inside=nothing):
        """Run one step: generate and update."""
        self.generate(inside)
        self.seen.append(self.update(inside))
        return self.seen[-1]

    def generate(self, inside=nothing, *args, **kwargs):
        return inside(*args, **kwargs)

    def update(self, inside=nothing, *args, **kwargs):
        """Update the policy."""
        return inside(*args, **kwargs)

    @classmethod
    def build(cls, name="built"):
        """Make a trainer."""
        cls.instances += 1
        return cls(name)

    @staticmethod
    def reward(text, scale=1):
        return len(text) * scale

    async def afit(self, steps=2, inside=None):
        """Train like `fit`, with coroutines."""
        for self.global_step in range(1, steps + 1):
            await self.atrain_step(inside)
        return self.seen

    async def atrain_step(self, inside=None):
        await self.agenerate(inside)
        self.seen.append("step")

    async def agenerate(self, inside=None, *args, **kwargs):
        """Generate, concurrently with other coroutines."""
        await asyncio.sleep(0)
        return await inside(*args, **kwargs) if inside is not None else "done"

    async def sample(self, number, inside=None):
        """Generate one of many concurrent samples."""
        await asyncio.sleep(0)
        return await inside(number) if inside is not None else number


def score(texts, *, scale=1):
    """Return the rewards of several texts."""
    return [Trainer.reward(text, scale) for text in texts]


def evaluate(inside=nothing, *args, **kwargs):
    """Evaluate; the call is a span of the timeline."""
    return inside(*args, **kwargs)
