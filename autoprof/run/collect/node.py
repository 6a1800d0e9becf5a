"""Functions that are shipped to a node by value, since it may have no autoprof, or another one.

Each is made inside of another, so that it refers to nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoprof.rundir.file_names import COLLECTED, PART


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions, by name."""
    collected, part = COLLECTED, PART

    def opened(directory: str, path: str) -> int:
        """Return a file below `directory`, open for reading, with no link on the way to it."""
        import os

        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        *folders, name = path.split("/")
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                below = os.open(folder, flags | os.O_DIRECTORY, dir_fd=place)
                os.close(place)
                place = below
            return os.open(name, flags, dir_fd=place)
        finally:
            os.close(place)

    def look(directory: str, mark: str, after: str, most: int) -> dict[str, Any]:
        """Return what lies below `directory`: at most `most` files, those that come after the path `after`.

        `mark` is a file that whoever asks has just made in its own part: who sees it has the same disk.
        """
        import importlib.util
        import os
        import socket
        import stat
        import time

        spec = importlib.util.find_spec("autoprof")
        said: dict[str, Any] = {
            "host": socket.gethostname(),
            # A folder without a package in it can be imported, too.
            "autoprof": spec is not None and spec.origin is not None,
            "state": "there",
            "reason": "",
            "same": bool(mark) and os.path.exists(os.path.join(directory, mark)),
            "disk": "",
            "files": [],
            "unfinished": [],
            "left_out": [],
            "more": False,
        }
        try:
            found = os.stat(directory)
            os.listdir(directory)
            # As `nodes.disk_of`, which a node without autoprof does not have.
            try:
                with open("/proc/sys/kernel/random/boot_id") as file:
                    machine = file.read().strip()
            except OSError:
                machine = said["host"]
            said["disk"] = f"{machine}:{found.st_dev}:{found.st_ino}"
        except FileNotFoundError:
            said["state"] = "absent"
        except OSError as error:
            said["state"], said["reason"] = "unreadable", str(error)
        if said["state"] != "there" or said["same"]:
            return said
        files: list[tuple[str, int, int]] = []

        def refused(error: OSError) -> None:
            said["left_out"].append((os.path.relpath(error.filename, directory), str(error)))

        for place, folders, names in os.walk(directory, onerror=refused):
            here = os.path.relpath(place, directory)
            top = here == "."
            for name in [*folders, *names]:
                path = name if top else f"{here}/{name}"
                # What is hidden is of the moment, and requests are for this node's own trainer.
                if name.startswith(".") or (top and name in ("control", collected)):
                    continue
                try:
                    found = os.lstat(os.path.join(place, name))
                except OSError:  # it has another name now
                    continue
                if name.endswith(part):
                    said["unfinished"].append((path, time.time() - found.st_mtime))
                elif stat.S_ISREG(found.st_mode):
                    files.append((path, found.st_size, found.st_mtime_ns))
                elif not stat.S_ISDIR(found.st_mode):
                    said["left_out"].append((path, "it is a link, or no file"))
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".") and not name.endswith(part) and not (top and name == "control")
            ]
        files = sorted(each for each in files if each[0] > after)
        said["files"], said["more"] = files[:most], len(files) > most
        return said

    def read(directory: str, wanted: list[tuple[str, int, int, int, int]]) -> list[tuple[bytes, str, str]]:
        """Return pieces of files, for each its sha256 and what is wrong with it.

        `wanted` has for each the path, where the piece begins, its length, and how large and how old (`st_mtime_ns`,
        or 0 for a file that may have grown) the file was.
        """
        import hashlib
        import os
        import stat

        found = []
        for path, offset, length, size, mtime_ns in wanted:
            try:
                with open(opened(directory, path), "rb") as file:
                    before = os.fstat(file.fileno())
                    file.seek(offset)
                    data = file.read(length) if stat.S_ISREG(before.st_mode) else b""
                    after = os.fstat(file.fileno())
                whole = len(data) == length and min(before.st_size, after.st_size) >= size
                same = not mtime_ns or all(
                    (each.st_size, each.st_mtime_ns) == (size, mtime_ns) for each in (before, after)
                )
                found.append((data, hashlib.sha256(data).hexdigest(), "") if whole and same else (b"", "", "changed"))
            except OSError as error:
                found.append((b"", "", error.strerror or str(error)))
        return found

    def digest(directory: str, wanted: list[tuple[str, int]]) -> list[str]:
        """Return sha256 of the first bytes of files, by paths and numbers; an empty text where there are fewer."""
        import hashlib

        found = []
        for path, size in wanted:
            sums, left = hashlib.sha256(), size
            try:
                with open(opened(directory, path), "rb") as file:
                    while left and (piece := file.read(min(left, 1 << 20))):
                        sums.update(piece)
                        left -= len(piece)
            except OSError:
                left = -1
            found.append(sums.hexdigest() if left == 0 else "")
        return found

    return {"look": look, "read": read, "digest": digest}
