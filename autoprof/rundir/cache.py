"""Cache of a large run: what commands have read from files that did not change since.

`.cache.msgpack` in the run's directory has named parts. Each part has the inodes, sizes and times of the files that it
was made from, and is ignored if one has changed. A damaged cache, and a cache of another release or another user, is
ignored too. You can remove it.
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

# Size of all journals from which a run gets a cache. Smaller ones are read within a second.
WORTH_BYTES = 64 << 20
_MAX_BYTES = 1 << 30
_FORMAT = 1

# Inode, size and time of change of a file, by which its part of the cache is recognized as current.
Stamp = tuple[int, int, int]
T = TypeVar("T")


class _CacheFile(Struct):
    """Content of the cache."""

    release: str
    parts: dict[str, Raw]
    format: int = _FORMAT


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """Return the state of a file or folder; None if it does not exist."""
    status = files.status(path)
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def stamps_of_run(run: Path) -> dict[str, Stamp]:
    """Return the state of each file of a run, without reports. The folder of a step stands for its files."""
    stamps: dict[str, Stamp] = {}
    for parent, folders, names in files.walk(run):
        steps = [name for name in folders if name.startswith(STEP)]
        folders[:] = [name for name in folders if name not in steps]
        own = {CACHE, *(name for name in names if name.startswith("report."))} if parent == str(run) else ()
        for name in (*steps, *(name for name in names if name not in own)):
            if (current := stamp(f"{parent}/{name}")) is not None:
                stamps[f"{parent}/{name}"] = current
    return stamps


def is_worth(stamps: dict[str, Stamp]) -> bool:
    """Return True if journals with these stamps are so large that a cache saves time."""
    return sum(size for _, size, _ in stamps.values()) > WORTH_BYTES


def get(run: Path, part: str, kind: type[T], hook: Callable[[type, Any], Any] | None = None) -> T | None:
    """Return a part of a run's cache; None if it does not exist. `hook` is msgspec's `dec_hook`."""
    raw = _parts(run).get(part)
    with seam.suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None if raw is None else msgspec.msgpack.decode(raw, type=kind, dec_hook=hook)
    return None


def put(run: Path, part: str, content: Any, hook: Callable[[Any], Any] | None = None) -> None:
    """Write a part of a run's cache. Errors are ignored: it only saves time. `hook` is msgspec's `enc_hook`."""
    with seam.suppress(OSError, msgspec.MsgspecError, ValueError, OverflowError):
        encoded = Raw(msgspec.msgpack.encode(content, enc_hook=hook))
        files.open_as(run)
        whole = _CacheFile(__version__, _parts(run) | {part: encoded})
        files.write(run / CACHE, msgspec.msgpack.encode(whole))


def _parts(run: Path) -> dict[str, Raw]:
    with seam.suppress(OSError, msgspec.MsgspecError, ValueError, RecursionError):
        content = files.read(run / CACHE, _MAX_BYTES, (os.getuid(), os.stat(run).st_uid))
        whole = msgspec.msgpack.decode(content, type=_CacheFile)
        if (whole.release, whole.format) == (__version__, _FORMAT):
            return whole.parts
    return {}
