"""Reads timeline files as streams. A line that is cut off or that nobody knows is left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from autoprof.redaction import writable
from autoprof.report.figures import PROFILING
from autoprof.report.words import listed, several
from autoprof.traces import hosts, spans
from autoprof.traces.attempts import PROCESS
from autoprof.traces.events import OTHER_NAMES
from autoprof.traces.lines import Ns, Number, lines
from autoprof.traces.reader import NO_JSON, TraceError

Ids: TypeAlias = dict[str, str | int | float | bool | None]
# Of the thousands of files of a large run's.
_MOST_NOTES = 20
# So many names of spans, roles and steps are told apart: some put a number into every name. What is told of a step
# grows with them, and so does each page.
MOST_NAMES, MOST_ROLES, MOST_STEPS = 1_000, 200, 100_000
# More tokens than any engine makes in a span.
_Count: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line of a timeline file: a span, or what is said of the process (`host`, `pid`)."""

    kind: str
    name: str = ""
    step: Number | None = None
    role: str = ""
    rank: Number | None = None
    start_ns: Ns = 0
    end_ns: Ns = 0
    error: str | None = None
    ids: Ids = {}
    counts: dict[str, _Count | None] = {}


SPANS = frozenset({"step", "stage", "timer", "sample", "turn", "tool", "reward", "request", "window", PROFILING})


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
    """The timeline files of a run, on one clock as far as that is known, and what is to say of their clocks.

    Host and process are in the files' names, as in their first lines.
    """
    found = []
    for path in sorted((run / "timeline").glob("*.jsonl")):
        whose = spans.process(path)
        name, host = writable(f"timeline/{path.name}"), writable(whose.host)
        found.append(Timeline(path=path, name=name, host=host, pid=whose.pid))
    there = {timeline.host for timeline in found}
    if len(there) < 2:
        return found, []
    try:
        clocks = hosts.read(run)
    except (TraceError, OSError) as error:
        return found, [f"the clocks of {len(there)} hosts are taken as they are set: {error}"]
    # Where they are measured well is all the same here: what is told are seconds.
    offsets = {host: min(measured, key=lambda each: each.error_ns) for host, measured in clocks.offsets.items()}
    shifted = [
        msgspec.structs.replace(timeline, shift_ns=-offsets[timeline.host].offset_ns)
        if timeline.host in offsets
        else timeline
        for timeline in found
    ]
    unknown = sorted(there - offsets.keys() - {clocks.driver})
    if not unknown:
        return shifted, []
    if len(unknown) == 1:
        return shifted, [f"nobody measured the clock of {unknown[0]}: it is taken as it is set"]
    return shifted, [f"nobody measured the clocks of {listed(unknown)}: they are taken as they are set"]


class Reader:
    """Reads spans, and counts what is left out.

    Attributes:
        left_out: By file and reason, how many lines.
        failed: By file, why it can't be read (to its end).
    """

    def __init__(self) -> None:
        self.left_out: Counter[tuple[str, str]] = Counter()
        self.failed: dict[str, str] = {}
        self._known: dict[str, set[str | int]] = {"name": set(), "role": set(), "step": set()}
        self._beyond: Counter[str] = Counter()
        self._decoder = msgspec.json.Decoder(Line)
        self._any: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

    def spans(self, timeline: Timeline) -> Iterator[Line]:
        """The spans of a file, in the order in which they ended, and lines of kind `PROCESS`. Nothing is raised."""
        try:
            for content in lines(timeline.path):
                if content is None:
                    self.left_out[timeline.name, "too long"] += 1
                elif (line := self._decoded(timeline, content)) is not None:
                    yield line
        except OSError as error:
            self.failed[timeline.name] = error.strerror or str(error)

    def _decoded(self, timeline: Timeline, content: bytes) -> Line | None:
        try:
            line = self._decoder.decode(content)
        except NO_JSON:
            if content.strip() and not self._foreign(content):
                self.left_out[timeline.name, "cut off or no span"] += 1
            return None
        if line.kind not in SPANS:
            return line if line.kind == PROCESS else None
        if not 0 < line.start_ns <= line.end_ns:
            self.left_out[timeline.name, "without a time"] += 1
            return None
        if not self._is_known("step", line.step, MOST_STEPS):
            return None
        if not self._is_known("name", line.name, MOST_NAMES):
            line = msgspec.structs.replace(line, name=OTHER_NAMES)
        if not self._is_known("role", line.role, MOST_ROLES):
            line = msgspec.structs.replace(line, role=OTHER_NAMES)
        if timeline.shift_ns:
            shift = timeline.shift_ns
            return msgspec.structs.replace(line, start_ns=line.start_ns + shift, end_ns=line.end_ns + shift)
        return line

    def _is_known(self, what: str, value: str | int | None, most: int) -> bool:
        """Whether it is one of the first `most` values."""
        known = self._known[what]
        if value is None or value in known:
            return True
        if len(known) >= most:
            self._beyond[what] += 1
            return False
        known.add(value)
        return True

    def _foreign(self, content: bytes) -> bool:
        """Whether it is of a kind that is not known here: a newer autoprof may write such lines."""
        try:
            line = self._any.decode(content)
        except NO_JSON:
            return False
        return isinstance(line, dict) and isinstance(line.get("kind"), str) and line["kind"] not in SPANS

    def notes(self) -> list[str]:
        """What was left out, a line for each file and reason; of very many files the first."""
        notes = [f"{file}: it can't be read: {reason}" for file, reason in sorted(self.failed.items())] + [
            f"{file}: {several(count, 'line')} left out: {reason}"
            for (file, reason), count in sorted(self.left_out.items())
        ]
        for what, did in (("name", "told as one name"), ("role", "told as one role"), ("step", "left out")):
            if count := self._beyond[what]:
                most = len(self._known[what])
                notes.insert(0, f"{several(count, 'span')} {did}: they are beyond the first {most} {what}s")
        rest = notes[_MOST_NOTES:]
        return notes[:_MOST_NOTES] + ([f"and {several(len(rest), 'more such note')} of other files"] if rest else [])
