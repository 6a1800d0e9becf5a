"""Snapshot of this process: the stacks of its threads, its tasks of asyncio, its open spans and its memory."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from autoprof.base import identity
from autoprof.run.hook_log import process_title
from autoprof.run.timeline import Timeline
from autoprof.run.watch import beside
from autoprof.rundir import layout
from autoprof.rundir.layout import RunDir
from autoprof.rundir.stacks import Frame, OpenSpan, ProcessStacks, Thread

# So many functions of a stack are told: the innermost.
_DEEPEST = 200


def write(run: RunDir, timeline: Timeline, folder: str) -> None:
    """Write this process's file in a folder of `stacks/` or `hangs/`.

    Raises:
        OSError: It can't be written.
    """
    run.make(Path(folder))
    layout.write_json(Path(folder, f"{identity.HOST}-{os.getpid()}.json"), beside.added(take(timeline), folder))


def take(timeline: Timeline) -> ProcessStacks:
    """Return where this process stands now."""
    lines = [span.line for span in timeline.open()]
    spans = [
        OpenSpan(
            kind=line.span,
            name=line.name,
            step=line.step,
            role=line.role,
            rank=line.rank,
            start_ns=line.start_ns,
            ids=line.ids,
            stage_kind=line.stage_kind,
        )
        for line in lines
    ]
    return ProcessStacks(
        host=identity.HOST,
        pid=os.getpid(),
        unix_ns=time.time_ns(),
        process=process_title(),
        rank=identity.own_rank(),
        by="itself",
        spans=spans,
        threads=_threads(),
    )


def _threads() -> list[Thread]:
    known = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    own = threading.get_ident()
    found = []
    for ident, frame in sys._current_frames().items():
        if ident == own:
            continue
        thread = known.get(ident)
        found.append(
            Thread(
                name=thread.name if thread is not None else "",
                ident=ident,
                native=(thread.native_id or 0) if thread is not None else 0,
                main=ident == main,
                frames=_frames(frame),
            )
        )
    return sorted(found, key=lambda thread: (not thread.main, thread.name, thread.ident))


def _frames(innermost: FrameType) -> list[Frame]:
    found: list[Frame] = []
    frame: FrameType | None = innermost
    while frame is not None and len(found) < _DEEPEST:
        code = frame.f_code
        found.append(Frame(getattr(code, "co_qualname", code.co_name), code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return found[::-1]
