"""Python interpreter for a run's helper processes.

If Python is embedded or frozen, `sys.executable` is empty or the user's program, which must not be started again.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from autoprof.base import files, seam
from autoprof.base.originals import io, json, os, subprocess, tempfile

_NAME = re.compile(r"(python|pypy)[\d.]*[a-z]*")
_VERSION = f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}"
_SHOW = "import sys; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])"
_TIMEOUT_S = 60.0


def find() -> str:
    """Return the path of a Python interpreter that has the version of this process.

    Raises:
        OSError: No such Python was found.
    """
    path = _find(sys.executable)
    if not path:
        raise FileNotFoundError(f"no {_VERSION} was found to start: sys.executable is {sys.executable!r}")
    return path


@contextlib.contextmanager
def job_file(job: dict[str, Any]) -> Iterator[BinaryIO]:
    """Yield an unnamed file with a job as JSON, for the stdin of a helper process.

    A pipe is not used: if the program forks meanwhile, the child keeps the pipe open, and the helper process waits for
    the end of the pipe.

    Raises:
        OSError: The file can't be made.
    """
    content = json.dumps(job, default=str).encode()
    files.check_size(len(content))
    with files.low_numbers_taken(), tempfile.TemporaryFile() as empty:
        descriptor = files.high(empty.fileno())
    with io.open(descriptor, "w+b") as file:
        file.write(content)
        file.seek(0)
        yield file


@functools.lru_cache
def _find(executable: str | None) -> str:
    if executable and _runs_here(executable):
        return executable
    return next(filter(_is_python, _others()), "")


def _runs_here(path: str) -> bool:
    """Return True if `path` is the program of this process, and this program is a Python interpreter."""
    with seam.suppress(OSError):
        own = os.path.realpath("/proc/self/exe")
        return os.path.samefile(path, own) and _has_python_name(own) and not getattr(sys, "frozen", False)
    return False


def _others() -> Iterator[str]:
    """Yield paths at which this Python installation may have interpreters.

    The interpreter of a virtual environment comes first, because it has the packages.
    """
    for prefix in dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)):
        yield os.path.join(prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    yield getattr(sys, "_base_executable", None) or ""


def _is_python(path: str) -> bool:
    if not _has_python_name(path) or not os.access(path, os.X_OK):
        return False
    command = [path, "-I", "-S", "-c", _SHOW]
    with seam.suppress(OSError, subprocess.SubprocessError):
        version = subprocess.check_output(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_TIMEOUT_S)
        return bool(version.decode(errors="replace").strip() == _VERSION)
    return False


def _has_python_name(path: str) -> bool:
    return _NAME.fullmatch(os.path.basename(path)) is not None
