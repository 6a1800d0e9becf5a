"""Stacks of this process's threads."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

from autoprof.base.originals import threading
from autoprof.run.span import Span
from autoprof.run.watch import owners, places
from autoprof.run.watch.places import MOST_DEEP, Names, Place
from autoprof.rundir.stacks import Thread

# So many threads are told: the main thread, those with spans, then the others.
_MOST = 256


class Found(NamedTuple):
    """A thread, and the spans that its functions work on."""

    thread: Thread
    spans: list[Span]


def found(names: Names, own: int) -> tuple[list[Found], int]:
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
        stack, spans = _read(frame)
        del frame
        thread = known.get(ident)
        all_of_them.append((ident != main, not spans, ident, thread, stack, spans))
    all_of_them.sort(key=lambda each: each[:3])
    told = [
        Found(
            Thread(
                name=places.text(thread.name) if thread is not None else "",
                ident=ident,
                native=(thread.native_id or 0) if thread is not None else 0,
                main=not other,
                frames=names.frames(stack),
            ),
            spans,
        )
        for other, _, ident, thread, stack, spans in all_of_them[:_MOST]
    ]
    return told, len(all_of_them)


def _read(innermost: FrameType) -> tuple[list[Place], list[Span]]:
    stack: list[Place] = []
    spans: list[Span] = []
    frame: FrameType | None = innermost
    while frame is not None and len(stack) < MOST_DEEP:
        stack.append((frame.f_code, frame.f_lineno or 0))
        spans += owners.in_frame(frame)
        frame = frame.f_back
    return stack, spans
