"""The log of autoprof itself: lines on stderr that begin with `autoprof:`."""

from __future__ import annotations

import logging
import sys

from autoprof.base import files, interrupts, process
from autoprof.base.exception_text import described
from autoprof.base.redact import hidden, plain

_logger = logging.getLogger("autoprof")


class _Plain(logging.Formatter):
    """One line a message, whatever an error or a name holds, and no secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(hidden(super().format(record)).replace("\n", " "))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Leaves out what can't be written, and passes on what a signal handler raises meanwhile."""

    def emit(self, record: logging.LogRecord) -> None:
        # stderr may be a file.
        files.no_size_signal(super().emit, record)

    def handleError(self, record: logging.LogRecord) -> None:
        if (error := sys.exc_info()[1]) is not None:
            interrupts.pass_on(error)


class _State(process.State):
    """The handler of this process's log, and what has been said once."""

    handler: _Handler | None = None

    def begin(self) -> None:
        self.said: set[str] = set()
        if self.handler is not None:
            _logger.removeHandler(self.handler)
            _logger.propagate = True
            _logger.setLevel(logging.NOTSET)
            self.handler = None


_state = _State()


def configure(level: str) -> None:
    """Set up the log of this process. `level` is a value of `AUTOPROF_LOG`."""
    if not _logger.handlers:
        _state.handler = _Handler(sys.stderr)
        _state.handler.setFormatter(_Plain("autoprof: %(message)s"))
        _logger.addHandler(_state.handler)
        _logger.propagate = False
    _logger.setLevel(level.upper())


def debug(message: str) -> None:
    _say(logging.DEBUG, message)


def info(message: str) -> None:
    _say(logging.INFO, message)


def warning(message: str) -> None:
    _say(logging.WARNING, message)


def warning_once(message: str) -> None:
    """Warn about the same thing once in this process."""
    if message not in _state.said:
        _state.said.add(message)
        _say(logging.WARNING, message)


def error_once(what: str, error: BaseException) -> None:
    """Warn about an error once in this process."""
    warning_once(f"{what}: {described(error)}")


def warning_aside(message: str) -> None:
    """Warn about a thing once, from a thread that `threading` doesn't know: `logging` would make it known there."""
    if message not in _state.said and _state.handler is not None and _logger.level <= logging.WARNING:
        _state.said.add(message)
        _write(_state.handler, message)


def _say(level: int, message: str) -> None:
    """Log a message. A program's patches of `time.time` and the like do not receive the calls of `logging`."""
    handler = _state.handler
    if handler is None or _logger.handlers != [handler] or _logger.filters:  # the program has set up this log
        _logger.log(level, message)
    elif level >= _logger.level and level > _logger.manager.disable:
        _write(handler, message)


def _write(handler: _Handler, message: str) -> None:
    text = plain(hidden(message).replace("\n", " "))
    with interrupts.suppress(Exception):  # the program may have closed it
        files.no_size_signal(handler.stream.write, f"autoprof: {text}\n")
        files.no_size_signal(handler.stream.flush)
