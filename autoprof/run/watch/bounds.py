"""Size of a process's file: what is told often goes first, then what is deep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from autoprof.rundir.stacks import MOST_BYTES, Frame, ProcessStacks, Task, Thread

_Stack = TypeVar("_Stack", Thread, Task)
_Step = Callable[[ProcessStacks], ProcessStacks]
_encoder = msgspec.json.Encoder()


def encoded(told: ProcessStacks, most: int = MOST_BYTES - 1) -> bytes:
    """Return a process's file, with no more than so many bytes. `left_out` says what it lacks."""
    content = _encoder.encode(told)
    for step in _STEPS:
        if len(content) <= most:
            break
        told = step(told)
        content = _encoder.encode(told)
    return content


def _equal(tasks: int, threads: int, spans: bool) -> _Step:
    """Leave out tasks and threads whose stack so many others have, of those without spans, or of all."""

    def step(told: ProcessStacks) -> ProcessStacks:
        kept_tasks = _first(told.tasks, tasks, spans)
        kept_threads = _first(told.threads, threads, spans)
        lacks = [
            f"{len(all_of) - len(kept)} {what} with the stack of another one"
            for all_of, kept, what in ((told.tasks, kept_tasks, "tasks"), (told.threads, kept_threads, "threads"))
            if len(all_of) > len(kept)
        ]
        return replace(told, tasks=kept_tasks, threads=kept_threads, left_out=[*told.left_out, *lacks])

    return step


def _first(stacks: Sequence[_Stack], most: int, spans: bool) -> list[_Stack]:
    seen: Counter[tuple[Frame, ...]] = Counter()
    kept = []
    for each in stacks:
        if each.spans and not spans:
            kept.append(each)
            continue
        stack = tuple(each.frames)
        seen[stack] += 1
        if seen[stack] <= most:
            kept.append(each)
    return kept


def _inner(most: int) -> _Step:
    """Leave out the functions outside of so many innermost ones."""

    def step(told: ProcessStacks) -> ProcessStacks:
        tasks = [replace(each, frames=each.frames[-most:]) for each in told.tasks]
        threads = [replace(each, frames=each.frames[-most:]) for each in told.threads]
        lacks = f"all but the {most} innermost functions of each stack"
        return replace(told, tasks=tasks, threads=threads, left_out=[*told.left_out, lacks])

    return step


def _few(spans: int, tasks: int, threads: int) -> _Step:
    """Keep so many of each: the oldest spans, and the tasks and threads in front."""

    def step(told: ProcessStacks) -> ProcessStacks:
        lacks = [
            f"{there - most} more {what}"
            for there, most, what in (
                (len(told.spans), spans, "spans"),
                (len(told.tasks), tasks, "tasks"),
                (len(told.threads), threads, "threads"),
            )
            if there > most
        ]
        return replace(
            told,
            spans=told.spans[:spans],
            tasks=[_without(each, spans) for each in told.tasks[:tasks]],
            threads=[_without(each, spans) for each in told.threads[:threads]],
            left_out=[*told.left_out, *lacks],
        )

    return step


def _without(stack: _Stack, spans: int) -> _Stack:
    return replace(stack, spans=[place for place in stack.spans if place < spans])


_STEPS: tuple[_Step, ...] = (
    _equal(tasks=3, threads=3, spans=False),
    _inner(50),
    _equal(tasks=30, threads=10, spans=True),
    _few(spans=1_000, tasks=500, threads=128),
    _inner(15),
    _few(spans=100, tasks=50, threads=50),
    _few(spans=20, tasks=0, threads=10),
    _inner(3),
)
