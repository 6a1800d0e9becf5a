"""Answer of one node to `autoprof stacks`."""

from __future__ import annotations

from msgspec import Struct

from autoprof.rundir.stacks import OpenSpan


class Absent(Struct, frozen=True, kw_only=True):
    """A process without a stack in the answer.

    Attributes:
        state: `running`, `gone` or `elsewhere`, as in `open_spans`.
        reason: The reason.
        spans: Its last open spans.
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
        files: The content of each file, by name.
        absent: The processes without a file.
        py_spy: The reason why py-spy could not help; empty if it did.
        problem: The reason why no process could be asked; empty if they could.
    """

    host: str
    folder: str
    files: dict[str, bytes]
    absent: list[Absent]
    py_spy: str
    problem: str
