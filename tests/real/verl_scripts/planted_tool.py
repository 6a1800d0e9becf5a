"""Tool of planted.py, for `multi_turn.function_tool_path`. Its first call in one step is slow."""

import asyncio

from planted import SLOW_S, SLOW_TOOL, once
from verl.tools.function_tool import function_tool


@function_tool("search")
async def search(query: str) -> str:
    """Search.

    Args:
        query: Search terms.
    """
    await asyncio.sleep(SLOW_S if once(SLOW_TOOL) else 0.01)
    return "found"
