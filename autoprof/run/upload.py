"""Copier of a collected run to an object store, another disk or a server. It uses the library fsspec.

A file that has its final name is complete. `run.json` is copied last. Credentials come from the configuration of
fsspec, or from the environment variables that the package of the protocol reads.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoprof.base import files as safe_files
from autoprof.base import redact, seam
from autoprof.base.originals import json, os, time
from autoprof.base.redact import hidden
from autoprof.rundir.file_names import COLLECTING, LINES, PART, RUN
from autoprof.rundir.journal import lines
from autoprof.rundir.records import Missing

# Protocols whose files are visible while they are being written. A file is copied to another name first, and renamed
# when it is complete. All other protocols are object stores, which show only complete objects.
_RENAMED = {"file", "local", "memory", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs"}
_TRIES = 3
# Number of failures in a row after which copying stops, because each failure may take half a minute. If the cause is
# that one folder can't be made, fewer files fail in a row.
_MAX_FAILURES = 10
_PAUSE_S = 0.5


class NoTarget(Exception):
    """The URL can't be used. The message gives the reason."""


def lacks(url: str) -> str:
    """Return a message if a package that the URL needs is not installed; otherwise an empty text.

    The function imports only fsspec.
    """
    import importlib.util

    if importlib.util.find_spec("fsspec") is None:
        return "fsspec is not installed: pip install 'autoprof-rl[remote]'"
    from fsspec.registry import known_implementations, registry

    for protocol in url.partition("://")[0].split("::"):
        known_package = known_implementations.get(protocol)
        if known_package is None and protocol not in registry:
            return f"fsspec does not support {protocol}://"
        module = known_package["class"].partition(".")[0] if known_package else "fsspec"
        if importlib.util.find_spec(module) is None:
            return f"{protocol}:// needs the package {module}, which is not installed"
    return ""


class Sending:
    """The copying of one run to one URL.

    Attributes:
        sent: The number of files that this object has copied.
        bytes: The total size of these files in bytes.
    """

    def __init__(self, run: Path, url: str) -> None:
        """Open the file system of the URL.

        Raises:
            NoTarget: A package is missing, or fsspec can't open the file system.
        """
        if problem := lacks(url):
            raise NoTarget(f"{redact.url(url)}: {problem}")
        from fsspec.core import url_to_fs

        opened, problem = _call_fsspec(url_to_fs, url)
        if problem:
            raise NoTarget(f"{redact.url(url)}: {problem}")
        self._fs, root = opened
        self._fs.invalidate_cache()
        self._run = run
        self._root = f"{str(root).rstrip('/')}/{run.name}"
        protocols = self._fs.protocol if isinstance(self._fs.protocol, (tuple, list)) else (self._fs.protocol,)
        self._renamed = not _RENAMED.isdisjoint(protocols)
        name = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:16]
        self._index = run / COLLECTING / f"sent-{name}{LINES}"
        self.sent = self.bytes = 0

    def send(self, progress: Callable[[int], object]) -> list[Missing]:
        """Copy the files that are missing at the URL or have changed. Return the files that could not be copied.

        `progress` is called with the size of each file that has been copied or was already there.
        """
        safe_files.folder(self._run / COLLECTING)
        sent_before = self._known()
        missing: list[Missing] = []
        files = self.files()
        failure_count = 0
        for index, (path, size, mtime_ns) in enumerate(files):
            if failure_count == _MAX_FAILURES:
                untried_count = len(files) - index
                problem = f"{untried_count} more files, not tried after {failure_count} failures in a row"
                missing.append(Missing("", "", "", problem))
                break
            if path == RUN and missing:
                # Readers assume that a run that has `run.json` is complete.
                missing.append(Missing("", "", path, "it is copied last, after all other files"))
                continue
            if sent_before.get(path) == (size, mtime_ns) and self._exists(path, size):
                progress(size)
                continue
            if problem := self._copy_with_retries(path):
                missing.append(Missing("", "", path, problem))
                failure_count += 1
                continue
            failure_count = 0
            progress(size)
            self.sent += 1
            self.bytes += size
            with contextlib.suppress(OSError):
                safe_files.append(self._index, json.dumps([path, size, mtime_ns]).encode() + b"\n")
        return missing

    def files(self) -> list[tuple[str, int, int]]:
        """Return the path, the size and the last change of each complete file of the run, `run.json` last.

        The last change is in nanoseconds since the epoch.
        """
        complete_files = []
        for parent, folders, names in os.walk(self._run):
            folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(PART)]
            for name in names:
                path = Path(parent, name)
                if name.startswith(".") or name.endswith(PART) or path.is_symlink():
                    continue
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    complete_files.append((path.relative_to(self._run).as_posix(), stat.st_size, stat.st_mtime_ns))
        return sorted(complete_files, key=lambda file: (file[0] == RUN, file[0]))

    def _copy_with_retries(self, path: str) -> str:
        """Copy a file, in at most `_TRIES` attempts. Return the problem of the last attempt, or an empty text."""
        problem = ""
        for tries in range(_TRIES):
            time.sleep(_PAUSE_S * tries)
            if not (problem := _call_fsspec(self._copy_once, path)[1]):
                break
        return problem

    def _copy_once(self, path: str) -> None:
        target, source = f"{self._root}/{path}", self._run / path
        upload = f"{target}{PART}" if self._renamed else target
        if self._renamed:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        status_before = source.stat()
        # No file object of fsspec is used, because after an error it would complete the file with the bytes so far.
        self._fs.put_file(str(source), upload)
        status_after = source.stat()
        if not path.endswith(LINES) and (status_before.st_size, status_before.st_mtime_ns) != (
            status_after.st_size,
            status_after.st_mtime_ns,
        ):
            raise OSError("it changed while it was copied")
        self._fs.invalidate_cache()
        copied = int(self._fs.info(upload)["size"])
        if not status_before.st_size <= copied <= status_after.st_size:
            raise OSError(f"{copied} bytes were copied instead of {status_before.st_size}")
        if self._renamed and _call_fsspec(self._fs.mv, upload, target)[1]:
            # Some packages do not replace an existing file.
            self._fs.rm_file(target)
            self._fs.mv(upload, target)

    def _exists(self, path: str, size: int) -> bool:
        # If the package raises an error, the file counts as missing and is copied again.
        status, problem = _call_fsspec(self._fs.info, f"{self._root}/{path}")
        return not problem and status.get("size") == size

    def _known(self) -> dict[str, tuple[int, int]]:
        sent_before = {}
        with contextlib.suppress(OSError):
            for line in lines(self._index):
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    path, size, mtime_ns = json.loads(line)
                    sent_before[str(path)] = size, mtime_ns
        return sent_before


def _call_fsspec(call: Callable[..., Any], *arguments: str) -> tuple[Any, str]:
    """Call a function of fsspec. Return its result and an empty text, or None and the text of its exception.

    Every exception is caught, because each package of fsspec has its own exceptions.
    """
    result, error = seam.attempt(call, *arguments)
    if error is None:
        return result, ""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return None, hidden(f"{type(error).__name__}: {first_line}", 200)
