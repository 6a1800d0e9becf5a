"""Limit of file sizes (`ulimit -f`): a write over it fails and raises SIGXFSZ, which may end the process.

The boot uses this, too: standard library only, and no copies of `base/originals.py`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C, as in base/interrupts.py
import contextlib
import errno
import resource
from posix import strerror

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def size_limit() -> int | None:
    """Return the largest size of a file in bytes that this process may write, or None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_size(size: int) -> None:
    """Check that a file may have a size. The signal for a larger one, SIGXFSZ, may end the process.

    Raises:
        OSError: It may not.
    """
    limit = size_limit()
    if limit is not None and size > limit:
        raise OSError(errno.EFBIG, f"{strerror(errno.EFBIG)}: the limit is {limit} bytes (ulimit -f)")


@contextlib.contextmanager
def no_size_signal() -> Iterator[None]:
    """Let writes over the limit of file sizes fail with EFBIG in this thread, without the signal SIGXFSZ."""
    signals = {_signal.SIGXFSZ}
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    pending = signals.intersection(_signal.sigpending())
    # Python calls signal handlers after `pthread_sigmask` has set the mask, so they can raise from it.
    try:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, signals)
        yield
    finally:
        try:
            if signals.intersection(_signal.sigpending()) - pending:
                _signal.sigtimedwait(signals, 0)
        finally:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
