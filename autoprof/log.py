"""autoprof's own log: lines on stderr that begin with `autoprof:`."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("autoprof")
_said: set[str] = set()


def configure(level: str) -> None:
    """Set up the log of this process. `level` is a value of `AUTOPROF_LOG`."""
    if not _logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("autoprof: %(message)s"))
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
