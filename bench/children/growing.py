"""Target with a trainer and Ray actors that do nothing; growing.toml is its recipe."""

import ray


class Trainer:
    def __init__(self, workers):
        self.workers = workers
        self.global_step = 0

    def step(self):
        pass


@ray.remote(num_cpus=0)
class Worker:
    def nothing(self):
        pass
