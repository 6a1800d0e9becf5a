"""Turns of the processes that finish captures: few of one user's work on a host at a time. Part of `job.py`, which
loads it: stdlib only.

The locks are files in a folder of the user, where no other user can make or hold one. A process removes its lock and
the folder when its turn ends. So another process may find that either is gone, and makes it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable

# Cores of the host for each process that finishes a capture.
_CORES_A_TURN = 8
_PAUSE_S = 0.1
_SIGN_OF_LIFE_S = 2.0
# A stopped process keeps its lock.
_PATIENCE_S = 600.0
# Tries to open a folder that other processes remove.
_TRIES = 100


def wait(raw: str) -> Callable[[], None]:
    """Wait while as many processes of this user finish captures on this host as may at once, ten minutes at most.

    The run continues meanwhile and needs the host's cores. There is no wait if no folder for the locks can be made.

    Args:
        raw: Is touched, since a file that does not change for long counts as left behind.

    Returns:
        The function that ends the turn.
    """
    places = max(1, (os.cpu_count() or 1) // _CORES_A_TURN)
    deadline = time.monotonic() + _PATIENCE_S
    touched = 0.0
    while (now := time.monotonic()) < deadline:
        try:
            for place in range(places):
                if (end := _taken(f"autoprof-finish{place}.lock")) is not None:
                    return end
        except OSError:  # no folder, or a file system without locks
            break
        if now - touched > _SIGN_OF_LIFE_S:
            touched = now
            with contextlib.suppress(OSError):
                os.utime(raw)
        time.sleep(_PAUSE_S)
    return _nothing


def _taken(name: str) -> Callable[[], None] | None:
    """Take a lock. Return the function that gives it back, or None if another process has it.

    Raises:
        OSError: There are no locks here.
    """
    folder, made = _folder()
    try:
        lock = _locked(name, folder)
    except FileNotFoundError:  # another process has just removed the folder
        lock = None
    except OSError:
        os.close(folder)
        raise
    if lock is None:
        os.close(folder)
        return None

    def give_back() -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        os.close(lock)
        os.close(folder)
        with contextlib.suppress(OSError):  # others have locks in it
            if made:
                os.rmdir(made)

    return give_back


def _locked(name: str, folder: int) -> int | None:
    """Return the descriptor of a lock that this process has taken, or None if another process has or had it."""
    lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had it may have removed it, and a third one may have made a new file.
        if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(lock)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _folder() -> tuple[int, str]:
    """Open the folder of the locks: the user's own one for such files, else one in the temporary folder.

    Returns:
        Its descriptor, and its path if it is to be removed when it is empty.

    Raises:
        OSError: No folder is private to this user.
    """
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(own):
        with contextlib.suppress(OSError):
            return _private(own), ""
    path = os.path.join(tempfile.gettempdir(), f"autoprof-{os.getuid()}")
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            return _private(path), path
    raise FileNotFoundError(path)


def _private(path: str) -> int:
    """Open a folder of this user.

    Raises:
        OSError: It belongs to another user, others can write in it, or a link is in its place.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(folder)
    if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    os.close(folder)
    raise PermissionError(path)


def _nothing() -> None:
    """Do nothing: there is no lock to give back."""
