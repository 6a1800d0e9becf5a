"""Structs of the files and lines in a run directory.

`docs/reference/files.md` is generated from these structs and their comments. A field without a default is always
written; a field with a default is omitted while it has the default value. `layout` reads the structs. It can also read
damaged files and files of other releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from autoprof.base.redact import writable
from autoprof.config.values import thread_safe

# Nanoseconds and seconds since the epoch, up to the year 2116.
Ns: TypeAlias = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=(1 << 62) / 1e9)]
# Integers that every JSON reader keeps exactly, also a reader that uses doubles with 53 bits.
MAX_NUMBER = 1 << 53
Number: TypeAlias = Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]


class RunNode(Struct, frozen=True):
    """A Ray node that the run worked on."""

    id: str = ""  # Ray's id of the node.
    host: str = ""  # The host name of the node.
    directory: str = ""  # The path of the run directory on the node.


class RunSettings(Struct, frozen=True):
    """The settings that commands read. `run.json` has every setting of docs/reference/settings.md, without secrets."""

    steps: str = ""  # The value of `AUTOPROF_STEPS`.
    recipes: list[str] = []  # The value of `AUTOPROF_RECIPES`.
    tool: list[str] = []  # The value of `AUTOPROF_TOOL`.
    when: list[dict[str, Any]] = []  # The conditions of `AUTOPROF_WHEN`.


class Frame(Struct, frozen=True, omit_defaults=True):
    """One function on a stack."""

    function: str = ""  # The name of the function, with the name of its class if known.
    file: str = ""  # The source file of the function.
    line: Number = 0  # The number of the line that was running.


class NamedProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dead process that an exception of Ray, torchrun, vLLM, SGLang or torch's data loader names."""

    pid: Number = 0  # The process id; 0 if the exception does not contain the id.
    rank: Number | None = None  # The global rank of the process.
    name: str = ""  # The kind of process, such as `Ray actor Scorer` or `vLLM's EngineCore`.
    signal: str = ""  # The signal that ended the process, such as `SIGKILL`.
    status: Number | None = None  # The exit status of the process.
    # `memory` if Ray's memory monitor or the kernel killed the process because memory ran out; `node` if its node died.
    cause: str = ""
    used_bytes: Size = 0  # The used memory of the node when the process died.
    limit_bytes: Size = 0  # The total memory of the node.


