"""User module for verl, `actor_rollout_ref.model.external_lib`, with causes of slow steps.

verl imports it in the trainer's workers, the agent loops and the servers. The number of updates gives the step; the
loss writes it into the folder PLANTED.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import ray
import torch
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

# Slow steps, each with one cause.
SLOW_TOOL, SLOW_SYNC, SLOW_RANK, SLOW_REPLICA, SLOW_REWARD, SLOW_SENDER, VERY_SLOW_REWARD = 3, 5, 7, 9, 12, 14, 22
SLOW_S, VERY_SLOW_S = 4.0, 30.0
# Stop tokens, 64 of the 512 tokens, so that a turn ends after about eight tokens.
STOPS = list(range(100, 164))

_updates = Path(os.environ["PLANTED"], "updates")
_done = set()
_own_updates = 0


def generates_for(step):
    """Return True if the samples of this step are being generated."""
    return step == 1 + (_updates.stat().st_size if _updates.exists() else 0)


def once(step):
    """Return True for the first call in a process while the samples of this step are being generated."""
    if not generates_for(step) or step in _done:
        return False
    _done.add(step)
    return True


@ToolParser.register("planted")
class Parser(ToolParser):
    """Parser that treats the first turn of each sample as a call of the tool, since the model is untrained."""

    called = False

    @property
    def stop_token_ids(self):
        return STOPS

    async def extract_tool_calls(self, responses_ids, tools=None):
        calls = [] if self.called else [FunctionCall(name="search", arguments='{"query": "the sum"}')]
        self.called = True
        return "", calls


@register_policy_loss("planted")
def loss(*args, **options):
    """Return verl's own loss. In one step, rank 1 is late, and rank 0 waits in FSDP's collectives."""
    global _own_updates
    _own_updates += 1
    rank = torch.distributed.get_rank()
    if rank == 1 and _own_updates == SLOW_RANK:
        time.sleep(SLOW_S)
    if rank == 0:
        with _updates.open("ab") as file:
            file.write(b".")
    return get_policy_loss_fn("vanilla")(*args, **options)


_send = BucketedWeightSender.async_send_weights


async def _send_slowly(self, weights):
    if _own_updates == SLOW_SYNC:
        await asyncio.sleep(SLOW_S)
    await _send(self, weights)
    # No collectives follow, so the other rank does not wait for this one.
    if _own_updates == SLOW_SENDER and torch.distributed.get_rank() == 1:
        await asyncio.sleep(SLOW_S)


BucketedWeightSender.async_send_weights = _send_slowly


def _slow_engine(generate):
    slow = None

    async def generate_slowly(self, *args, **options):
        nonlocal slow
        if slow is None:
            slow = (ray.get_runtime_context().get_actor_name() or "").startswith("vllm_server_1_")
        async for output in generate(self, *args, **options):
            if slow and generates_for(SLOW_REPLICA):
                await asyncio.sleep(SLOW_S / 4)
            yield output

    return generate_slowly


if engine := sys.modules.get("vllm.v1.engine.async_llm"):
    engine.AsyncLLM.generate = _slow_engine(engine.AsyncLLM.generate)
