"""Archive of a step's traces as they are, with a manifest by which Perfetto lays them over each other.

Perfetto from 58.2 on reads it (perfetto.dev/docs/reference/perfetto-manifest): each trace is a machine of its own, so
that equal process ids stay apart, and its times are moved onto the common base. Older ones open the archive, too, but
throw processes of equal ids together.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.traces.merge import Aligned, Input, align, part_of
from autoprof.traces.reader import TraceError
from autoprof.traces.timeline import Timeline, draw

MANIFEST = "perfetto_manifest.json"
TIMELINE = "timeline.json"
# Perfetto reads no extended headers of POSIX, and GNU's long names.
_FORMAT = tarfile.GNU_FORMAT


def pack(
    inputs: Sequence[Input], output: Path, timeline: Timeline | None = None, step: int | None = None
) -> tuple[int, dict[str, str]]:
    """Make an archive of traces; `output` gets its name when it is complete.

    The traces are not read but for what their times count from, so one that is cut off goes in as it is.

    Args:
        inputs: The traces.
        output: The file to make.
        timeline: Spans that go in as a trace of their own.
        step: The step, for the manifest.

    Returns:
        The file's size in bytes, and the traces that are left out, each with why.

    Raises:
        TraceError: There is neither a trace that can be read nor a timeline. Nothing is left.
        OSError: The file can't be written.
    """
    aligned = align(inputs, timeline)
    if not aligned.sources and timeline is None:
        raise TraceError(next(iter(aligned.left_out.values()), "there is nothing to put in"))
    with part_of(output) as part:
        with part.open("wb") as file, tarfile.open(fileobj=file, mode="w", format=_FORMAT, dereference=True) as archive:
            # The manifest has to come first.
            _add(archive, MANIFEST, msgspec.json.encode(_manifest(aligned, timeline, step)))
            if timeline is not None:
                _add(archive, TIMELINE, _drawn(timeline, aligned.base_ns))
            for source in aligned.sources:
                archive.add(source.path, source.name, recursive=False, filter=_plain)
        size = part.stat().st_size
        os.replace(part, output)
    return size, aligned.left_out


def _manifest(aligned: Aligned, timeline: Timeline | None, step: int | None) -> dict[str, Any]:
    files: list[dict[str, Any]] = [{"path": TIMELINE, "machine": {"name": "timeline"}}] if timeline is not None else []
    for source in aligned.sources:
        entry: dict[str, Any] = {"path": source.name, "machine": {"name": source.label}}
        if source.shift_ns:
            # What is added to the file's times (perfetto_manifest_reader.cc, ParseClocks).
            entry["clocks"] = {"offset_ns": source.shift_ns}
        files.append(entry)
    attributes = {} if step is None else {"attributes": {"autoprof.global_step": step}}
    return {"perfetto_manifest": {"version": 1, "files": files, **attributes}}


def _drawn(timeline: Timeline, base_ns: int) -> bytes:
    pieces: list[bytes] = []
    draw(timeline, base_ns, 1, pieces.append)
    head = msgspec.json.encode({"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns})
    return b"".join([head[:-1], b',"traceEvents":[\n', *pieces, b"\n]}\n"])


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out the owner of the file on this machine."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
