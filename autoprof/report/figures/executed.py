"""Steps that a run executed, without reading all of a large timeline: its index tells, or a search for the lines of
steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from autoprof.base import files
from autoprof.report.figures import index
from autoprof.report.figures.reading import Reader, Timeline, timelines
from autoprof.rundir import decoder
from autoprof.rundir.records import Line
from autoprof.traces.reader import NO_JSON

_PIECE = 1 << 20
# As autoprof writes it.
_STEP = b'"kind":"step"'
# A file without a step's line in so much of its begin and its end is of a process that drives no steps.
_PROBED = 8 << 20


def steps(run: Path) -> tuple[dict[int, float], list[str]]:
    """Return the seconds of the steps that have ended by number, and notes on the lines that were left out."""
    found, _ = timelines(run)
    stamp = index.stamp(found)
    reader = Reader()
    if (known := index.read(run, stamp)) is not None:
        known.tell(reader)
        return {span.number: _seconds(span) for span in known.spans}, reader.notes()
    if not index.large(stamp):
        lines = (line for file in found for line in reader.spans(file) if line.kind == "step")
        return {line.step: _seconds(line) for line in lines if line.step is not None}, reader.notes()
    drivers = [file for file in found if any(_numbers(file, probe=True))]
    numbers = {number: took for file in drivers or found for number, took in _numbers(file)}
    return numbers, ["the timeline is large, and was searched for steps alone: autoprof report reads all of it"]


def _seconds(span: Line | index.StepSpan) -> float:
    return (span.end_ns - span.start_ns) / 1e9


def _numbers(timeline: Timeline, probe: bool = False) -> Iterator[tuple[int, float]]:
    try:
        with os.fdopen(files.opened(timeline.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not probe or size <= 2 * _PROBED:
                yield from _searched(file, 0, size)
            else:
                yield from _searched(file, 0, _PROBED)
                yield from _searched(file, size - _PROBED, size)
    except OSError:  # a report names it
        return


def _searched(file: BinaryIO, at: int, end: int) -> Iterator[tuple[int, float]]:
    """Yield the numbers and the seconds in the lines of steps between two places."""
    file.seek(at)
    rest = b""
    while at < end and (piece := file.read(min(_PIECE, end - at))):
        at += len(piece)
        text = rest + piece
        place = text.find(_STEP)
        while place >= 0:
            close = text.find(b"\n", place)
            if close < 0:
                break
            try:
                line = decoder.line(text[text.rfind(b"\n", 0, place) + 1 : close])
            except NO_JSON:
                line = None
            if line is not None and line.kind == "step" and line.step is not None and 0 < line.start_ns <= line.end_ns:
                yield line.step, _seconds(line)
            place = text.find(_STEP, close)
        rest = text[text.rfind(b"\n") + 1 :][-_PIECE:]
