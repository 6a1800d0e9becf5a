"""Announcement of the current step to the processes of a run: written by the trainer, read when a stage begins.

If Ray is up, its key-value store holds the announcement: the trainer's put ends before the trainer calls a worker. For
workers that are plain processes, each call carries it (`parcel`). Otherwise it stays in this process. No process polls.
"""

from __future__ import annotations

from typing import Any

import msgspec

from autoprof.base import process
from autoprof.config import structs
from autoprof.run import cluster


class StepAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """The current step of the trainer.

    Attributes:
        step: The global step.
        captured: True if a window is open in it.
        overrides: The settings of that window (`Settings.overridden`).
        off: True if autoprof does nothing in this step.
    """

    step: int
    captured: bool
    overrides: dict[str, Any] = {}
    off: bool = False


@structs.complete
class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """An announcement that travels with a call of a worker.

    Attributes:
        number: The count of announcements so far. It shows which one is newer if calls overtake each other.
        announcement: The announcement; None between two steps.
    """

    number: int
    announcement: StepAnnouncement | None


class _AnnouncementState(process.State):
    """The announcements that this process knows: from a trainer here, from Ray's store, and from a call."""

    def begin(self) -> None:
        self.own: StepAnnouncement | None = None
        # The announcement last read from Ray's store.
        self.seen: StepAnnouncement | None = None
        self.trainer_here = False
        self.posted = 0
        self.received = Parcel(number=-1, announcement=None)


_state = _AnnouncementState()


def post(run_id: str, announcement: StepAnnouncement | None) -> None:
    """Announce the current step of the trainer, or None at the end of a step."""
    _state.own = announcement
    _state.posted += 1
    if cluster.is_up():
        cluster.put(_key(run_id), msgspec.json.encode(announcement))


def read(run_id: str) -> StepAnnouncement | None:
    """Return the current announcement of the run's trainer, or None. May ask Ray's store."""
    if (known := here()) is not None:
        return known
    posted = cluster.get(_key(run_id))
    _state.seen = None if posted is None else msgspec.json.decode(posted, type=StepAnnouncement | None)
    return _state.seen


def trainer_here() -> None:
    """Record that the trainer runs in this process. Called before its first step."""
    _state.trainer_here = True


def own() -> tuple[bool, StepAnnouncement | None]:
    """Return True if the trainer runs in this process, and its current announcement."""
    return _state.trainer_here or _state.own is not None, _state.own


def here() -> StepAnnouncement | None:
    """Return the current announcement if this process knows it without asking Ray."""
    return _state.own if _state.own is not None else _state.received.announcement


def parcel() -> dict[str, Any]:
    """Return the announcement of this process's trainer as plain dicts and values, for a call of a worker."""
    fields: dict[str, Any] = msgspec.to_builtins(Parcel(number=_state.posted, announcement=_state.own))
    return fields


def receive(sent: Any) -> bool:
    """Store an announcement that came with a call. Return True if it is newer than the last one.

    Raises:
        ValueError: `sent` is not a result of `parcel`.
    """
    received = msgspec.convert(sent, Parcel)
    if received.number <= _state.received.number:
        return False
    _state.received = received
    return True


def known() -> int | None:
    """Return the step known without asking Ray: of this trainer, from a call, or last read from Ray's store."""
    announcement = here() or _state.seen
    return announcement.step if announcement is not None else None


def _key(run_id: str) -> str:
    return f"step/{run_id}"
