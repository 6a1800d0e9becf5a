"""Reader of a run's journals: one file per process, `journal/<host>-<pid>.jsonl`, with one line per event.

`SpanReader` decodes the ended spans of a file in batches; `search` finds those with a text.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from autoprof.base import files, seam
from autoprof.base.originals import io
from autoprof.base.redact import writable
from autoprof.rundir import decoder, file_names
from autoprof.rundir.cache import Stamp, stamp
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import (
    SPAN_KINDS,
    BegunLine,
    DroppedLine,
    ErrorLine,
    ExitLine,
    HookLine,
    Line,
    MemoryLine,
    ProcessLine,
    RaisedLine,
)

# Exceptions for a line that can't be decoded: it is cut off, damaged, or from a newer autoprof.
NO_LINE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Journal(Struct, frozen=True, kw_only=True):
    """File of one process.

    Attributes:
        path: Its path.
        host: The host of the process, from the file's name.
        pid: The pid of the process, from the file's name; 0 if it has none.
        shift_ns: Nanoseconds to add to its times, to get the clock of the driver's host.
    """

    path: Path
    host: str
    pid: int
    shift_ns: int = 0

    @property
    def name(self) -> str:
        """Return its path relative to the run directory."""
        return writable(f"journal/{self.path.name}")


def journals(run: str | Path) -> list[Journal]:
    """Return the journals of a run, sorted by name."""
    named = [(path, *file_names.process_of(path.name)) for path in RunDir(Path(run)).lines("journal")]
    return [Journal(path=path, host=writable(host), pid=pid) for path, host, pid in named]


def journal_stamps(journals: Sequence[Journal]) -> dict[str, Stamp]:
    """Return the state of each journal by name, by which cached content is recognized as current."""
    stamps = {journal.path.name: stamp(journal.path) for journal in journals}
    return {name: current for name, current in stamps.items() if current is not None}


_CHUNK_BYTES = 1 << 20
# Longer than any line that autoprof writes.
_MAX_LINE_BYTES = 1 << 20
_BATCH_LINES = 128
# The four characters of a line after `{"kind":"`, for lines that are not ended spans.
_OTHER_KINDS = frozenset((b"proc", b"hook", b"erro", b"begu", b"drop", b"exit", b"rais", b"memo"))
_decode_batch = msgspec.json.Decoder(list[Line]).decode
_decode_any = msgspec.json.Decoder().decode


class Batch(NamedTuple):
    """Consecutive ended spans of a file, between two offsets in bytes. They are in the order of their ends."""

    begin: int
    end: int
    spans: list[Line]


class SpanReader:
    """Reader of ended spans, which counts the lines that it leaves out.

    Attributes:
        left_out: The number of lines left out, by file and reason.
        failed: The reason why a file can't be read to its end, by file.
    """

    def __init__(self) -> None:
        self.left_out: Counter[tuple[str, str]] = Counter()
        self.failed: dict[str, str] = {}

    def batches(self, journal: Journal, ranges: Sequence[tuple[int, int]] = ((0, sys.maxsize),)) -> Iterator[Batch]:
        """Yield the ended spans of a file. Never raises.

        Args:
            journal: The file.
            ranges: The parts of the file to read, as offsets of lines in bytes.
        """
        try:
            with io.open(files.opened(journal.path), "rb") as file:
                for begin, end in ranges:
                    for start, texts in _groups(file, begin, end):
                        spans = self._decoded(journal, [text for text in texts if text[9:13] not in _OTHER_KINDS])
                        yield Batch(start, start + sum(map(len, texts)) + len(texts), spans)
        except OSError as error:
            seam.pass_on(error)
            self.failed[journal.name] = error.strerror or str(error)

    def spans(self, journal: Journal) -> Iterator[Line]:
        """Yield the ended spans of a file that have a valid time, one by one. Never raises."""
        for batch in self.batches(journal):
            yield from (span for span in batch.spans if 0 < span.start_ns <= span.end_ns)

    def _decoded(self, journal: Journal, texts: list[bytes]) -> list[Line]:
        with seam.suppress(*NO_LINE):
            spans = _decode_batch(b"[" + b",".join(texts) + b"]")
            if len(spans) == len(texts) and {span.kind for span in spans} <= SPAN_KINDS.keys():
                return spans
        lines = (self._line(journal, text) for text in texts)
        return [line for line in lines if line is not None and line.kind in SPAN_KINDS]

    def _line(self, journal: Journal, text: bytes) -> Line | None:
        if len(text) > _MAX_LINE_BYTES:
            self.left_out[journal.name, "too long"] += 1
            return None
        with seam.suppress(*NO_LINE):
            return decoder.line(text)
        if text.strip() and not is_foreign(text):
            self.left_out[journal.name, "truncated, or not a span"] += 1
        return None


def is_foreign(text: bytes) -> bool:
    """Return True if a line has a kind that this release does not know. A newer release may write such lines."""
    with seam.suppress(*NO_LINE):
        line = _decode_any(text)
        return isinstance(line, dict) and isinstance(line.get("kind"), str) and line["kind"] not in SPAN_KINDS
    return False


def _groups(file: BinaryIO, at: int, end: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield groups of lines between two offsets, each with the offset of its first line.

    A line that is too long is cut.
    """
    file.seek(at)
    rest, skipping = b"", False
    while chunk := file.read(min(_CHUNK_BYTES, end - at)):
        begin, at = at - len(rest), at + len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        if skipping and lines:
            begin += len(lines[0]) + 1
            skipping, lines = False, lines[1:]
        for index in range(0, len(lines), _BATCH_LINES):
            group = lines[index : index + _BATCH_LINES]
            yield begin, group
            begin += sum(map(len, group)) + len(group)
        if len(rest) > _MAX_LINE_BYTES:
            if not skipping:
                yield begin, [rest]
            rest, skipping = b"", True
    # A line without an end: a process is still writing it, or was killed.
    if rest and not skipping:
        yield at - len(rest), [rest]


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends. The last line may be cut off, and a line over 1 MiB is.

    Raises:
        OSError: The path is not a file, or can't be read to its end.
    """
    with io.open(files.opened(path), "rb") as file:
        for _, group in _groups(file, 0, sys.maxsize):
            yield from group


EVER = 1 << 63


class Zone(Struct, array_like=True):
    """A part of a journal, from its first line to the next zone. A zone without spans matches no step."""

    begin: int
    start_ns: int = EVER
    end_ns: int = 0
    first_step: int = EVER
    last_step: int = -EVER

    def has(self, step: int, start_ns: int, end_ns: int) -> bool:
        """Return True if the zone may have spans of a step, or spans that overlap a period."""
        of_step = self.first_step <= step <= self.last_step
        return of_step or (self.start_ns < end_ns and self.end_ns > start_ns)


def ranges(zones: Sequence[Zone], steps: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a journal to read for some steps, as offsets. Adjacent zones make one part.

    Args:
        zones: The journal's zones. The last one includes lines that were written meanwhile.
        steps: The number, the start and the end of each step.
    """
    ranges: list[tuple[int, int]] = []
    for zone, end in zip(zones, [*(zone.begin for zone in zones[1:]), sys.maxsize], strict=False):
        if any(zone.has(*step) for step in steps):
            if ranges and ranges[-1][1] == zone.begin:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((zone.begin, end))
    return ranges


