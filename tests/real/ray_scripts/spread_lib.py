"""Small trainer with Ray actors on several nodes, used as a target."""

import os
import time

import ray
import torch


class Trainer:
    """Trainer that calls `workers`, each on its own node."""

    def __init__(self, workers):
        self.workers = workers
        self.global_step = 0
        self.pids = []

    def fit(self, steps):
        for _ in range(steps):
            self.global_step += 1
            self.step()

    def step(self):
        waiting = [worker.update.remote() for worker in self.workers]
        self.pids = []
        for reference in waiting:
            try:
                self.pids.append(ray.get(reference))
            except ray.exceptions.RayError:
                self.pids.append(None)


@ray.remote(num_cpus=0, max_restarts=1, max_task_retries=0)
class Worker:
    def __init__(self, rank, marker=""):
        self.rank = rank
        self.marker = marker
        self.times = 0

    def update(self):
        torch.ones(30, 30) @ torch.ones(30, 30)
        self.times += 1
        if self.marker and self.times == 2:
            with open(self.marker, "w"):
                pass
            time.sleep(600)
        return os.getpid()

    def environment(self):
        return {name: value for name, value in os.environ.items() if name.startswith("AUTOPROF")}

    def die(self):
        os._exit(1)
