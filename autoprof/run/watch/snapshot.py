"""Snapshot of this process: the stacks of its threads, its tasks of asyncio, its open spans and its memory."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from autoprof.base import files, identity, interrupts
from autoprof.base.originals import os, threading, time
from autoprof.base.redact import writable
from autoprof.run.hook_log import process_title
from autoprof.run.span import Span
from autoprof.run.timeline import Timeline
from autoprof.run.watch import beside, bounds, tasks, threads
from autoprof.run.watch.places import Names
from autoprof.rundir.layout import RunDir
from autoprof.rundir.stacks import OpenSpan, ProcessStacks


def write(run: RunDir, timeline: Timeline, folder: str) -> None:
    """Write this process's file in a folder of `stacks/` or `hangs/`.

    Raises:
        OSError: It can't be written.
    """
    standing = take(timeline)
    run.make(Path(folder))
    content = bounds.encoded(beside.added(standing, folder))
    files.write(Path(folder, f"{identity.HOST}-{os.getpid()}.json"), content + b"\n")


def take(timeline: Timeline) -> ProcessStacks:
    """Return where this process stands now. Its own thread, the watcher's, is left out."""
    names = Names()
    now = time.time_ns()
    told_threads, all_threads = threads.found(names, threading.get_ident())
    told_tasks, all_tasks = tasks.found(names)
    # After the stacks: what they are inside of has begun before.
    spans = timeline.open()
    by_thread, by_task = _owned(spans, told_threads, told_tasks)
    left_out = [
        f"{there - len(told)} of {there} {what}"
        for there, told, what in ((all_threads, told_threads, "threads"), (all_tasks, told_tasks, "tasks"))
        if there > len(told)
    ]
    return ProcessStacks(
        host=identity.HOST,
        pid=os.getpid(),
        unix_ns=now,
        process=writable(process_title()),
        rank=_rank(),
        by="itself",
        left_out=left_out,
        spans=list(map(_open, spans)),
        threads=[
            replace(found.thread, spans=sorted(places)) for found, places in zip(told_threads, by_thread, strict=True)
        ],
        tasks=[replace(found.task, spans=sorted(places)) for found, places in zip(told_tasks, by_task, strict=True)],
    )


def _owned(
    spans: list[Span], told_threads: list[threads.Found], told_tasks: list[tasks.Found]
) -> tuple[list[set[int]], list[set[int]]]:
    """Return the places of the spans that each thread and each task works on.

    A span that no frame leads to, as one between two calls, belongs to the thread in which it began.
    """
    place = {id(span): number for number, span in enumerate(spans)}
    by_thread = [{place[id(span)] for span in found.spans if id(span) in place} for found in told_threads]
    by_task = [{place[id(span)] for span in found.spans if id(span) in place} for found in told_tasks]
    left = set(place.values()).difference(*by_thread, *by_task)
    numbers = {found.thread.ident: number for number, found in enumerate(told_threads)}
    for number in left:
        thread = numbers.get(getattr(spans[number], "thread", 0))
        if thread is not None:
            by_thread[thread].add(number)
    return by_thread, by_task


def _open(span: Span) -> OpenSpan:
    line = span.line
    return OpenSpan(
        kind=line.span,
        name=writable(line.name),
        step=line.step,
        role=writable(line.role),
        rank=line.rank,
        start_ns=line.start_ns,
        ids={name: writable(value) if isinstance(value, str) else value for name, value in line.ids.items()},
        stage_kind=line.stage_kind,
    )


def _rank() -> int | None:
    try:
        return identity.own_rank()
    except Exception as error:  # a launcher's variable that is no number
        interrupts.pass_on(error)
        return None
