"""Tool for `multi_turn.function_tool_path`, with two causes of stuck steps.

Its first call in one step does not return. Its first call in another step waits for a method of the actor that runs it.
"""

import asyncio

import ray
from standing import FOLDER, ITSELF, TOOL, first, must_wait
from verl.tools.function_tool import function_tool


def ask_itself():
    """Wait for a method of this actor, whose event loop this function blocks."""
    answer = ray.get_runtime_context().current_actor._get_mm_processor_kwargs.remote()
    while must_wait(ITSELF):
        try:
            ray.get(answer, timeout=1)
            return
        except ray.exceptions.GetTimeoutError:
            (FOLDER / "asked_itself").touch()


@function_tool("search")
async def search(query: str) -> str:
    """Search.

    Args:
        query: Search terms.
    """
    if first(TOOL):
        while must_wait(TOOL):
            await asyncio.sleep(0.2)
    if first(ITSELF):
        ask_itself()
    return "found"
