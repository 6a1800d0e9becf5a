"""Structs of the files and lines in a run directory.

`docs/reference/files.md` is generated from these structs and their comments. A field without a default is always
written; a field with a default is omitted while it has that value. `decoder` reads the structs, also from damaged files
and from files of other releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from autoprof.base.redact import writable
from autoprof.config import structs

# Nanoseconds and seconds since the epoch, up to the year 2116.
Ns: TypeAlias = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=(1 << 62) / 1e9)]
# Integers that every JSON reader keeps exactly: a double has 53 bits.
Number: TypeAlias = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]


class RunNode(Struct, frozen=True):
    """A Ray node that the run worked on."""

    id: str = ""  # Ray's id of the node.
    host: str = ""  # Its host name.
    directory: str = ""  # The run directory there.


class RunSettings(Struct, frozen=True):
    """The settings that commands need. `run.json` has every setting of docs/reference/settings.md, without secrets."""

    steps: str = ""  # `AUTOPROF_STEPS`.
    recipes: list[str] = []  # `AUTOPROF_RECIPES`.
    tool: list[str] = []  # `AUTOPROF_TOOL`.


class Frame(Struct, frozen=True, omit_defaults=True):
    """One function on a stack."""

    function: str = ""  # The function's name, with its class if known.
    file: str = ""  # Its file.
    line: Number = 0  # The current line number.


class NamedProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dead process that an exception of Ray or torchrun names."""

    pid: Number = 0  # The process id; 0 if the exception does not name it.
    rank: Number | None = None  # Its global rank.
    signal: str = ""  # The signal that ended it, such as `SIGKILL`.
    status: Number | None = None  # Its exit status.
    # `memory` if Ray's memory monitor or the kernel killed it because memory ran out; `node` if its node died.
    cause: str = ""
    used_bytes: Size = 0  # The used memory of the node at that time.
    limit_bytes: Size = 0  # The total memory of the node.


