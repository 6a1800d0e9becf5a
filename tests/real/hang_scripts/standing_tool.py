"""A tool, as `multi_turn.function_tool_path`: its first call of one step does not return, and of another waits for an
answer of the actor that it is in."""

import asyncio

import ray
from standing import FOLDER, ITSELF, TOOL, first, stands
from verl.tools.function_tool import function_tool


def ask_itself():
    """Wait for a method of the actor whose event loop this holds up."""
    answer = ray.get_runtime_context().current_actor._get_mm_processor_kwargs.remote()
    while stands(ITSELF):
        try:
            ray.get(answer, timeout=1)
            return
        except ray.exceptions.GetTimeoutError:
            (FOLDER / "asked_itself").touch()


@function_tool("search")
async def search(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    if first(TOOL):
        while stands(TOOL):
            await asyncio.sleep(0.2)
    if first(ITSELF):
        ask_itself()
    return "found"