class Raised(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception: its type, its text and its stack."""

    type: str = ""  # The type of the exception.
    # The text without secrets, at most 1,000 characters. If the class of the exception defines `__str__`, the text
    # consists of the arguments of the exception.
    message: str = ""
    # The stack, the innermost function last. If Ray brought the exception from another process, it is the stack of that
    # process.
    frames: list[Frame] = []
    cause: str = ""  # The exception that caused this exception, in one line.
    pid: Number = 0  # The id of the process that raised the exception, if Ray brought it from another process.
    named: list[NamedProcess] = []  # The dead processes that the exception names.


class Death(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process of the run that ended abnormally, or whose exception ended the run."""

    # The way in which the process ended. `exception`: by an exception. `exit`: it called `sys.exit`, ended with a
    # status other than 0, or ended before the other ranks. `crash`: by a signal such as SIGSEGV that the process itself
    # caused. `killed`: by a known signal, because memory ran out, or because its node died. `gone`: it vanished without
    # a trace, killed by a signal or ended by `os._exit`.
    how: str = ""
    host: str = ""  # The host of the process.
    pid: Number = 0  # The process id.
    role: str = ""  # The role of the last stage of the process.
    name: str = ""  # The kind of process, such as `Ray actor Scorer`, if only an exception names the process.
    rank: Number | None = None  # The rank of the process.
    step: Number | None = None  # The step in which the process died.
    loop: Number = 1  # The number of the step's loop.
    stage: str = ""  # The innermost stage that was open when the process died.
    after: str = ""  # The last stage that had ended, if no stage was open.
    since_ns: Ns = 0  # The start of the open stage, in nanoseconds since the epoch.
    last_ns: Ns = 0  # The last sign of life, in nanoseconds since the epoch.
    signal: str = ""  # The signal that ended the process.
    status: Number | None = None  # The exit status of the process.
    # `kernel` or `Ray` if the kernel or Ray killed the process because memory ran out; `node` if its node died.
    killer: str = ""
    used_bytes: Size = 0  # The used memory of the container or the node when the process died.
    limit_bytes: Size = 0  # The memory limit of the container or the node.
    resident_bytes: Size = 0  # The resident memory of the process when autoprof last checked it.
    started: bool = False  # True if the process started the run.
    earlier: bool = False  # True if the process died in an attempt before the run was resumed.
    exception: Raised | None = None  # The exception that ended the process.
    # The stack of the process when it crashed or SIGTERM killed it, the innermost function last.
    frames: list[Frame] = []
    file: str = ""  # The file with the evidence: the dump of a crash or a kill, or a journal.


class Attempt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt at a run that was resumed later."""

    host: str = ""  # The host of the process that started the attempt.
    pid: Number = 0  # The id of the process that started the attempt.
    started: Seconds | None = None  # The start of the attempt, in seconds since the epoch.
    ended: Seconds | None = None  # The end of the attempt, in seconds since the epoch, if known.
    state: str = ""  # The state of the attempt: `ended`, `failed` or `unfinished`.


@thread_safe
class RankFile(Struct, frozen=True, kw_only=True):
    """`ranks/<launch>/<rank>`: a rank that a launcher such as `srun` started.

    The file `first` in the same folder has the rank that joined first. When a rank ends, it writes `<rank>.ended`. This
    file has the type of the rank's uncaught exception, or is empty.
    """

    program: str = ""  # A random id of the program that the launcher started.
    host: str = ""  # The host of the rank.
    pid: Number = 0  # The id of the process that joined as this rank.
    ticks: Number = 0  # The start time of that process, as in `run.json`.
    started: Seconds = 0.0  # The time when the process joined, in seconds since the epoch.


@thread_safe
class RunFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`run.json`: facts about the run. The process that started the run completes the file when the run ends.

    On systems with glibc, that process also writes its exit status, one byte, to `exit_status`. A killed process does
    not write it. An exit status other than 0 means that the run failed, even if `state` is `ended`.
    """

    id: str  # The id of the run, which is the name of the run directory.
    command: str  # The command line, without secrets.
    cwd: str  # The working directory.
    host: str  # The host of the process that started the run.
    pid: Number  # The id of the process that started the run.
    # The start time of that process in clock ticks since the host's boot; 0 if unknown. It distinguishes processes with
    # the same pid, because pids are reused.
    ticks: Number
    started: Seconds  # The start, in seconds since the epoch.
    python: str  # The version of Python.
    autoprof: str  # The version of autoprof.
    settings: RunSettings  # The run's settings.
    hosts: list[str]  # The hosts of the processes that have a journal.
    versions: dict[str, str]  # The versions of the targets, of torch and of the GPU driver, by name.
    recipes: list[str]  # The recipes of which at least one hook was applied.
    # `running`, `ended`, or `failed` if an exception ended the run. If the state is `running` but the process that
    # started the run no longer exists, it was killed, or ended by `os._exit`; commands then show `unfinished`.
    state: str
    earlier: list[Attempt] = []  # The attempts before the run was resumed, oldest first.
    nodes: list[RunNode] = []  # The Ray nodes that the run worked on.
    ended: Seconds | None = None  # The end, in seconds since the epoch.
    error: str = ""  # The type of the exception that ended the process that started the run, or `SIGINT`.
    exception: Raised | None = None  # The exception that ended that process.
    # The processes that were dead when the run ended, and the process whose exception ended the run. The likely cause
    # comes first. If this list is missing, commands find the dead processes in other files.
    died: list[Death] = []
    no_hooks: str = ""  # The reason why no hook was applied in any process, if none was applied.


class Moment(Struct, frozen=True):
    """The time of one moment, read from both clocks of a host."""

    unix_ns: Ns = 0  # Nanoseconds since the epoch, by the wall clock, which users and NTP may set.
    monotonic_ns: Ns = 0  # Nanoseconds of the monotonic clock, which cannot be set.


class Clock(Struct, frozen=True):
    """The times at which a capture started and stopped."""

    start: Moment = Moment()  # The time of the start.
    stop: Moment = Moment()  # The time of the stop.


@thread_safe
class CaptureMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`global_step_<step>/<capture>.meta.json`: facts about a capture that has ended. It may have failed.

    If a process runs several trainers one after the other, each trainer has a loop. From the second loop on, the folder
    of a step is `global_step_<step>.loop<loop>`.
    """

    step: Number | None  # The global step.
    role: str  # The role. In a whole-step capture, all roles of the process, joined by `+`.
    stage: str  # The stage.
    rank: Number | None  # The global rank.
    replica: Number | None  # The replica of the rollout engine, null in a trainer.
    part: str  # The part of the replica.
    tool: str  # `torch`, `npu`, `nsys` or `memory`; `none` if this process records nothing (see `reason`).
    contents: list[str]  # The words of `AUTOPROF_CONTENTS` whose data was recorded.
    # The words of `AUTOPROF_CONTENTS` and the tool options that the installed release of the tool does not support.
    left_out: list[str]
    window: str  # The setting or request that opened the window.
    host: str  # The host.
    pid: Number | None  # The process id.
    clock: Clock  # The start and stop of the capture.
    versions: dict[str, str]  # The versions of autoprof, the targets and the tools, by package.
    bytes: Size  # The size of the trace in bytes.
    state: str  # `complete`, `truncated` or `failed`.
    reason: str  # The reason why the capture is not complete, or another remark.
    stage_kind: str = ""  # The stage's [kind](recipes.md#kinds), if it has one.
    slowest: str = ""  # The reason why these ranks were captured, if the slowest ranks were requested.
    steps: list[Number] = []  # All steps in a whole-step capture.
    stages: list[Any] = []  # The stages in a whole-step capture.
    # True if the trace contains GPU work. The field is only written if GPU work may be missing from the trace.
    device_events: bool | None = None
    device_reason: str = ""  # The possible reason why the trace contains no GPU work.
    loop: Number = 1  # The number of the step's loop. Each trainer of a process has a loop.


class MergedMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`global_step_<step>/*merged*.meta.json`: facts about a merged trace."""

    step: Number | None  # The global step, null if the traces do not belong to a step.
    tool: str  # Always `merge`.
    merged: list[str]  # The traces that the merged trace contains.
    cut: dict[str, str]  # The damaged traces, of which only the part before the damage was merged, with the reason.
    left_out: dict[str, str]  # The traces that were left out, with the reason.
    versions: dict[str, str]  # The version of autoprof.
    bytes: Size  # The size of the merged trace in bytes.
    state: str  # `complete` or `failed`.
    reason: str  # The reason why the merge failed.
    said: list[str]  # The other messages of the command, for example about clocks.
    role: str = ""  # The role, if the traces are of one replica.
    stage: str = ""  # The stage, if the traces are of one replica.
    replica: Number | None = None  # The replica.


class OutOfMemoryMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`oom/<host>.pid<pid>.meta.json`: a snapshot of CUDA's allocator when it ran out of memory."""

    tool: str  # Always `memory`.
    host: str  # The host.
    pid: Number  # The process id.
    unix_ns: Ns  # The time of the snapshot, in nanoseconds since the epoch.
    device: Number  # The number of the device.
    asked_bytes: Size  # The size of the failed allocation in bytes.
    total_bytes: Size  # The memory of the device in bytes.
    free_bytes: Size  # The free memory of the device in bytes.
    versions: dict[str, str]  # The versions of the tools, by package.
    bytes: Size  # The size of the snapshot in bytes.
    state: str  # Always `complete`.
    reason: str  # Always empty.
    step: Number | None = None  # The step of the capture that was being recorded, if any.
    role: str = ""  # The role of that capture.
    stage: str = ""  # The stage of that capture.
    stage_kind: str = ""  # The [kind](recipes.md#kinds) of that stage, if it has one.
    rank: Number | None = None  # The rank of that capture.
    replica: Number | None = None  # The replica of that capture.
    part: str = ""  # The part of that replica.
    loop: Number = 1  # The number of the loop of that capture's step.


class Offset(Struct, frozen=True, kw_only=True):
    """A line of `clocks/<host>-<pid>.jsonl`: the difference between another host's clock and the trainer's clock.

    A host that does not answer within half a minute has no line.
    """

    host: str  # The other host.
    offset_ns: Ns  # The time of the other clock minus the time of the clock of the trainer's host, in nanoseconds.
    error_ns: Ns  # The maximum error of `offset_ns` in nanoseconds: half of the round trip.
    unix_ns: Ns  # The time of the measurement, by the clock of the trainer's host.


class Missing(Struct, frozen=True):
    """A file, or the whole part of a node, that was not collected."""

    node: str = ""  # Ray's id of the node.
    host: str = ""  # The host name of the node.
    path: str = ""  # The path of the file; empty if no file of the node was collected.
    reason: str = ""  # The reason why it was not collected.

    @property
    def line(self) -> str:
        """Return node, path and reason in one line."""
        where = f"{self.host} ({self.node[:8]})" if self.node else ""
        return ": ".join(filter(None, [where, self.path, self.reason]))


class NodeState(Struct, frozen=True, kw_only=True):
    """A node of the cluster, and the files of the run that it has."""

    id: str = ""  # Ray's id of the node.
    host: str = ""  # The host name of the node.
    # `here`: the node has the same disk as this host. `collected`: all files of the node are here. `incomplete`: some
    # files of the node are missing here. `nothing`: the node has no files of the run. `no autoprof`: the node has no
    # files because autoprof is not installed there. `dead`, `no answer`, `unreadable`: the files could not be read.
    state: str = ""
    directory: str = ""  # The path of the run directory on the node.
    files: Size = 0  # The number of files of the run on the node, including the files that were collected before.
    bytes: Size = 0  # The total size of these files in bytes.
    fetched: Size = 0  # The number of bytes that this collection fetched.


@thread_safe
class CollectedFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`collected.json`: the result of `autoprof collect`, which copies the files of a run from all nodes."""

    run: str  # The run's id.
    directory: str  # The run directory on this host.
    nodes: list[NodeState]  # The nodes, and the files of the run that each of them has.
    missing: list[Missing]  # The files that were not collected.
    left_out: list[Missing]  # The files left out on purpose: links, and paths that lead out of the run directory.
    when: Seconds | None = None  # The time at which the file was written, in seconds since the epoch.

    @property
    def fetched(self) -> int:
        """Return the number of bytes that this collection fetched from all nodes."""
        return sum(node.fetched for node in self.nodes)


# A count, such as of tokens. The limit is more than any engine generates in one span.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**12)] | Annotated[float, Meta(ge=0, le=1e12)]
# A value that distinguishes a span from other spans with the same name. A span has few such values.
Id: TypeAlias = str | int | float | bool


class MemoryState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The memory of a process, and of the control group or machine that limits the memory of the process."""

    resident_bytes: Size = 0  # The resident memory of the process.
    peak_bytes: Size = 0  # The peak of the resident memory.
    cgroup: str = ""  # The folder of the process's control group, which counts `kills`.
    # The used memory of the control group or the machine, whichever has the least free memory. File pages that the
    # kernel can drop do not count.
    used_bytes: Size = 0
    used_peak_bytes: Size = 0  # The peak of that used memory, if the kernel records it. It includes these file pages.
    limit_bytes: Size = 0  # The memory limit of that control group or machine.
    kills: Size = 0  # The number of processes of the control group that the kernel killed because memory ran out.
    machine_kills: Size = 0  # The number of processes of the machine that the kernel killed because memory ran out.


class ProcessLine(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="process"):
    """The first line of a part of `journal/<host>-<pid>.jsonl`. It describes the process that writes the file.

    A reader can read a part without the earlier parts: after this line, the part repeats the starts of open spans, the
    hooks that failed and the errors of autoprof. A part begins at the start of the file, after 32 kB of other lines,
    and when the title, the node or a version has changed.
    """

    host: str  # The host.
    pid: Number  # The process id.
    clock: Moment  # The time at which the line was written, by both clocks.
    version: str  # The version of autoprof.
    ticks: Number = 0  # The start time of the process, as in `run.json`.
    # The id of the process's pid namespace, 0 if unknown. Processes of two containers may have the same pid.
    namespace: Number = 0
    boot: str = ""  # The machine's boot id.
    parent: Number = 0  # The id of the parent process.
    process: str = ""  # The command line of the process, or the title that Ray gave it.
    python: str = ""  # The version of Python.
    node: str = ""  # Ray's id of the node.
    ray: str = ""  # The address of the node's Ray cluster.
    versions: dict[str, str] = {}  # The versions of the imported targets, of torch and of the GPU driver, by name.
    # The file to which the process writes its stderr, if no other process writes to that file. Ray's workers have one.
    stderr: str = ""
    memory: MemoryState = MemoryState()  # The memory of the process when the line was written.
    # The states of the process's hooks when the line was written, by name: `applied`, `called` or `failed`.
    hooks: dict[str, str] = {}
    steps: Size = 0  # The number of steps that had ended in the process.
    raised: Size = 0  # The number of `raised` lines that the process had written.


class HookLine(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="hook"):
    """The outcome of a hook in this process. Another line follows when the outcome changes, and at the first call."""

    hook: str  # The recipe and the name of the hook: `verl/update-actor`.
    module: str = ""  # The module of the function.
    attribute: str = ""  # The function in that module.
    behaviour: str = ""  # The behaviour that the hook runs.
    state: str = "unknown"  # `applied`, `skipped` or `failed`.
    reason: str = ""  # The reason why the hook was skipped or has failed.
    called: bool = False  # True if the hook was called.


class ErrorLine(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="error"):
    """An error of autoprof itself, at one place. A line is written when the count reaches 1, 2, 4, 8, ..."""

    where: str  # The place in autoprof.
    count: Size = 1  # The number of errors at this place so far.
    last: str = ""  # The text of the last error.


# The value of `where` in the error line that counts the journal lines that could not be written.
LOST_LINES = "timeline"


class BegunLine(Struct, frozen=True, omit_defaults=True, gc=False, tag_field="kind", tag="begun"):
    """The start of a span. The span is open until a later line ends it.

    The start of a step, stage or window is written immediately, and that of a timer in a step unless timers take too
    much time. The start of any other span is written once the span has been open for ten seconds. At most 256 written
    starts are open at the same time. A `begun` line also ends an earlier span of the same kind, name, role, rank and
    ids.
    """

    span: str  # The kind of the span.
    name: str  # The name of the span.
    step: Number | None  # The trainer's step, null if the process does not know it.
    role: str  # The role.
    rank: Number | None  # The rank, null if the process has no rank.
    start_ns: Ns  # The start, in nanoseconds since the epoch, by the host's clock.
    ids: Mapping[str, Id | None] = {}  # The ids of the sample, request or replica.
    stage_kind: str = ""  # The [kind](recipes.md#kinds) of a stage, if it has one.


class DroppedLine(Struct, frozen=True, omit_defaults=True, gc=False, tag_field="kind", tag="dropped"):
    """A line that removes a span from the timeline, because the start of the span was written before."""

    span: str  # The kind of the span.
    name: str  # The name of the span.
    start_ns: Ns  # The start of the span, in nanoseconds since the epoch.


class ExitLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="exit"):
    """The last line of a process, written at its exit.

    The line is missing if the process was killed, crashed, or called `os._exit`.
    """

    unix_ns: Ns  # The time of the exit, in nanoseconds since the epoch.
    error: str = ""  # The type of the uncaught exception, or `SIGINT`.
    exception: Raised | None = None  # The uncaught exception with its stack; missing after `SIGINT`.
    peak_bytes: Size = 0  # The peak of the resident memory of the process.
    steps: Size = 0  # The number of steps that ended in the process.
    raised: Size = 0  # The number of `raised` lines that the process wrote.


