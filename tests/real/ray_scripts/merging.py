"""merging.py RUN: an actor hands a run to be merged and dies at once, and Ray with it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import ray

from autoprof import ending
from autoprof.rundir import RunDir
from autoprof.settings import Settings


@ray.remote
class Trainer:
    def last_window(self, path):
        settings = Settings(contents=("merge-profiles",))
        ending._after(SimpleNamespace(settings=settings, rundir=RunDir(Path(path))))


ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
trainer = Trainer.remote()
ray.get(trainer.last_window.remote(sys.argv[1]))
ray.kill(trainer)
ray.shutdown()
