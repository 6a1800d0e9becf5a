"""Reader of a run's journals: one file per process, `journal/<host>-<pid>.jsonl`, with one journal line per event.

`SpanReader` decodes the ended spans of a file in groups of lines. `search` finds the ended spans that contain a text.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from autoprof.base import files, seam
from autoprof.base.originals import io
from autoprof.base.redact import writable
from autoprof.rundir import file_names, layout
from autoprof.rundir.layout import RunDir, Stamp, stamp
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
    StacksLine,
)

# Exceptions that the decoder raises for a line that is cut off, damaged, or written by a newer autoprof.
NO_LINE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Journal(Struct, frozen=True, kw_only=True):
    """The journal of one process.

    Attributes:
        path: The path of the file.
        host: The host of the process, from the file's name.
        pid: The pid of the process, from the file's name; 0 if the name has no pid.
        shift_ns: The nanoseconds to add to the times in the file. The sums are times of the clock of the driver's host.
    """

    path: Path
    host: str
    pid: int
    shift_ns: int = 0

    @property
    def name(self) -> str:
        """Return the path of the file relative to the run directory."""
        return writable(f"journal/{self.path.name}")


def journals(run: str | Path) -> list[Journal]:
    """Return the journals of a run, sorted by name."""
    named_files = [(path, *file_names.process_of(path.name)) for path in RunDir(Path(run)).lines("journal")]
    return [Journal(path=path, host=writable(host), pid=pid) for path, host, pid in named_files]


def journal_stamps(journals: Sequence[Journal]) -> dict[str, Stamp]:
    """Return a dict from the name of a journal to its stamp. Cached content is valid while the stamp is the same."""
    stamps = {journal.path.name: stamp(journal.path) for journal in journals}
    return {name: current for name, current in stamps.items() if current is not None}


WHOLE_FILE = ((0, sys.maxsize),)
_CHUNK_BYTES = 1 << 20
# Maximum length of a line that is read. It is longer than any line that autoprof writes.
_MAX_LINE_BYTES = 1 << 20
_BATCH_LINES = 128
# The first four characters of the kind, which follow `{"kind":"`, of lines that are not ended spans.
OTHER_KINDS: frozenset[bytes] = frozenset(
    (b"proc", b"hook", b"erro", b"begu", b"drop", b"exit", b"rais", b"memo", b"stac")
)
_STACKS = b"stac"
_decode_batch = msgspec.json.Decoder(list[Line]).decode
_decode_any = msgspec.json.Decoder().decode


_decode_line = msgspec.json.Decoder(Line).decode


def span_line(content: bytes) -> Line:
    """Decode the journal line of an ended span.

    For a line of another kind, only the fields that also belong to `Line` are set. All other fields are blank.

    Raises:
        msgspec.DecodeError: The line is not valid.
        UnicodeDecodeError: The line is not UTF-8.
        RecursionError: The line is nested too deeply.
    """
    try:
        return _decode_line(content)
    except msgspec.ValidationError:
        return msgspec.convert({**layout.blanks(Line), **msgspec.json.decode(content, type=dict[str, Any])}, Line)


AnyLine: TypeAlias = (
    ProcessLine | HookLine | ErrorLine | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine | StacksLine
)
_decode_other: Callable[[bytes], AnyLine] = msgspec.json.Decoder(AnyLine).decode
_decode_others: Callable[[bytes], list[AnyLine]] = msgspec.json.Decoder(list[AnyLine]).decode


def decoded(text: bytes) -> AnyLine | Line | None:
    """Decode a journal line of any kind. Return None if the line is damaged or of an unknown kind."""
    # `seam.suppress` is not used, because it would take a fifth of the time of this function.
    try:
        if text[9:13] in OTHER_KINDS:
            return _decode_other(text)
        span = span_line(text)
    except NO_LINE as error:
        seam.pass_on(error)
        return None
    return span if span.kind in SPAN_KINDS else None


def all_decoded(texts: Sequence[bytes]) -> Sequence[AnyLine | Line | None]:
    """Decode journal lines of any kind, as `decoded` does for one line. This is twice as fast if no line is damaged."""
    others = [text for text in texts if text[9:13] in OTHER_KINDS]
    spans = [text for text in texts if text[9:13] not in OTHER_KINDS] if others else texts
    with seam.suppress(*NO_LINE):
        span_lines, other_lines = _decode_batch(b"[%b]" % b",".join(spans)), _decode_others(b"[%b]" % b",".join(others))
        # If a line has two JSON values, there are more decoded values than lines.
        is_complete = (len(span_lines), len(other_lines)) == (len(spans), len(others))
        if is_complete and {span.kind for span in span_lines} <= SPAN_KINDS.keys():
            if not others:
                return span_lines
            next_span, next_other = iter(span_lines).__next__, iter(other_lines).__next__
            return [next_other() if text[9:13] in OTHER_KINDS else next_span() for text in texts]
    return [decoded(text) for text in texts]


class Batch(NamedTuple):
    """The ended spans of a group of consecutive journal lines.

    Attributes:
        begin: The offset of the first line, in bytes.
        spans: The spans, in the order of their ends.
        stacks: The samples of stacks in these lines.
    """

    begin: int
    spans: list[Line]
    stacks: list[StacksLine]


class SpanReader:
    """Reader of ended spans. It counts the journal lines that it can't decode.

    Attributes:
        left_out: Counter of the lines that were left out, by the name of the file and the reason.
        failed: Dict from the name of a file that can't be read to its end, to the reason.
    """

    def __init__(self) -> None:
        self.left_out: Counter[tuple[str, str]] = Counter()
        self.failed: dict[str, str] = {}

    def batches(self, journal: Journal, ranges: Sequence[tuple[int, int]] = WHOLE_FILE) -> Iterator[Batch]:
        """Yield the ended spans of a journal, in groups. Never raises.

        Args:
            journal: The journal to read.
            ranges: The parts of the file to read: for each part, the offset of its first line and of its end, in bytes.
        """
        try:
            with io.open(files.opened(journal.path), "rb") as file:
                for begin, end in ranges:
                    for start, texts in _groups(file, begin, end):
                        spans = self._decoded(journal, [text for text in texts if text[9:13] not in OTHER_KINDS])
                        stacks = [decoded(text) for text in texts if text[9:13] == _STACKS]
                        samples = [line for line in stacks if isinstance(line, StacksLine)]
                        yield Batch(start, spans, samples)
        except OSError as error:
            seam.pass_on(error)
            self.failed[journal.name] = error.strerror or str(error)

    def spans(self, journal: Journal) -> Iterator[Line]:
        """Yield the ended spans of a journal one by one. Omit spans without a valid start and end. Never raises."""
        for batch in self.batches(journal):
            yield from (span for span in batch.spans if 0 < span.start_ns <= span.end_ns)

    def _decoded(self, journal: Journal, texts: list[bytes]) -> list[Line]:
        lines = all_decoded(texts)
        if None in lines:
            for line, text in zip(lines, texts, strict=True):
                if line is None and len(text) > _MAX_LINE_BYTES:
                    self.left_out[journal.name, "too long"] += 1
                elif line is None and text.strip() and not is_foreign(text):
                    self.left_out[journal.name, "truncated, or not a span"] += 1
        return [line for line in lines if type(line) is Line]


def is_foreign(text: bytes) -> bool:
    """Return True if a journal line has a kind that this release does not know. A newer release may have written it."""
    with seam.suppress(*NO_LINE):
        line = _decode_any(text)
        return isinstance(line, dict) and isinstance(line.get("kind"), str) and line["kind"] not in SPAN_KINDS
    return False


def _groups(file: BinaryIO, offset: int, end: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield groups of lines, each with the offset of its first line in bytes.

    A line that is longer than `_MAX_LINE_BYTES` is cut.

    Args:
        file: The open journal.
        offset: The offset at which to begin, in bytes.
        end: The offset at which to stop, in bytes.
    """
    file.seek(offset)
    rest, skipping = b"", False
    while chunk := file.read(min(_CHUNK_BYTES, end - offset)):
        begin, offset = offset - len(rest), offset + len(chunk)
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
    # The last line has no newline: a process is still writing the line, or was killed while it wrote the line.
    if rest and not skipping:
        yield offset - len(rest), [rest]


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their newlines. A line over 1 MiB is cut. The last line may be incomplete.

    Raises:
        OSError: The path is not a file, or can't be read to its end.
    """
    with io.open(files.opened(path), "rb") as file:
        for _, group in _groups(file, 0, sys.maxsize):
            yield from group


EVER = 1 << 63


class Zone(Struct, array_like=True):
    """A part of a journal, from its first line to the next zone. A zone without spans matches no step.

    Attributes:
        begin: The offset of the first line, in bytes.
        start_ns: The earliest start of a span in the zone.
        end_ns: The latest end of a span in the zone.
        first_step: The smallest step of a span in the zone.
        last_step: The largest step of a span in the zone.
    """

    begin: int
    start_ns: int = EVER
    end_ns: int = 0
    first_step: int = EVER
    last_step: int = -EVER

    def has(self, step: int, start_ns: int, end_ns: int) -> bool:
        """Return True if the zone may have spans of the step, or spans that overlap the period of the step."""
        of_step = self.first_step <= step <= self.last_step
        return of_step or (self.start_ns < end_ns and self.end_ns > start_ns)


def ranges(zones: Sequence[Zone], steps: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a journal that may have spans of some steps. Adjacent zones become one part.

    Args:
        zones: The zones of the journal. The last zone also includes lines that were written after the zones were made.
        steps: For each step, its number, start and end. The times are in nanoseconds since the epoch.

    Returns:
        For each part, the offset of its beginning and of its end, in bytes.
    """
    ranges: list[tuple[int, int]] = []
    for zone, end in zip(zones, [*(zone.begin for zone in zones[1:]), sys.maxsize], strict=False):
        if any(zone.has(*step) for step in steps):
            if ranges and ranges[-1][1] == zone.begin:
                ranges[-1] = ranges[-1][0], end
            else:
                ranges.append((zone.begin, end))
    return ranges


