"""Merge of traces into one trace for Perfetto, on one clock.

A gzip file may consist of several members. So each trace is rewritten independently, in parallel if the traces are
large, and the results are concatenated.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from autoprof.base import files
from autoprof.rundir import decoder
from autoprof.rundir.file_names import MERGING, PART
from autoprof.rundir.records import CaptureMeta
from autoprof.traces.clocks import beginning, corrections_ns
from autoprof.traces.reader import TraceError
from autoprof.traces.rewrite import Source, Tally, rewrite
from autoprof.traces.timeline import StepTimeline, draw

T = TypeVar("T")

_POLL_S = 0.2
# Tasks that a process gets at once. Handing over one small trace takes as long as rewriting it.
_MAX_BATCH = 64
# Counter of the work done, shared with the process that waits; set in workers only.
_done: Any = None


def run_in_pool(
    work: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, progress: Callable[[int], object]
) -> Iterator[T]:
    """Yield the results of `work(*task, progress)` in the order of the tasks.

    Args:
        work: A function of a module.
        tasks: Its arguments, without the last one.
        jobs: The number of processes. With 1, the work runs in this process.
        progress: Callback for the amounts that the workers report to their own `progress`.

    Raises:
        OSError: A process was killed.
    """
    if min(jobs, len(tasks)) <= 1:
        for task in tasks:
            yield work(*task, progress)
        return
    # Spawn, so that workers inherit neither memory nor threads of this process.
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, _remember, (done,)) as pool:
        size = min(_MAX_BATCH, len(tasks) // (8 * jobs) + 1)
        futures = [pool.submit(_do, work, tasks[first : first + size]) for first in range(0, len(tasks), size)]
        reported = 0
        try:
            for future in futures:
                while not future.done():
                    wait([future], _POLL_S)
                    now = done.value
                    progress(now - reported)
                    reported = now
                yield from future.result()
        except BrokenProcessPool:
            raise OSError("a merging process was killed; maybe there is too little memory") from None


def _remember(done: Any) -> None:
    global _done
    _done = done


def _do(work: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[T]:
    return [work(*task, _add) for task in tasks]


def _add(amount: int) -> None:
    with _done.get_lock():
        _done.value += amount


# Fastest compression: even so it takes half the time of a merge.
_LEVEL = 1
# Compressed input from which a merge uses several processes. For less, starting them takes longer than it saves.
_PARALLEL_BYTES = 32 << 20
_MAX_JOBS = 8
# Size of a trace below which its rewritten form is kept in memory.
_SMALL_BYTES = 1 << 18
_SECOND_NS = 1_000_000_000
_HOUR_NS = 3600 * _SECOND_NS
# Margin before the earliest first event. The first event of a file is not always its earliest.
_BEFORE_NS = 6 * _HOUR_NS
# Microseconds below which a float is exact to half a nanosecond.
_NEAR_US = 2.0**43


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a merge.

    Attributes:
        traces: The number of traces in it.
        spans: The number of timeline spans in it.
        events: The number of all events.
        bytes: The file's size.
        json_bytes: The size of its JSON, which a viewer reads.
        cut: Descriptions of the missing ends of truncated traces, by name.
        left_out: Reasons for traces that are left out, by name.
    """

    traces: int
    spans: int
    events: int
    bytes: int
    json_bytes: int
    cut: dict[str, str]
    left_out: dict[str, str]


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """A trace to merge.

    Attributes:
        path: The file.
        label: The name for its processes.
        detail: Further text about its processes.
        meta: The capture's meta file.
        shift_ns: Nanoseconds to add to its times, to get the clock of the driver's host.
        name: Its name in messages, by default the file name.
    """

    path: Path
    label: str
    detail: str = ""
    meta: CaptureMeta = decoder.record({}, CaptureMeta)
    shift_ns: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.path.name)


class _Aligned(msgspec.Struct, frozen=True):
    """Traces on one clock.

    Attributes:
        base_ns: The base of the merged trace's times, in ns since the epoch.
        sources: The traces, each with the shift to this base.
        left_out: Reasons for traces that can't be read or have no base, by name.
    """

    base_ns: int
    sources: list[Source]
    left_out: dict[str, str]


def merge(
    inputs: Sequence[Input],
    output: Path,
    jobs: int | None = None,
    timeline: StepTimeline | None = None,
    progress: Callable[[int], object] = lambda read: None,
) -> Summary:
    """Merge traces. `output` appears only once it is complete.

    Truncated traces are merged up to their last complete event. Unreadable traces are left out.

    Args:
        inputs: The traces, in display order.
        output: The gzip file to write.
        jobs: The number of processes; by default one per core, at most 8, or 1 for small traces.
        timeline: Spans to show above the traces.
        progress: Callback with the number of bytes read since its last call.

    Raises:
        TraceError: There is no readable trace and no timeline. No file is written.
        OSError: The file can't be written.
    """
    aligned = _align(inputs, timeline)
    sources = aligned.sources
    if jobs is None:
        large = sum(each.path.stat().st_size for each in sources) > _PARALLEL_BYTES
        jobs = min(len(os.sched_getaffinity(0)), _MAX_JOBS) if large else 1
    with _part_of(output) as part:
        with part.open("wb") as file:
            drawn, tallies = _write(file, aligned, timeline, jobs, progress)
        size = part.stat().st_size
        named = list(zip((each.name for each in sources), tallies, strict=True))
        left_out = aligned.left_out | {name: tally.refused for name, tally in named if tally.refused}
        if len(left_out) == len(inputs) and not drawn.events:
            raise TraceError(next(iter(left_out.values()), "there is nothing to merge"))
        os.replace(part, output)
    return Summary(
        traces=len(inputs) - len(left_out),
        spans=sum(map(len, timeline.processes.values())) if timeline is not None else 0,
        events=sum(tally.events for tally in tallies) + drawn.events,
        bytes=size,
        json_bytes=sum(tally.bytes for tally in tallies) + drawn.bytes,
        cut={name: tally.cut for name, tally in named if tally.cut},
        left_out=left_out,
    )


