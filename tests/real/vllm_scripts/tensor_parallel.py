"""AsyncLLM with two tensor-parallel workers, captured once: tensor_parallel.py MODEL"""

import asyncio
import json
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from autoprof.behaviours import vllm as vllm_engine


async def generate(engine, name):
    parameters = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    async for output in engine.generate({"prompt_token_ids": [5, 6, 7]}, parameters, name):
        tokens = list(output.outputs[0].token_ids)
    return tokens


async def main():
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=sys.argv[1],
            tensor_parallel_size=2,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=33554432,
        )
    )
    said = {"before": await generate(engine, "a")}
    request = vllm_engine.Request(action="start", step=1, replica=1, rank=2)
    said["start"] = await vllm_engine.start(engine, request)
    await generate(engine, "b")
    said["stop"] = await vllm_engine.stop(engine)
    said["after"] = await generate(engine, "c")
    print("RESULT " + json.dumps(said), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
