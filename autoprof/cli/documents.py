"""Documents that commands print with `--json`. `make formats` writes docs/reference/json.md from them.

Those of report, doctor and recipes stand where their figures are made.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from autoprof.rundir.records import Frame, Missing, NodeState, OpenSpan, ProcessStacks

# The form of all documents: raised when a field goes or changes its meaning.
SCHEMA = 1


class Document(Struct, kw_only=True):
    """What a command prints: one object."""

    schema: int = SCHEMA  # The version of the document's form. New fields do not change it.


class ListedCapture(Struct):
    """A capture of a step, or a trace that was merged from several."""

    name: str  # Its name, without endings.
    bytes: int  # Its size.
    state: str  # `complete`, `truncated`, `failed` or `unfinished`.
    meta: dict[str, Any]  # Its meta file, as [CaptureMeta or MergedMeta](files.md#capturemeta) says.


class ListedStep(Struct):
    """A captured step."""

    number: int  # The trainer's global step.
    captures: list[ListedCapture]  # Its captures.
    merged: list[ListedCapture]  # Traces that hold what captures hold already.


class ListedSpan(Struct):
    """A step or a stage that has begun and not ended."""

    name: str  # Its name: `step`, or that of the stage.
    step: int | None  # The step.
    age_s: float  # How long it is open, in seconds.


class ListedRun(Struct):
    """A run."""

    id: str  # Its id.
    path: str  # Its directory.
    info: dict[str, Any]  # Its `run.json`, as [RunFile](files.md#runfile) says.
    steps: list[ListedStep]  # The captured steps, in order.
    left_out: list[str]  # What could not be read of it, a line each.
    state: str  # Its state, which `info` may not know: `unfinished` where the process that started it is gone.
    bytes: int  # The size of its captures.
    open: list[ListedSpan] = []  # Of a run that goes on the open step and the stage that began last in it.


class Listed(Document):
    """`autoprof ls --json`."""

    runs: list[ListedRun]  # The runs, oldest first, or the one that was asked for.


class Merged(Document):
    """`autoprof merge --json`."""

    file: str  # The merged trace.
    bytes: int  # Its size.
    step: int | None  # The step; null for traces that belong to no run.
    traces: int  # The number of traces that were to be merged.
    lines: list[str]  # What came of it in words, a line each: traces that were left out among them.


class Analysed(Struct):
    """A folder of torch_npu's."""

    name: str  # Its step's folder and its own name.
    analysed: bool  # Whether torch_npu could analyse it.


class Analyses(Document):
    """`autoprof analyse --json`."""

    run: str  # The run's id.
    folders: list[Analysed]  # The folders that were not analysed before.


class Copied(Struct):
    """A copy of the run."""

    to: str  # The URL, without what may be secret in it.
    files: int  # The number of files.
    bytes: int  # Their size.


class Collected(Document):
    """`autoprof collect --json`."""

    run: str  # The run's id.
    directory: str  # Its directory here.
    nodes: list[NodeState] = []  # The nodes, with their parts, as [NodeState](files.md#nodestate) says.
    missing: list[Missing] = []  # What was not collected, as [Missing](files.md#missing) says.
    left_out: list[Missing] = []  # What was not meant to come: links, names that lead elsewhere.
    when: float | None = None  # The time, in seconds since the epoch; null where no cluster could be asked.
    copied: Copied | None = None  # The copy, with `--to`.
    missing_lines: list[str] = []  # All that is missing, of the copy too, a line each.


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
    joined: bool = False  # Whether the same was asked for already, and this joins it.
    off: bool = False  # Whether autoprof is switched off in the run.
    captured: list[int] = []  # The captured steps.
    folders: list[Folder] = []  # Their folders, on all hosts.
    problems: list[str] = []  # What is not as it should be, a line each.
    reason: str = ""  # Why not all was captured.


class Opened(Document):
    """`autoprof open --json`, which goes on to serve."""

    run: str  # The run's id.
    url: str  # The page with links to all.
    report: str | None = None  # The report.
    trace: str | None = None  # The merged trace.
    step: int | None = None  # Its step.


class StackGroup(Struct):
    """Threads of several processes with one stack, in one stage."""

    heading: str  # What they do, in words.
    processes: list[str]  # The processes, each as its file is called.
    frames: list[Frame]  # The stack, the outermost function first, as [Frame](files.md#frame) says.


class Lacking(Struct):
    """A process without a stack."""

    host: str  # The host.
    pid: int  # The process.
    process: str  # Its command line, or the title that Ray gave it.
    state: str  # `running`, `gone`, or `elsewhere`, which is on a host or in a container that could not be asked.
    reason: str  # Why there is none.
    spans: list[OpenSpan]  # The spans that are open on its timeline, as [OpenSpan](files.md#openspan) says.


class Stacks(Document):
    """`autoprof stacks --json`."""

    run: str  # The run's id.
    folders: list[str]  # The folders with the files, of each host.
    processes: list[ProcessStacks]  # The files, as [ProcessStacks](files.md#processstacks) says.
    groups: list[StackGroup]  # The threads that work on a span, then other main threads, most of a kind first.
    absent: list[Lacking]  # The processes that did not answer.
    problems: list[str]  # What could not be done, a line each.
