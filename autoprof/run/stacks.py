"""Snapshot of this process: stacks of its threads and asyncio tasks, open spans and memory.

Stacks are bounded, contain no secrets, and omit autoprof's own wrappers. The locals of the program's frames are never
read: up to Python 3.12 reading them leaves a copy in the frame. autoprof's own frames are read for the spans that they
hold.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from autoprof.base import files, identity, interrupts
from autoprof.base.originals import os, threading, time
from autoprof.base.redact import hidden, writable
from autoprof.run import process_state
from autoprof.run.hook_log import process_title
from autoprof.run.timeline import Span, Timeline
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import MAX_STACKS_BYTES, Frame, OpenSpan, ProcessStacks, Task, Thread

_Stack = TypeVar("_Stack", Thread, Task)
_Step = Callable[[ProcessStacks], ProcessStacks]
_encoder = msgspec.json.Encoder()


def encoded(told: ProcessStacks, most: int = MAX_STACKS_BYTES - 1) -> bytes:
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


# Of a stack so many functions are told: those outside first, then the innermost.
_OUTER, _INNER = 20, 120
# So many are looked at.
MOST_DEEP = 3_000
_LONGEST = 300

# Code, and the line that it is at.
Place: TypeAlias = "tuple[CodeType, int]"


class Names:
    """Names of code for one snapshot, in which most of them stand often."""

    def __init__(self) -> None:
        self._known: dict[CodeType, tuple[str, str]] = {}

    def frames(self, places: list[Place]) -> list[Frame]:
        """Return a stack, from the innermost place to the outermost, as it is told: the outermost first.

        autoprof's functions around those of the user are left out, but for innermost ones: it works there itself.
        """
        inside = 0
        while inside < len(places) and is_own(places[inside][0]):
            inside += 1
        kept = places[:inside] + [place for place in places[inside:] if not is_around(place[0])]
        cut = len(kept) - _OUTER - _INNER
        if cut <= 1:
            return [self._frame(place) for place in reversed(kept)]
        more = "at least " if len(places) >= MOST_DEEP else ""
        inner, outer = kept[:_INNER], kept[len(kept) - _OUTER :]
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
    """Return a name that the user's code has given, as a file may hold it."""
    return writable(hidden(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."))


# The folder of the package, as its code names it, and a wrapper's file where it has come from another machine.
_HERE = "run/stacks.py"
OWN = sys._getframe().f_code.co_filename.removesuffix(_HERE)
_WRAPPER = "/autoprof/hooks/wrapper.py"
# Whose functions stand around the user's.
_AROUND = f"{OWN}hooks/"
# The functions that drive a behaviour around a call, with the variable that holds it, or several.
_DRIVERS = {
    (f"{OWN}hooks/dispatch.py", "drive"): "run",
    (f"{OWN}hooks/dispatch.py", "drive_coroutine"): "run",
    (f"{OWN}hooks/dispatch.py", "within"): "runs",
    (f"{OWN}hooks/dispatch.py", "within_coroutine"): "runs",
}
# Variables of theirs that go before the frame does: an exception would hold itself.
_PASSING = ("error", "traceback", "result")


def is_own(code: CodeType) -> bool:
    """Return whether code is autoprof's."""
    return code.co_filename.startswith(OWN) or (
        code.co_name == "autoprof_wrapper" and code.co_filename.endswith(_WRAPPER)
    )


def is_around(code: CodeType) -> bool:
    """Return whether code is autoprof's and stands around a hooked function; its other code does work of its own."""
    return is_own(code) and not (code.co_filename.startswith(OWN) and not code.co_filename.startswith(_AROUND))


def spans_in_frame(frame: FrameType) -> list[Span]:
    """Return the spans of a frame that may be running."""
    name = _DRIVERS.get((frame.f_code.co_filename, frame.f_code.co_name))
    if name is None:
        return []
    if sys.version_info >= (3, 13):
        return list(_of(frame.f_locals.get(name)))
    # A trace function of the user's may be at work with the copy that Python makes.
    if frame.f_trace is not None:
        return []
    local = frame.f_locals
    found = local.get(name)
    for passing in _PASSING:
        local.pop(passing, None)
    return list(_of(found))


def spans_in_awaited(awaited: Any, code: CodeType, frame: FrameType | None) -> list[Span]:
    """Return the spans of a coroutine or a generator: by what it refers to, without a copy, if it is suspended."""
    if (code.co_filename, code.co_name) not in _DRIVERS:
        return []
    found = [span for value in _referred(awaited, frame) for span in _of(value)]
    return found if found or frame is None else spans_in_frame(frame)


def _of(value: Any) -> Iterator[Span]:
    """Yield the spans of a behaviour that is being driven, or of several."""
    if type(value) is list:
        for each in value[:]:
            if type(each) is not list:
                yield from _of(each)
        return
    if type(value).__module__ != "autoprof.hooks.dispatch":
        return
    around = getattr(value, "_around", None)
    if around is None:
        return
    for each in _referred(around, around.gi_frame):
        kind = type(each)
        if kind is Span:
            yield each
        elif kind.__module__.startswith("autoprof.") and type(span := getattr(each, "_span", None)) is Span:
            yield span


def _referred(generator: Any, frame: FrameType | None) -> list[Any]:
    """Return what a suspended generator or coroutine has in its variables, among others."""
    # Up to Python 3.10 its frame has them.
    return gc.get_referents(generator) if sys.version_info >= (3, 11) else gc.get_referents(generator, frame)


# So many tasks are read: those with spans are told first.
_MAX_TASKS = 10_000
# Of a gathering so many tasks are named.
_MOST_NAMED = 3
# What a task waits on that waits for its loop alone.
_TURN = "its turn"

_KINDS = {CoroutineType: "cr_await", GeneratorType: "gi_yieldfrom", AsyncGeneratorType: "ag_await"}
# Objects of C that stand between two coroutines and tell what they go on with only to the collector of garbage.
_BETWEEN = {"coroutine_wrapper", "async_generator_asend", "async_generator_athrow", "anext_awaitable"}


class TaskStack(NamedTuple):
    """A task, and the spans that its coroutines work on."""

    task: Task
    spans: list[Span]


def task_stacks(names: Names) -> tuple[list[TaskStack], int]:
    """Return the tasks of all loops that are not done, those with spans first, and how many there are."""
    pending = 0
    told = []
    for task in _all():
        try:
            if task.done():
                continue
            pending += 1
            if pending <= _MAX_TASKS:
                told.append(_read_task(task, names))
        except Exception as error:  # a task of the user's own kind
            interrupts.pass_on(error)
    return sorted(told, key=lambda each: not each.spans), pending


def _all() -> list[Any]:
    """Return the tasks that asyncio knows. Copies of a set are one step of the interpreter each."""
    tasks: dict[int, Any] = {}
    for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks"):
        known = getattr(asyncio.tasks, name, ())
        for each in list(getattr(known, "data", known)):
            # Python up to 3.11 has them all in one weak set; later ones have eager tasks in a set.
            task = each() if isinstance(each, weakref.ref) else each
            if task is not None:
                tasks[id(task)] = task
    if sys.version_info >= (3, 14):
        # Only the loop leads to the others.
        for loop in _loops():
            tasks |= {id(task): task for task in asyncio.all_tasks(loop)}
    return list(tasks.values())


def _loops() -> list[Any]:
    """Return the loops of asyncio's own that run, by their frames, whose locals are no copy in these Pythons."""
    loops = []
    for frame in sys._current_frames().values():
        each: FrameType | None = frame
        while each is not None:
            if each.f_code is asyncio.BaseEventLoop.run_forever.__code__:
                loops.append(each.f_locals["self"])
            each = each.f_back
    return loops


def _read_task(task: Any, names: Names) -> TaskStack:
    chain: list[Place] = []
    spans: list[Span] = []
    awaited = task.get_coro()
    deep = 0
    while awaited is not None and deep < MOST_DEEP:
        deep += 1
        inner, code, frame = _inside(awaited)
        if code is not None and frame is not None:
            chain.append((code, frame.f_lineno or 0))
            spans += spans_in_awaited(awaited, code, frame)
        awaited = inner
    chain.reverse()
    name = str(task.get_name())
    waits_on = _waits_on(task)
    thread = 0 if waits_on else _runs_in(task)
    told = Task(name=place_text(name), frames=names.frames(chain), waits_on=waits_on, thread=thread)
    return TaskStack(told, spans)


def _runs_in(task: Any) -> int:
    """Return the thread in whose stack the outermost coroutine of a task is, 0 where none has it."""
    outermost = getattr(task.get_coro(), "cr_frame", None)
    for ident, frame in sys._current_frames().items() if outermost is not None else ():
        each: FrameType | None = frame
        while each is not None:
            if each is outermost:
                return ident
            each = each.f_back
    return 0


def _inside(awaited: Any) -> tuple[Any, CodeType | None, FrameType | None]:
    """Return what a coroutine or a generator awaits, its code, and its frame."""
    kind = type(awaited)
    attribute = _KINDS.get(kind)
    if attribute is not None:
        begins = attribute.partition("_")[0]
        code: CodeType = getattr(awaited, f"{begins}_code")
        return getattr(awaited, attribute), code, getattr(awaited, f"{begins}_frame")
    if _between(awaited):
        behind = (each for each in gc.get_referents(awaited) if type(each) in _KINDS or _between(each))
        return next(behind, None), None, None
    return None, None, None


def _between(awaited: Any) -> bool:
    kind = type(awaited)
    return kind.__module__ == "builtins" and kind.__name__ in _BETWEEN


def _waits_on(task: Any) -> str:
    """Return what a task waits on in words; an empty text for one that runs."""
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None:
        return "" if asyncio.current_task(task.get_loop()) is task else _TURN
    if isinstance(waiter, asyncio.Task):
        return place_text(str(waiter.get_name()))
    parts = getattr(waiter, "_children", None)
    if type(parts) is list:
        left = [each for each in parts if not each.done()]
        named = [str(each.get_name()) for each in left[:_MOST_NAMED] if isinstance(each, asyncio.Task)]
        more = ", ..." if len(left) > len(named) else ""
        return place_text(f"{len(left)} of {len(parts)} gathered: {', '.join(named)}{more}".removesuffix(": "))
    return type(waiter).__name__


# So many threads are told: the main thread, those with spans, then the others.
_MAX_THREADS = 256


class ThreadStack(NamedTuple):
    """A thread, and the spans that its functions work on."""

    thread: Thread
    spans: list[Span]


def thread_stacks(names: Names, own: int) -> tuple[list[ThreadStack], int]:
    """Return the threads but for the one with the number `own`, the main one first, and how many there are."""
    # Its lock may be held by a thread that was interrupted: a copy of what it protects is one step of the interpreter.
    known = dict(threading._active)  # type: ignore[attr-defined]
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(own, None)
    all_of_them = []
    # Each is let go as soon as it is read: it keeps alive what its function had.
    while frames:
        ident, frame = frames.popitem()
        stack, spans = _read_thread(frame)
        del frame
        thread = known.get(ident)
        all_of_them.append((ident != main, not spans, ident, thread, stack, spans))
    all_of_them.sort(key=lambda each: each[:3])
    told = [
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
        for other, _, ident, thread, stack, spans in all_of_them[:_MAX_THREADS]
    ]
    return told, len(all_of_them)


def _read_thread(innermost: FrameType) -> tuple[list[Place], list[Span]]:
    stack: list[Place] = []
    spans: list[Span] = []
    frame: FrameType | None = innermost
    while frame is not None and len(stack) < MOST_DEEP:
        stack.append((frame.f_code, frame.f_lineno or 0))
        spans += spans_in_frame(frame)
        frame = frame.f_back
    return stack, spans


def write_snapshot(run: RunDir, timeline: Timeline, folder: str) -> None:
    """Write this process's file in a folder of `stacks/` or `hangs/`.

    Raises:
        OSError: It can't be written.
    """
    standing = take_snapshot(timeline)
    run.make(Path(folder))
    content = encoded(process_state.with_process_state(standing, folder))
    files.write(Path(folder, f"{identity.HOST}-{os.getpid()}.json"), content + b"\n")


def take_snapshot(timeline: Timeline) -> ProcessStacks:
    """Return where this process stands now. Its own thread, the watcher's, is left out."""
    names = Names()
    now = time.time_ns()
    told_threads, all_threads = thread_stacks(names, threading.get_ident())
    told_tasks, all_tasks = task_stacks(names)
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
    spans: list[Span], told_threads: list[ThreadStack], told_tasks: list[TaskStack]
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
