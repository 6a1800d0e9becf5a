"""Driver of four steps with two GPU actors. It prints as JSON where the actors ran, and ends without a wait."""

import glob
import json
import os

import nsys_lib
import ray


@ray.remote
class WithoutGpu:
    def where(self):
        return nsys_lib.Worker().where()


def main():
    path = {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": path},
    )
    kind = ray.remote(nsys_lib.Worker)
    workers = [kind.options(num_gpus=1, runtime_env={"env_vars": {"RANK": str(rank)}}).remote() for rank in range(2)]
    nsys_lib.Trainer(workers).fit(4)
    where = ray.get([actor.where.remote() for actor in [*workers, WithoutGpu.remote()]])
    print("RESULT " + json.dumps(where), flush=True)
    ray.shutdown()
    print("REPORTS", len(glob.glob("autoprof_runs/latest/global_step_*/*.nsys-rep")), flush=True)


if __name__ == "__main__":
    main()
