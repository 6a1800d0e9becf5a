"""Spans of a run's timeline: those of one step, from the files of all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from autoprof.traces.attempts import PROCESS, Attempts, is_of
from autoprof.traces.lines import Ns, Number, lines
from autoprof.traces.reader import NO_JSON

# No viewer shows more spans of a step.
MOST_SPANS = 500_000
_STEP, _TRAINER = "step", "trainer"


class Span(Struct, frozen=True):
    """One line of a timeline. Times are in ns since the epoch, by the clock of the process's host."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    step: int | None = None
    role: str = ""
    rank: int | None = None
    error: str = ""
    ids: dict[str, Any] = {}
    counts: dict[str, Any] = {}


class Process(Struct, frozen=True):
    """Whose spans they are: a file's process, by the file's name where its first line does not say."""

    host: str
    pid: int


class Line(Struct):
    """A line as it stands there: a span or a process."""

    kind: str = ""
    name: str = ""
    start_ns: Ns | None = None
    end_ns: Ns | None = None
    step: Number | None = None
    role: str | None = None
    rank: Number | None = None
    error: str = ""
    ids: dict[str, Any] = {}
    counts: dict[str, Any] = {}


_decode = msgspec.json.Decoder(Line).decode


def read(path: Path, too_long: Counter[str] | None = None) -> Iterator[Span]:
    """The spans of one file, and one of kind `PROCESS` where a process begins its part of it.

    Lines that can't be read, as where a process was killed, are left out; `too_long` counts those that are that.

    Raises:
        OSError: The file can't be read, or is none.
    """
    for text in lines(path):
        if text is None and too_long is not None:
            too_long[path.name] += 1
        try:
            line = _decode(text or b"")
        except NO_JSON:
            continue
        if line.kind == PROCESS:
            yield Span(kind=PROCESS, name="", start_ns=0, end_ns=0)
        elif line.start_ns is not None and line.end_ns is not None:
            yield Span(
                kind=line.kind,
                name=line.name,
                start_ns=line.start_ns,
                end_ns=max(line.start_ns, line.end_ns),
                step=line.step,
                role=line.role or "",
                rank=line.rank,
                error=line.error,
                ids=line.ids,
                counts=line.counts,
            )


def process(path: Path) -> Process:
    """Whose file it is."""
    host, _, pid = path.stem.rpartition("-")
    return Process(host or path.stem, int(pid) if pid.isdecimal() else 0)


def of_step(run: Path, number: int, said: list[str] | None = None) -> dict[Process, list[Span]]:
    """The spans of a step: those that carry its number, and those without one that begin while it runs.

    Of a step that ran again after the run was resumed, those of the last time. The files are read twice, line by line;
    what is kept is one step's, and no more than `MOST_SPANS`; `said` is told what is left out.
    """
    paths = [path for path in sorted((run / "timeline").glob("*.jsonl")) if path.is_file()]
    attempts, too_long = Attempts(), Counter[str]()
    # Each host's own clock: a step that the driver timed is compared with spans of other hosts as they stand.
    bounds = []
    for place, path in enumerate(paths):
        for span in read(path, too_long):
            attempts.add(place, span)
            if span.step == number:
                bounds.append((span.kind == _STEP, span.role == _TRAINER, span.start_ns, span.end_ns))
    attempts.finish()
    if said is not None:
        lines_of = {name: "1 line" if count == 1 else f"{count} lines" for name, count in too_long.items()}
        said += [f"timeline/{name}: {several} left out: too long" for name, several in lines_of.items()]
    if not bounds:
        return {}
    since, until = attempts.around(max(bounds)[2])
    steps = [bound for bound in bounds if bound[0] and since < bound[3] and bound[2] < until] or bounds
    start, end = min(bound[2] for bound in steps), max(bound[3] for bound in steps)
    found: dict[Process, list[Span]] = {}
    count = 0
    for path in paths:
        for span in read(path):
            own = span.step == number and is_of(span, since, until)
            if own or (span.step is None and span.kind != PROCESS and start <= span.start_ns <= end):
                count += 1
                if count > MOST_SPANS:
                    continue
                found.setdefault(process(path), []).append(span)
    if count > MOST_SPANS and said is not None:
        said.append(
            f"left out: {count - MOST_SPANS} spans of the timeline, which has more than {MOST_SPANS} of the step"
        )
    return found
