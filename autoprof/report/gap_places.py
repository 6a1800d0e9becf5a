"""Places of the driver in the times of a step without a stage, from the samples of its stack in the journal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import msgspec

from autoprof.base.intervals import Union
from autoprof.report import places
from autoprof.report.model import GapPlace, StepRow
from autoprof.report.overview import LEAST_S, free_time
from autoprof.report.timeline import NO_FILE, RunTimeline, StepSpan
from autoprof.rundir.journal import SpanReader, ranges
from autoprof.rundir.records import LOCK_HELD, Frame, StacksLine

# Maximum number of steps whose samples are read, and of places of a step. The steps with the longest times are read.
_MAX_STEPS, _MAX_PLACES = 32, 8
# Places under this share of the time without a stage are left out.
_MIN_SHARE = 0.02
# Maximum number of functions of the stack of a place.
_MAX_FRAMES = 12
# Files of Python's own import, whose functions are left out.
_IMPORT = "<frozen importlib"


def with_places(rows: Sequence[StepRow], spans: Mapping[int, StepSpan], timeline: RunTimeline) -> list[StepRow]:
    """Return the rows of all steps. Add the places of the driver to the longest times without a stage.

    Args:
        rows: The rows of the steps.
        spans: The spans of the steps, by number.
        timeline: The timeline of the run.
    """
    gaps_s = {row.number: row.no_stage.seconds for row in rows if row.no_stage is not None}
    chosen = sorted(gaps_s, key=lambda number: -gaps_s[number])[:_MAX_STEPS]
    samples = _samples([spans[number] for number in chosen], timeline)
    return [
        msgspec.structs.replace(row, no_stage=msgspec.structs.replace(row.no_stage, places=found))
        if row.no_stage is not None
        and row.number in chosen
        and (found := _places_in_step(spans[row.number], timeline, samples[row.number]))
        else row
        for row in rows
    ]


def _samples(spans: Sequence[StepSpan], timeline: RunTimeline) -> dict[int, list[tuple[StacksLine, int]]]:
    """Return the samples of the drivers of some steps, by the number of the step, each with the shift of its clock."""
    by_file: dict[int, list[StepSpan]] = defaultdict(list)
    for span in spans:
        if span.file != NO_FILE:
            by_file[span.file].append(span)
    found: dict[int, list[tuple[StacksLine, int]]] = defaultdict(list)
    reader = SpanReader()
    for file, steps in by_file.items():
        journal = timeline.journals[file]
        times = [(step.number, step.start_ns, step.end_ns) for step in steps]
        for batch in reader.batches(journal, ranges(timeline.zones[file], times)):
            for line in batch.stacks:
                start_ns, end_ns = line.unix_ns + journal.shift_ns, line.until_ns + journal.shift_ns
                for step in steps:
                    if start_ns < step.end_ns and end_ns > step.start_ns:
                        found[step.number].append((line, journal.shift_ns))
    return found


def _places_in_step(step: StepSpan, timeline: RunTimeline, samples: Sequence[tuple[StacksLine, int]]) -> list[GapPlace]:
    """Return the places of the driver in the times of a step without a stage, the longest first."""
    free = free_time(step, timeline.steps[step.number])
    sums_ns: dict[str, int] = defaultdict(int)
    longest: dict[str, tuple[int, list[Frame]]] = {}
    covered = Union()
    for line, shift_ns in samples:
        stacks = [_stack(line, indexes) for indexes in line.stacks]
        names = [_name(stack) for stack in stacks]
        for number, (start_ms, end_ms, index) in enumerate(line.periods):
            begin_ns, end_ns = (line.unix_ns + shift_ns + at_ms * 10**6 for at_ms in (start_ms, end_ms))
            # The last sample of the step before may stand for the begin of this step too. Milliseconds are rounded.
            if begin_ns < step.start_ns - 10**6:
                continue
            period = Union([(begin_ns, end_ns)])
            length_ns = sum(period.length(low, high) for low, high in free)
            if not length_ns or not LOCK_HELD <= index < len(stacks):
                continue
            for low, high in period.pieces():
                covered.add(low, high)
            stack, name = (stacks[index], names[index]) if index != LOCK_HELD else _after(line, number, stacks, names)
            sums_ns[name] += length_ns
            longest[name] = max(longest.get(name, (0, [])), (length_ns, stack), key=lambda each: each[0])
    whole_ns = sum(high - low for low, high in free)
    found = [
        GapPlace(seconds=sum_ns / 1e9, place=name, frames=_texts(longest[name][1]))
        for name, sum_ns in sums_ns.items()
        if sum_ns >= _MIN_SHARE * whole_ns
    ]
    found.sort(key=lambda place: -place.seconds)
    unsampled_s = (whole_ns - sum(covered.length(low, high) for low, high in free)) / 1e9
    if found and unsampled_s >= LEAST_S:
        found = [*found[:_MAX_PLACES], GapPlace(seconds=unsampled_s, place="without a sample of its stack")]
    return found[: _MAX_PLACES + 1]


def _after(
    line: StacksLine, number: int, stacks: Sequence[list[Frame]], names: Sequence[str]
) -> tuple[list[Frame], str]:
    """Return the stack and the name for a time in which the interpreter's lock was held, the period `number`."""
    text = "without a sample, because the interpreter's lock was held"
    following = line.periods[number + 1 : number + 2]
    if not following or not 0 <= following[0][2] < len(stacks):
        return [], text
    index = following[0][2]
    return stacks[index], f"{text}; then it was {names[index]}"


def _stack(line: StacksLine, indexes: Sequence[int]) -> list[Frame]:
    """Return the functions of a stack, the outermost first."""
    frames = [line.frames[index] for index in indexes if 0 <= index < len(line.frames)]
    return [frame for frame in frames if not frame.file.startswith(_IMPORT)]


def _texts(stack: Sequence[Frame]) -> list[str]:
    """Return the functions of a stack, from the outermost one to the function that the place calls."""
    end = _index(stack, places.best_frame(stack)) + 2
    return [places.text(frame) for frame in stack[:end][-_MAX_FRAMES:]]


def _index(stack: Sequence[Frame], wanted: Frame | None) -> int:
    return max((index for index, frame in enumerate(stack) if frame is wanted), default=-1)


def _name(stack: Sequence[Frame]) -> str:
    """Return the place of a stack, such as `in queue.get at train.py:33 wait_batch`."""
    best = places.best_frame(stack)
    if best is None:
        return "at an unknown place"
    where = f"at {places.text(best)}"
    inner = stack[_index(stack, best) + 1 :]
    if places.waits(stack) == places.RAY:
        return f"{places.RAY} {where}"
    if not inner:
        return where
    # autoprof's import hook is in the stack of a module that is imported, too.
    packages = [places.package(frame) for frame in inner]
    if next((package for package in reversed(packages) if package != "python"), "") == "autoprof":
        return f"in autoprof {where}"
    if (imported := next((frame for frame in inner if places.name(frame) == "<module>"), None)) is not None:
        return f"in import {_module(imported)} {where}"
    # torch calls a module's `forward` through functions such as `_wrapped_call_impl`, which say nothing.
    called = next((frame for frame in inner if not places.name(frame).startswith("_")), inner[0])
    return f"in {_module(called)}.{places.name(called)} {where}" if places.package(called) else where


def _module(frame: Frame) -> str:
    """Return the name of the module of a function, without its packages."""
    path = PurePath(frame.file)
    return path.parent.name if path.stem == "__init__" else path.stem