class Raised(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception."""

    type: str = ""  # Its type.
    # Its text without secrets, at most 1,000 characters; its arguments instead if its class defines `__str__`.
    message: str = ""
    # Its stack, the innermost function last. If Ray brought it from another process, the stack is of that process.
    frames: list[Frame] = []
    cause: str = ""  # The exception that caused it, in one line.
    pid: Number = 0  # The process that raised it, if Ray brought it from another one.
    named: list[NamedProcess] = []  # The dead processes that it names.


class Death(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process of the run that ended abnormally, or whose exception ended the run."""

    # `exception`; `exit`: it called `sys.exit`, or ended with a status other than 0; `crash`: a signal such as SIGSEGV
    # that the process itself caused; `killed`: by a known signal, because memory ran out, or with its node; `gone`: it
    # vanished without a trace, killed by a signal or ended by `os._exit`.
    how: str = ""
    host: str = ""  # Its host.
    pid: Number = 0  # Its process id.
    role: str = ""  # The role of its last stage.
    rank: Number | None = None  # Its rank.
    step: Number | None = None  # The step in which it died.
    stage: str = ""  # The innermost stage that was open.
    after: str = ""  # The last stage that had ended, if no stage was open.
    since_ns: Ns = 0  # The start of the open stage, in nanoseconds since the epoch.
    last_ns: Ns = 0  # The last sign of life, in nanoseconds since the epoch.
    signal: str = ""  # The signal that ended it.
    status: Number | None = None  # Its exit status.
    killer: str = ""  # `kernel` or `Ray` if one of them killed it because memory ran out; `node` if its node died.
    used_bytes: Size = 0  # The used memory of the container or the node at that time.
    limit_bytes: Size = 0  # The memory limit of the container or the node.
    resident_bytes: Size = 0  # The resident memory of the process at its last check.
    started: bool = False  # True if it started the run.
    earlier: bool = False  # True if it died in an attempt before the run was resumed.
    exception: Raised | None = None  # The exception.
    frames: list[Frame] = []  # Its stack when it crashed, the innermost function last.
    file: str = ""  # The file with the evidence: a crash dump or a journal.


class Attempt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt at a run that was resumed later."""

    host: str = ""  # The host of the process that started it.
    pid: Number = 0  # The id of that process.
    started: Seconds | None = None  # The start, in seconds since the epoch.
    ended: Seconds | None = None  # The end, if known.
    state: str = ""  # `ended`, `failed` or `unfinished`.


@structs.complete
class RankFile(Struct, frozen=True, kw_only=True):
    """`ranks/<launch>/<rank>`: a rank that a launcher such as `srun` started. `first` is the rank that joined first.

    When the rank ends, it writes `<rank>.ended` with the type of its uncaught exception, or an empty file.
    """

    program: str = ""  # A random id of the program that the launcher started.
    host: str = ""  # Its host.
    pid: Number = 0  # The id of the process that joined.
    ticks: Number = 0  # Its start time, as in `run.json`.
    started: Seconds = 0.0  # The time when it joined, in seconds since the epoch.


@structs.complete
class RunFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`run.json`: the run. The process that started the run completes the file at the end.

    With glibc, that process also writes its exit status, one byte, to `exit_status`; a killed process does not. An
    exit status other than 0 means that the run failed, even if `state` is `ended`.
    """

    id: str  # The run's id, the name of its directory.
    command: str  # The command line, without secrets.
    cwd: str  # The working directory.
    host: str  # The host of the process that started the run.
    pid: Number  # The id of that process.
    ticks: Number  # Its start time in clock ticks since the host's boot, because pids are reused; 0 if unknown.
    started: Seconds  # The start, in seconds since the epoch.
    python: str  # The version of Python.
    autoprof: str  # The version of autoprof.
    settings: RunSettings  # The run's settings.
    hosts: list[str]  # The hosts of the processes that have a journal.
    versions: dict[str, str]  # The versions of the targets, by package.
    recipes: list[str]  # The recipes with an applied hook.
    # `running`, `ended`, or `failed` by an exception. Commands show `running` as `unfinished` if the process no longer
    # exists: it was killed, or ended by `os._exit`.
    state: str
    earlier: list[Attempt] = []  # The attempts before the run was resumed, oldest first.
    nodes: list[RunNode] = []  # The Ray nodes that the run worked on.
    ended: Seconds | None = None  # The end, in seconds since the epoch.
    error: str = ""  # The type of the exception that ended the process, or `SIGINT`.
    exception: Raised | None = None  # That exception.
    # The processes that were dead at the end of the run, and the process whose exception ended it, the likely cause
    # first. For a run without this list, commands find the dead processes themselves.
    died: list[Death] = []
    no_hooks: str = ""  # The reason, if no hook was applied in any process.


class Moment(Struct, frozen=True):
    """One moment by both clocks of a host."""

    unix_ns: Ns = 0  # Nanoseconds since the epoch, by the wall clock, which users and NTP may set.
    monotonic_ns: Ns = 0  # Nanoseconds of the monotonic clock, which cannot be set.


class Clock(Struct, frozen=True):
    """The time of a capture."""

    start: Moment = Moment()  # Its start.
    stop: Moment = Moment()  # Its stop.


@structs.complete
class CaptureMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`global_step_<step>/<capture>.meta.json`: a complete or failed capture."""

    step: Number | None  # The global step.
    role: str  # The role. For a whole-step capture all roles of the process, joined by `+`.
    stage: str  # The stage.
    rank: Number | None  # The global rank.
    replica: Number | None  # The replica of the rollout engine, null in a trainer.
    part: str  # The part of the replica.
    tool: str  # `torch`, `npu`, `nsys` or `memory`; `none` if this process records nothing (see `reason`).
    contents: list[str]  # The recorded words of `AUTOPROF_CONTENTS`.
    left_out: list[str]  # The words and tool options that this release of the tool does not support.
    window: str  # The setting or request that opened the window.
    host: str  # The host.
    pid: Number | None  # The process id.
    clock: Clock  # The start and stop of the capture.
    versions: dict[str, str]  # The versions of autoprof, the targets and the tools, by package.
    bytes: Size  # The size of the trace.
    state: str  # `complete`, `truncated` or `failed`.
    reason: str  # Why it is not complete, or another remark.
    stage_kind: str = ""  # The stage's [kind](recipes.md#kinds), if it has one.
    slowest: str = ""  # Why these ranks were captured, if the slowest ranks were requested.
    steps: list[Number] = []  # All steps in a whole-step capture.
    stages: list[Any] = []  # The stages in a whole-step capture.
    # True if the trace holds GPU work. The field is only written if something may have kept GPU work out of it.
    device_events: bool | None = None
    device_reason: str = ""  # The possible reason why the trace holds no GPU work.


class MergedMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`global_step_<step>/*merged*.meta.json`: a merged trace."""

    step: Number | None  # The global step, null if the traces are not of a step.
    tool: str  # `merge`.
    merged: list[str]  # The traces in it.
    cut: dict[str, str]  # The damaged traces, merged up to the damage, with the reason.
    left_out: dict[str, str]  # The traces that were left out, with the reason.
    versions: dict[str, str]  # The version of autoprof.
    bytes: Size  # The size of the merged trace.
    state: str  # `complete` or `failed`.
    reason: str  # Why it failed.
    said: list[str]  # Further messages of the command, for example about clocks.
    role: str = ""  # The role, if the traces are of one replica.
    stage: str = ""  # The stage, if the traces are of one replica.
    replica: Number | None = None  # The replica.


class OutOfMemoryMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`oom/<host>.pid<pid>.meta.json`: a snapshot of CUDA's allocator when it ran out of memory."""

    tool: str  # `memory`.
    host: str  # The host.
    pid: Number  # The process id.
    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    device: Number  # The number of the device.
    asked_bytes: Size  # The size of the failed allocation.
    total_bytes: Size  # The memory of the device.
    free_bytes: Size  # The free memory of the device.
    versions: dict[str, str]  # The versions of the tools, by package.
    bytes: Size  # The size of the snapshot.
    state: str  # `complete`.
    reason: str  # Empty.
    step: Number | None = None  # The step of the capture that was being recorded, if any.
    role: str = ""  # The role of that capture.
    stage: str = ""  # Its stage.
    stage_kind: str = ""  # The stage's [kind](recipes.md#kinds), if it has one.
    rank: Number | None = None  # Its rank.
    replica: Number | None = None  # Its replica.
    part: str = ""  # Its part of the replica.


class Offset(Struct, frozen=True, kw_only=True):
    """A line of `clocks/<host>-<pid>.jsonl`: another host's clock minus the clock of the trainer's host.

    A host that does not answer within half a minute has no line.
    """

    host: str  # The other host.
    offset_ns: Ns  # The nanoseconds that the other clock is ahead.
    error_ns: Ns  # The maximum error in nanoseconds: half of the round trip.
    unix_ns: Ns  # The time of the measurement, by the clock of the trainer's host.


class Missing(Struct, frozen=True):
    """Something of the run that was not collected."""

    node: str = ""  # Ray's id of the node.
    host: str = ""  # Its host name.
    path: str = ""  # The file; empty if nothing of the node was collected.
    reason: str = ""  # Why it was not collected.

    @property
    def line(self) -> str:
        """Return node, path and reason in one line."""
        where = f"{self.host} ({self.node[:8]})" if self.node else ""
        return ": ".join(filter(None, [where, self.path, self.reason]))


class NodeState(Struct, frozen=True, kw_only=True):
    """A node of the cluster and its part of the run."""

    id: str = ""  # Ray's id of the node.
    host: str = ""  # Its host name.
    # `here`: it shares this disk; `collected`; `incomplete`: something is missing; `nothing`: it has no files of the
    # run; `no autoprof`: it has no files because autoprof is not installed there; `dead`; `no answer`; `unreadable`.
    state: str = ""
    directory: str = ""  # The run directory there.
    files: Size = 0  # The number of files of its part, including those collected before.
    bytes: Size = 0  # Their total size.
    fetched: Size = 0  # The bytes fetched this time.


@structs.complete
class CollectedFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`collected.json`: the result of collecting the run's parts."""

    run: str  # The run's id.
    directory: str  # The run directory on this host.
    nodes: list[NodeState]  # The nodes and their parts of the run.
    missing: list[Missing]  # The files that were not collected.
    left_out: list[Missing]  # The files left out on purpose: links, and paths that lead out of the run directory.
    when: Seconds | None = None  # The time, in seconds since the epoch.

    @property
    def fetched(self) -> int:
        """Return the bytes fetched from all nodes."""
        return sum(node.fetched for node in self.nodes)


# A count of tokens. The limit is more than any engine generates in one span.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**12)] | Annotated[float, Meta(ge=0, le=1e12)]
# A value that identifies one of many spans of a name. A span has few of them.
Id: TypeAlias = str | int | float | bool


class MemoryState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of a process, and of the control group or machine that limits it."""

    resident_bytes: Size = 0  # The process's resident memory.
    peak_bytes: Size = 0  # Its peak.
    cgroup: str = ""  # The folder of its control group, which counts `kills`.
    # Used memory of the control group or machine with the least free memory, without file pages that can be dropped.
    used_bytes: Size = 0
    used_peak_bytes: Size = 0  # Its peak with these file pages, if the kernel records it.
    limit_bytes: Size = 0  # Its limit.
    kills: Size = 0  # The number of processes of the group that the kernel has killed because memory ran out.
    machine_kills: Size = 0  # The same number for the whole machine.


class ProcessLine(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="process"):
    """The first line of a part of `journal/<host>-<pid>.jsonl`, which has one process.

    A part can be read alone: the starts of open spans, the hooks that failed and the errors of autoprof follow again. A
    part begins at the start, after 64 kB of other lines, and if the title, the node or a version has changed.
    """

    host: str  # The host.
    pid: Number  # The process id.
    clock: Moment  # The time of writing, by both clocks.
    version: str  # The version of autoprof.
    ticks: Number = 0  # Its start time, as in `run.json`.
    namespace: Number = 0  # The id of its pid namespace, 0 if unknown: several containers use the same pids.
    boot: str = ""  # The machine's boot id.
    parent: Number = 0  # The id of its parent process.
    process: str = ""  # Its command line, or the title that Ray gave it.
    python: str = ""  # The version of Python.
    node: str = ""  # Ray's id of the node.
    ray: str = ""  # The address of the node's Ray cluster.
    versions: dict[str, str] = {}  # The versions of the imported targets, by package.
    stderr: str = ""  # The file of its stderr, if no other process writes to it. Ray's workers have one.
    memory: MemoryState = MemoryState()  # Its memory at that time.
    hooks: dict[str, str] = {}  # The states of its hooks at that time, by name: `applied`, `called` or `failed`.
    steps: Size = 0  # The number of steps that it had ended.
    raised: Size = 0  # The number of its `raised` lines.


class HookLine(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="hook"):
    """The outcome of a hook in this process. If it changes, or at the first call, another line follows."""

    hook: str  # The recipe and the name of the hook: `verl/update-actor`.
    module: str = ""  # The module of the function.
    attribute: str = ""  # The function in that module.
    behaviour: str = ""  # The behaviour that the hook runs.
    state: str = "unknown"  # `applied`, `skipped` or `failed`.
    reason: str = ""  # Why it was skipped or failed.
    called: bool = False  # True if it was called.


class ErrorLine(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="error"):
    """An error of autoprof itself, at one place. Lines are written at the counts 1, 2, 4, 8, ..."""

    where: str  # The place.
    count: Size = 1  # The number of times it happened.
    last: str = ""  # The last error.


# The place of the error line that counts lines that could not be written.
LOST_LINES = "timeline"


class BegunLine(Struct, frozen=True, omit_defaults=True, gc=False, tag_field="kind", tag="begun"):
    """The start of a span. The span is open until another line ends it.

    The start of a step, stage or window is written immediately. The start of another span is written once it is ten
    seconds old; at most 256 starts are open at once. A later `begun` of the same kind, name, role, rank and ids also
    ends an earlier one.
    """

    span: str  # The kind of the span.
    name: str  # Its name.
    step: Number | None  # The trainer's step, null if the process does not know it.
    role: str  # The role.
    rank: Number | None  # The rank, null if the process has no rank.
    start_ns: Ns  # The start, in nanoseconds since the epoch, by the host's clock.
    ids: Mapping[str, Id | None] = {}  # The ids of the sample, request or replica.
    stage_kind: str = ""  # The [kind](recipes.md#kinds) of a stage, if it has one.


class DroppedLine(Struct, frozen=True, omit_defaults=True, gc=False, tag_field="kind", tag="dropped"):
    """The end of a span that is left out of the timeline although its start was written."""

    span: str  # The kind of the span.
    name: str  # Its name.
    start_ns: Ns  # Its start, in nanoseconds since the epoch.


class ExitLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="exit"):
    """A process's last line, at its exit. It is missing if the process was killed, crashed, or called `os._exit`."""

    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    error: str = ""  # The type of the uncaught exception, or `SIGINT`.
    exception: Raised | None = None  # The same exception with its stack; missing after `SIGINT`.
    peak_bytes: Size = 0  # The peak of its resident memory.
    steps: Size = 0  # The number of steps that it ended.
    raised: Size = 0  # The number of its raised lines.


class RaisedLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="raised"):
    """An exception that left a step, a stage, a window, a reward or a sample. Only the innermost of these has a line.

    A process writes at most 50 lines for stages and windows. For samples and rewards, it writes at most 20 lines, and
    at most 2 of the same name and exception type, per 1 MB of other lines.
    """

    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    span: str  # The kind of the span.
    name: str  # Its name.
    step: Number | None  # The step.
    role: str  # The role.
    rank: Number | None  # The rank.
    exception: Raised  # The exception.


class MemoryLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="memory"):
    """The memory of the process, checked every ten seconds.

    A line is written if the process has grown by an eighth and at least 64 MiB, or if the kernel has killed a process
    of the control group or the machine because memory ran out. It is also written as a sign of life.
    """

    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    memory: MemoryState  # The memory.


class Line(Struct, frozen=True, omit_defaults=True, gc=False):
    """A line of `journal/<host>-<pid>.jsonl`: one span, written after it ends.

    Steps, stages, windows and exceptions are written immediately. Other spans are buffered. The buffer is written when
    it has 256 lines, when its first line is one second old, with the next immediate line, when the process has no open
    span, and at exit. A killed process therefore loses the spans of its last second. A node that crashes may lose the
    last ten seconds. Each line is written whole or not at all. Lines contain ids that recipes name, but no prompts,
    answers or arguments.

    A file grows by about 230 bytes per span of a sample: 0.35 MB in a step of 512 samples, 3.6 GB in 10,000 such
    steps. Without these spans (`AUTOPROF_DISABLE='verl/sample*'`), 10,000 steps need 75 MB.
    """

    kind: str  # The kind of the span.
    name: str  # Its name.
    step: Number | None  # The trainer's step, null if the process does not know it.
    role: str  # The role.
    rank: Number | None  # The rank, null if the process has no rank.
    start_ns: Ns  # The start, in nanoseconds since the epoch, by the host's clock.
    end_ns: Ns  # The start plus the duration by the monotonic clock.
    error: str | None = None  # The type of the exception that ended the span.
    ids: Mapping[str, Id | None] = {}  # The ids of the sample, request or replica.
    counts: Mapping[str, Count | None] = {}  # Counts, such as tokens.
    stage_kind: str = ""  # The [kind](recipes.md#kinds) of a stage or timer, if it has one.


