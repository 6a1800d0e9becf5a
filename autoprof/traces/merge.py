"""Merge of several traces into one trace for Perfetto, whose times are on one clock.

A gzip file may consist of several members. So each trace is rewritten independently into one member, and the members
are concatenated. Large traces are rewritten in parallel.

All traces and spans of one process are a group, under one name. Viewers show a group as one process: first the tracks
of the timeline, then the threads of all captures. A device has a separate group. Traces outside of a run have no
groups, because it is unknown which process wrote them.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec
from msgspec import Struct

from autoprof.base import files
from autoprof.config.values import role_place
from autoprof.rundir.file_names import MERGING, PART
from autoprof.rundir.journal import Journal
from autoprof.rundir.records import Line
from autoprof.traces.clocks import beginning, corrections_ns
from autoprof.traces.reader import TraceError
from autoprof.traces.rewrite import Input, ProcessGroup, Tally, rewrite
from autoprof.traces.timeline import NO_SPANS, Timeline, draw

# A trace, its number, the number of all traces, and the file for the rewritten trace.
_Task: TypeAlias = tuple[Input, int, int, Path | None]

_POLL_S = 0.2
# Maximum number of tasks that a worker process gets at once. Handing over one small trace takes as long as rewriting
# the trace.
_MAX_BATCH = 64
# Counter of the work that all workers have done. They share it with the process that waits. It is set in workers only.
_done: Any = None


def _rewritten(tasks: Sequence[_Task], jobs: int, progress: Callable[[int], object]) -> Iterator[tuple[Tally, bytes]]:
    """Yield the results of `_rewrite_into(*task, progress)` in the order of the tasks.

    Args:
        tasks: The arguments of each call, without the last argument `progress`.
        jobs: The number of processes. If it is 1, the work runs in this process.
        progress: Function that is called with the number of bytes that were read since the previous call.

    Raises:
        OSError: A worker process was killed.
    """
    if min(jobs, len(tasks)) <= 1:
        for task in tasks:
            yield _rewrite_into(*task, progress)
        return
    # Use spawn: then workers inherit neither memory nor threads of this process.
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, _remember, (done,)) as pool:
        batch_size = min(_MAX_BATCH, len(tasks) // (8 * jobs) + 1)
        futures = [
            pool.submit(_do, tasks[first_task : first_task + batch_size])
            for first_task in range(0, len(tasks), batch_size)
        ]
        reported_count = 0
        try:
            for future in futures:
                while not future.done():
                    wait([future], _POLL_S)
                    done_count = done.value
                    progress(done_count - reported_count)
                    reported_count = done_count
                yield from future.result()
        except BrokenProcessPool:
            raise OSError("a merging process was killed; maybe there is too little memory") from None


def _remember(done: Any) -> None:
    global _done
    _done = done


def _do(tasks: Sequence[_Task]) -> list[tuple[Tally, bytes]]:
    return [_rewrite_into(*task, _add) for task in tasks]


def _add(amount: int) -> None:
    with _done.get_lock():
        _done.value += amount


# Fastest compression level. Even at this level, compression takes half of the time of a merge.
_LEVEL = 1
# Total size of the compressed input above which a merge uses several processes. For a smaller input, starting the
# processes takes longer than they save.
_PARALLEL_BYTES = 32 << 20
_MAX_JOBS = 8
# Size of a trace below which the rewritten trace is kept in memory instead of in a file.
_SMALL_BYTES = 1 << 18
_SECOND_NS = 1_000_000_000
_HOUR_NS = 3600 * _SECOND_NS
# Time from the base of the merged trace to the earliest first event of a trace. The margin is needed because the first
# event in a file is not always the earliest event of the file.
_BEFORE_NS = 6 * _HOUR_NS
# Times below this many microseconds are exact to half a nanosecond as floats.
_NEAR_US = 2.0**43


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a merge.

    Attributes:
        traces: The number of traces that the merged trace contains.
        spans: The number of timeline spans that the merged trace contains.
        events: The number of all events in the merged trace.
        bytes: The size of the compressed file.
        json_bytes: The size of the uncompressed JSON, which a viewer reads.
        cut: Dict from the name of each truncated trace to the reason why its end is missing.
        left_out: Dict from the name of each trace that was left out to the reason.
    """

    traces: int
    spans: int
    events: int
    bytes: int
    json_bytes: int
    cut: dict[str, str]
    left_out: dict[str, str]


