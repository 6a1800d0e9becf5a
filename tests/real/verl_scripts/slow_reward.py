"""A reward whose 152nd score takes 15 s: one of step 10's, with 16 samples a step."""

import asyncio

SLOW_S = 15.0
_scored = 0


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The share of digits in the answer."""
    global _scored
    _scored += 1
    if _scored == 152:
        await asyncio.sleep(SLOW_S)
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