# The name of the `profiling` span of an export: a thread writes the trace while the process continues.
EXPORT = "export"
# The kinds of spans, with their ids and counts.
SPAN_KINDS = {
    "step": "the trainer's step; a generation batch if there is no trainer",
    "stage": "a stage or another call: `rollout` in the trainer, `generate_sequences` in an agent loop",
    "timer": (
        "a timer of the trainer itself, with the trainer's name for it: verl's `marked_timer`, in the trainer's "
        "process. Timers nest. The timer `step` begins just before the step"
    ),
    "sample": (
        "the agent loop of one sample: `sample` (the index of its prompt in the data set), `rollout` (the number of "
        "the answer to it), `agent`; `validate` is true in a validation"
    ),
    "turn": (
        "one generation in a sample, measured in its agent loop: the sample's ids, `request` (the conversation); "
        "`prompt_tokens`, `response_tokens`"
    ),
    "tool": "one call of a tool in a sample, with the tool's name: the sample's ids",
    "reward": "the score of a sample: the sample's ids",
    "request": (
        "one generation in the server's process, which does not know the step: `replica`, `request` (verl's id of "
        "this turn); `prompt_tokens`, `response_tokens`"
    ),
    "window": "a recording of an engine, from start to stop: `replica`",
    "profiling": (
        "the cost of a capture for the run: `profiler start` (Kineto's first start takes seconds), `profiler stop`, "
        "`export` of the trace in a thread, `writing` while a process waits for the file: `replica`"
    ),
}


