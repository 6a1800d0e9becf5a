"""Readers of timeline files, as streams. Truncated and unknown lines are left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from autoprof.base.redact import writable
from autoprof.report.figures.words import listed, several
from autoprof.rundir import decoder
from autoprof.rundir.jsonl import lines
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import PROCESS, SPAN_KINDS, Id, Line, is_span
from autoprof.traces import clocks, timeline
from autoprof.traces.event_rows import OTHER_NAMES
from autoprof.traces.reader import NO_JSON, TraceError

Ids: TypeAlias = Mapping[str, Id | None]
# Notes in a report. A large run has thousands of files.
_MAX_NOTES = 20
# Distinct names of spans, roles and steps that are read. Some programs put a number into every name, and the page grows
# with each name.
MAX_DISTINCT = {"name": 1_000, "role": 200, "step": 100_000}


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Timeline file of one process.

    Attributes:
        path: Its path.
        name: Its path relative to the run directory.
        shift_ns: Nanoseconds to add to its times, to get the clock of the driver's host.
    """

    path: Path
    name: str
    host: str
    pid: int
    shift_ns: int = 0


def timelines(run: Path) -> tuple[list[Timeline], list[str]]:
    """Return the timeline files of a run, and notes on their clocks.

    Times are brought onto one clock if the run measured the clocks of its hosts. Host and pid come from the file names.
    """
    timelines = []
    for path in RunDir(run).lines("timeline"):
        process = timeline.process_of(path)
        name, host = writable(f"timeline/{path.name}"), writable(process.host)
        timelines.append(Timeline(path=path, name=name, host=host, pid=process.pid))
    hosts = {timeline.host for timeline in timelines}
    if len(hosts) < 2:
        return timelines, []
    try:
        offsets_by_host = clocks.read_offsets(run)
    except (TraceError, OSError) as error:
        return timelines, [f"clocks of {len(hosts)} hosts are not corrected; their own settings are used: {error}"]
    # The best measurement of each host is precise enough for a report, which shows seconds.
    offsets = {
        host: min(measured, key=lambda each: each.error_ns) for host, measured in offsets_by_host.offsets.items()
    }
    shifted = [
        msgspec.structs.replace(timeline, shift_ns=-offsets[timeline.host].offset_ns)
        if timeline.host in offsets
        else timeline
        for timeline in timelines
    ]
    unknown = sorted(hosts - offsets.keys() - {offsets_by_host.driver})
    if not unknown:
        return shifted, []
    if len(unknown) == 1:
        return shifted, [f"the clock of {unknown[0]} was not measured; its own setting is used"]
    return shifted, [f"clocks of {listed(unknown)} were not measured; their own settings are used"]


class Reader:
    """Reader of spans that counts the lines it leaves out.

    Attributes:
        left_out: The number of lines left out, by file and reason.
        failed: The reason why a file can't be read to its end, by file.
        beyond: The number of spans whose name, role or step exceeds `MAX_DISTINCT`.
    """

    def __init__(self) -> None:
        self.left_out: Counter[tuple[str, str]] = Counter()
        self.failed: dict[str, str] = {}
        self._known: dict[str, set[str | int]] = {"name": set(), "role": set(), "step": set()}
        self.beyond: Counter[str] = Counter()
        self._any: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

    def spans(
        self,
        timeline: Timeline,
        part: Callable[[int], object] | None = None,
        parts: Sequence[tuple[int, int]] | None = None,
    ) -> Iterator[Line]:
        """Yield a file's spans in the order of their ends, and its lines of kind `PROCESS`. Never raises.

        Args:
            timeline: The file.
            part: The argument of `jsonl.lines`.
            parts: The argument of `jsonl.lines`.
        """
        try:
            for content in lines(timeline.path, part, parts):
                if content is None:
                    self.left_out[timeline.name, "too long"] += 1
                elif is_span(content) and (line := self._decoded(timeline, content)) is not None:
                    yield line
        except OSError as error:
            self.failed[timeline.name] = error.strerror or str(error)

    def _decoded(self, timeline: Timeline, content: bytes) -> Line | None:
        try:
            line = decoder.line(content)
        except NO_JSON:
            if content.strip() and not self._foreign(content):
                self.left_out[timeline.name, "truncated, or not a span"] += 1
            return None
        if line.kind not in SPAN_KINDS:
            return line if line.kind == PROCESS else None
        if not 0 < line.start_ns <= line.end_ns:
            self.left_out[timeline.name, "without a time"] += 1
            return None
        if not self._is_known("step", line.step):
            return None
        if not self._is_known("name", line.name):
            line = msgspec.structs.replace(line, name=OTHER_NAMES)
        if not self._is_known("role", line.role):
            line = msgspec.structs.replace(line, role=OTHER_NAMES)
        if timeline.shift_ns:
            shift = timeline.shift_ns
            return msgspec.structs.replace(line, start_ns=line.start_ns + shift, end_ns=line.end_ns + shift)
        return line

    def _is_known(self, what: str, value: str | int | None) -> bool:
        """Return True if a value is among the first `MAX_DISTINCT` of its kind."""
        known = self._known[what]
        if value is None or value in known:
            return True
        if len(known) >= MAX_DISTINCT[what]:
            self.beyond[what] += 1
            return False
        known.add(value)
        return True

    def _foreign(self, content: bytes) -> bool:
        """Return True if a line has a kind that this version does not know. A newer autoprof may write such lines."""
        try:
            line = self._any.decode(content)
        except NO_JSON:
            return False
        return isinstance(line, dict) and isinstance(line.get("kind"), str) and line["kind"] not in SPAN_KINDS

    def notes(self) -> list[str]:
        """Return a note for each file and reason with left-out lines; if there are many files, for the first ones."""
        notes = [f"{file}: it can't be read: {reason}" for file, reason in sorted(self.failed.items())] + [
            f"{file}: {several(count, 'line')} left out: {reason}"
            for (file, reason), count in sorted(self.left_out.items())
        ]
        for what, effect in (("name", "merged into one name"), ("role", "merged into one role"), ("step", "left out")):
            if count := self.beyond[what]:
                spans = several(count, "span")
                notes.insert(0, f"{spans} {effect}: only the first {MAX_DISTINCT[what]} {what}s are distinguished")
        more = notes[_MAX_NOTES:]
        return notes[:_MAX_NOTES] + ([f"and {several(len(more), 'more such note')} of other files"] if more else [])
