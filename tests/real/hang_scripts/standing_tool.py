"""A tool, as `multi_turn.function_tool_path`: its first call of one step does not return."""

import asyncio

from standing import TOOL, first, stands
from verl.tools.function_tool import function_tool


@function_tool("search")
async def search(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    if first(TOOL):
        while stands(TOOL):
            await asyncio.sleep(0.2)
    return "found"
