"""File that gets the stacks of this process when it crashes: `crashes/<host>-<pid>.txt`, written by `faulthandler`.

Python's own tool writes from inside of the signal, restores what was there before it and lets the signal come again:
the process ends as it would without. It stays off where the program has enabled it or handles one of the signals, and
goes when the program enables or disables it later: `faulthandler` alone holds the file then, and lets go of it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C, as in base/interrupts.py
import faulthandler
import stat
import sys
from typing import Any
from weakref import ref

from autoprof.base import files, interrupts, log, process
from autoprof.base.originals import io, os
from autoprof.rundir.layout import CRASHES, RunDir

# The signals that `faulthandler` handles.
_SIGNALS = (_signal.SIGSEGV, _signal.SIGFPE, _signal.SIGABRT, _signal.SIGBUS, _signal.SIGILL)
# Bytes that a dump may have: SIGXFSZ must not end the process in place of the signal of the crash.
_LARGEST = 1 << 20
# Python 3.14 would also walk the stack of C, which may hang where memory is damaged.
_ARGUMENTS: dict[str, Any] = {"all_threads": True} | ({"c_stack": False} if sys.version_info >= (3, 14) else {})


class _CrashFile:
    """The open file. Nobody but `faulthandler` holds it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        self._descriptor = files.create(path, held=True)
        self._own = _which(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor, for `faulthandler`."""
        return self._descriptor

    def flush(self) -> None:
        """Do nothing: `faulthandler` calls it."""

    def is_own(self) -> bool:
        """Return whether the descriptor is this file's: a program may have closed all, and opened others."""
        return _which(self._descriptor) == self._own

    def __del__(self) -> None:
        try:
            if self._descriptor >= 0 and self.is_own():
                os.close(self._descriptor)
        except Exception as error:  # at the end of the interpreter
            interrupts.pass_on(error)


def _which(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError as error:
        interrupts.pass_on(error)
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


class _State(process.State):
    """The crash file of this process, as long as `faulthandler` holds it."""

    def begin(self) -> None:
        self.leave()
        self.file: ref[_CrashFile] | None = None
        self.path = ""

    def in_child(self) -> None:
        # Not the parent's file. The parent's is not removed, either.
        self.path = ""
        self.leave()

    def leave(self) -> None:
        """Disable what is ours, and remove the file if nothing is in it."""
        file = getattr(self, "file", None)
        if file is None:
            return
        path, self.file, self.path = self.path, None, ""
        if file() is not None:
            faulthandler.disable()
        if path:
            with interrupts.suppress(OSError):
                if os.lstat(path).st_size == 0:
                    os.unlink(path)
                    os.rmdir(os.path.dirname(path))


_state = _State()


def begin(run: RunDir) -> None:
    """Have a crash of this process leave its stacks, unless the program sees to that itself. Raises nothing."""
    if _state.file is not None:
        return
    try:
        if faulthandler.is_enabled() or _handled():
            return
        files.check_size(_LARGEST)
        file = _made(run)
        # None of Python's code comes between the two that could fork.
        _state.file, _state.path = ref(file), file.path
        faulthandler.enable(file, **_ARGUMENTS)
    except Exception as error:  # no descriptor is free, the disk is full, or files may not be large
        interrupts.pass_on(error)
        log.debug(f"a crash of this process will leave no stack: {type(error).__name__}: {error}")


def _made(run: RunDir) -> _CrashFile:
    """Make the file. Another process that ends may remove the folder while it is empty."""
    path = str(run.process_file(CRASHES, ".txt"))
    run.make(run.path / CRASHES)
    try:
        return _CrashFile(path)
    except FileNotFoundError as error:
        interrupts.pass_on(error)
        run.make(run.path / CRASHES)
        return _CrashFile(path)


def check() -> None:
    """Disable it if another file has the descriptor now, or if the program has set a limit of file sizes."""
    file = _state.file() if _state.file is not None else None
    if file is not None and not (file.is_own() and _may_be_written()):
        del file
        _state.leave()


def _may_be_written() -> bool:
    limit = files.size_limit()
    return limit is None or limit >= _LARGEST


def end() -> None:
    """Leave no empty file, at the end of the process."""
    _state.leave()


def _handled() -> bool:
    """Return whether the program, or a library of C, handles or ignores one of the signals."""
    if any(_signal.getsignal(number) != _signal.SIG_DFL for number in _SIGNALS):
        return True
    bits = sum(1 << (number - 1) for number in _SIGNALS)
    with io.open("/proc/self/status", "rb", opener=files.descriptor) as file:
        for line in file:
            if line.startswith((b"SigCgt:", b"SigIgn:")) and int(line.split()[1], 16) & bits:
                return True
    return False