# Value of `RaisedLine.span` for the exception that ended an engine, which has no span.
ENGINE = "engine"


class RaisedLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="raised"):
    """An exception that left a step, a stage, a window, a reward or a sample, or that ended an `engine`.

    If an exception leaves several of these spans, only the innermost span gets a line. A process writes at most 50 such
    lines for stages and windows. For samples and rewards, a process writes at most 20 such lines per 1 MB of the file,
    and at most 2 of them for the same span name and exception type.
    """

    unix_ns: Ns  # The time of the exception, in nanoseconds since the epoch.
    span: str  # The kind of the span.
    name: str  # The name of the span.
    step: Number | None  # The step.
    role: str  # The role.
    rank: Number | None  # The rank.
    exception: Raised  # The exception.


class MemoryLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="memory"):
    """The memory of the process, checked every ten seconds.

    A line is written if the resident memory has grown by an eighth and by at least 64 MiB, or if the kernel has killed
    a process of the control group or the machine because memory ran out. A line is also written as a sign of life.
    """

    unix_ns: Ns  # The time of the check, in nanoseconds since the epoch.
    memory: MemoryState  # The memory of the process.
    moved: bool = False  # True if the engine of the process has worked on its open batch since the last check.


# The index in `StacksLine.periods` of a time in which the sampler waited for the interpreter's lock.
LOCK_HELD = -1


class StacksLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="stacks"):
    """Samples of the stack of the thread that runs the steps, from times in which a step but no stage was open.

    `AUTOPROF_GAP_STACKS=0` switches them off. A line has the samples of about ten seconds, or of less in a time that is
    much longer than the times before, so that a killed process keeps them. A process writes at most 10,000 such lines.
    """

    unix_ns: Ns  # The start of the first period, in nanoseconds since the epoch.
    frames: list[Frame] = []  # The functions on the stacks.
    # For each different stack, the indexes of its functions in `frames`, the outermost first.
    stacks: list[list[Number]] = []
    # For each period with the same stack: its start and its end in milliseconds after `unix_ns`, and the index of the
    # stack. The index is -1 if the interpreter's lock was held in the whole period, so that nothing could be sampled.
    periods: list[tuple[Number, Number, Number]] = []

    @property
    def until_ns(self) -> int:
        """Return the end of the last period, in nanoseconds since the epoch."""
        return self.unix_ns + max((end_ms for _, end_ms, _ in self.periods), default=0) * 10**6


class Line(Struct, frozen=True, omit_defaults=True, gc=False):
    """A line of `journal/<host>-<pid>.jsonl`: one span, written after the span has ended.

    Steps, stages, windows and exceptions are written immediately. Other spans are buffered. The buffer is written when
    it has 256 lines, when its first line is one second old, together with the next line that is written immediately,
    after a span of the program if no other span is open, and at exit. A killed process therefore loses the spans of its
    last second. A node that crashes may lose the last ten seconds. Each line is written whole or not at all. Lines
    contain the ids that recipes name, but no prompts, answers or arguments.

    A file grows by about 230 bytes per span of a sample: 0.35 MB in a step of 512 samples, 3.6 GB in 10,000 such
    steps. If these spans are disabled (`AUTOPROF_DISABLE='verl/sample*'`), 10,000 steps need 75 MB.
    """

    kind: str  # The kind of the span.
    name: str  # The name of the span.
    step: Number | None  # The trainer's step, null if the process does not know it.
    role: str  # The role.
    rank: Number | None  # The rank, null if the process has no rank.
    start_ns: Ns  # The start, in nanoseconds since the epoch, by the host's clock.
    end_ns: Ns  # The end: `start_ns` plus the duration that the monotonic clock measured.
    error: str | None = None  # The type of the exception that ended the span.
    ids: Mapping[str, Id | None] = {}  # The ids of the sample, request or replica.
    counts: Mapping[str, Count | None] = {}  # Counts by name, such as `response_tokens`.
    stage_kind: str = ""  # The [kind](recipes.md#kinds) of a stage or timer, if it has one.
    beside: bool = False  # True if the stage began in another thread or asyncio task than the open step.


