"""Archive of a step's unchanged traces, with a manifest that tells Perfetto how to align them.

Perfetto reads the manifest from version 58.2 on (perfetto.dev/docs/reference/perfetto-manifest). Each trace becomes a
separate machine, so that equal process ids stay separate, and its times are shifted onto the common base. Older
versions open the archive too, but merge processes with equal ids.
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
# Perfetto reads GNU's long names, but no POSIX extended headers.
_FORMAT = tarfile.GNU_FORMAT


def pack(
    inputs: Sequence[Input], output: Path, timeline: Timeline | None = None, step: int | None = None
) -> tuple[int, dict[str, str]]:
    """Write an archive of traces. `output` appears only once it is complete.

    Only the base time of each trace is read, so a truncated trace is added as it is.

    Args:
        inputs: The traces.
        output: The file to write.
        timeline: Spans to add as a separate trace.
        step: The step, for the manifest.

    Returns:
        The file's size in bytes, and the reasons for traces that are left out, by name.

    Raises:
        TraceError: There is no readable trace and no timeline. No file is written.
        OSError: The file can't be written.
    """
    aligned = align(inputs, timeline)
    if not aligned.sources and timeline is None:
        raise TraceError(next(iter(aligned.left_out.values()), "there is nothing to archive"))
    with part_of(output) as part:
        with part.open("wb") as file, tarfile.open(fileobj=file, mode="w", format=_FORMAT, dereference=True) as archive:
            # Perfetto requires the manifest first.
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
            # Perfetto adds this to the file's times (perfetto_manifest_reader.cc, ParseClocks).
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
    """Remove the file's owner from the entry."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
