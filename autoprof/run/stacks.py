"""Snapshot of this process: stacks of its threads and asyncio tasks, open spans and memory.

Stacks are bounded, contain no secrets, and omit autoprof's own wrappers. The locals of the program's frames are never
read, because up to Python 3.12 reading them leaves a copy in the frame. Only the locals of autoprof's own frames are
read, to find the spans of each stack.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from autoprof.base import files, identity, seam
from autoprof.base.originals import os, threading, time
from autoprof.base.redact import hidden, writable
from autoprof.run import process_state
from autoprof.run.hook_log import process_title
from autoprof.run.timeline import Span, Timeline
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import MAX_STACKS_BYTES, Frame, OpenSpan, ProcessStacks, Task, Thread

_encoder = msgspec.json.Encoder()
# Limits of a snapshot that is larger than a file may be: functions of each stack, bytes of all spans.
_MAX_CUT_FRAMES, _MAX_SPANS_BYTES = 15, MAX_STACKS_BYTES // 4
# Space for the entries of `left_out` about these limits.
_LEFT_OUT_BYTES = 1 << 10


def encoded(snapshot: ProcessStacks) -> bytes:
    """Return the JSON of a snapshot in less than `MAX_STACKS_BYTES`. `left_out` lists the missing parts."""
    content = _encoder.encode(snapshot)
    return content if len(content) < MAX_STACKS_BYTES else _encoder.encode(_cut(snapshot))


def _cut(snapshot: ProcessStacks) -> ProcessStacks:
    """Return the oldest spans and the most important stacks of a snapshot that fit into a file.

    First comes the main thread, then one stack of each group of equal stacks. Stacks with spans precede others.
    """
    spans = snapshot.spans[: _fitting(snapshot.spans, _MAX_SPANS_BYTES)]
    whole: list[Thread | Task] = [*snapshot.threads, *snapshot.tasks]
    stacks = [
        replace(
            stack, frames=stack.frames[-_MAX_CUT_FRAMES:], spans=[index for index in stack.spans if index < len(spans)]
        )
        for stack in whole
    ]
    equal: Counter[tuple[Frame, ...]] = Counter()
    order = []
    for index, stack in enumerate(stacks):
        frames = tuple(stack.frames)
        order.append((index > 0, equal[frames] > 0, not stack.spans, equal[frames], index))
        equal[frames] += 1
    indexes = [key[-1] for key in sorted(order)]
    rest = replace(snapshot, spans=spans, threads=[], tasks=[])
    room = MAX_STACKS_BYTES - len(_encoder.encode(rest)) - _LEFT_OUT_BYTES
    kept = [stacks[index] for index in sorted(indexes[: _fitting([stacks[index] for index in indexes], room)])]
    threads = [stack for stack in kept if isinstance(stack, Thread)]
    tasks = [stack for stack in kept if isinstance(stack, Task)]
    omissions = [
        f"{len(all_items) - len(items)} of {len(all_items)} {kind}"
        for kind, items, all_items in (
            ("spans", spans, snapshot.spans),
            ("threads", threads, snapshot.threads),
            ("tasks", tasks, snapshot.tasks),
        )
        if len(items) < len(all_items)
    ]
    omissions.append(f"all but the {_MAX_CUT_FRAMES} innermost functions of each stack")
    return replace(rest, threads=threads, tasks=tasks, left_out=[*snapshot.left_out, *omissions])


def _fitting(items: Sequence[Any], max_bytes: int) -> int:
    """Return the number of first items whose JSON fits into `max_bytes`, with a comma after each."""
    sizes = itertools.accumulate(len(_encoder.encode(item)) + 1 for item in items)
    return sum(1 for _ in itertools.takewhile(lambda size: size <= max_bytes, sizes))


# Number of functions that are kept of a stack: the outermost and the innermost ones.
_MAX_OUTER, _MAX_INNER = 20, 120
# Number of functions that are read of a stack.
MAX_DEPTH = 3_000
_MAX_NAME_CHARS = 300

# A code object and the current line in it.
Place: TypeAlias = "tuple[CodeType, int]"


class Names:
    """Cache of the names of code objects for one snapshot, in which most of them occur often."""

    def __init__(self) -> None:
        self._known: dict[CodeType, tuple[str, str]] = {}

    def frames(self, places: list[Place]) -> list[Frame]:
        """Return the frames of a stack, the outermost first. `places` begin with the innermost.

        Omit autoprof's wrappers around functions of the user. Keep the innermost functions of autoprof, because there
        autoprof itself is working.
        """
        inside = 0
        while inside < len(places) and is_own(places[inside][0]):
            inside += 1
        kept = places[:inside] + [place for place in places[inside:] if not is_around(place[0])]
        cut = len(kept) - _MAX_OUTER - _MAX_INNER
        if cut <= 1:
            return [self._frame(place) for place in reversed(kept)]
        more = "at least " if len(places) >= MAX_DEPTH else ""
        inner, outer = kept[:_MAX_INNER], kept[len(kept) - _MAX_OUTER :]
        left_out = Frame(f"... {more}{cut} more functions ...")
        return [*map(self._frame, reversed(outer)), left_out, *map(self._frame, reversed(inner))]

    def _frame(self, place: Place) -> Frame:
        code, line = place
        known = self._known.get(code)
        if known is None:
            function = getattr(code, "co_qualname", code.co_name)
            known = self._known[code] = place_text(function), place_text(code.co_filename)
        return Frame(*known, line)


def place_text(name: str) -> str:
    """Return a name from the user's code in a form that a file may contain: short and without secrets."""
    return writable(hidden(name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."))


# Folder of the package in the file names of its code.
_HERE = "run/stacks.py"
OWN = sys._getframe().f_code.co_filename.removesuffix(_HERE)
# End of the file name of a wrapper that was pickled on another machine.
_WRAPPER = "/autoprof/hooks/wrapper.py"
# Folder of the wrappers around functions of the user.
_WRAPPERS = f"{OWN}hooks/"
# Functions that drive behaviours around a call, with the local variable that holds the behaviour or the list of them.
_DRIVERS = {
    (f"{OWN}hooks/dispatch.py", "drive"): "hook_call",
    (f"{OWN}hooks/dispatch.py", "drive_coroutine"): "hook_call",
    (f"{OWN}hooks/dispatch.py", "within"): "hook_calls",
    (f"{OWN}hooks/dispatch.py", "within_coroutine"): "hook_calls",
}
# Local variables that the drivers delete before they return. In a copy they would keep an exception alive.
_DELETED_LOCALS = ("error", "traceback", "result")


def is_own(code: CodeType) -> bool:
    """Return True if code belongs to autoprof."""
    return code.co_filename.startswith(OWN) or (
        code.co_name == "autoprof_wrapper" and code.co_filename.endswith(_WRAPPER)
    )


def is_around(code: CodeType) -> bool:
    """Return True if code belongs to a wrapper of autoprof around a hooked function."""
    return is_own(code) and not (code.co_filename.startswith(OWN) and not code.co_filename.startswith(_WRAPPERS))


def spans_in_frame(frame: FrameType) -> list[Span]:
    """Return the spans of a frame of a driver, which may be running; empty for other frames."""
    name = _DRIVERS.get((frame.f_code.co_filename, frame.f_code.co_name))
    if name is None:
        return []
    if sys.version_info >= (3, 13):
        return list(_spans_of(frame.f_locals.get(name)))
    # A trace function of the user may be using the copy of the locals that Python makes.
    if frame.f_trace is not None:
        return []
    local = frame.f_locals
    behaviour = local.get(name)
    for variable in _DELETED_LOCALS:
        local.pop(variable, None)
    return list(_spans_of(behaviour))


def spans_in_awaited(awaited: Any, code: CodeType, frame: FrameType | None) -> list[Span]:
    """Return the spans of a coroutine or a generator. If it is suspended, its locals are read without a copy."""
    if (code.co_filename, code.co_name) not in _DRIVERS:
        return []
    spans = [span for value in _referents(awaited, frame) for span in _spans_of(value)]
    return spans if spans or frame is None else spans_in_frame(frame)


def _spans_of(value: Any) -> Iterator[Span]:
    """Yield the spans of a running behaviour, or of a list of them."""
    if type(value) is list:
        for behaviour in value[:]:
            if type(behaviour) is not list:
                yield from _spans_of(behaviour)
        return
    if type(value).__module__ != "autoprof.hooks.dispatch":
        return
    around = getattr(value, "_around", None)
    if around is None:
        return
    for local in _referents(around, around.gi_frame):
        kind = type(local)
        if kind is Span:
            yield local
        elif kind.__module__.startswith("autoprof.") and type(span := getattr(local, "_span", None)) is Span:
            yield span


def _referents(generator: Any, frame: FrameType | None) -> list[Any]:
    """Return the objects that a suspended generator or coroutine refers to, including its locals."""
    # Up to Python 3.10, the locals belong to its frame.
    return gc.get_referents(generator) if sys.version_info >= (3, 11) else gc.get_referents(generator, frame)


# Number of tasks that are read.
_MAX_TASKS = 10_000
# Number of tasks that are named of one `asyncio.gather`.
_MAX_NAMED_TASKS = 3
# `waits_on` of a task that is ready to run and waits for its event loop.
_TURN = "its turn"

_KINDS = {CoroutineType: "cr_await", GeneratorType: "gi_yieldfrom", AsyncGeneratorType: "ag_await"}
# C objects between two coroutines. They reveal the awaited coroutine only to the garbage collector.
_BETWEEN = {"coroutine_wrapper", "async_generator_asend", "async_generator_athrow", "anext_awaitable"}


class TaskStack(NamedTuple):
    """A task and the spans that its coroutines work on."""

    task: Task
    spans: list[Span]


def task_stacks(names: Names) -> tuple[list[TaskStack], int]:
    """Return the pending tasks of all loops, tasks with spans first, and the number of pending tasks."""
    pending = 0
    stacks = []
    for task in _all_tasks():
        try:
            if task.done():
                continue
            pending += 1
            if pending <= _MAX_TASKS:
                stacks.append(_read_task(task, names))
        except Exception as error:  # a task of a class of the user
            seam.pass_on(error)
    return sorted(stacks, key=lambda stack: not stack.spans), pending


def _all_tasks() -> list[Any]:
    """Return the tasks that asyncio knows. Sets are copied first, because a copy cannot be interrupted."""
    tasks: dict[int, Any] = {}
    for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks"):
        known = getattr(asyncio.tasks, name, ())
        for entry in list(getattr(known, "data", known)):
            # Up to Python 3.11, all tasks are in one weak set. Later, eager tasks are in a plain set.
            task = entry() if isinstance(entry, weakref.ref) else entry
            if task is not None:
                tasks[id(task)] = task
    if sys.version_info >= (3, 14):
        # The other tasks can be reached only through their loop.
        for loop in _loops():
            tasks |= {id(task): task for task in asyncio.all_tasks(loop)}
    return list(tasks.values())


def _loops() -> list[Any]:
    """Return the running loops of asyncio, from the locals of their frames. In these Pythons locals are not copied."""
    loops = []
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is asyncio.BaseEventLoop.run_forever.__code__:
                loops.append(caller.f_locals["self"])
            caller = caller.f_back
    return loops


def _read_task(task: Any, names: Names) -> TaskStack:
    chain: list[Place] = []
    spans: list[Span] = []
    awaited = task.get_coro()
    depth = 0
    while awaited is not None and depth < MAX_DEPTH:
        depth += 1
        inner, code, frame = _unwrap(awaited)
        if code is not None and frame is not None:
            chain.append((code, frame.f_lineno or 0))
            spans += spans_in_awaited(awaited, code, frame)
        awaited = inner
    chain.reverse()
    name = str(task.get_name())
    waits_on = _waits_on(task)
    thread = 0 if waits_on else _thread_of(task)
    record = Task(name=place_text(name), frames=names.frames(chain), waits_on=waits_on, thread=thread)
    return TaskStack(record, spans)


def _thread_of(task: Any) -> int:
    """Return Python's id of the thread that runs a task, 0 if none does. Its stack has the task's outer coroutine."""
    outermost = getattr(task.get_coro(), "cr_frame", None)
    for ident, frame in sys._current_frames().items() if outermost is not None else ():
        caller: FrameType | None = frame
        while caller is not None:
            if caller is outermost:
                return ident
            caller = caller.f_back
    return 0


def _unwrap(awaited: Any) -> tuple[Any, CodeType | None, FrameType | None]:
    """Return the object that a coroutine or a generator awaits, its code, and its frame."""
    kind = type(awaited)
    attribute = _KINDS.get(kind)
    if attribute is not None:
        prefix = attribute.partition("_")[0]
        code: CodeType = getattr(awaited, f"{prefix}_code")
        return getattr(awaited, attribute), code, getattr(awaited, f"{prefix}_frame")
    if _is_between(awaited):
        inner = (value for value in gc.get_referents(awaited) if type(value) in _KINDS or _is_between(value))
        return next(inner, None), None, None
    return None, None, None


def _is_between(awaited: Any) -> bool:
    kind = type(awaited)
    return kind.__module__ == "builtins" and kind.__name__ in _BETWEEN


def _waits_on(task: Any) -> str:
    """Return a text for the object that a task awaits; an empty text if the task is running."""
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None:
        return "" if asyncio.current_task(task.get_loop()) is task else _TURN
    if isinstance(waiter, asyncio.Task):
        return place_text(str(waiter.get_name()))
    children = getattr(waiter, "_children", None)
    if type(children) is list:
        pending = [child for child in children if not child.done()]
        named = [str(child.get_name()) for child in pending[:_MAX_NAMED_TASKS] if isinstance(child, asyncio.Task)]
        more = ", ..." if len(pending) > len(named) else ""
        return place_text(f"{len(pending)} of {len(children)} gathered: {', '.join(named)}{more}".removesuffix(": "))
    return type(waiter).__name__


# Number of threads that are kept: the main thread, then threads with spans, then the others.
_MAX_THREADS = 256


class ThreadStack(NamedTuple):
    """A thread and the spans that its functions work on."""

    thread: Thread
    spans: list[Span]


def thread_stacks(names: Names, own: int) -> tuple[list[ThreadStack], int]:
    """Return the threads except the one with the id `own`, the main thread first, and the number of threads."""
    # `threading`'s lock is not taken, because an interrupted thread may hold it. A copy cannot be interrupted.
    known = dict(threading._active)  # type: ignore[attr-defined]
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(own, None)
    rows = []
    # Drop each frame once it is read, because it keeps the locals of its function alive.
    while frames:
        ident, frame = frames.popitem()
        stack, spans = _read_thread(frame)
        del frame
        thread = known.get(ident)
        rows.append((ident != main, not spans, ident, thread, stack, spans))
    rows.sort(key=lambda row: row[:3])
    stacks = [
        ThreadStack(
            Thread(
                name=place_text(thread.name) if thread is not None else "",
                ident=ident,
                native=(thread.native_id or 0) if thread is not None else 0,
                main=not other,
                frames=names.frames(stack),
            ),
            spans,
        )
        for other, _, ident, thread, stack, spans in rows[:_MAX_THREADS]
    ]
    return stacks, len(rows)


def _read_thread(innermost: FrameType) -> tuple[list[Place], list[Span]]:
    stack: list[Place] = []
    spans: list[Span] = []
    frame: FrameType | None = innermost
    while frame is not None and len(stack) < MAX_DEPTH:
        stack.append((frame.f_code, frame.f_lineno or 0))
        spans += spans_in_frame(frame)
        frame = frame.f_back
    return stack, spans


def write_snapshot(run: RunDir, timeline: Timeline, folder: str) -> None:
    """Write the snapshot of this process to a folder of `stacks/` or `hangs/`.

    Raises:
        OSError: The file can't be written.
    """
    snapshot = take_snapshot(timeline)
    run.make(Path(folder))
    content = encoded(process_state.with_process_state(snapshot, folder))
    files.write(Path(folder, f"{identity.HOST}-{os.getpid()}.json"), content + b"\n")


def take_snapshot(timeline: Timeline) -> ProcessStacks:
    """Return the stacks and open spans of this process. Omit the calling thread, which is the watcher's."""
    names = Names()
    now = time.time_ns()
    threads, thread_count = thread_stacks(names, threading.get_ident())
    tasks, task_count = task_stacks(names)
    # Read the spans after the stacks, so that every span of a stack is among them.
    spans = timeline.open()
    by_thread, by_task = _owned(spans, threads, tasks)
    left_out = [
        f"{count - len(kept)} of {count} {kind}"
        for count, kept, kind in ((thread_count, threads, "threads"), (task_count, tasks, "tasks"))
        if count > len(kept)
    ]
    return ProcessStacks(
        host=identity.HOST,
        pid=os.getpid(),
        unix_ns=now,
        process=writable(process_title()),
        rank=_rank(),
        by="itself",
        left_out=left_out,
        spans=[OpenSpan.of(span.line) for span in spans],
        threads=[
            replace(stack.thread, spans=sorted(indexes)) for stack, indexes in zip(threads, by_thread, strict=True)
        ],
        tasks=[replace(stack.task, spans=sorted(indexes)) for stack, indexes in zip(tasks, by_task, strict=True)],
    )


def _owned(
    spans: list[Span], threads: list[ThreadStack], tasks: list[TaskStack]
) -> tuple[list[set[int]], list[set[int]]]:
    """Return the indexes of the spans that each thread and each task works on.

    A span that is in no frame, such as one between two calls, belongs to the thread in which it began.
    """
    indexes = {id(span): index for index, span in enumerate(spans)}
    by_thread = [{indexes[id(span)] for span in stack.spans if id(span) in indexes} for stack in threads]
    by_task = [{indexes[id(span)] for span in stack.spans if id(span) in indexes} for stack in tasks]
    unowned = set(indexes.values()).difference(*by_thread, *by_task)
    thread_indexes = {stack.thread.ident: index for index, stack in enumerate(threads)}
    for index in unowned:
        thread = thread_indexes.get(getattr(spans[index], "thread", 0))
        if thread is not None:
            by_thread[thread].add(index)
    return by_thread, by_task


def _rank() -> int | None:
    with seam.suppress(ValueError, RuntimeError):  # a launcher's variable is not a number, or torch has ended the group
        return identity.own_rank()
    return None