# The names of the `profiling` spans of a thread that writes a trace: the export, which holds the interpreter's lock all
# the time (torch 2.13), and the start of the process that compresses the trace, which holds it for about 20 ms.
EXPORT, HAND_OVER = "export", "hand-over"
# Dict from the kind of a span to its meaning, its ids and its counts.
SPAN_KINDS = {
    "step": (
        "the trainer's step; a generation batch if there is no trainer: `loop` (the number of the step's loop, from "
        "the process's second trainer on), `trainer` (its class, if a `step.loop` hook shows it), `before_s` (the "
        "seconds from the begin of the loop to its first step, from the second loop on)"
    ),
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
        "`export` of the trace in a thread, `hand-over` to the process that compresses it, `writing` while a process "
        "waits for the file: `replica`"
    ),
}


# Folder for stacks that a user requested, and folder for stacks that were requested because a step is slow.
STACKS, HANGS = "stacks", "hangs"
# Value of `ProcessStacks.by` if py-spy read the stacks, because the process did not answer.
BY_PY_SPY = "py-spy"
# The same for a Ray actor without hooks, and for a worker process of multiprocessing. Both can't answer.
BY_PY_SPY_OF_ACTOR = "py-spy, no hooks"
BY_PY_SPY_OF_WORKER = "py-spy, worker process"
# Maximum size in bytes of one file of a process. For a hang, a process writes two such files: its stacks, and torch's
# record of collectives.
MAX_STACKS_BYTES = 1 << 19
# Name of the file that says which process requested the stacks, and why.
WHY = "why.json"


