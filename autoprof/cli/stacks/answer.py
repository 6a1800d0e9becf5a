"""What a node says when its processes are asked where they stand."""

from __future__ import annotations

from msgspec import Struct

from autoprof.rundir.stacks import OpenSpan


class Absent(Struct, frozen=True, kw_only=True):
    """A process of which there is no stack.

    Attributes:
        state: `running`, `gone` or `elsewhere`, as in `open_spans`.
        reason: Why there is none.
        spans: What it was at last.
    """

    host: str
    pid: int
    process: str
    state: str
    reason: str
    spans: list[OpenSpan]


class Answer(Struct, frozen=True, kw_only=True):
    """The answer of a node.

    Attributes:
        host: The host.
        folder: The folder with the files.
        files: The files, by their names.
        absent: The processes without one.
        py_spy: Why py-spy was of no help; empty where it was.
        problem: Why nobody could be asked.
    """

    host: str
    folder: str
    files: dict[str, bytes]
    absent: list[Absent]
    py_spy: str
    problem: str
