"""A user's agent trainer with samples in an event loop, and a recipe for it: `python -m rollouts OPTIONS`.

It measures its steps, stages and tokens by its own clock, and writes one line of JSON for each step to `truth.jsonl`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PROMPTS, ANSWERS, REPLICAS = 4, 2, 2


class Answer:
    """An answer of the model."""

    def __init__(self, tokens: int) -> None:
        self.token_ids = [7] * tokens


class Engine:
    """A replica of an engine that generates with a fixed number of tokens per second."""

    def __init__(self, replica: int) -> None:
        self.replica, self.token_s = replica, 0.01

    async def generate(self, prompt: list[int], tokens: int, request: str) -> Answer:
        await asyncio.sleep(tokens * self.token_s)
        return Answer(tokens)


async def call_tool(name: str, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "found"


async def compute_score(answer: Answer, seconds: float) -> float:
    await asyncio.sleep(seconds)
    if seconds < 0:
        raise ValueError("no score")
    return 1.0


class Trainer:
    """A trainer whose samples call a tool and get a reward.

    Options: `steps`; `spread`, the relative variation of lengths; `tool`, True if samples call a tool; and `plant` with
    `cause`, `step` and `seconds`. Causes are `long`, `tool`, `reward`, `raise`, `replica`, `sync`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = {"steps": 8, "spread": 0.1, "plant": {}} | options
        self.engines = [Engine(replica) for replica in range(REPLICAS)]
        self.random = random.Random(3)
        self.global_step = self.tokens = 0
        self.model = torch.nn.Linear(64, 64)

    def planted(self, cause: str) -> float:
        """Return the seconds of a cause in this step, 0 if it is planted elsewhere."""
        plant = self.options["plant"]
        here = (plant.get("cause"), plant.get("step")) == (cause, self.global_step)
        return float(plant["seconds"]) if here else 0.0

    async def sample(self, prompt: int, answer: int) -> Answer:
        engine = self.engines[(prompt * ANSWERS + answer) % REPLICAS]
        slow = (prompt, answer) == (2, 1)
        tokens = round(24 * (1 + self.options["spread"] * self.random.uniform(-1, 1)))
        if slow:
            tokens += round(self.planted("long") / engine.token_s)
        engine.token_s = 0.01
        if engine.replica == 1:
            engine.token_s += self.planted("replica") / 24
        generated = await self.turn(engine, [1] * 5, tokens, f"{prompt}-{answer}")
        self.tokens += tokens
        if self.options.get("tool") or self.planted("tool"):
            await call_tool("search", 0.02 + slow * self.planted("tool"))
        await compute_score(generated, -1.0 if slow and self.planted("raise") else 0.02 + slow * self.planted("reward"))
        return generated

    async def turn(self, engine: Engine, prompt: list[int], tokens: int, request: str) -> Answer:
        return await engine.generate(prompt, tokens, request)

    async def sample_all(self) -> None:
        pairs = [(prompt, answer) for prompt in range(PROMPTS) for answer in range(ANSWERS)]
        await asyncio.gather(*(self.sample(*pair) for pair in pairs), return_exceptions=True)

    def generate(self) -> None:
        with self.timed("generate"):
            asyncio.run(self.sample_all())

    def update_actor(self) -> None:
        with self.timed("update_actor"):
            end = time.perf_counter() + 0.2
            for _ in range(10):
                self.model(torch.ones(64, 64)).sum().backward()
            time.sleep(max(0.0, end - time.perf_counter()))

    def update_weights(self) -> None:
        with self.timed("update_weights"):
            time.sleep(0.05 + self.planted("sync"))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spans.append((name, begin, time.perf_counter()))

    def train_step(self) -> None:
        self.generate()
        self.update_actor()
        self.update_weights()

    def fit(self) -> None:
        for number in range(1, self.options["steps"] + 1):
            self.global_step = number
            self.spans: list[tuple[str, float, float]] = []
            self.tokens, begin = 0, time.perf_counter()
            self.train_step()
            line = {"step": self.global_step, "rank": 0, "seconds": time.perf_counter() - begin, "spans": self.spans}
            with open("truth.jsonl", "a") as file:
                file.write(json.dumps(line | {"tokens": self.tokens}) + "\n")


if __name__ == "__main__":
    # The recipe's target is the imported module, not this script.
    import rollouts

    torch.set_num_threads(1)
    rollouts.Trainer(json.loads(sys.argv[1])).fit()
