"""A user's training loop in one process, or in several ranks of torchrun: `loop.py OPTIONS`, which are JSON.

It measures its steps and stages by its own clock, and writes one line of JSON for each step of each rank to
`truth.jsonl`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from causes import CAUSES

import autoprof

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STAGES = [["generate", "rollout", 0.15], ["reward", "reward", 0.05], ["update_actor", "actor", 0.2]]


class Loop:
    """A loop with stages as blocks.

    Options:
        steps: Number of steps.
        first: Number of the first step, as after a resumption.
        validated_before: True if a validation precedes the first step.
        stages: Name, role and seconds of each stage.
        spread: Relative variation of the seconds of stages, the same on all ranks.
        micro: Number of micro-batches of the update; each is a stage.
        work: Number of forward and backward passes in each stage. They replace the seconds.
        first_s: Seconds by which the update of step 1 takes longer, as with torch.compile.
        between_s: Seconds between stages, for logging and the like.
        validate, save: Every how many steps a validation or a checkpoint follows the update.
        extra_s: Seconds of a validation or a checkpoint.
        ahead: True if a thread generates for the next step during the update.
        grow_s: Seconds by which the update takes longer in each further step.
        nested: True if the update has a stage inside.
        plant: Table with `cause` (a name in `CAUSES`), `seconds`, `step`, `rank`, and `stage` (empty: after the first
            stage, or before it in step 1).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = {"steps": 8, "stages": STAGES, "plant": {}} | options
        self.spans: list[tuple[str, float, float]] = []
        self.random = random.Random(7)
        self.number = 0
        self.model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @contextmanager
    def timed(self, name: str, role: str) -> Iterator[None]:
        with autoprof.stage(name, role=role):
            begin = time.perf_counter()
            yield
            self.spans.append((name, begin, time.perf_counter()))

    def compute(self, trains: bool) -> None:
        if not trains:
            with torch.no_grad():
                self.model(torch.ones(64, 256))
            return
        loss = self.model(torch.ones(64, 256)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def work(self, seconds: float, trains: bool = False) -> None:
        end = time.perf_counter() + seconds * (1 + self.options.get("spread", 0) * self.random.uniform(-1, 1))
        for _ in range(self.options.get("work", 1)):
            self.compute(trains)
        if "work" not in self.options:
            time.sleep(max(0.0, end - time.perf_counter()))

    def plant(self, stage: str) -> None:
        plant = self.options["plant"]
        if (self.number, stage) == (plant.get("step"), plant.get("stage", "")) and plant.get("rank", 0) == RANK:
            begin = time.perf_counter()
            try:
                CAUSES[plant["cause"]](plant["seconds"])
            finally:
                self.write("planted.json", {"seconds": time.perf_counter() - begin})

    def run_stage(self, name: str, role: str, seconds: float) -> None:
        if name == "update_actor":
            seconds += self.options.get("first_s", 0) * (self.number == 1)
            seconds += self.options.get("grow_s", 0) * self.number
        for _ in range(self.options.get("micro", 1) if name == "update_actor" else 1):
            with self.timed(name, role):
                self.plant(name)
                if self.options.get("nested") and name == "update_actor":
                    with autoprof.stage("forward", role="actor"):
                        self.work(seconds / 2, trains=True)
                    seconds /= 2
                self.work(seconds, trains=name == "update_actor")
                if RANKS > 1 and name == "update_actor":
                    torch.distributed.all_reduce(torch.ones(1000))

    def step(self) -> None:
        self.work(self.options.get("between_s", 0))
        if self.number == 1 and self.options["plant"].get("step") == 1:
            self.plant("")
        ahead = None
        for place, each in enumerate(self.options["stages"]):
            if place == 0 and self.options.get("ahead"):
                ahead = threading.Thread(target=self.run_stage, args=each)
                ahead.start()
                time.sleep(0.01)
            else:
                self.run_stage(*each)
            if place == 0 and self.number > 1:
                self.plant("")
        if ahead is not None:
            ahead.join()
        for key, name, role in (("validate", "validate", "trainer"), ("save", "save_checkpoint", "actor")):
            if self.options.get(key) and self.number % self.options[key] == 0:
                self.run_stage(name, role, self.options.get("extra_s", 0.3))

    def write(self, file: str, line: dict[str, Any]) -> None:
        with open(file, "a") as opened:
            opened.write(json.dumps(line | {"rank": RANK}) + "\n")

    def run(self) -> None:
        if self.options.get("validated_before"):
            self.run_stage("validate", "trainer", 0.5)
        first = self.options.get("first", 1)
        for number in range(first, first + self.options["steps"]):
            self.number = number
            self.spans = []
            with autoprof.step(self.number):
                begin = time.perf_counter()
                self.step()
                seconds = time.perf_counter() - begin
            self.write("truth.jsonl", {"step": self.number, "seconds": seconds, "spans": self.spans})


if __name__ == "__main__":
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    Loop(json.loads(sys.argv[1])).run()
    if RANKS > 1:
        torch.distributed.destroy_process_group()
