"""Script that calls a real AsyncLLM as a server actor does, and prints the answers as JSON.

engine.py MODEL plain|configured [FOLDER]: with `configured`, vLLM's own profiler is configured for FOLDER, and the
worker runs in the engine's process, as with one GPU.
"""

import asyncio
import inspect
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from autoprof.behaviours import vllm as vllm_engine


def request(step, **overrides):
    return vllm_engine.Request(action="start", step=step, replica=1, rank=4, overrides=overrides)


async def generate(engine, name):
    parameters = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    async for output in engine.generate({"prompt_token_ids": [5, 6, 7]}, parameters, name):
        tokens = list(output.outputs[0].token_ids)
    return tokens


def arguments(engine):
    """Return arguments for the parameters that this release's start_profile has."""
    values = {"profile_prefix": "mine", "delay_iterations": 1, "max_iterations": 2}
    taken = inspect.signature(engine.start_profile).parameters
    return {name: value for name, value in values.items() if name in taken}


async def users_own(engine, name, **given):
    """Call start_profile and stop_profile as the user; return "ok" or the name of the exception."""
    try:
        await engine.start_profile(**given)
        await generate(engine, name)
        await engine.stop_profile()
    except Exception as error:
        return type(error).__name__
    return "ok"


def make_engine(model, **more):
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            # In bfloat16, the attention kernel of vLLM 0.30 and 0.32 dies of SIGILL on some CPUs with AMX.
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=33554432,
            **more,
        )
    )


async def main():
    model, kind, *folder = sys.argv[1:]
    # vLLM starts and stops its front end's profiler in any free thread of the loop's pool, and torch crashes if the two
    # threads differ (vLLM 0.27.1, torch 2.13). One thread avoids this crash, which has nothing to do with autoprof.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    more = {}
    if kind == "configured":
        more["profiler_config"] = {"profiler": "torch", "torch_profiler_dir": folder[0]}
        more["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    engine = make_engine(model, **more)
    said = {}
    said["before"] = await generate(engine, "a")
    said["stop without start"] = await vllm_engine.stop(engine)
    said["user before"] = await users_own(engine, "b")
    said["start 1"] = await vllm_engine.start(engine, request(1))
    said["start again"] = await vllm_engine.start(engine, request(1))
    said["recorded"] = await generate(engine, "c")
    said["stop 1"] = await vllm_engine.stop(engine)
    said["stop again"] = await vllm_engine.stop(engine)
    said["user after"] = await users_own(engine, "d", **arguments(engine))
    said["start 2"] = await vllm_engine.start(engine, request(2))
    await generate(engine, "e")
    said["stop 2"] = await vllm_engine.stop(engine)
    said["start 3"] = await vllm_engine.start(engine, request(3))
    said["stop 3"] = await vllm_engine.stop(engine)
    # Record only the second and the third pass.
    for step in (6, 7):
        said[f"start {step}"] = await vllm_engine.start(engine, request(step, rollout_iterations="1:3"))
        said[f"recorded {step}"] = await generate(engine, f"bounded {step}")
        said[f"stop {step}"] = await vllm_engine.stop(engine)
    said["start 8"] = await vllm_engine.start(engine, request(8, rollout_iterations="1:3"))
    said["stop 8"] = await vllm_engine.stop(engine)
    # The user's profiler starts during a capture, and the other way round.
    said["start 4"] = await vllm_engine.start(engine, request(4))
    await generate(engine, "g")
    said["user during"] = await users_own(engine, "h")
    said["stop 4"] = await vllm_engine.stop(engine)
    if kind == "configured":
        await engine.start_profile()
        said["start during the user's"] = await vllm_engine.start(engine, request(5))
        await generate(engine, "i")
        await engine.stop_profile()
    said["after"] = await generate(engine, "f")
    print("RESULT " + json.dumps(said), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
