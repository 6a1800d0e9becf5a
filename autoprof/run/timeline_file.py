"""File of a process's timeline, `timeline/<host>-<pid>.jsonl`: the line of the process, and those of its spans.

A line is written whole or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from autoprof import __version__
from autoprof.base import files, identity, interrupts
from autoprof.base.originals import os, time
from autoprof.rundir import memory_state
from autoprof.rundir.layout import RunDir
from autoprof.rundir.lines import (
    BegunLine,
    DroppedLine,
    ExitLine,
    Line,
    MemoryLine,
    MemoryState,
    ProcessLine,
    RaisedLine,
)
from autoprof.rundir.records import Moment

AnyLine: TypeAlias = Line | BegunLine | DroppedLine | ExitLine | RaisedLine | MemoryLine


class TimelineFile:
    """The file, which is made with the first lines.

    Attributes:
        run: The run that it is of.
        path: Where it is; empty before it is made.
        size: The bytes that were written since the caller has set this to 0.
        memory: This process's memory, since the file was made.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.path = ""
        self.size = 0
        self.memory = memory_state.Watch()
        self._first = b""

    def append(self, lines: list[AnyLine]) -> None:
        """Write lines.

        Raises:
            OSError: The disk does not take them.
        """
        content = _encoded(lines)
        self.size += len(content)
        if not self.path:
            path = self.run.process_file("timeline")
            self.run.make(path.parent)
            self._first = _process_line(self.memory.first())
            # An earlier process of the run may have had the same pid: this one's lines begin anew.
            files.append(path, self._first + content)
            self.path = str(path)
            return
        try:
            files.append(self.path, content, self._first)
        except FileNotFoundError as error:  # somebody has removed the folder
            interrupts.pass_on(error)
            self.run.make(Path(self.path).parent)
            files.append(self.path, content, self._first)


_encoder = msgspec.json.Encoder()


def _encoded(lines: list[AnyLine]) -> bytes:
    try:
        return _encoder.encode_lines(lines)
    except Exception as error:  # text with lone surrogates, as in file names that are no UTF-8
        interrupts.pass_on(error)
        return _encoder.encode_lines([_mended(msgspec.to_builtins(line)) for line in lines])


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_mended(name): _mended(inner) for name, inner in value.items()}
    return [_mended(inner) for inner in value] if isinstance(value, list) else value


def _process_line(at_first: MemoryState) -> bytes:
    clock = Moment(time.time_ns(), time.monotonic_ns())
    pid = os.getpid()
    ticks = identity.began(pid) or 0
    process = ProcessLine(
        host=identity.HOST,
        pid=pid,
        clock=clock,
        version=__version__,
        ticks=ticks,
        namespace=identity.pid_namespace(),
        boot=identity.machine(),
        stderr=identity.own_stderr(),
        memory=at_first,
    )
    return msgspec.json.encode(process) + b"\n"
