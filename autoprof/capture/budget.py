"""Limits of recordings: the free disk space and the size of a trace.

torch keeps its recording in memory and does not report the size. So autoprof estimates the size of a trace from the
previous trace of the same kind in the same process. For the first trace of a kind, there is no estimate: if the trace
is too large, it is cut when it is written. Later recordings are ended before they become too large.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from autoprof.base import files, process
from autoprof.base.originals import os, time
from autoprof.config.settings import Settings

_MB = 1e6
# Minimum time between two checks of a recording.
_CHECK_S = 0.5


class OverBudget(Exception):
    """The disk is too full, so the recording does not begin. The message gives the numbers."""


class _Before(NamedTuple):
    """Size and duration of a recording that has been written.

    Attributes:
        step: The global step.
        size: Bytes before compression.
        seconds: Duration of the recording.
    """

    step: int
    size: int
    seconds: float


class _BudgetState(process.State):
    """The last written recording of each kind in this process.

    Attributes:
        before: Dict from the kind (the argument of `Budget`) to the recording.
    """

    def begin(self) -> None:
        self.before: dict[Hashable, _Before] = {}


_state = _BudgetState()


class Budget:
    """Limits of one recording.

    Args:
        settings: The settings of the capture.
        kind: Key that is the same for recordings that probably have the same size per second.
        step: The global step.
        folder: The folder of the recording's files.
    """

    def __init__(self, settings: Settings, kind: Hashable, step: int, folder: Path) -> None:
        self._kind = kind
        self._step = step
        self._folder = folder
        self._limit = int(settings.max_trace_mb * _MB)
        self._floor = int(settings.min_free_mb * _MB)
        self._begun = self._ended = self._checked = time.monotonic()

    def begin(self) -> None:
        """Note that the recording begins.

        Raises:
            OverBudget: The disk does not have enough free space.
        """
        previous = _state.before.get(self._kind)
        expected_bytes = min(previous.size, self._limit) if previous is not None else 0
        free = _free(self._folder)
        if free < self._floor + expected_bytes:
            estimate = (
                f" and {_mb(expected_bytes)} for the trace, the size in step {previous.step}"
                if previous is not None
                else ""
            )
            raise OverBudget(
                f"not recorded: the disk has {_mb(free)} free and needs {_mb(self._floor)} to stay free{estimate} "
                "(AUTOPROF_MIN_FREE_MB)"
            )
        self._begun = self._checked = time.monotonic()

    def exceeded(self, raw: Path) -> str:
        """If the recording exceeds a limit, return the reason why it must end now. Otherwise return an empty text.

        The limits are checked at most twice a second. Calls in between return an empty text.

        Args:
            raw: Path to which the tool writes.
        """
        now = time.monotonic()
        if now - self._checked < _CHECK_S:
            return ""
        self._checked = now
        if _free(self._folder) < self._floor:
            return f"less than {_mb(self._floor)} is free on the disk (AUTOPROF_MIN_FREE_MB)"
        if files.is_folder(raw) and files.size(str(raw)) > self._limit:
            return f"the trace is over {_mb(self._limit)} (AUTOPROF_MAX_TRACE_MB)"
        previous = _state.before.get(self._kind)
        if previous is not None and previous.seconds > 0:
            bytes_per_second = previous.size / previous.seconds
            if (now - self._begun) * bytes_per_second > self._limit:
                return (
                    f"the trace would pass {_mb(self._limit)} (AUTOPROF_MAX_TRACE_MB) "
                    f"at the {_mb(int(bytes_per_second))} a second of step {previous.step}"
                )
        return ""

    def end(self) -> None:
        """Note that the recording has ended."""
        self._ended = time.monotonic()

    def written(self, size: int) -> None:
        """Note the size of the written raw trace in bytes, before the trace is cut or compressed."""
        _state.before[self._kind] = _Before(self._step, size, self._ended - self._begun)


def _free(folder: Path) -> int:
    """Return how many bytes this user may still write to the disk that contains an existing folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _mb(size: int) -> str:
    return f"{size / _MB:,.0f} MB"
