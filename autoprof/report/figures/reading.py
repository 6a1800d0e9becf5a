"""Readers of timeline files, as streams. Lines that are cut off or unknown are left out and counted."""

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
# Of the thousands of files of a large run's.
_MOST_NOTES = 20
# So many names of spans, roles and steps are told apart: some put a number into every name. What is told of a step
# grows with them, and so does each page.
MOST = {"name": 1_000, "role": 200, "step": 100_000}


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline file of one process; `name` is relative to the run directory.

    `shift_ns` brings its times onto the clock of the driver's host.
    """

    path: Path
    name: str
    host: str
    pid: int
    shift_ns: int = 0


def timelines(run: Path) -> tuple[list[Timeline], list[str]]:
    """Return the timeline files of a run, on one clock as far as that is known, and notes on their clocks.

    Host and process are in the files' names, as in their first lines.
    """
    found = []
    for path in RunDir(run).lines("timeline"):
        whose = timeline.process_of(path)
        name, host = writable(f"timeline/{path.name}"), writable(whose.host)
        found.append(Timeline(path=path, name=name, host=host, pid=whose.pid))
    there = {timeline.host for timeline in found}
    if len(there) < 2:
        return found, []
    try:
        offsets_by_host = clocks.read_offsets(run)
    except (TraceError, OSError) as error:
        return found, [f"the clocks of {len(there)} hosts are taken as they are set: {error}"]
    # Where they are measured well is all the same here: what is told are seconds.
    offsets = {
        host: min(measured, key=lambda each: each.error_ns) for host, measured in offsets_by_host.offsets.items()
    }
    shifted = [
        msgspec.structs.replace(timeline, shift_ns=-offsets[timeline.host].offset_ns)
        if timeline.host in offsets
        else timeline
        for timeline in found
    ]
    unknown = sorted(there - offsets.keys() - {offsets_by_host.driver})
    if not unknown:
        return shifted, []
    if len(unknown) == 1:
        return shifted, [f"nobody measured the clock of {unknown[0]}: it is taken as it is set"]
    return shifted, [f"nobody measured the clocks of {listed(unknown)}: they are taken as they are set"]


class Reader:
    """Reader of spans that counts the lines it leaves out.

    Attributes:
        left_out: By file and reason, how many lines.
        failed: By file, why it can't be read (to its end).
        beyond: How many spans had a name, a role or a step beyond the first ones.
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
        """Yield a file's spans in the order in which they ended, and lines of kind `PROCESS`. Nothing is raised.

        `part` and `parts` as in `jsonl.lines`.
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
                self.left_out[timeline.name, "cut off or no span"] += 1
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
        """Return whether it is one of the first values."""
        known = self._known[what]
        if value is None or value in known:
            return True
        if len(known) >= MOST[what]:
            self.beyond[what] += 1
            return False
        known.add(value)
        return True

    def _foreign(self, content: bytes) -> bool:
        """Return whether it is of a kind that is unknown here: a newer autoprof may write such lines."""
        try:
            line = self._any.decode(content)
        except NO_JSON:
            return False
        return isinstance(line, dict) and isinstance(line.get("kind"), str) and line["kind"] not in SPAN_KINDS

    def notes(self) -> list[str]:
        """Return the lines left out, a note for each file and reason; of very many files the first."""
        notes = [f"{file}: it can't be read: {reason}" for file, reason in sorted(self.failed.items())] + [
            f"{file}: {several(count, 'line')} left out: {reason}"
            for (file, reason), count in sorted(self.left_out.items())
        ]
        for what, did in (("name", "told as one name"), ("role", "told as one role"), ("step", "left out")):
            if count := self.beyond[what]:
                notes.insert(0, f"{several(count, 'span')} {did}: they are beyond the first {MOST[what]} {what}s")
        rest = notes[_MOST_NOTES:]
        return notes[:_MOST_NOTES] + ([f"and {several(len(rest), 'more such note')} of other files"] if rest else [])