@contextlib.contextmanager
def _part_of(output: Path) -> Iterator[Path]:
    """Create an empty file beside the output, and remove it unless the caller moves it.

    Raises:
        OSError: The file can't be created. The error names the output.
    """
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=MERGING, suffix=PART) as folder:
            part = Path(folder, "merged")
            os.close(files.create(part))
            yield part
    except OSError as error:
        files.name_whole(error, output)
        raise


def _align(inputs: Sequence[Input], timeline: StepTimeline | None) -> _Aligned:
    """Return traces on one clock.

    Its base is some hours before their first time. Kineto's base is up to three months earlier, and a float can't hold
    such times to the nanosecond. Perfetto reads floats, so a quarter of the times would be off by 1 ns, and it drops
    slices that end 1 ns after the slice around them.
    """
    beginnings: list[tuple[int, float | None] | None] = []
    left_out: dict[str, str] = {}
    for each in inputs:
        try:
            beginnings.append(beginning(each.path))
        except TraceError as error:
            beginnings.append(None)
            left_out[each.name] = str(error)
    base = next((own for own, _ in filter(None, beginnings) if own), 0)
    starts = [timeline.starts_ns] if timeline is not None and timeline.starts_ns else []
    if timeline is not None and not any(beginnings):
        base = timeline.starts_ns // _SECOND_NS * _SECOND_NS
    sources = []
    for each, begin, correction in zip(inputs, beginnings, corrections_ns([each.meta for each in inputs]), strict=True):
        if begin is None:
            continue
        own, first = begin
        shift = own - base + correction + each.shift_ns
        near = first is not None and abs(first) < _NEAR_US
        sources.append(
            Source(path=each.path, label=each.label, detail=each.detail, shift_ns=shift, near=near, name=each.name)
        )
        if first is not None:
            starts.append(base + round(first * 1000) + shift)
    nearer_ns = (min(starts, default=0) - base - _BEFORE_NS) // _HOUR_NS * _HOUR_NS
    if nearer_ns <= 0 or not base:
        return _Aligned(base, sources, left_out)
    sources = [msgspec.structs.replace(each, shift_ns=each.shift_ns - nearer_ns) for each in sources]
    return _Aligned(base + nearer_ns, sources, left_out)


def _write(
    file: BinaryIO, aligned: _Aligned, timeline: StepTimeline | None, jobs: int, progress: Callable[[int], object]
) -> tuple[Tally, list[Tally]]:
    sources = aligned.sources
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": aligned.base_ns}
    file.write(_member([msgspec.json.encode(head)[:-1], b',"traceEvents":[\n']))
    drawn, tallies = Tally(), list[Tally]()
    if timeline is not None:
        pieces: list[bytes] = []
        drawn = draw(timeline, aligned.base_ns, len(sources) + 1, pieces.append)
        file.write(_member(pieces))
    # Files of large traces; a small one is kept in memory.
    places = [
        None
        if (status := files.status(source.path)) and status.st_size < _SMALL_BYTES
        else Path(f"{file.name}.{number}")
        for number, source in enumerate(sources)
    ]
    separator = _member([b",\n"])
    # Number 0 is reserved for the timeline, even without one.
    work = [
        (source, number, len(sources) + 1, place)
        for number, (source, place) in enumerate(zip(sources, places, strict=True), 1)
    ]
    written = drawn.events > 0
    for (tally, small), place in zip(run_in_pool(_rewrite_into, work, jobs, progress), places, strict=True):
        if tally.events:
            file.write(separator if written else b"")
            written = True
            if place is None:
                file.write(small)
            else:
                with place.open("rb") as content:
                    shutil.copyfileobj(content, file, 1 << 20)
        if place is not None:
            place.unlink()
        tallies.append(tally)
    merged = [
        {"label": source.label, "file": source.name, "shift_ns": source.shift_ns}
        for source, tally in zip(sources, tallies, strict=True)
        if not tally.refused
    ]
    tail = msgspec.json.encode({"autoprof": {"merged": merged, "timeline": timeline is not None}})
    file.write(_member([b"\n],", tail[1:], b"\n"]))
    return drawn, tallies


def _rewrite_into(
    source: Source, number: int, of: int, place: Path | None, progress: Callable[[int], object]
) -> tuple[Tally, bytes]:
    """Rewrite a trace into a separate gzip member, in a file or, without one, in memory.

    For an unreadable trace, `Tally.refused` has the reason.
    """
    packer = zlib.compressobj(_LEVEL, wbits=31)
    with io.BytesIO() if place is None else place.open("wb") as file:
        try:
            tally = rewrite(source, number, of, lambda piece: file.write(packer.compress(piece)), progress)
        except TraceError as error:
            return Tally(refused=str(error)), b""
        file.write(packer.flush())
        return tally, file.getvalue() if isinstance(file, io.BytesIO) else b""


def _member(pieces: Iterable[bytes]) -> bytes:
    packer = zlib.compressobj(_LEVEL, wbits=31)
    return b"".join([*map(packer.compress, pieces), packer.flush()])
