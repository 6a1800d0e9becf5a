"""Small run in an existing cluster: asked.py ADDRESS FOLDER

The trainer, an actor, calls a worker in each step until the file `enough` is in the folder.
"""

import os
import sys
import time

import ray


class Worker:
    def update(self):
        import torch

        return float((torch.ones(30, 30) @ torch.ones(30, 30)).sum())


class Trainer:
    global_steps = 0

    def __init__(self, folder):
        self.folder = folder
        self.worker = ray.remote(num_cpus=0)(Worker).remote()

    def fit(self):
        while not os.path.exists(os.path.join(self.folder, "enough")):
            self.global_steps += 1
            self.step()
            time.sleep(0.1)
        return self.global_steps

    def step(self):
        ray.get(self.worker.update.remote())


def main():
    address, folder = sys.argv[1:]
    place = os.path.dirname(os.path.abspath(__file__))
    variables = {"PYTHONPATH": place, "OMP_NUM_THREADS": "1"}
    local = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100_000_000}
    ray.init(address=address, runtime_env={"env_vars": variables}, **(local if address == "local" else {}))
    print("head", ray.get_runtime_context().gcs_address, flush=True)
    import asked

    trainer = ray.remote(num_cpus=0)(asked.Trainer).remote(folder)
    print("steps", ray.get(trainer.fit.remote()), flush=True)


if __name__ == "__main__":
    main()
