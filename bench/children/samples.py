"""Agent loop that does nothing; samples.toml is its recipe."""

from __future__ import annotations

from typing import Any


class Output:
    """Result of a turn."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


class Worker:
    """Agent loop whose sample has a turn and a reward."""

    async def sample(self, trajectory: dict[str, Any], *, agent_name: str, **kwargs: Any) -> None:
        output = await self.generate("0123456789abcdef0123456789abcdef", prompt_ids=PROMPT)
        await self.score([output])

    async def generate(self, request_id: str, *, prompt_ids: list[int]) -> Output:
        return ANSWER

    async def score(self, outputs: list[Output]) -> None:
        pass


PROMPT, ANSWER = [1] * 1024, Output([2] * 4096)
