"""OpenRLHF's own command, in a Ray cluster with fake GPUs: `train.py GPUS ARGUMENT...`"""

import runpy
import sys

import ray

if __name__ == "__main__":
    ray.init("local", num_cpus=8, num_gpus=int(sys.argv.pop(1)), include_dashboard=False)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
