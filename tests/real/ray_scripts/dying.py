"""Trainer in an actor, with a worker that dies in step 2: dying.py HOW"""

import ctypes
import faulthandler
import os
import signal
import sys
import time

import ray


def fetch_score():
    raise ValueError("no score")


def hold_memory():
    """Allocate 3 GB slowly, so that Ray notices."""
    held = []
    for _ in range(60):
        held.append(b"x" * (50 << 20))
        time.sleep(0.2)


ENDS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashed": lambda: ctypes.string_at(0),
    "raised": fetch_score,
    "exited": lambda: os._exit(3),
    "memory": hold_memory,
    "healthy": lambda: None,
}


class Worker:
    def update(self, step, how):
        if step == 2:
            ENDS[how]()
        return faulthandler.is_enabled()


class Trainer:
    global_steps = 0

    def __init__(self):
        self.worker = ray.remote(num_cpus=0)(Worker).remote()

    def fit(self, how):
        for self.global_steps in range(1, 4):
            self.step(how)
        return faulthandler.is_enabled()

    def step(self, how):
        print("enabled in the worker:", ray.get(self.worker.update.remote(self.global_steps, how)), flush=True)


def main():
    variables = {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__)), "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": variables},
    )
    import dying

    trainer = ray.remote(num_cpus=0)(dying.Trainer).remote()
    print("enabled in the trainer:", ray.get(trainer.fit.remote(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