# Name of the part of the cache with the index.
INDEX = "timeline"


class JournalIndex(Struct, kw_only=True):
    """Index of a run's journals, by which the spans of a step are found without reading all journals.

    Attributes:
        stamps: Dict from the name of a journal to its stamp when the index was made.
        shifts_ns: For each journal, in the order of their names, the nanoseconds that were added to its times.
        zones: For each journal, in the order of their names, its zones.
        attempts: The start of each attempt of the run, and of each further loop, in nanoseconds since the epoch.
        loop_of: The number of the loop that starts at each of these times.
        loops: Dict from the number of each loop to the name of its trainer's class and its number in its process.
        trainers: The indexes of the journals with spans of a trainer. The attempts are found in these journals.
        beyond: Dict from a reason to the number of spans that are in no zone for that reason.
    """

    stamps: dict[str, Stamp]
    shifts_ns: list[int]
    zones: list[list[Zone]]
    attempts: list[int]
    loop_of: list[int]
    loops: dict[int, tuple[str, int]]
    trainers: list[int]
    beyond: dict[str, int]


def search(journal: Journal, texts: Sequence[bytes]) -> Iterator[Line]:
    """Yield the ended spans of a journal whose lines contain one of the texts. Never raises.

    The texts must have the form in which autoprof writes JSON. Searching is ten times as fast as decoding all lines.
    """
    with seam.suppress(OSError), io.open(files.opened(journal.path), "rb") as file:
        rest = b""
        while chunk := file.read(_CHUNK_BYTES):
            text, _, rest = (rest + chunk).rpartition(b"\n")
            yield from _matching(text, texts)
            rest = rest if len(rest) <= _MAX_LINE_BYTES else b""
        yield from _matching(rest, texts)


def _matching(lines: bytes, texts: Sequence[bytes]) -> Iterator[Line]:
    """Yield the spans whose journal lines contain one of the texts, in the order of the lines."""
    line_ends = {}
    for text in texts:
        position = lines.find(text)
        while position >= 0:
            end = lines.find(b"\n", position)
            end = end if end >= 0 else len(lines)
            line_ends[lines.rfind(b"\n", 0, position) + 1] = end
            position = lines.find(text, end)
    for begin, end in sorted(line_ends.items()):
        span = decoded(lines[begin:end])
        if isinstance(span, Line) and 0 < span.start_ns <= span.end_ns:
            yield span


# Number of bytes at the end of a journal that `recent_spans` reads.
_MAX_RECENT_BYTES = 4 << 20


def recent_spans(journal: Journal) -> list[Line]:
    """Return the last ended spans of a journal; an empty list if the journal can't be read."""
    status = files.status(journal.path)
    begin = max(0, status.st_size - _MAX_RECENT_BYTES) if status is not None else 0
    return [span for batch in SpanReader().batches(journal, [(begin, sys.maxsize)]) for span in batch.spans]