def merge(
    inputs: Sequence[Input],
    output: Path,
    jobs: int | None = None,
    timeline: Timeline = NO_SPANS,
    progress: Callable[[int], object] = lambda read: None,
) -> Summary:
    """Merge traces into the file `output`. The file appears only once it is complete.

    Truncated traces are merged up to their last complete event. Unreadable traces are left out.

    Args:
        inputs: The traces, in the order in which viewers show them.
        output: The path of the gzip file to write.
        jobs: The number of processes. By default it is the number of cores, at most 8. For small traces it is 1.
        timeline: The spans to show above the traces.
        progress: Function that is called with the number of bytes that were read since the previous call.

    Raises:
        TraceError: There is no readable trace and no timeline. No file is written.
        OSError: The file can't be written.
    """
    base_ns, sources, left_out = _align_clocks(inputs, timeline)
    if jobs is None:
        large = sum(each.path.stat().st_size for each in sources) > _PARALLEL_BYTES
        jobs = min(len(os.sched_getaffinity(0)), _MAX_JOBS) if large else 1
    with _part_of(output) as part:
        with part.open("wb") as file:
            drawn, tallies = _write(file, base_ns, sources, timeline, jobs, progress)
        output_bytes = part.stat().st_size
        named_tallies = list(zip((each.name for each in sources), tallies, strict=True))
        left_out |= {name: tally.refused for name, tally in named_tallies if tally.refused}
        if len(left_out) == len(inputs) and not drawn.events:
            raise TraceError(next(iter(left_out.values()), "there is nothing to merge"))
        os.replace(part, output)
    return Summary(
        traces=len(inputs) - len(left_out),
        spans=sum(map(len, timeline.values())),
        events=sum(tally.events for tally in tallies) + drawn.events,
        bytes=output_bytes,
        json_bytes=sum(tally.bytes for tally in tallies) + drawn.bytes,
        cut={name: tally.cut for name, tally in named_tallies if tally.cut},
        left_out=left_out,
    )


@contextlib.contextmanager
def _part_of(output: Path) -> Iterator[Path]:
    """Yield the path of a new empty file, in a temporary folder beside the output.

    The folder is removed at the end. The caller moves the file to keep it.

    Raises:
        OSError: The file can't be created, written or moved. The error names `output` instead of the temporary file.
    """
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=MERGING, suffix=PART) as folder:
            part = Path(folder, "merged")
            os.close(files.create(part))
            yield part
    except OSError as error:
        files.set_full_path(error, output)
        raise


def _align_clocks(inputs: Sequence[Input], timeline: Timeline) -> tuple[int, list[Input], dict[str, str]]:
    """Put the times of all traces on one clock.

    The base of this clock is some hours before the first time of all traces. Kineto's base can't be kept: it is up to
    three months earlier, and a float can't hold times that are so large to the nanosecond. Perfetto reads floats, so a
    quarter of the times would be off by 1 ns. And Perfetto drops slices that end 1 ns after the slice around them.

    Returns:
        Three values: the base of the times in the merged trace, in ns since the epoch; the readable traces, whose times
        become relative to this base by their `shift_ns`; and a dict from the name of each trace that can't be read, or
        has no base, to the reason.
    """
    beginnings: list[tuple[Input, int, int, float | None]] = []
    left_out: dict[str, str] = {}
    for each, correction in zip(inputs, corrections_ns([each.meta for each in inputs]), strict=True):
        try:
            beginnings.append((each, correction, *beginning(each.path)))
        except TraceError as error:
            left_out[each.name] = str(error)
    first_span_ns = min((span.start_ns for spans in timeline.values() for span in spans), default=0)
    base = next((own_base for _, _, own_base, _ in beginnings if own_base), 0)
    if timeline and not beginnings:
        base = first_span_ns // _SECOND_NS * _SECOND_NS
    starts = [first_span_ns] if first_span_ns else []
    sources = []
    for each, correction, own_base, first_us in beginnings:
        shift = own_base - base + correction + each.shift_ns
        near = first_us is not None and abs(first_us) < _NEAR_US
        sources.append(msgspec.structs.replace(each, shift_ns=shift, near=near))
        if first_us is not None:
            starts.append(base + round(first_us * 1000) + shift)
    base_shift_ns = (min(starts, default=0) - base - _BEFORE_NS) // _HOUR_NS * _HOUR_NS
    if base_shift_ns <= 0 or not base:
        return base, sources, left_out
    sources = [msgspec.structs.replace(each, shift_ns=each.shift_ns - base_shift_ns) for each in sources]
    return base + base_shift_ns, sources, left_out


def _write(
    file: BinaryIO,
    base_ns: int,
    sources: Sequence[Input],
    timeline: Timeline,
    jobs: int,
    progress: Callable[[int], object],
) -> tuple[Tally, list[Tally]]:
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
    file.write(_member([msgspec.json.encode(head)[:-1], b',"traceEvents":[\n']))
    pieces: list[bytes] = []
    tallies: list[Tally] = []
    sources, groups = grouped(sources, timeline)
    drawn = draw(timeline, groups, base_ns, pieces.append)
    file.write(_member(pieces) if timeline else b"")
    # Temporary file for each rewritten trace; None for a small trace, which is kept in memory after it is rewritten.
    temporary_files = [
        None
        if (status := files.status(source.path)) and status.st_size < _SMALL_BYTES
        else Path(f"{file.name}.{number}")
        for number, source in enumerate(sources)
    ]
    separator = _member([b",\n"])
    # Number 0 is reserved for the timeline, even if there is no timeline.
    tasks = [
        (source, number, len(sources) + 1, temporary_file)
        for number, (source, temporary_file) in enumerate(zip(sources, temporary_files, strict=True), 1)
    ]
    written = drawn.events > 0
    for (tally, member), temporary_file in zip(_rewritten(tasks, jobs, progress), temporary_files, strict=True):
        if tally.events:
            file.write(separator if written else b"")
            written = True
            if temporary_file is None:
                file.write(member)
            else:
                with temporary_file.open("rb") as content:
                    shutil.copyfileobj(content, file, 1 << 20)
        if temporary_file is not None:
            temporary_file.unlink()
        tallies.append(tally)
    merged = [
        {"label": source.label, "file": source.name, "shift_ns": source.shift_ns}
        for source, tally in zip(sources, tallies, strict=True)
        if not tally.refused
    ]
    tail = msgspec.json.encode({"autoprof": {"merged": merged, "timeline": bool(timeline)}})
    file.write(_member([b"\n],", tail[1:], b"\n"]))
    return drawn, tallies


