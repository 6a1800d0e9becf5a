"""autoprof's own log: lines on stderr that begin with `autoprof:`."""

from __future__ import annotations

import logging
import sys

from autoprof import interrupts
from autoprof.redaction import hidden, plain

_logger = logging.getLogger("autoprof")
_said: set[str] = set()


class _Plain(logging.Formatter):
    """One line a message, whatever an error or a name holds, and no secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(hidden(super().format(record).replace("\n", " ")))


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """What can't be written is left; what a signal handler raises meanwhile is the user's."""

    def handleError(self, record: logging.LogRecord) -> None:
        if (error := sys.exc_info()[1]) is not None:
            interrupts.pass_on(error)


def configure(level: str) -> None:
    """Set up the log of this process. `level` is a value of `AUTOPROF_LOG`."""
    if not _logger.handlers:
        handler = _Handler(sys.stderr)
        handler.setFormatter(_Plain("autoprof: %(message)s"))
        _logger.addHandler(handler)
        _logger.propagate = False
    _logger.setLevel(level.upper())


def debug(message: str) -> None:
    _logger.debug(message)


def info(message: str) -> None:
    _logger.info(message)


def warning(message: str) -> None:
    _logger.warning(message)


def warning_once(message: str) -> None:
    """Warn about the same thing once in this process."""
    if message not in _said:
        _said.add(message)
        _logger.warning(message)
