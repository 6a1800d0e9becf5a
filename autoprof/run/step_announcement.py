"""Announcement of the current step to the processes of a run: written by the trainer, read when a stage begins.

Ray's key-value store carries it where Ray is up, since a trainer's put ends before it calls a worker. Calls of workers
that are plain processes carry it themselves (`parcel`). Else it stays in this process. Nothing polls.
"""

from __future__ import annotations

from typing import Any

import msgspec

from autoprof.base import process
from autoprof.config import structs
from autoprof.run import cluster


class StepAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """The step that the trainer is in.

    Attributes:
        captured: Whether the window is open in it.
        overrides: The settings of that window's own (`Settings.overridden`).
        off: Whether autoprof does nothing at all in it.
    """

    step: int
    captured: bool
    overrides: dict[str, Any] = {}
    off: bool = False


@structs.complete
class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """An announcement that travels with a call of a worker.

    Attributes:
        number: Counts the announcements of the trainer: calls may overtake each other.
        announcement: None where no step is going on.
    """

    number: int
    announcement: StepAnnouncement | None


class _State(process.State):
    """The announcement of this process's own trainer, whether it has one, and the newest that came with a call."""

    def begin(self) -> None:
        self.own: StepAnnouncement | None = None
        # What was read last.
        self.seen: StepAnnouncement | None = None
        self.trainer_here = False
        self.posted = 0
        self.received = Parcel(number=-1, announcement=None)


_state = _State()


def post(run_id: str, announcement: StepAnnouncement | None) -> None:
    """Announce the step that the trainer is in, or with None that no step is going on."""
    _state.own = announcement
    _state.posted += 1
    if cluster.is_up():
        cluster.put(_key(run_id), msgspec.json.encode(announcement))


def read(run_id: str) -> StepAnnouncement | None:
    """Return the announcement of the step that the trainer of this run is in, if any."""
    if (known := here()) is not None:
        return known
    posted = cluster.get(_key(run_id))
    _state.seen = None if posted is None else msgspec.json.decode(posted, type=StepAnnouncement | None)
    return _state.seen


def trainer_here() -> None:
    """Note that there is a trainer in this process, before its first step."""
    _state.trainer_here = True


def own() -> tuple[bool, StepAnnouncement | None]:
    """Return whether the trainer is in this process, and the step that it is in, if any."""
    return _state.trainer_here or _state.own is not None, _state.own


def here() -> StepAnnouncement | None:
    """Return the step that the trainer is in, as far as this process knows it without asking Ray."""
    return _state.own if _state.own is not None else _state.received.announcement


def parcel() -> dict[str, Any]:
    """Return the announcement of this process's trainer as a call may carry it to a worker: plain dicts and values."""
    made: dict[str, Any] = msgspec.to_builtins(Parcel(number=_state.posted, announcement=_state.own))
    return made


def receive(sent: Any) -> bool:
    """Take what came with a call; return whether it is news: another step has begun, or the step has ended.

    Raises:
        ValueError: It is no output of `parcel`.
    """
    received = msgspec.convert(sent, Parcel)
    if received.number <= _state.received.number:
        return False
    _state.received = received
    return True


def known() -> int | None:
    """Return the step that this process knows of without asking: its own, one that was sent, or the one read last."""
    found = here() or _state.seen
    return found.step if found is not None else None


def _key(run_id: str) -> str:
    return f"step/{run_id}"
