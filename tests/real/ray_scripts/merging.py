"""Actor that starts the merge of a run and dies at once, before Ray ends: merging.py RUN"""

import sys
from pathlib import Path
from types import SimpleNamespace

import ray

from autoprof.config.settings import Settings
from autoprof.run import end
from autoprof.rundir.layout import RunDir


@ray.remote
class Trainer:
    def last_window(self, path):
        settings = Settings(contents=("merge-profiles",))
        end._work_after_run(SimpleNamespace(settings=settings, rundir=RunDir(Path(path))))


ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
trainer = Trainer.remote()
ray.get(trainer.last_window.remote(sys.argv[1]))
ray.kill(trainer)
ray.shutdown()
