"""The documents that commands print if `--json` is set. `make formats` writes docs/reference/json.md from them.

The documents of report and recipes are defined in the modules that fill them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from autoprof.rundir.records import Frame, HookLine, Missing, NodeState, OpenSpan, ProcessStacks

# Version of all documents. It is increased when a field of any document is removed or changes its meaning.
SCHEMA = 1


class Document(Struct, kw_only=True):
    """The one JSON object that a command with `--json` prints."""

    schema: int = SCHEMA  # The version of the format. New fields do not change it.


class ListedCapture(Struct):
    """A capture of a step, or a trace that was merged from several."""

    name: str  # The file name of the capture, without endings.
    bytes: int  # The size of the files of the capture.
    state: str  # `complete`, `truncated`, `failed` or `unfinished`.
    meta: dict[str, Any]  # The content of the meta file, a [CaptureMeta or MergedMeta](files.md#capturemeta).


class ListedStep(Struct):
    """A captured step."""

    number: int  # The trainer's global step.
    loop: int  # The number of the step's loop: a process that runs several trainers has a loop for each.
    captures: list[ListedCapture]  # The captures of the step.
    merged: list[ListedCapture]  # The traces that were merged from these captures.


class ListedSpan(Struct):
    """A step or a stage that has begun and not ended."""

    name: str  # `step`, or the name of the stage.
    step: int | None  # The global step to which the span belongs; null if it is not known.
    age_s: float  # Seconds since the span began.
    loop: int = 1  # The number of the step's loop in its process.


class ListedRun(Struct):
    """A run in the list of `autoprof ls`."""

    id: str  # The run's id.
    path: str  # The run's directory.
    info: dict[str, Any]  # The content of `run.json`, a [RunFile](files.md#runfile).
    steps: list[ListedStep]  # The captured steps, in the order of their numbers.
    left_out: list[str]  # Files or parts of files that could not be read, one line each.
    # The state now, with the reason of a failure and the number of processes that outlive the run. If the process that
    # started the run is gone, it is `unfinished`, unlike in `info`.
    state: str
    bytes: int  # The size of all captures of the run.
    open: list[ListedSpan] = []  # If the run is running: the open step, and the stage that began last in that step.


class Listed(Document):
    """The output of `autoprof ls --json`."""

    runs: list[ListedRun]  # All runs, oldest first; if RUN is given, only that run.


class Merged(Document):
    """The output of `autoprof merge --json`."""

    file: str  # The path of the merged trace.
    bytes: int  # The size of the merged trace.
    step: int | None  # The step of the traces; null for traces that belong to no run.
    traces: int  # The number of traces to merge, including the traces that were left out.
    lines: list[str]  # The result as lines of text. They name the traces that were left out.


class Analysed(Struct):
    """A folder that torch_npu recorded."""

    name: str  # The path of the folder in the run: the step's folder, a slash, and the name.
    analysed: bool  # True if this command analysed the folder; false if the analysis failed.


class Analyses(Document):
    """The output of `autoprof analyse --json`."""

    run: str  # The run's id.
    folders: list[Analysed]  # The folders that were not analysed before this command.


class Copied(Struct):
    """The copy of a run, which `--to` asked for."""

    to: str  # The URL of the copy, without secrets.
    files: int  # The number of files that were copied.
    bytes: int  # The size of the files that were copied.


class Collected(Document):
    """The output of `autoprof collect --json`."""

    run: str  # The run's id.
    directory: str  # The run's directory on this machine.
    nodes: list[NodeState] = []  # The nodes of the run, each a [NodeState](files.md#nodestate).
    missing: list[Missing] = []  # The parts that were not collected, each a [Missing](files.md#missing).
    left_out: list[Missing] = []  # Files that are never collected: links, and names that lead out of the run.
    when: float | None = None  # Seconds since the epoch at the collection; null if no cluster could be asked.
    copied: Copied | None = None  # The copy; null without `--to`.
    missing_lines: list[str] = []  # One line for each missing part of the run and of its copy.


class Folder(Struct):
    """The folder of a captured step on one host."""

    step: int  # The captured step.
    host: str  # The name of the host.
    path: str  # The path of the folder on this host.
    captures: int  # The number of captures in the folder.
    bytes: int  # The size of the captures.


class Triggered(Document):
    """The output of `autoprof trigger --json`. Without `--wait`, `captured` and the fields after it are empty."""

    run: str  # The run's id.
    request: str = ""  # The name of the request's file; empty for `--on` and `--off`.
    joined: bool = False  # True if an equal request was open already, and this command uses that request.
    off: bool = False  # True if autoprof is switched off in the run.
    captured: list[int] = []  # The captured steps.
    folders: list[Folder] = []  # The folders of the captured steps on all hosts.
    problems: list[str] = []  # One line for each capture that is missing or not complete.
    reason: str = ""  # The reason why some steps were not captured; empty if all were.


class Opened(Document):
    """The output of `autoprof open --json`. After this output, the command serves the pages until Ctrl-C."""

    run: str  # The run's id.
    url: str  # The URL of the page with links to the report and the trace.
    report: str | None = None  # The URL of the report; null if it can't be shown.
    trace: str | None = None  # The URL of the merged trace; null if it can't be shown.
    step: int | None = None  # The step of the merged trace.


class StackGroup(Struct):
    """A group of threads that have the same stack in the same stage. They may be of different processes."""

    heading: str  # A sentence that says which threads these are, and in which function.
    processes: list[str]  # The processes of the threads, as `host-pid`.
    frames: list[Frame]  # The stack, with the outermost function first. Each function is a [Frame](files.md#frame).


class Lacking(Struct):
    """A process of which the command got no stack."""

    host: str  # The host of the process.
    pid: int  # The process id.
    process: str  # The command line of the process, or the title that Ray gave the process.
    state: str  # `running`, `gone`, or `elsewhere`: the process is on a host or in a container that was not asked.
    reason: str  # The reason why there is no stack.
    spans: list[OpenSpan]  # The open spans of the process, each an [OpenSpan](files.md#openspan).


class Stacks(Document):
    """The output of `autoprof stacks --json`."""

    run: str  # The run's id.
    folders: list[str]  # The folders with the processes' answers, as `host:path`.
    processes: list[ProcessStacks]  # The answers of the processes, each a [ProcessStacks](files.md#processstacks).
    groups: list[StackGroup]  # First the threads that work on a span, then other main threads; large groups first.
    absent: list[Lacking]  # The processes that did not answer.
    problems: list[str]  # One line for each host, file or process that could not be read.


# Reason of a hook whose module could not be imported. ModuleNotFoundError is excepted, because it only means that an
# optional dependency is not installed.
_RAISED = re.compile("importing [^ ]+ raised (?!ModuleNotFoundError:)")


class Report(Document, kw_only=True):
    """The output of `autoprof doctor --json`."""

    subject: str  # The environment or the run that was checked.
    verdict: str = ""  # The result of the checks in one sentence.
    facts: dict[str, str] = {}  # Facts about the environment or the run, by name.
    hooks: list[tuple[str, str, str]] = []  # For each hook: its key, its state, and the reason for the state.
    problems: list[str] = []  # Problems, and what to do about them. If there are any, the exit status is 1.
    notes: list[str] = []  # Observations that are no problems.

    def add_hooks(self, hooks: Mapping[str, HookLine]) -> None:
        """Add hooks, and the problems of failed hooks. Hooks that share a failed import make one problem."""
        failures: dict[tuple[str, str], list[str]] = {}
        for key, hook in sorted(hooks.items()):
            self.hooks.append((key, hook.state, hook.reason))
            if hook.state == "failed":
                failures.setdefault((key, hook.reason), []).append(key)
            elif _RAISED.match(hook.reason):
                failures.setdefault(("", hook.reason), []).append(key)
        for (_, reason), keys in failures.items():
            self.problems.append(f"hook{'s' if len(keys) > 1 else ''} {', '.join(keys)}: {reason}")
