"""Functions that Ray runs on other nodes: they read the clock of the node, and the files of a run on the node.

A node may have no autoprof, or another release of it. So `cluster.shipped` sends the source text of this
module, and the module uses only the standard library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import stat
import time
from typing import Any

# Names of files and folders in a run directory, as in `rundir/file_names.py` and `rundir/layout.py`.
CONTROL, COLLECTED, PART = "control", "collected.json", ".part"


def clock() -> tuple[str, int]:
    """Return the host name of the node, and the current time in nanoseconds since the epoch."""
    return socket.gethostname(), time.time_ns()


def look(directory: str, mark: str) -> dict[str, Any]:
    """Return a description of the run directory on this node, with all files in it. `NodePart` has the same fields.

    Args:
        directory: The path of the run directory.
        mark: The path of a file that the caller has just made in its own run directory. If this node finds the file in
            `directory`, it has the same disk as the caller.
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
    """Return the text that identifies a folder and its machine, as `cluster.disk_of` does."""
    status = os.stat(directory)
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}:{status.st_dev}:{status.st_ino}"


def _add_files(directory: str, answer: dict[str, Any]) -> None:
    """Add the complete files, the incomplete files, and the paths that are left out to an answer of `look`."""

    def leave_out(error: OSError) -> None:
        answer["left_out"].append((os.path.relpath(error.filename, directory), str(error)))

    for parent, folders, names in os.walk(directory, onerror=leave_out):
        folder_path = os.path.relpath(parent, directory)
        for name in [*folders, *names]:
            path = name if folder_path == "." else f"{folder_path}/{name}"
            # Hidden files are temporary. `control` has requests that are only for the trainer on this node.
            if name.startswith(".") or path in (CONTROL, COLLECTED):
                continue
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:  # the file was just renamed
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


# A piece of a file: the path of the file, the offset and the length of the piece, then the size and the last change of
# the file when `look` was called. The last change is `st_mtime_ns`, or 0 for a file that may grow.
Request = tuple[str, int, int, int, int]


def read(directory: str, pieces: list[Request]) -> list[tuple[bytes, str, str]]:
    """Return for each piece its bytes, its sha256, and the problem or an empty text.

    The problem is `changed` if the file has changed since `look` was called. If there is a problem, the bytes and the
    sha256 are empty.
    """
    answers = []
    for path, offset, length, size, mtime_ns in pieces:
        try:
            with open(_open_below(directory, path), "rb") as file:
                status_before = os.fstat(file.fileno())
                file.seek(offset)
                data = file.read(length) if stat.S_ISREG(status_before.st_mode) else b""
                status_after = os.fstat(file.fileno())
            is_whole = len(data) == length and min(status_before.st_size, status_after.st_size) >= size
            is_unchanged = not mtime_ns or all(
                (status.st_size, status.st_mtime_ns) == (size, mtime_ns) for status in (status_before, status_after)
            )
            answers.append(
                (data, hashlib.sha256(data).hexdigest(), "") if is_whole and is_unchanged else (b"", "", "changed")
            )
        except OSError as error:
            answers.append((b"", "", error.strerror or str(error)))
    return answers


def digest(directory: str, pieces: list[Request]) -> list[str]:
    """Return for each piece the sha256 of its whole file, or an empty text if the file can't be read."""
    digests = []
    for path, *_ in pieces:
        sums = hashlib.sha256()
        try:
            with open(_open_below(directory, path), "rb") as file:
                while block := file.read(1 << 20):
                    sums.update(block)
            digests.append(sums.hexdigest())
        except OSError:
            digests.append("")
    return digests


def _open_below(directory: str, path: str) -> int:
    """Open a file in `directory` or in a folder below it for reading. Return the descriptor of the file.

    Symbolic links are not followed.
    """
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
