"""A user's driver with workers of multiprocessing that generate: `pool.py OPTIONS`.

The driver measures its steps and stages by its own clock, and writes one line of JSON for each step to `truth.jsonl`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

import autoprof


def serve(rank: int, orders: Any, results: Any) -> None:
    """Work for each order of the driver until the order is None."""
    while (seconds := orders.get()) is not None:
        with autoprof.stage("generate", role="rollout", rank=rank):
            time.sleep(seconds)
        results.put(rank)


class Driver:
    """A driver with workers. Options: `steps`, `workers`, and `plant` with `step`, `rank` and `seconds`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = {"steps": 8, "workers": 3, "plant": {}} | options
        context = multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.orders = [context.Queue() for _ in range(self.options["workers"])]
        for rank, orders in enumerate(self.orders):
            context.Process(target=serve, args=(rank, orders, self.results), daemon=True).start()

    def generate(self, number: int) -> None:
        plant = self.options["plant"]
        for rank, orders in enumerate(self.orders):
            orders.put(0.2 + plant.get("seconds", 0) * ((number, rank) == (plant.get("step"), plant.get("rank"))))
        for _ in self.orders:
            self.results.get()

    def step(self, number: int) -> None:
        spans = []
        with autoprof.step(number):
            begin = time.perf_counter()
            for name, work in (("collect", lambda: self.generate(number)), ("update_actor", lambda: time.sleep(0.2))):
                with autoprof.stage(name, role="trainer"):
                    start = time.perf_counter()
                    work()
                    spans.append((name, start, time.perf_counter()))
            seconds = time.perf_counter() - begin
        with open("truth.jsonl", "a") as file:
            file.write(json.dumps({"step": number, "rank": 0, "seconds": seconds, "spans": spans}) + "\n")

    def run(self) -> None:
        # The workers start before the first step.
        self.generate(0)
        for number in range(1, self.options["steps"] + 1):
            self.step(number)
        for orders in self.orders:
            orders.put(None)


if __name__ == "__main__":
    Driver(json.loads(sys.argv[1])).run()