# Folder of stacks that a user requested, and folder of stacks that a slow step requested.
STACKS, HANGS = "stacks", "hangs"
# Maximum size of one file of a process. For a hang it writes two: its stacks, and torch's record of collectives.
MAX_STACKS_BYTES = 1 << 19
# Name of the file with the origin of the request and its reason.
WHY = "why.json"


class OpenSpan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A span that has begun and not ended."""

    kind: str = ""  # The kind of the span.
    name: str = ""  # Its name.
    step: Number | None = None  # The step.
    role: str = ""  # The role.
    rank: Number | None = None  # The rank.
    start_ns: Ns = 0  # The start, in nanoseconds since the epoch.
    ids: Mapping[str, Id | None] = {}  # The ids of the sample, request or replica.
    stage_kind: str = ""  # The kind of the stage.

    @classmethod
    def of(cls, line: BegunLine) -> OpenSpan:
        """Return the span that began with a line."""
        return cls(
            kind=line.span,
            name=writable(line.name),
            step=line.step,
            role=writable(line.role),
            rank=line.rank,
            start_ns=line.start_ns,
            ids={name: writable(value) if isinstance(value, str) else value for name, value in line.ids.items()},
            stage_kind=line.stage_kind,
        )


class Thread(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A thread and its stack, the outermost function first."""

    name: str = ""  # Its name in Python; empty if Python does not know the thread.
    ident: Number = 0  # Python's id of the thread.
    native: Number = 0  # The kernel's id of the thread.
    main: bool = False  # True if it is the main thread.
    frames: list[Frame] = []  # Its functions.
    spans: list[Number] = []  # The spans that it works on, as indexes into `spans` of the file.


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task of asyncio and the coroutines that await each other, the outermost first."""

    name: str = ""  # Its name.
    frames: list[Frame] = []  # Its coroutines.
    waits_on: str = ""  # The object that the innermost coroutine awaits, such as `Future` or `Task-7`.
    spans: list[Number] = []  # The spans that it works on, as indexes into `spans` of the file.
    thread: Number = 0  # Python's id of the thread that runs it now; 0 if it waits.


@structs.complete
class Why(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stacks/<time>/why.json` and `hangs/step_<step>/why.json`: who requested the stacks of all processes, and why."""

    host: str = ""  # The host of the process that requested them.
    pid: Number = 0  # The id of that process.
    unix_ns: Ns = 0  # The time of the request, in nanoseconds since the epoch.
    step: Number | None = None  # The step that takes too long.
    since_ns: Ns = 0  # The start of that step, in nanoseconds since the epoch.
    condition: str = ""  # The condition of `AUTOPROF_WHEN` that was met.
    reason: str = ""  # The reason, as a sentence.


@structs.complete
class ProcessStacks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stacks/<time>/<host>-<pid>.json` and `hangs/step_<step>/<host>-<pid>.json`: the stacks of one process."""

    host: str  # The host.
    pid: Number  # The process id.
    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    process: str = ""  # Its command line, or the title that Ray gave it.
    rank: Number | None = None  # The rank.
    by: str = ""  # `itself`, or the tool that read the stacks from outside.
    left_out: list[str] = []  # The missing items, each with its reason.
    spans: list[OpenSpan] = []  # The open spans, oldest first.
    threads: list[Thread] = []  # The threads, the main thread first.
    tasks: list[Task] = []  # The tasks of asyncio.
    # Sizes in bytes by name: `resident`, `peak_resident`, `used`, `limit`, `device_used`, `device_total`. `used` and
    # `limit` are those of `MemoryState`. The device sizes sum up the devices that the process uses: `device_used` is
    # the memory that torch has reserved there.
    memory: dict[str, Size] = {}
    # The state of an engine by name: `running`, `waiting`, `free_blocks`, `total_blocks`, `longest_s`, `longest`.
    engine: dict[str, Count | str] = {}
    flight_record: str = ""  # The file in the same folder with torch's record of its collectives.
