"""AsyncLLM whose worker is a Ray actor, captured twice: ray_executor.py MODEL"""

import asyncio
import json
import os
import sys

import ray
from engine import generate, make_engine, request

from autoprof.behaviours import vllm as vllm_engine


async def main():
    os.environ["RAY_ADDRESS"] = ray.init(address="local", num_gpus=1, num_cpus=2, include_dashboard=False).address_info[
        "address"
    ]
    engine = make_engine(sys.argv[1], distributed_executor_backend="ray")
    said = {"before": await generate(engine, "a")}
    for step in (1, 2):
        said[f"start {step}"] = await vllm_engine.start(engine, request(step))
        said[f"during {step}"] = await generate(engine, f"b{step}")
        said[f"stop {step}"] = await vllm_engine.stop(engine)
    said["after"] = await generate(engine, "c")
    print("RESULT " + json.dumps(said), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
