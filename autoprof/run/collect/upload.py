"""Copy of a collected run to where fsspec reaches: an object store, another disk, a server.

What is there with its final name is complete, and `run.json` comes last. Credentials are fsspec's own affair: its
configuration, and the environment of the package for the protocol.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from autoprof.base import files as safe_files
from autoprof.base import redact
from autoprof.base.originals import json, os, time
from autoprof.base.redact import hidden
from autoprof.run.collect.fetch import Patience
from autoprof.rundir.file_names import COLLECTING, LINES, PART, RUN
from autoprof.rundir.jsonl import lines
from autoprof.rundir.records import Missing

# Where a file can be seen while it is being written; an object of a store is there when it is complete.
_RENAMED = {"file", "local", "memory", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs"}
_TRIES = 3
# So many files that fail one after the other: the next ones would, too, and each takes its package half a minute. More
# than what fails where something else is in the place of a folder.
_FAILING = 10
_PAUSE_S = 0.5


class NoTarget(Exception):
    """Nothing can be copied there. The message says why."""


def lacks(url: str) -> str:
    """Return what has to be installed for this URL, or an empty text. Nothing but fsspec is imported for it."""
    import importlib.util

    if importlib.util.find_spec("fsspec") is None:
        return "fsspec is not installed: pip install 'autoprof-rl[remote]'"
    from fsspec.registry import known_implementations, registry

    for protocol in url.partition("://")[0].split("::"):
        known = known_implementations.get(protocol)
        if known is None and protocol not in registry:
            return f"fsspec knows no {protocol}://"
        module = known["class"].partition(".")[0] if known else "fsspec"
        if importlib.util.find_spec(module) is None:
            return f"{protocol}:// takes the package {module}, which is not installed"
    return ""


class Sending:
    """One copy of one run.

    Attributes:
        sent: How many files went up now, and `bytes`, how much that was.
    """

    def __init__(self, run: Path, url: str, patience: Patience) -> None:
        """Find the place.

        Raises:
            NoTarget: fsspec can't reach it.
        """
        if why := lacks(url):
            raise NoTarget(f"{redact.url(url)}: {why}")
        from fsspec.core import url_to_fs

        try:
            self._fs, root = url_to_fs(url)
        except Exception as error:  # any package's
            raise NoTarget(f"{redact.url(url)}: {_said(error)}") from None
        self._fs.invalidate_cache()
        self._run = run
        self._root = f"{str(root).rstrip('/')}/{run.name}"
        self._patience = patience
        protocols = self._fs.protocol if isinstance(self._fs.protocol, (tuple, list)) else (self._fs.protocol,)
        self._renamed = not _RENAMED.isdisjoint(protocols)
        name = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:16]
        self._index = run / COLLECTING / f"sent-{name}{LINES}"
        self.sent = self.bytes = 0

    def send(self, progress: Callable[[int], object]) -> list[Missing]:
        """Copy what is not there yet; returns what could not be copied."""
        safe_files.folder(self._run / COLLECTING)
        known = self._known()
        missing: list[Missing] = []
        files = self.files()
        failing = 0
        for place, (path, size, mtime_ns) in enumerate(files):
            if failing == _FAILING:
                rest = len(files) - place
                missing.append(Missing("", "", "", f"{rest} more files, not tried after {failing} failures in a row"))
                break
            if self._patience.out:
                missing.append(Missing("", "", path, "there was no time left to copy it"))
                continue
            if path == RUN and missing:
                # Who sees it may take the run for whole.
                missing.append(Missing("", "", path, "it comes last, when all the rest is there"))
                continue
            if known.get(path) == (size, mtime_ns) and self._there(path, size):
                progress(size)
                continue
            if problem := self._try(path, size, progress):
                missing.append(Missing("", "", path, problem))
                failing += 1
                continue
            failing = 0
            self.sent += 1
            self.bytes += size
            with contextlib.suppress(OSError):
                safe_files.append(self._index, json.dumps([path, size, mtime_ns]).encode() + b"\n")
        return missing

    def files(self) -> list[tuple[str, int, int]]:
        """Return what is copied: the complete files of the run, `run.json` last."""
        found = []
        for place, folders, names in os.walk(self._run):
            folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(PART)]
            for name in names:
                path = Path(place, name)
                if name.startswith(".") or name.endswith(PART) or path.is_symlink():
                    continue
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    found.append((path.relative_to(self._run).as_posix(), stat.st_size, stat.st_mtime_ns))
        return sorted(found, key=lambda each: (each[0] == RUN, each[0]))

    def _try(self, path: str, size: int, progress: Callable[[int], object]) -> str:
        for tries in range(1, _TRIES + 1):
            try:
                return self._put(path, size, progress)
            except Exception as error:  # any package's
                if tries == _TRIES or self._patience.out:
                    return _said(error)
                time.sleep(_PAUSE_S * tries)
        return ""

    def _put(self, path: str, size: int, progress: Callable[[int], object]) -> str:
        target, source = f"{self._root}/{path}", self._run / path
        made = f"{target}{PART}" if self._renamed else target
        if self._renamed:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        before = source.stat()
        # Not by a file object: those of fsspec complete what they have when an error ends them.
        self._fs.put_file(str(source), made)
        after = source.stat()
        if not path.endswith(LINES) and (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OSError("it changed while it was copied")
        self._fs.invalidate_cache()
        there = int(self._fs.info(made)["size"])
        if not before.st_size <= there <= after.st_size:
            raise OSError(f"{there} bytes of {before.st_size} are there")
        if self._renamed:
            self._rename(made, target)
        progress(size)
        return ""

    def _rename(self, made: str, target: str) -> None:
        try:
            self._fs.mv(made, target)
        except Exception:  # any package's; some don't replace what is there
            self._fs.rm_file(target)
            self._fs.mv(made, target)

    def _there(self, path: str, size: int) -> bool:
        try:
            return int(self._fs.info(f"{self._root}/{path}").get("size", -1)) == size
        except Exception:  # any package's; it is copied anew
            return False

    def _known(self) -> dict[str, tuple[int, int]]:
        found = {}
        with contextlib.suppress(OSError):
            for line in lines(self._index):
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    path, size, mtime_ns = json.loads(line or b"")
                    found[str(path)] = size, mtime_ns
        return found


def _said(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return hidden(f"{type(error).__name__}: {first}", 200)
