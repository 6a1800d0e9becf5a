"""Reward whose first score is slow in one step and very slow in another."""

import asyncio

from planted import SLOW_REWARD, SLOW_S, VERY_SLOW_REWARD, VERY_SLOW_S, once


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the share of digits in the answer."""
    if once(SLOW_REWARD):
        await asyncio.sleep(SLOW_S)
    if once(VERY_SLOW_REWARD):
        await asyncio.sleep(VERY_SLOW_S)
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