def _rewrite_into(
    source: Input, number: int, trace_count: int, output: Path | None, progress: Callable[[int], object]
) -> tuple[Tally, bytes]:
    """Rewrite a trace into a separate gzip member: in the file `output`, or in memory if `output` is None.

    Returns:
        The tally, and the bytes of a member in memory; for a member in a file, empty bytes. If the trace can't be read,
        `Tally.refused` has the reason.
    """
    packer = zlib.compressobj(_LEVEL, wbits=31)
    with io.BytesIO() if output is None else output.open("wb") as file:
        try:
            tally = rewrite(source, number, trace_count, lambda piece: file.write(packer.compress(piece)), progress)
        except TraceError as error:
            return Tally(refused=str(error)), b""
        file.write(packer.flush())
        return tally, file.getvalue() if isinstance(file, io.BytesIO) else b""


def _member(pieces: Iterable[bytes]) -> bytes:
    packer = zlib.compressobj(_LEVEL, wbits=31)
    return b"".join([*map(packer.compress, pieces), packer.flush()])


# Host and pid of a process, and the words that tell apart several ranks that one process recorded, such as `rank0`.
_Key = tuple[str, int, str]


class _Members(Struct):
    """The data of one group while it is collected."""

    roles: list[str] = []
    words: str = ""
    replica: int | None = None
    rank: int | None = None

    def add_roles(self, roles: Iterable[str]) -> None:
        self.roles = sorted({*self.roles, *filter(None, roles)}, key=lambda role: (role_place(role), role))

    def add_spans(self, spans: Sequence[Line]) -> None:
        self.add_roles(span.role for span in spans)
        if self.words:
            return
        replicas = {replica for span in spans if isinstance(replica := span.ids.get("replica"), int)}
        ranks = {span.rank for span in spans if span.rank is not None}
        self.replica = replicas.pop() if len(replicas) == 1 else None
        self.rank = ranks.pop() if len(ranks) == 1 else None
        numbers = (("replica", self.replica), ("rank", self.rank))
        self.words = " ".join(f"{name}{number}" for name, number in numbers if number is not None)


def grouped(inputs: Sequence[Input], timeline: Timeline) -> tuple[list[Input], dict[Journal, ProcessGroup]]:
    """Return the traces with their groups, and the group of each journal of the timeline."""
    members: dict[_Key, _Members] = {}
    key_of_process: dict[tuple[str, int], _Key] = {}
    for each in inputs:
        if each.pid is not None:
            key = (each.meta.host, each.pid, each.words)
            found = members.setdefault(key, _Members([], each.words, each.meta.replica, each.meta.rank))
            found.add_roles(each.roles)
            key_of_process.setdefault(key[:2], key)
    for journal, spans in timeline.items():
        key = key_of_process.setdefault((journal.host, journal.pid), (journal.host, journal.pid, ""))
        members.setdefault(key, _Members()).add_spans(spans)
    groups = _groups(members)
    grouped_inputs = [
        each if each.pid is None else msgspec.structs.replace(each, group=groups[each.meta.host, each.pid, each.words])
        for each in inputs
    ]
    return grouped_inputs, {journal: groups[key_of_process[journal.host, journal.pid]] for journal in timeline}


def _groups(members: Mapping[_Key, _Members]) -> dict[_Key, ProcessGroup]:
    has_several_hosts = len({host for host, _, _ in members}) > 1

    def name(key: _Key, with_pid: bool = False) -> str:
        host, pid, _ = key
        words = ["+".join(members[key].roles) or "other", members[key].words]
        words += [host if has_several_hosts else "", f"pid {pid}" if with_pid else ""]
        return " ".join(filter(None, words))

    def order(key: _Key) -> tuple[int, str, int, int, _Key]:
        of = members[key]
        role = of.roles[0] if of.roles else ""
        return role_place(role), role, -1 if of.replica is None else of.replica, of.rank or 0, key

    name_counts = Counter(map(name, members))
    return {
        key: ProcessGroup(
            name=name(key, name_counts[name(key)] > 1),
            labels=", ".join(filter(None, [key[0] and f"on {key[0]}", f"pid {key[1]}"])),
            number=number,
            count=len(members),
        )
        for number, key in enumerate(sorted(members, key=order))
    }
