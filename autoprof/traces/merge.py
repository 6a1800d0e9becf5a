"""Merges traces into one that Perfetto opens: a process or more for each, on one clock.

Traces are independent once their clocks are known, and a gzip file may consist of several members. So each is rewritten
by itself, in several processes where that is worth it, and the results are put one behind the other.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from autoprof import _files
from autoprof.rundir import MERGING, PART
from autoprof.traces.clocks import base_ns, corrections_ns
from autoprof.traces.rewrite import Source, Tally, rewrite

# Half the time of a merge is compression already.
_LEVEL = 1
# Below so many bytes of compressed input, other processes take longer to start than they save.
_WORTH_BYTES = 32 << 20
_MOST_JOBS = 8


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a merge made. `bytes` is the file's size, `json_bytes` what a viewer reads."""

    traces: int
    events: int
    bytes: int
    json_bytes: int
    hosts: int


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """A trace and what is known of it: its label, what else is said of its processes, and its meta file."""

    path: Path
    label: str
    detail: str = ""
    meta: Mapping[str, Any] = {}


def merge(inputs: Sequence[Input], output: Path, jobs: int | None = None) -> Summary:
    """Merge traces; `output` gets its name when it is complete.

    Args:
        inputs: The traces, in the order in which viewers show them.
        output: The file to make, gzip.
        jobs: How many processes work on it, by default as many as there are cores for.

    Raises:
        TraceError: One of the traces can't be read, or does not say what its times count from. Nothing is left.
        OSError: The file can't be written.
    """
    base, sources = _aligned(inputs)
    if jobs is None:
        large = sum(each.path.stat().st_size for each in sources) > _WORTH_BYTES
        jobs = min(len(os.sched_getaffinity(0)), _MOST_JOBS) if large else 1
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=MERGING, suffix=PART) as folder:
        part = Path(folder, "merged")
        os.close(_files.create(part))
        with part.open("wb") as file:
            tallies = _write(file, base, sources, jobs)
        size = part.stat().st_size
        os.replace(part, output)
    return Summary(
        traces=len(sources),
        events=sum(tally.events for tally in tallies),
        bytes=size,
        json_bytes=sum(tally.bytes for tally in tallies),
        hosts=len({each.meta.get("host") for each in inputs}),
    )


def _aligned(inputs: Sequence[Input]) -> tuple[int, list[Source]]:
    """The base of the merged trace in ns since the epoch, and the traces with what brings each onto it."""
    bases = [base_ns(each.path) for each in inputs]
    base = next(filter(None, bases), 0)
    sources = []
    for each, own, correction in zip(inputs, bases, corrections_ns([each.meta for each in inputs]), strict=True):
        shift = own - base + correction
        sources.append(Source(path=each.path, label=each.label, detail=each.detail, shift_ns=shift))
    return base, sources


def _write(file: BinaryIO, base: int, sources: Sequence[Source], jobs: int) -> list[Tally]:
    merged = [{"label": source.label, "file": source.path.name, "shift_ns": source.shift_ns} for source in sources]
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base, "autoprof": {"merged": merged}}
    file.write(_member([msgspec.json.encode(head)[:-1], b',"traceEvents":[\n']))
    tallies: list[Tally] = []

    def add(tally: Tally, content: BinaryIO) -> None:
        if tally.events:
            if any(before.events for before in tallies):
                file.write(_member([b",\n"]))
            shutil.copyfileobj(content, file, 1 << 20)
        tallies.append(tally)

    places = [Path(f"{file.name}.{number}") for number in range(len(sources))]
    work = (sources, range(len(sources)), [len(sources)] * len(sources), places)
    for tally, place in zip(_run(work, min(jobs, len(sources))), places, strict=True):
        with place.open("rb") as content:
            add(tally, content)
        place.unlink()
    file.write(_member([b"\n]}\n"]))
    return tallies


def _run(work: tuple[Iterable[Any], ...], jobs: int) -> Iterable[Tally]:
    if jobs <= 1:
        yield from map(_rewrite_into, *work)
        return
    # A process that starts afresh has nothing of this one's memory and threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(_rewrite_into, *work)
        except BrokenProcessPool:
            raise OSError("a process that merged was killed; is there too little memory?") from None


def _rewrite_into(source: Source, number: int, of: int, place: Path) -> Tally:
    """Rewrite a trace into a gzip member of its own."""
    packer = zlib.compressobj(_LEVEL, wbits=31)
    with place.open("wb") as file:
        tally = rewrite(source, number, of, lambda piece: file.write(packer.compress(piece)))
        file.write(packer.flush())
    return tally


def _member(pieces: Iterable[bytes]) -> bytes:
    packer = zlib.compressobj(_LEVEL, wbits=31)
    return b"".join([*map(packer.compress, pieces), packer.flush()])
