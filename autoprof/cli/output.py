"""Standard output that may be full, closed, or read by nobody any more."""

from __future__ import annotations

import io
import os
import sys

# typing takes longer to import than the rest of a help.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


class Lost(BaseException):
    """Standard output takes no more. No command catches it, as commands do errors of the files that they read."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class Output(io.TextIOWrapper):
    """Standard output that raises `Lost` where it can't be written."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise Lost(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise Lost(error) from None


def replace() -> TextIO:
    """Put an `Output` in the place of standard output, and return what was there.

    First whatever is closed is opened: the next file would get its number, and all that is printed. Commands that
    `autoprof run` becomes find it closed, since Python's files are not inherited.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            place = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(place, "r" if name == "stdin" else "w", encoding="utf-8"))
    real = sys.stdout
    if type(real) is io.TextIOWrapper:
        sys.stdout = Output(
            real.buffer,
            encoding=real.encoding,
            errors=real.errors,
            line_buffering=real.line_buffering,
            write_through=real.write_through,
        )
    return real


def restore(real: TextIO) -> None:
    """Write what is left, and put standard output back.

    Raises:
        Lost: It can't be written.
    """
    ours, sys.stdout = sys.stdout, real
    if isinstance(ours, Output):
        try:
            ours.flush()
        finally:
            ours.detach()


def lost(error: OSError) -> int:
    """Say why standard output is lost, if whoever reads it has not gone, and return the exit status."""
    # The interpreter tries again at its end, and would show a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    from autoprof.cli.console import complain

    return complain(f"standard output: {error.strerror}", 1)
