#: files: no
#: captures: yes
#: slow:
#: needs: torch
#: needs: ray
"""Ray in captured steps: actors with async methods, classes by value, exceptions of actors."""

import os

import ray
import torch
from tinyrl import Trainer

os.environ["RAY_DEDUP_LOGS"] = "0"
ray.init(
    address="local",
    num_cpus=2,
    include_dashboard=False,
    log_to_driver=False,
    logging_level="ERROR",
    configure_logging=False,
)


class Mine(Trainer):
    async def work(self):
        return await self.agenerate(), self.fit(1, lambda: torch.ones(2).sum().item())

    def fails(self):
        return self.update(lambda: 1 / 0)


actor = ray.remote(Mine).remote("actor")
print(ray.get(actor.work.remote()), Trainer().fit(1, lambda: ray.get(actor.work.remote())))
try:
    ray.get(actor.fails.remote())
except ZeroDivisionError as error:
    print(type(error).__name__, error.cause)
print(ray.get(ray.remote(Trainer.reward).remote("abc")))
ray.shutdown()
