"""Announcement of the current step: the trainer announces it, and the other processes read it when a stage begins.

If Ray is up, the announcement is in Ray's key-value store. The trainer has stored it there before the trainer calls a
worker. If the workers are plain processes, each call of a worker contains the announcement (`parcel`). In all other
cases, only the process of the trainer knows the announcement. No process polls.
"""

from __future__ import annotations

from typing import Any

import msgspec

from autoprof.base import process
from autoprof.config import structs
from autoprof.run import cluster


class StepAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """The current step of the trainer, and the settings for capturing it.

    Attributes:
        step: The global step.
        captured: True if a window is open in this step.
        overrides: The settings of that window (`Settings.overridden`).
        off: True if autoprof does nothing in this step.
    """

    step: int
    captured: bool
    overrides: dict[str, Any] = {}
    off: bool = False


@structs.complete
class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """An announcement in the form in which it is sent with a call of a worker.

    Attributes:
        number: The number of announcements so far. If a call arrives later than a newer call, the number shows which
            announcement is newer.
        announcement: The announcement; None between two steps.
    """

    number: int
    announcement: StepAnnouncement | None


class _AnnouncementState(process.State):
    """The announcements that this process knows.

    Attributes:
        own: The current announcement of a trainer in this process, or None.
        seen: The announcement that was last read from Ray's store, or None.
        trainer_here: True if the trainer runs in this process.
        posted: The number of announcements of a trainer in this process.
        received: The newest announcement that came with a call.
    """

    def begin(self) -> None:
        self.own: StepAnnouncement | None = None
        self.seen: StepAnnouncement | None = None
        self.trainer_here = False
        self.posted = 0
        self.received = Parcel(number=-1, announcement=None)


_state = _AnnouncementState()


def post(run_id: str, announcement: StepAnnouncement | None) -> None:
    """Announce the current step of the trainer. At the end of a step, announce None."""
    _state.own = announcement
    _state.posted += 1
    if cluster.is_up():
        cluster.put(_key(run_id), msgspec.json.encode(announcement))


def read(run_id: str) -> StepAnnouncement | None:
    """Return the current announcement of the run's trainer, or None between two steps.

    If this process does not know the announcement, it is read from Ray's store.
    """
    if (own_or_received := here()) is not None:
        return own_or_received
    posted = cluster.get(_key(run_id))
    _state.seen = None if posted is None else msgspec.json.decode(posted, type=StepAnnouncement | None)
    return _state.seen


def trainer_here() -> None:
    """Record that the trainer runs in this process. Called before the first step of the trainer."""
    _state.trainer_here = True


def own() -> tuple[bool, StepAnnouncement | None]:
    """Return two values: True if the trainer runs in this process, and the trainer's current announcement or None."""
    return _state.trainer_here or _state.own is not None, _state.own


def here() -> StepAnnouncement | None:
    """Return the current announcement if this process knows it without a call of Ray's store; otherwise None."""
    return _state.own if _state.own is not None else _state.received.announcement


def parcel() -> dict[str, Any]:
    """Return the announcement of the trainer in this process as plain dicts and values, to send it with a call."""
    fields: dict[str, Any] = msgspec.to_builtins(Parcel(number=_state.posted, announcement=_state.own))
    return fields


def receive(sent: Any) -> bool:
    """Keep an announcement that came with a call. Return False if it is not newer than the announcement kept before.

    Raises:
        ValueError: `sent` is not a result of `parcel`.
    """
    received = msgspec.convert(sent, Parcel)
    if received.number <= _state.received.number:
        return False
    _state.received = received
    return True


def known() -> int | None:
    """Return the current step if this process knows it without a call of Ray's store; otherwise None.

    The step comes from the trainer in this process, from a call, or from the last read of Ray's store.
    """
    announcement = here() or _state.seen
    return announcement.step if announcement is not None else None


def _key(run_id: str) -> str:
    return f"step/{run_id}"
