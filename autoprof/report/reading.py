"""Reads timeline files as streams. A line that is cut off or that nobody knows is left out and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

_CHUNK_BYTES = 1 << 20
# No span's line is longer.
_LINE_BYTES = 1 << 20

Ids = dict[str, str | int | float | bool | None]


class Line(msgspec.Struct, frozen=True, gc=False):
    """One line of a timeline file: a span, or what is said of the process (`host`, `pid`)."""

    kind: str
    name: str = ""
    step: int | None = None
    role: str = ""
    rank: int | None = None
    start_ns: int = 0
    end_ns: int = 0
    error: str | None = None
    ids: Ids = {}
    counts: dict[str, int | float | None] = {}


SPANS = frozenset({"step", "stage", "timer", "sample", "turn", "tool", "reward", "request", "window"})


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline file of one process; `name` is relative to the run directory.

    `shift_ns` brings its times onto the clock of the driver's host.
    """

    path: Path
    name: str
    host: str
    pid: int
    shift_ns: int = 0


def timelines(run: Path) -> list[Timeline]:
    """The timeline files of a run. Host and process are in their names, as in their first lines."""
    found = []
    for path in sorted((run / "timeline").glob("*.jsonl")):
        host, _, pid = path.stem.rpartition("-")
        found.append(
            Timeline(path=path, name=f"timeline/{path.name}", host=host, pid=int(pid) if pid.isdecimal() else 0)
        )
    return found


class Reader:
    """Reads spans, and counts what is left out.

    Attributes:
        left_out: By file and reason, how many lines, or 1 for a file that can't be read.
    """

    def __init__(self) -> None:
        self.left_out: Counter[tuple[str, str]] = Counter()
        self._decoder = msgspec.json.Decoder(Line)
        self._any: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

    def spans(self, timeline: Timeline) -> Iterator[Line]:
        """The spans of a file, in the order in which they ended. Nothing is raised."""
        try:
            with timeline.path.open("rb") as file:
                rest, too_long = b"", False
                while chunk := file.read(_CHUNK_BYTES):
                    *lines, rest = (rest + chunk).split(b"\n")
                    if too_long and lines:
                        lines, too_long = lines[1:], False
                    for content in lines:
                        if (line := self._decoded(timeline, content)) is not None:
                            yield line
                    if len(rest) > _LINE_BYTES:
                        if not too_long:
                            self.left_out[timeline.name, "too long"] += 1
                        rest, too_long = b"", True
                # Whole or not: a process that writes has not ended its line yet, one that was killed never will.
                if rest and not too_long and (line := self._decoded(timeline, rest)) is not None:
                    yield line
        except OSError as error:
            self.left_out[timeline.name, error.strerror or str(error)] += 1

    def _decoded(self, timeline: Timeline, content: bytes) -> Line | None:
        try:
            line = self._decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if content.strip() and not self._foreign(content):
                self.left_out[timeline.name, "cut off or no span"] += 1
            return None
        if line.kind not in SPANS:
            return None
        if not 0 < line.start_ns <= line.end_ns:
            self.left_out[timeline.name, "without a time"] += 1
            return None
        if timeline.shift_ns:
            shift = timeline.shift_ns
            return msgspec.structs.replace(line, start_ns=line.start_ns + shift, end_ns=line.end_ns + shift)
        return line

    def _foreign(self, content: bytes) -> bool:
        """Whether it is of a kind that is not known here: a newer autoprof may write such lines."""
        try:
            line = self._any.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return isinstance(line, dict) and isinstance(line.get("kind"), str) and line["kind"] not in SPANS

    def notes(self) -> list[str]:
        """What was left out, a line for each file and reason."""
        return [
            f"{file}: {count} line{'' if count == 1 else 's'} left out: {reason}"
            for (file, reason), count in sorted(self.left_out.items())
        ]
