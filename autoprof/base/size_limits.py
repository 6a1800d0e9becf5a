"""Limit of file sizes (`ulimit -f`): a write beyond it fails and sends SIGXFSZ, which may end the process.

The boot uses this module, too. So the module imports only the standard library, not the copies in `base/originals.py`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C, as in base/seam.py
import errno
import resource
from posix import strerror

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def size_limit() -> int | None:
    """Return the maximum size in bytes of a file that this process may write, or None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_size(size: int) -> None:
    """Check that a file may have `size` bytes. Writing a larger file sends SIGXFSZ, which may end the process.

    Raises:
        OSError: The size is over the limit.
    """
    limit = size_limit()
    if limit is not None and size > limit:
        raise OSError(errno.EFBIG, f"{strerror(errno.EFBIG)}: the limit is {limit} bytes (ulimit -f)")


def no_size_signal(call: Callable[..., Any], *args: Any) -> Any:
    """Call `call` without the signal SIGXFSZ. Writes beyond the limit of file sizes fail with EFBIG.

    If a signal handler of the program blocks other signals during the call, these signals stay blocked.

    Returns:
        The result of `call`.
    """
    signals = {_signal.SIGXFSZ}
    blocked = signals <= _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    restore = _signal.SIG_BLOCK if blocked else _signal.SIG_UNBLOCK
    # The signal mask is restored twice, because a signal handler that raises may interrupt the first call.
    try:
        try:
            return _blocking(signals, call, args)
        finally:
            _signal.pthread_sigmask(restore, signals)
    finally:
        _signal.pthread_sigmask(restore, signals)


def _blocking(signals: set[int], call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    pending = signals.intersection(_signal.sigpending())
    try:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, signals)
        return call(*args)
    finally:
        if signals.intersection(_signal.sigpending()) - pending:
            _signal.sigtimedwait(signals, 0)