class OpenSpan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A span that has begun and not ended."""

    kind: str = ""  # The kind of the span.
    name: str = ""  # The name of the span.
    step: Number | None = None  # The step.
    role: str = ""  # The role.
    rank: Number | None = None  # The rank.
    start_ns: Ns = 0  # The start, in nanoseconds since the epoch.
    ids: Mapping[str, Id | None] = {}  # The ids of the sample, request or replica.
    stage_kind: str = ""  # The kind of the stage.

    @classmethod
    def of(cls, line: BegunLine) -> OpenSpan:
        """Return the open span that a `begun` line describes."""
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

    name: str = ""  # The name of the thread in Python; empty if Python does not know the thread.
    ident: Number = 0  # Python's id of the thread.
    native: Number = 0  # The kernel's id of the thread.
    main: bool = False  # True for the main thread.
    frames: list[Frame] = []  # The functions on the stack.
    spans: list[Number] = []  # The spans that the thread works on, as indexes into `spans` of the file.
    peer: str = ""  # The rank for which the thread waits in a send or recv of torch.distributed: `recv from rank 1`.
    # The server or the process of `subprocess` for which the thread waits: `an answer from 10.0.0.2:8000`,
    # `process 12 (cat)`.
    awaits: str = ""


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task of asyncio and its chain of coroutines, the outermost first. Each coroutine awaits the next one."""

    name: str = ""  # The name of the task.
    frames: list[Frame] = []  # The coroutines of the task.
    waits_on: str = ""  # The object that the innermost coroutine awaits, such as `Future` or `Task-7`.
    spans: list[Number] = []  # The spans that the task works on, as indexes into `spans` of the file.
    thread: Number = 0  # Python's id of the thread that runs the task now; 0 if the task waits.


class WorkerProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A living process that this process has started with multiprocessing, such as a worker of a data loader."""

    pid: Number  # The process id.
    name: str  # The name, such as `data loader worker 1` or `process Process-2`.
    awaited: bool = False  # True if a data loader waits for this worker.


@thread_safe
class Why(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stacks/<time>/why.json` and `hangs/step_<step>/why.json`: a request for the stacks of all processes."""

    host: str = ""  # The host of the process that requested the stacks.
    pid: Number = 0  # The id of the process that requested the stacks.
    unix_ns: Ns = 0  # The time of the request, in nanoseconds since the epoch.
    step: Number | None = None  # The step that takes too long.
    since_ns: Ns = 0  # The start of that step, in nanoseconds since the epoch.
    condition: str = ""  # The condition of `AUTOPROF_WHEN` that was met.
    reason: str = ""  # The reason, as a sentence.
    # If autoprof doctor requested the stacks because no process did: the processes that had shown no sign of life, as
    # `<host>-<pid>`.
    silent: list[str] = []


@thread_safe
class ProcessStacks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stacks/<time>/<host>-<pid>.json` and `hangs/step_<step>/<host>-<pid>.json`: the stacks of one process."""

    host: str  # The host.
    pid: Number  # The process id.
    unix_ns: Ns  # The time at which the stacks were read, in nanoseconds since the epoch.
    process: str = ""  # The command line of the process, or the title that Ray gave it.
    rank: Number | None = None  # The rank.
    # `itself` if the process read its own stacks, or the name of the tool that read them from outside.
    by: str = ""
    left_out: list[str] = []  # The missing items, each with the reason why it is missing.
    spans: list[OpenSpan] = []  # The open spans, oldest first.
    threads: list[Thread] = []  # The threads, the main thread first.
    tasks: list[Task] = []  # The tasks of asyncio.
    # The threads and tasks that ended with an exception that no code has caught, and the worker processes that died or
    # are stopped, one sentence each.
    failed: list[str] = []
    workers: list[WorkerProcess] = []  # The worker processes of multiprocessing that are alive.
    # Sizes in bytes by name: `resident`, `peak_resident`, `used`, `limit`, `device_used`, `device_total`. `used` and
    # `limit` mean the same as `used_bytes` and `limit_bytes` of `MemoryState`. The device sizes are sums over the
    # devices that the process uses. `device_used` is the memory that torch has reserved on these devices.
    memory: dict[str, Size] = {}
    # The state of an engine by name: `running`, `waiting`, `free_blocks`, `total_blocks`, `longest_s`, `longest`.
    engine: dict[str, Count | str] = {}
    flight_record: str = ""  # The file in the same folder with torch's record of its collectives.
