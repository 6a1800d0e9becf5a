"""Log of autoprof itself: lines on stderr that begin with `autoprof:`."""

from __future__ import annotations

import logging
import sys

from autoprof.base import process, seam
from autoprof.base.redact import hidden, plain

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
    """Handler of this process's log, and the messages that this process has logged and will not log again."""

    handler: _Handler | None = None

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
    if message not in _state.logged and _state.handler is not None and _logger.level <= logging.WARNING:
        _state.logged.add(message)
        _write(_state.handler, message)


def _log(level: int, message: str) -> None:
    """Log a message without `logging` if possible: `logging` would call the program's patches, as of `time.time`."""
    handler = _state.handler
    if handler is None or _logger.handlers != [handler] or _logger.filters:  # the program has set up this log
        _logger.log(level, message)
    elif level >= _logger.level and level > _logger.manager.disable:
        _write(handler, message)


def _write(handler: _Handler, message: str) -> None:
    text = plain(hidden(message).replace("\n", " "))
    with seam.suppress(Exception):  # the program may have closed the stream, or replaced stderr by any object
        seam.no_size_signal(handler.stream.write, f"autoprof: {text}\n")
        seam.no_size_signal(handler.stream.flush)
