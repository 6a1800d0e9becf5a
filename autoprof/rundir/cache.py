"""Cache of a large run: it keeps data that commands have read from files, so that the next command is faster.

`.cache.msgpack` in the run directory has named parts. Each part has the inodes, sizes and times of change of the files
whose data it keeps. If one of these files has changed, the part is ignored. The whole cache is ignored if it is
damaged, or if another release or another user wrote it. Users can remove the file at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from autoprof import __version__
from autoprof.base import files, seam
from autoprof.base.originals import os
from autoprof.rundir.file_names import CACHE, STEP

# Total size of a run's journals, in bytes, from which the run gets a cache. Smaller journals are read within a second.
WORTH_BYTES = 64 << 20
_MAX_BYTES = 1 << 30
_FORMAT = 1

# Inode, size and time of change (in nanoseconds) of a file. If they are equal, the file has not changed.
Stamp = tuple[int, int, int]
T = TypeVar("T")


class _CacheFile(Struct):
    """Content of `.cache.msgpack`: the release of autoprof that wrote it, and the encoded parts by name."""

    release: str
    parts: dict[str, Raw]
    format: int = _FORMAT


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """Return the stamp of a file or folder; None if it does not exist."""
    status = files.status(path)
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def stamps_of_run(run: Path) -> dict[str, Stamp]:
    """Return a dict from path to stamp, for each file of a run except the cache and reports.

    For the files of a step, the dict has only the folder of the step.
    """
    stamps: dict[str, Stamp] = {}
    for parent, folders, names in files.walk(run):
        steps = [name for name in folders if name.startswith(STEP)]
        folders[:] = [name for name in folders if name not in steps]
        omitted_names = {CACHE, *(name for name in names if name.startswith("report."))} if parent == str(run) else ()
        for name in (*steps, *(name for name in names if name not in omitted_names)):
            if (current := stamp(f"{parent}/{name}")) is not None:
                stamps[f"{parent}/{name}"] = current
    return stamps


def is_worth(stamps: dict[str, Stamp]) -> bool:
    """Return True if journals with these stamps are so large that a cache saves time."""
    return sum(size for _, size, _ in stamps.values()) > WORTH_BYTES


def get(run: Path, part: str, kind: type[T], hook: Callable[[type, Any], Any] | None = None) -> T | None:
    """Return a part of the cache of a run, decoded as `kind`. Return None if the cache does not have that part.

    `hook` is msgspec's `dec_hook`.
    """
    raw = _parts(run).get(part)
    with seam.suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None if raw is None else msgspec.msgpack.decode(raw, type=kind, dec_hook=hook)
    return None


def put(run: Path, part: str, content: Any, hook: Callable[[Any], Any] | None = None) -> None:
    """Write a part of the cache of a run. Errors are ignored, because the cache only saves time.

    `hook` is msgspec's `enc_hook`.
    """
    with seam.suppress(OSError, msgspec.MsgspecError, ValueError, OverflowError):
        encoded = Raw(msgspec.msgpack.encode(content, enc_hook=hook))
        files.open_as(run)
        cache_file = _CacheFile(__version__, _parts(run) | {part: encoded})
        files.write(run / CACHE, msgspec.msgpack.encode(cache_file))


def _parts(run: Path) -> dict[str, Raw]:
    with seam.suppress(OSError, msgspec.MsgspecError, ValueError, RecursionError):
        content = files.read(run / CACHE, _MAX_BYTES, (os.getuid(), os.stat(run).st_uid))
        cache_file = msgspec.msgpack.decode(content, type=_CacheFile)
        if (cache_file.release, cache_file.format) == (__version__, _FORMAT):
            return cache_file.parts
    return {}
