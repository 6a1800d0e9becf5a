"""Turns of the processes that finish captures: few of one user's work on a host at a time. Part of `job.py`, which
loads it: stdlib only.

The locks lie in a folder of the user's, where nobody else can make or hold one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time

# One process at a time for so many cores.
_CORES_A_TURN = 8
_PAUSE_S = 0.1
_SIGN_OF_LIFE_S = 2.0
# A process that is stopped holds its lock on.
_PATIENCE_S = 600.0


def wait(raw: str) -> None:
    """Wait while as many processes of this user's finish captures on this host as may at once, ten minutes at most.

    The run goes on meanwhile and needs the host's cores. `raw` is touched, since what is not for long is taken for left
    behind. Nothing is waited for where there is no folder for the locks.
    """
    places = max(1, (os.cpu_count() or 1) // _CORES_A_TURN)
    deadline = time.monotonic() + _PATIENCE_S
    touched = 0.0
    folder = _folder()
    try:
        while folder is not None and (now := time.monotonic()) < deadline:
            if any(_taken(folder, f"autoprof-finish{place}.lock") for place in range(places)):
                return
            if now - touched > _SIGN_OF_LIFE_S:
                touched = now
                with contextlib.suppress(OSError):
                    os.utime(raw)
            time.sleep(_PAUSE_S)
    finally:
        if folder is not None:
            os.close(folder)


def _taken(folder: int, name: str) -> bool:
    """Take a lock until this process ends; return whether there is nothing to wait for."""
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    except OSError:  # a file system without locks
        os.close(lock)
    return True


def _folder() -> int | None:
    """Open the folder of the locks: the user's own one for such files, else one in the temporary folder."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(own) and (folder := _private(own)) is not None:
        return folder
    with contextlib.suppress(OSError):
        made = os.path.join(tempfile.gettempdir(), f"autoprof-{os.getuid()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(made, 0o700)
        return _private(made)
    return None


def _private(path: str) -> int | None:
    """Open a folder if it is this user's, nobody else can write in it, and no link is in its place."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    found = os.fstat(folder)
    if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    os.close(folder)
    return None
