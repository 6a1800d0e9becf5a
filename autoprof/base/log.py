"""Log of autoprof itself: lines on stderr that begin with `autoprof:`."""

from __future__ import annotations

import logging
import select
import sys
from typing import Any

from autoprof.base import process, seam
from autoprof.base.originals import os
from autoprof.base.redact import hidden, plain

# Level of the line at the end of a run, between INFO and WARNING.
NOTICE = 25
_logger = logging.getLogger("autoprof")


class _Plain(logging.Formatter):
    """Formatter that puts each message on one line, without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(hidden(super().format(record)).replace("\n", " "))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that drops messages that can't be written, and raises the exceptions of signal handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        # stderr may be a file.
        seam.no_size_signal(super().emit, record)

    def handleError(self, record: logging.LogRecord) -> None:
        if (error := sys.exc_info()[1]) is not None:
            seam.pass_on(error)


class _LogState(process.State):
    """Handler of this process's log, and the messages that this process has logged and will not log again.

    Attributes:
        stderr: Device and inode of the file behind stderr when the log was set up; None if stderr had no file.
    """

    handler: _Handler | None = None
    stderr: tuple[int, int] | None = None

    def reset(self) -> None:
        self.logged: set[str] = set()
        if self.handler is not None:
            _logger.removeHandler(self.handler)
            _logger.propagate = True
            _logger.setLevel(logging.NOTSET)
            self.handler = None


_state = _LogState()


def configure(level: str) -> None:
    """Set up the log of this process. `level` is a value of `AUTOPROF_LOG`."""
    if not _logger.handlers:
        _state.handler = _Handler(sys.stderr)
        _state.handler.setFormatter(_Plain("autoprof: %(message)s"))
        _logger.addHandler(_state.handler)
        _logger.propagate = False
    _state.stderr = _file_of(sys.stderr)
    _logger.setLevel(NOTICE if level == "notice" else level.upper())


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


def has_warned(message: str) -> bool:
    """Return True if `warning_once` has logged this warning in this process."""
    return message in _state.logged


def error_once(message: str, error: BaseException) -> None:
    """Log a warning about an error, unless this process has logged the same warning before."""
    warning_once(f"{message}: {seam.described(error)}")


def warning_aside(message: str) -> None:
    """Log a warning once, from a thread that the module `threading` does not know.

    This function does not use `logging`, which would register the thread in `threading`.
    """
    if message not in _state.logged and _state.handler is not None and _logger.level <= logging.WARNING:
        _state.logged.add(message)
        _write(_state.handler.stream, message)


def closing_line(message: str) -> None:
    """Write the last line of a run, with the level `NOTICE`.

    The program may have closed stderr, and its number may belong to another file now. A pipe may be full, or have no
    reader. Then the line is left out: it must neither wait, nor change the program's files or its exit status.
    """
    handler = _state.handler
    if handler is None or _logger.handlers != [handler] or _logger.filters:
        _log(NOTICE, message)
    elif _is_on(NOTICE):
        stream = sys.stderr  # the program may have replaced it by another stream, as test runners do
        is_other_file = stream is handler.stream and _state.stderr != _file_of(stream)
        if not is_other_file and _takes_line(stream):
            _write(stream, message)


def _file_of(stream: Any) -> tuple[int, int] | None:
    """Return the device and inode of a stream's file, or None if the stream has no file."""
    with seam.suppress(Exception):  # notebooks and test runners replace stderr by objects without a file
        status = os.fstat(stream.fileno())
        return status.st_dev, status.st_ino
    return None


def _takes_line(stream: Any) -> bool:
    """Return True if a write to a stream does not block, and does not fail because a pipe has no reader."""
    if _file_of(stream) is None:
        return stream is not None
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLOUT)
    events = dict(poll.poll(0)).get(stream.fileno(), 0)
    return bool(events & select.POLLOUT) and not events & (select.POLLERR | select.POLLHUP | select.POLLNVAL)


def _is_on(level: int) -> bool:
    return level >= _logger.level and level > _logger.manager.disable


def _log(level: int, message: str) -> None:
    """Log a message without `logging` if possible: `logging` would call the program's patches, as of `time.time`."""
    handler = _state.handler
    if handler is None or _logger.handlers != [handler] or _logger.filters:  # the program has set up this log
        _logger.log(level, message)
    elif _is_on(level):
        _write(handler.stream, message)


def _write(stream: Any, message: str) -> None:
    text = plain(hidden(message).replace("\n", " "))
    with seam.suppress(Exception):  # the program may have closed the stream, or replaced stderr by any object
        seam.no_size_signal(stream.write, f"autoprof: {text}\n")
        seam.no_size_signal(stream.flush)
