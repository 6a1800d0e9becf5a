"""The tool of planted.py, as `multi_turn.function_tool_path`: its first call of one step takes long."""

import asyncio

from planted import SLOW_S, SLOW_TOOL, once
from verl.tools.function_tool import function_tool


@function_tool("search")
async def search(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    await asyncio.sleep(SLOW_S if once(SLOW_TOOL) else 0.01)
    return "found"
