"""Functions that Ray runs on other nodes: the clock of a node, and the files of its part of a run.

A node may have no autoprof or another release of it, so `cluster.shipped` sends the source text of this module.
Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import stat
import time
from typing import Any

# Names of the run directory, as in `rundir/file_names.py` and `rundir/layout.py`.
CONTROL, COLLECTED, PART = "control", "collected.json", ".part"


def clock() -> tuple[str, int]:
    """Return the host name and the time in nanoseconds since the epoch."""
    return socket.gethostname(), time.time_ns()


def look(directory: str, mark: str) -> dict[str, Any]:
    """Return the files below `directory`, sorted by path.

    `mark` is a file that the caller has just made in its own part. A node that sees it has the same disk.
    """
    spec = importlib.util.find_spec("autoprof")
    answer: dict[str, Any] = {
        "host": socket.gethostname(),
        # A namespace package, which is a folder without a package in it, has a spec without an origin.
        "autoprof": spec is not None and spec.origin is not None,
        "state": "there",
        "reason": "",
        "same": bool(mark) and os.path.exists(os.path.join(directory, mark)),
        "disk": "",
        "files": [],
        "unfinished": [],
        "left_out": [],
    }
    try:
        os.listdir(directory)
        answer["disk"] = _disk_of(directory)
    except FileNotFoundError:
        answer["state"] = "absent"
    except OSError as error:
        answer["state"], answer["reason"] = "unreadable", str(error)
    if answer["state"] == "there" and not answer["same"]:
        _add_files(directory, answer)
        answer["files"].sort()
    return answer


def _disk_of(directory: str) -> str:
    """Return the identity of a folder, as `cluster.disk_of` does."""
    status = os.stat(directory)
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}:{status.st_dev}:{status.st_ino}"


def _add_files(directory: str, answer: dict[str, Any]) -> None:
    """Add complete and incomplete files, and the paths that are left out, to an answer of `look`."""

    def leave_out(error: OSError) -> None:
        answer["left_out"].append((os.path.relpath(error.filename, directory), str(error)))

    for parent, folders, names in os.walk(directory, onerror=leave_out):
        folder_path = os.path.relpath(parent, directory)
        for name in [*folders, *names]:
            path = name if folder_path == "." else f"{folder_path}/{name}"
            # Hidden files are temporary. `control` holds requests for the trainer of this node only.
            if name.startswith(".") or path in (CONTROL, COLLECTED):
                continue
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:  # the file was renamed meanwhile
                continue
            if name.endswith(PART):
                answer["unfinished"].append((path, time.time() - status.st_mtime))
            elif stat.S_ISREG(status.st_mode):
                answer["files"].append((path, status.st_size, status.st_mtime_ns))
            elif not stat.S_ISDIR(status.st_mode):
                answer["left_out"].append((path, "it is a link or not a regular file"))
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not name.endswith(PART) and (folder_path, name) != (".", CONTROL)
        ]


# A piece of a file: its path, its offset and length, and the size and last change that the file had before. The last
# change is `st_mtime_ns`, or 0 for a file that may grow.
Request = tuple[str, int, int, int, int]


def read(directory: str, pieces: list[Request]) -> list[tuple[bytes, str, str]]:
    """Return pieces of files: for each its bytes, its sha256, and the problem or an empty text."""
    answers = []
    for path, offset, length, size, mtime_ns in pieces:
        try:
            with open(_opened(directory, path), "rb") as file:
                before = os.fstat(file.fileno())
                file.seek(offset)
                data = file.read(length) if stat.S_ISREG(before.st_mode) else b""
                after = os.fstat(file.fileno())
            whole = len(data) == length and min(before.st_size, after.st_size) >= size
            same = not mtime_ns or all(
                (status.st_size, status.st_mtime_ns) == (size, mtime_ns) for status in (before, after)
            )
            answers.append((data, hashlib.sha256(data).hexdigest(), "") if whole and same else (b"", "", "changed"))
        except OSError as error:
            answers.append((b"", "", error.strerror or str(error)))
    return answers


def digest(directory: str, pieces: list[Request]) -> list[str]:
    """Return the sha256 of whole files, or an empty text for a file that can't be read."""
    digests = []
    for path, *_ in pieces:
        sums = hashlib.sha256()
        try:
            with open(_opened(directory, path), "rb") as file:
                while block := file.read(1 << 20):
                    sums.update(block)
            digests.append(sums.hexdigest())
        except OSError:
            digests.append("")
    return digests


def _opened(directory: str, path: str) -> int:
    """Open a file below `directory` for reading, and return its descriptor. Do not follow symbolic links."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    *folders, name = path.split("/")
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            child = os.open(folder, flags | os.O_DIRECTORY, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(name, flags, dir_fd=parent)
    finally:
        os.close(parent)
