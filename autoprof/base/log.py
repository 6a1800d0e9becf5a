"""Log of autoprof itself: lines on stderr that begin with `autoprof:`."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from autoprof.base import process, seam
from autoprof.base.redact import hidden, plain

_logger = logging.getLogger("autoprof")


class _LogState(process.State):
    """Stream of this process's log, and the messages that this process has logged and will not log again.

    Attributes:
        stream: stderr, or None if the program has set up this log, or before `configure`.
    """

    stream: TextIO | None = None

    def begin(self) -> None:
        self.logged: set[str] = set()
        if self.stream is not None:
            _logger.propagate = True
            _logger.setLevel(logging.NOTSET)
            self.stream = None


_state = _LogState()


def configure(level: str) -> None:
    """Set up the log of this process. `level` is a value of `AUTOPROF_LOG`."""
    if not _logger.handlers:
        _state.stream = sys.stderr
        _logger.propagate = False
    _logger.setLevel(level.upper())


def debug(message: str) -> None:
    _log(logging.DEBUG, message)


def info(message: str) -> None:
    _log(logging.INFO, message)


def warning(message: str) -> None:
    _log(logging.WARNING, message)


def warning_once(message: str) -> None:
    """Log a warning, unless this process has logged the same warning before."""
    if message not in _state.logged:
        _state.logged.add(message)
        _log(logging.WARNING, message)


def error_once(message: str, error: BaseException) -> None:
    """Log a warning about an error, unless this process has logged the same warning before."""
    warning_once(f"{message}: {seam.described(error)}")


def warning_aside(message: str) -> None:
    """Log a warning once, from a thread that the module `threading` does not know.

    This function does not use `logging`, which would register the thread in `threading`.
    """
    if message not in _state.logged and _logger.level <= logging.WARNING:
        _state.logged.add(message)
        _write(message)


def _log(level: int, message: str) -> None:
    """Log a message without `logging` if possible: `logging` would call the program's patches, as of `time.time`."""
    if _state.stream is None or _logger.handlers:  # handlers of the program
        _logger.log(level, message)
    if level < _logger.level or level <= _logger.manager.disable:
        return
    # Filters of the program need a record.
    if not _logger.filters or _logger.filter(logging.makeLogRecord({"levelno": level, "msg": message})):
        _write(message)


def _write(message: str) -> None:
    """Write a message on one line, without secrets and control characters."""
    if _state.stream is None:
        return
    text = plain(hidden(message).replace("\n", " "))
    with seam.suppress(Exception):  # the program may have closed the stream, or replaced stderr by any object
        # stderr may be a file.
        seam.no_size_signal(_state.stream.write, f"autoprof: {text}\n")
        seam.no_size_signal(_state.stream.flush)
