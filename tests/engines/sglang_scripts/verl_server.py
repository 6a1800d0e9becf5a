"""verl's own SGLang server with a real engine, without Ray: verl_server.py MODEL SITE_PACKAGES

SITE_PACKAGES contains verl. Only the start of the server is replaced: this script makes its engine. It prints the
number of tokens of each answer.
"""

import asyncio
import json
import sys
from types import SimpleNamespace

# Last, so that this environment's own packages take precedence.
sys.path.append(sys.argv[2])

import sglang
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

REPLICA = 3


def main(model):
    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        mem_fraction_static=0.1,
        max_total_tokens=1024,
        max_running_requests=4,
        log_level="warning",
    )
    server = object.__new__(SGLangHttpServer)
    server.config = SimpleNamespace(
        max_model_len=64, prompt_length=16, response_length=8, enable_rollout_routing_replay=False, mtp=None
    )
    server.model_config = SimpleNamespace(lora_rank=0, lora={})
    server.tokenizer_manager, server.replica_rank, server.node_rank = engine.tokenizer_manager, REPLICA, 0
    server.global_steps, server._disaggregation_role, server._pd_decode_peers = 1, "null", []

    async def generate(number):
        parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 4 + number}
        output = await server.generate([5, 6, 7, *range(8, 8 + number)], parameters, f"request{number}")
        return len(output.token_ids)

    async def all_at_once():
        return await asyncio.gather(*map(generate, range(3)))

    try:
        print("RESULT " + json.dumps(engine.loop.run_until_complete(asyncio.wait_for(all_at_once(), 120))), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
