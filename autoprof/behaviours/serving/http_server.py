"""Requests to `/start_profile`, `/stop_profile` and `/autoprof` of a server, and their answers."""

from __future__ import annotations

from typing import Any

from autoprof.base import interrupts
from autoprof.base.originals import json
from autoprof.behaviours.rollout.request import Request
from autoprof.behaviours.serving import server as serving

# Fields that autoprof knows in the body of `/start_profile`.
KEYS = frozenset({"global_step", "duration_s"})


async def answer_start(server: serving.Server, body: bytes) -> tuple[int, dict[str, str]]:
    """Return the HTTP status and the content that answer `/start_profile`."""
    try:
        step, duration_s = window_of(body)
    except ValueError as error:
        interrupts.pass_on(error)
        return 400, {"problem": str(error)}
    return _answer(await server.open_window(step, duration_s))


async def answer_stop(server: serving.Server) -> tuple[int, dict[str, str]]:
    """Return the HTTP status and the content that answer `/stop_profile`."""
    return _answer(await server.close_window())


async def answer_trainer(server: serving.Server, directory: str, body: bytes) -> tuple[int, dict[str, str]]:
    """Return the HTTP status and the content that answer `/autoprof`, by which a trainer drives the engine."""
    try:
        request = Request.read(body)
    except ValueError as error:
        interrupts.pass_on(error)
        return 400, {"problem": str(error)}
    if request.action == "stop":
        return await answer_stop(server)
    if request.action == "start":
        status, content = _answer(await server.open_window(request=request))
        return status, content | {"run": directory}
    server.follow(same_run=request.run == directory)
    return 200, {"problem": "", "run": directory}


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
    """Return the fields of a body, none without one; None if it is no object in JSON."""
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