# Name of the index's part of the cache.
INDEX = "timeline"


class JournalIndex(Struct, kw_only=True):
    """Index of a run's journals: where the spans of a step are. All lists have an entry for each journal, in order.

    Attributes:
        stamps: The state of the journals, by name.
        shifts_ns: Nanoseconds that were added to their times.
        zones: Their zones.
        attempts: The start of each attempt of the run.
        trainers: The numbers of the journals with spans of a trainer, by which attempts are found.
        beyond: The number of spans that are not in the zones, by the reason.
    """

    stamps: dict[str, Stamp]
    shifts_ns: list[int]
    zones: list[list[Zone]]
    attempts: list[int]
    trainers: list[int]
    beyond: dict[str, int]


AnyLine: TypeAlias = ProcessLine | HookLine | ErrorLine | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine
_decode_other: Callable[[bytes], AnyLine] = msgspec.json.Decoder(AnyLine).decode
_decode_others: Callable[[bytes], list[AnyLine]] = msgspec.json.Decoder(list[AnyLine]).decode


def decoded(text: bytes) -> AnyLine | Line | None:
    """Decode a line of any kind. Return None if that is not possible."""
    # `suppress` would take a fifth of the time.
    try:
        if text[9:13] in _OTHER_KINDS:
            return _decode_other(text)
        span = decoder.line(text)
    except NO_LINE as error:
        seam.pass_on(error)
        return None
    return span if span.kind in SPAN_KINDS else None


def all_decoded(texts: Sequence[bytes]) -> Sequence[AnyLine | Line | None]:
    """Decode lines of any kind, as `decoded` does. For lines without damage this takes half the time."""
    kinds = [text[9:13] in _OTHER_KINDS for text in texts]
    try:
        spans = iter(_decode_batch(b"[%b]" % b",".join(itertools.compress(texts, map(operator.not_, kinds)))))
        others = iter(_decode_others(b"[%b]" % b",".join(itertools.compress(texts, kinds))))
        lines = [next(others) if other else next(spans) for other in kinds]
    except (*NO_LINE, StopIteration) as error:
        seam.pass_on(error)
        return [decoded(text) for text in texts]
    # A line with two values makes the batch longer.
    whole = next(spans, None) is None and next(others, None) is None
    if whole and all(type(line) is not Line or line.kind in SPAN_KINDS for line in lines):
        return lines
    return [decoded(text) for text in texts]


def search(journal: Journal, texts: Sequence[bytes]) -> Iterator[Line]:
    """Yield the ended spans of a file whose lines contain one of the texts, in autoprof's own spelling. Never raises.

    Searching is ten times as fast as decoding all lines.
    """
    with seam.suppress(OSError), io.open(files.opened(journal.path), "rb") as file:
        rest = b""
        while chunk := file.read(_CHUNK_BYTES):
            text, _, rest = (rest + chunk).rpartition(b"\n")
            yield from _matching(text, texts)
            rest = rest if len(rest) <= _MAX_LINE_BYTES else b""
        yield from _matching(rest, texts)


def _matching(lines: bytes, texts: Sequence[bytes]) -> Iterator[Line]:
    found = {}
    for text in texts:
        at = lines.find(text)
        while at >= 0:
            end = lines.find(b"\n", at)
            end = end if end >= 0 else len(lines)
            found[lines.rfind(b"\n", 0, at) + 1] = end
            at = lines.find(text, end)
    for begin, end in sorted(found.items()):
        span = decoded(lines[begin:end])
        if isinstance(span, Line) and 0 < span.start_ns <= span.end_ns:
            yield span


# Bytes at the end of a file in which `recent_spans` reads.
_MAX_RECENT_BYTES = 4 << 20


def recent_spans(journal: Journal) -> list[Line]:
    """Return the last ended spans of a file; none if it can't be read."""
    status = files.status(journal.path)
    begin = max(0, status.st_size - _MAX_RECENT_BYTES) if status is not None else 0
    return [span for batch in SpanReader().batches(journal, [(begin, sys.maxsize)]) for span in batch.spans]
