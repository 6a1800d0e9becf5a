"""How the current step reaches the other processes of a run: written by the trainer, read when a stage begins.

Ray's key-value store carries it where Ray is up, since a trainer's put ends before it calls a worker; else the process
itself. Nobody polls.
"""

from __future__ import annotations

from typing import Any

import msgspec

from autoprof import store


class Posting(msgspec.Struct, frozen=True, kw_only=True):
    """The step that the trainer is in. `captured` says whether the window is open in it, `overrides` which settings
    that window has of its own (`Settings.overridden`), `off` that autoprof does nothing at all in it."""

    step: int
    captured: bool
    overrides: dict[str, Any] = {}
    off: bool = False


_own: Posting | None = None
_trainer_here = False


def post(run_id: str, posting: Posting | None) -> None:
    """Say which step it is, or with None that no step is going on."""
    global _own
    _own = posting
    if store.up():
        store.put(_key(run_id), msgspec.json.encode(posting))


def read(run_id: str) -> Posting | None:
    """The step that the trainer of this run is in, if there is one."""
    if _own is not None:
        return _own
    posted = store.get(_key(run_id))
    return None if posted is None else msgspec.json.decode(posted, type=Posting | None)


def trainer_here() -> None:
    """Say that there is a trainer in this process, before its first step."""
    global _trainer_here
    _trainer_here = True


def own() -> tuple[bool, Posting | None]:
    """Whether the trainer is in this process, and the step that it is in, if any."""
    return _trainer_here or _own is not None, _own


def _key(run_id: str) -> str:
    return f"step/{run_id}"
