"""`/start_profile`, `/stop_profile` and `/autoprof` of a server: what requests say, and what they are answered."""

from __future__ import annotations

import json
from typing import Any

from autoprof import interrupts
from autoprof.behaviours import serve

# What autoprof knows in the body of `/start_profile`.
KEYS = frozenset({"global_step", "duration_s"})


async def answer_start(server: serve.Server, body: bytes) -> tuple[int, dict[str, str]]:
    """The HTTP status and the content that answer `/start_profile`."""
    try:
        step, duration_s = window_of(body)
    except ValueError as error:
        interrupts.pass_on(error)
        return 400, {"problem": str(error)}
    return _answer(await server.open_window(step, duration_s))


async def answer_stop(server: serve.Server) -> tuple[int, dict[str, str]]:
    """The HTTP status and the content that answer `/stop_profile`."""
    return _answer(await server.close_window())


async def answer_trainer(server: serve.Server, directory: str, body: bytes) -> tuple[int, dict[str, str]]:
    """The HTTP status and the content that answer `/autoprof`, by which a trainer drives the engine."""
    asked = fields_of(body) or {}
    match asked.get("action"):
        case "lead":
            server.follow()
            return 200, {"problem": "", "run": directory}
        case "start":
            status, content = await answer_start(server, body)
            return status, content | {"run": directory}
        case "stop":
            return await answer_stop(server)
    return 400, {"problem": f"action: got {asked.get('action')!r}; it takes 'lead', 'start' or 'stop'"}


def window_of(body: bytes) -> tuple[int | None, float | None]:
    """Read the body of `/start_profile`: the step's number and the seconds that the window is open. Both may lack.

    Raises:
        ValueError: It says which is wrong, what it got and what it takes.
    """
    asked = fields_of(body)
    if asked is None:
        raise ValueError(f"body: got {body[:100].decode(errors='replace')!r}; it takes an object in JSON, or nothing")
    step, duration_s = asked.get("global_step"), asked.get("duration_s")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"global_step: got {step!r}; it takes a whole number from 0")
    if duration_s is not None and not _is_duration(duration_s):
        raise ValueError(f"duration_s: got {duration_s!r}; it takes seconds, above 0 and below 1e9")
    return step, duration_s


def fields_of(body: bytes) -> dict[str, Any] | None:
    """The fields of a body, none without one. None if it is no object in JSON."""
    try:
        content = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as error:
        interrupts.pass_on(error)
        return None
    return content if isinstance(content, dict) else None


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _answer(problem: str) -> tuple[int, dict[str, str]]:
    return 409 if problem else 200, {"problem": problem}
