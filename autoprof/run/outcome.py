"""Exit of the process that started a run: the exception that ended it, and its exit status."""

from __future__ import annotations

import sys
from pathlib import Path

from autoprof.base import exceptions, files, interrupts, log
from autoprof.base.originals import os
from autoprof.run import raised
from autoprof.rundir.records import Raised


def exception() -> BaseException | None:
    """Return the exception that nobody caught, or None.

    The interpreter keeps it, except for `SystemExit`. A debugger or a notebook keeps others there, too.
    """
    ended_by = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") or not issubclass(type(ended_by), BaseException) else ended_by


def error() -> str:
    """Return the type of the exception that nobody caught, or an empty text."""
    ended_by = exception()
    if ended_by is None:
        return ""
    return "SIGINT" if issubclass(type(ended_by), KeyboardInterrupt) else exceptions.type_name(ended_by)


def told() -> Raised | None:
    """Return what is told of the exception that nobody caught; nothing of Ctrl-C."""
    ended_by = exception()
    return None if ended_by is None or issubclass(type(ended_by), KeyboardInterrupt) else raised.of(ended_by)


def keep_status(path: Path) -> None:
    """Have the process leave its exit status in a file of one byte, when it exits. Raises nothing.

    No Python runs any more when the status is known, after `sys.exit(1)` as after an exception. But glibc's `exit`
    calls functions with the status and an argument, and `fputc` is one: it writes its first argument, as a byte, to its
    second. A C library without `on_exit`, a signal and `os._exit` leave no status.
    """
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        register, write = libc.on_exit, ctypes.cast(libc.fputc, ctypes.c_void_p)
        libc.fdopen.restype = ctypes.c_void_p
        files.check_size(1)
        descriptor = files.create(str(path), held=True)
        stream = ctypes.c_void_p(libc.fdopen(descriptor, b"wb"))
        if not stream:
            os.close(descriptor)
            return
        # Without a buffer, since what exits later may crash.
        libc.setbuf(stream, None)
        register(write, stream)
    except Exception as error:  # ctypes may be missing, or restricted
        interrupts.pass_on(error)
        log.debug(f"the exit status can't be kept: {type(error).__name__}: {error}")
