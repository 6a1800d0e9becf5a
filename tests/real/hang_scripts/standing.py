"""User module for verl, `actor_rollout_ref.model.external_lib`, with causes of stuck steps.

Each step is stuck until a file with its number appears in the folder STANDING, so that the run ends normally. The
number of updates gives the step, as in planted.py.
"""

import os
import time
from pathlib import Path

import torch
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss

# Stuck steps, each with one cause.
REWARD, TOOL, RANK, LOCKS, ENGINE, ITSELF = 2, 3, 4, 5, 6, 7
FOLDER = Path(os.environ["STANDING"])
DEADLINE_S = 240

_updates = FOLDER / "updates"
_own_updates = 0
_begun = set()


def step():
    """Return the step whose samples are being generated."""
    return 1 + (_updates.stat().st_size if _updates.exists() else 0)


def must_wait(number):
    """Return True if this step must still be stuck."""
    return step() == number and not (FOLDER / f"go_on_{number}").exists()


def first(number):
    """Return True for the first call in a process while this step must be stuck."""
    if number in _begun or not must_wait(number):
        return False
    _begun.add(number)
    return True


def wait(number):
    """Wait until the step may continue. A deadline ends the wait if a test has failed."""
    end = time.monotonic() + DEADLINE_S
    while not (FOLDER / f"go_on_{number}").exists() and time.monotonic() < end:
        time.sleep(0.2)


@ToolParser.register("standing")
class Parser(ToolParser):
    """Parser that treats the first turn of each sample as a call of the tool."""

    called = False

    @property
    def stop_token_ids(self):
        return list(range(100, 164))

    async def extract_tool_calls(self, responses_ids, tools=None):
        calls = [] if self.called else [FunctionCall(name="search", arguments='{"query": "the sum"}')]
        self.called = True
        return "", calls


def wait_for_rank():
    """Make rank 1 wait while the other ranks are in a collective."""
    wait(RANK)


@register_policy_loss("standing")
def loss(*args, **options):
    """Return verl's own loss. In one step, rank 1 does not join FSDP's collectives."""
    global _own_updates
    _own_updates += 1
    rank = torch.distributed.get_rank()
    if rank == 1 and _own_updates == RANK:
        wait_for_rank()
    if rank == 0:
        with _updates.open("ab") as file:
            file.write(b".")
    return get_policy_loss_fn("vanilla")(*args, **options)
