"""Steps that a run executed, without a full reading of a large timeline.

They come from the timeline's index, or from a search for the lines of steps.
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
# Part of a step's line, in autoprof's own spelling.
_STEP = b'"kind":"step"'
# Bytes at the begin and at the end of a file that are probed. Without a step there, the process drives no steps.
_PROBED = 8 << 20


def steps(run: Path) -> tuple[dict[int, float], list[str]]:
    """Return the seconds of the steps that have ended, by number, and notes on the lines that were left out."""
    paths, _ = timelines(run)
    stamp = index.stamp(paths)
    reader = Reader()
    if (indexed := index.read(run, stamp)) is not None:
        indexed.restore_notes(reader)
        return {span.number: _seconds(span) for span in indexed.spans}, reader.notes()
    if not index.large(stamp):
        lines = (line for file in paths for line in reader.spans(file) if line.kind == "step")
        return {line.step: _seconds(line) for line in lines if line.step is not None}, reader.notes()
    drivers = [file for file in paths if any(_numbers(file, probe=True))]
    seconds = {number: took for file in drivers or paths for number, took in _numbers(file)}
    return seconds, ["the timeline is large, so only its steps were read; autoprof report reads all of it"]


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
    except OSError:  # the report has a note on it
        return


def _searched(file: BinaryIO, at: int, end: int) -> Iterator[tuple[int, float]]:
    """Yield the number and the seconds of each step's line between two offsets."""
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
