"""Tasks of asyncio in this process: the coroutines that await each other, and what the innermost one waits on.

They are read in another thread than their loop's, which is not touched: a task may end while it is read.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple

from autoprof.base import interrupts
from autoprof.run.span import Span
from autoprof.run.watch import owners, places
from autoprof.run.watch.places import MOST_DEEP, Names, Place
from autoprof.rundir.stacks import Task

# So many tasks are read: those with spans are told first.
_MOST = 10_000
# Of a gathering so many tasks are named.
_MOST_NAMED = 3
# What a task waits on that waits for its loop alone.
_TURN = "its turn"

_KINDS = {CoroutineType: "cr_await", GeneratorType: "gi_yieldfrom", AsyncGeneratorType: "ag_await"}
# Objects of C that stand between two coroutines and tell what they go on with only to the collector of garbage.
_BETWEEN = {"coroutine_wrapper", "async_generator_asend", "async_generator_athrow", "anext_awaitable"}


class Found(NamedTuple):
    """A task, and the spans that its coroutines work on."""

    task: Task
    spans: list[Span]


def found(names: Names) -> tuple[list[Found], int]:
    """Return the tasks of all loops that are not done, those with spans first, and how many there are."""
    pending = 0
    told = []
    for task in _all():
        try:
            if task.done():
                continue
            pending += 1
            if pending <= _MOST:
                told.append(_read(task, names))
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


def _read(task: Any, names: Names) -> Found:
    chain: list[Place] = []
    spans: list[Span] = []
    awaited = task.get_coro()
    deep = 0
    while awaited is not None and deep < MOST_DEEP:
        deep += 1
        inner, code, frame = _inside(awaited)
        if code is not None and frame is not None:
            chain.append((code, frame.f_lineno or 0))
            spans += owners.in_awaited(awaited, code, frame)
        awaited = inner
    chain.reverse()
    name = str(task.get_name())
    waits_on = _waits_on(task)
    thread = 0 if waits_on else _runs_in(task)
    told = Task(name=places.text(name), frames=names.frames(chain), waits_on=waits_on, thread=thread)
    return Found(told, spans)


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
        return places.text(str(waiter.get_name()))
    parts = getattr(waiter, "_children", None)
    if type(parts) is list:
        left = [each for each in parts if not each.done()]
        named = [str(each.get_name()) for each in left[:_MOST_NAMED] if isinstance(each, asyncio.Task)]
        more = ", ..." if len(left) > len(named) else ""
        return places.text(f"{len(left)} of {len(parts)} gathered: {', '.join(named)}{more}".removesuffix(": "))
    return type(waiter).__name__
