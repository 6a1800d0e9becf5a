"""Documents that commands print with `--json`. `make formats` writes docs/reference/json.md from them.

The documents of report, doctor and recipes are defined beside the code that fills them.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from autoprof.rundir.records import Frame, Missing, NodeState, OpenSpan, ProcessStacks

# Version of all documents: increased when a field is removed or changes its meaning.
SCHEMA = 1


class Document(Struct, kw_only=True):
    """The output of a command with `--json`: one object."""

    schema: int = SCHEMA  # The version of the format. New fields do not change it.


class ListedCapture(Struct):
    """A capture of a step, or a trace that was merged from several."""

    name: str  # Its file name, without endings.
    bytes: int  # Its size.
    state: str  # `complete`, `truncated`, `failed` or `unfinished`.
    meta: dict[str, Any]  # Its meta file, a [CaptureMeta or MergedMeta](files.md#capturemeta).


class ListedStep(Struct):
    """A captured step."""

    number: int  # The trainer's global step.
    captures: list[ListedCapture]  # Its captures.
    merged: list[ListedCapture]  # Traces that were merged from these captures.


class ListedSpan(Struct):
    """A step or a stage that has begun and not ended."""

    name: str  # `step`, or the name of the stage.
    step: int | None  # The step.
    age_s: float  # Seconds since it began.


class ListedRun(Struct):
    """A run."""

    id: str  # Its id.
    path: str  # Its directory.
    info: dict[str, Any]  # Its `run.json`, a [RunFile](files.md#runfile).
    steps: list[ListedStep]  # The captured steps, in order.
    left_out: list[str]  # Files or parts of files that could not be read, one line each.
    state: str  # Its state. It may differ from `info`: `unfinished` if the process that started the run is gone.
    bytes: int  # The size of its captures.
    open: list[ListedSpan] = []  # If the run is running, the open step and the latest stage in it.


class Listed(Document):
    """`autoprof ls --json`."""

    runs: list[ListedRun]  # All runs, oldest first, or the run that RUN names.


class Merged(Document):
    """`autoprof merge --json`."""

    file: str  # The merged trace.
    bytes: int  # Its size.
    step: int | None  # The step; null for traces that belong to no run.
    traces: int  # The number of traces to merge, including any that were left out.
    lines: list[str]  # The result in words, one line each, including the traces that were left out.


class Analysed(Struct):
    """A folder that torch_npu recorded."""

    name: str  # The step's folder and the folder's name.
    analysed: bool  # True if the analysis succeeded.


class Analyses(Document):
    """`autoprof analyse --json`."""

    run: str  # The run's id.
    folders: list[Analysed]  # The folders that were not analysed before.


class Copied(Struct):
    """A copy of the run."""

    to: str  # The URL, without secrets.
    files: int  # The number of files.
    bytes: int  # Their size.


class Collected(Document):
    """`autoprof collect --json`."""

    run: str  # The run's id.
    directory: str  # Its directory here.
    nodes: list[NodeState] = []  # The nodes with their parts, each a [NodeState](files.md#nodestate).
    missing: list[Missing] = []  # Parts that were not collected, each a [Missing](files.md#missing).
    left_out: list[Missing] = []  # Files that are never collected: links, and names that lead out of the run.
    when: float | None = None  # The time, in seconds since the epoch; null if no cluster could be asked.
    copied: Copied | None = None  # The copy, with `--to`.
    missing_lines: list[str] = []  # All missing parts, also of the copy, one line each.


class Folder(Struct):
    """The folder of a captured step."""

    step: int  # The step.
    host: str  # The host.
    path: str  # The folder there.
    captures: int  # The number of captures.
    bytes: int  # Their size.


class Triggered(Document):
    """`autoprof trigger --json`. The fields from `captured` on are for `--wait`."""

    run: str  # The run's id.
    request: str = ""  # The request's name; empty for `--on` and `--off`.
    joined: bool = False  # True if an earlier, equal request is open; this command then uses that one.
    off: bool = False  # True if autoprof is switched off in the run.
    captured: list[int] = []  # The captured steps.
    folders: list[Folder] = []  # Their folders, on all hosts.
    problems: list[str] = []  # Captures that are missing or not complete, one line each.
    reason: str = ""  # The reason why some steps were not captured.


class Opened(Document):
    """`autoprof open --json`. The command keeps serving after it printed this."""

    run: str  # The run's id.
    url: str  # The page with links to the report and the trace.
    report: str | None = None  # The report.
    trace: str | None = None  # The merged trace.
    step: int | None = None  # Its step.


class StackGroup(Struct):
    """Threads, also of different processes, with the same stack in the same stage."""

    heading: str  # The threads and their function, in words.
    processes: list[str]  # The processes, as `host-pid`.
    frames: list[Frame]  # The stack, outermost function first, each a [Frame](files.md#frame).


class Lacking(Struct):
    """A process without a stack."""

    host: str  # The host.
    pid: int  # The process id.
    process: str  # Its command line, or the title that Ray gave it.
    state: str  # `running`, `gone`, or `elsewhere`: on a host or in a container that could not be asked.
    reason: str  # The reason why it has no stack.
    spans: list[OpenSpan]  # The spans that are open on its timeline, each an [OpenSpan](files.md#openspan).


class Stacks(Document):
    """`autoprof stacks --json`."""

    run: str  # The run's id.
    folders: list[str]  # The folders with the files, one per host.
    processes: list[ProcessStacks]  # The files, each a [ProcessStacks](files.md#processstacks).
    groups: list[StackGroup]  # Threads that work on a span, then other main threads; large groups first.
    absent: list[Lacking]  # The processes that did not answer.
    problems: list[str]  # Hosts, files and processes that could not be read, one line each.
