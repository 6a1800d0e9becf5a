"""Structs of the files and lines in a run directory.

`docs/reference/files.md` is generated from these structs and their comments. A field without a default is always
written; a field with a default is omitted while it has that value. `decoder` reads the structs, also from damaged files
and from files of other releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from autoprof.config import structs

# Nanoseconds up to the year 2116, and seconds up to then.
Ns: TypeAlias = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=(1 << 62) / 1e9)]
# Whole numbers that any reader of JSON has as they are.
Number: TypeAlias = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]


class RunNode(Struct, frozen=True):
    """A Ray node that the run worked on."""

    id: str = ""  # Ray's id of the node.
    host: str = ""  # Its host name.
    directory: str = ""  # The run directory there.


class RunSettings(Struct, frozen=True):
    """The settings that commands read again; `run.json` has all of docs/reference/settings.md, without secrets."""

    steps: str = ""  # `AUTOPROF_STEPS`.
    recipes: list[str] = []  # `AUTOPROF_RECIPES`.
    tool: list[str] = []  # `AUTOPROF_TOOL`.


class Frame(Struct, frozen=True, omit_defaults=True):
    """One function on a stack."""

    function: str = ""  # Its name, with that of its class where that is known.
    file: str = ""  # Its file.
    line: Number = 0  # The line that it is at.


class Named(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that Ray or torchrun says is dead, in the words of an exception."""

    pid: Number = 0  # The process; 0 where it is not named.
    rank: Number | None = None  # Its global rank.
    signal: str = ""  # The signal that ended it, such as `SIGKILL`.
    status: Number | None = None  # Its exit status.
    cause: str = ""  # `memory` where Ray's monitor or the kernel killed it for that, `node` where its node died.
    used_bytes: Size = 0  # The memory of the node that was used then.
    limit_bytes: Size = 0  # The memory of the node.


class Raised(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception."""

    type: str = ""  # Its type.
    message: str = ""  # Its text without secrets, cut at 1,000 characters; its arguments if it defines `__str__`.
    frames: list[Frame] = []  # Its stack, the innermost function last; Ray's in the process where it was raised.
    cause: str = ""  # The exception that it was raised from, in words.
    pid: Number = 0  # The process where it was raised, if Ray brought it from another one.
    named: list[Named] = []  # The processes that it says are dead.


class Death(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process of the run that did not end as programs end, or whose exception ended the run."""

    # `exception`; `exit`, a status other than 0; `crash`, by a signal of its own; `killed`, by a known signal or for
    # memory; `gone`, without a word: it was killed, or left by `os._exit`.
    how: str = ""
    host: str = ""  # Its host.
    pid: Number = 0  # The process.
    role: str = ""  # The role, of what it was doing.
    rank: Number | None = None  # The rank.
    step: Number | None = None  # The step.
    stage: str = ""  # The innermost stage that was going on.
    after: str = ""  # The stage that had ended last, where none was going on.
    since_ns: Ns = 0  # When the stage that was going on began.
    last_ns: Ns = 0  # The last sign of life, in nanoseconds since the epoch.
    signal: str = ""  # The signal.
    status: Number | None = None  # The exit status.
    killer: str = ""  # `kernel` or `Ray`, where one of them killed it for memory; `node` where its node died.
    used_bytes: Size = 0  # The memory that was used, of the container or the node.
    limit_bytes: Size = 0  # The memory that there was.
    resident_bytes: Size = 0  # The memory of the process when it was last looked at.
    started: bool = False  # True if it had started the run.
    earlier: bool = False  # True if it died in an attempt before the run was resumed.
    exception: Raised | None = None  # The exception.
    frames: list[Frame] = []  # Its stack when it crashed, the innermost function last.
    file: str = ""  # The file that says so: a crash dump or a timeline.


class Attempt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt at a run that was resumed later."""

    host: str = ""  # The host of the process that started it.
    pid: Number = 0  # That process.
    started: Seconds | None = None  # The start, in seconds since the epoch.
    ended: Seconds | None = None  # The end, where that is known.
    state: str = ""  # `ended`, `failed` or `unfinished`.


@structs.complete
class RankFile(Struct, frozen=True, kw_only=True):
    """`ranks/<launch>/<rank>`: a rank that a launcher such as `srun` has started; `first` is the one that joined first.

    `<rank>.ended` is there when it has ended, and holds the type of the exception that nobody caught, if there was one.
    """

    program: str = ""  # A number that no other program has.
    host: str = ""  # Its host.
    pid: Number = 0  # The process that joined.
    ticks: Number = 0  # Its start time, as in `run.json`.
    started: Seconds = 0.0  # When it joined, in seconds since the epoch.


@structs.complete
class RunFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`run.json`: the run. The process that started it completes the file at the end.

    That process then leaves its exit status in `exit_status`, a file of one byte, where the C library is glibc and
    nothing kills it meanwhile. A run with another status than 0 has failed, whatever `state` says.
    """

    id: str  # The run's id, the name of its directory.
    command: str  # The command line, without secrets.
    cwd: str  # The working directory.
    host: str  # The host of the process that started the run.
    pid: Number  # That process.
    ticks: Number  # Its start time in clock ticks since the host's boot, since pids are used again; 0 where unknown.
    started: Seconds  # The start, in seconds since the epoch.
    python: str  # The version of Python.
    autoprof: str  # The version of autoprof.
    settings: RunSettings  # The run's settings.
    hosts: list[str]  # The hosts on which a process of the run had a hook.
    versions: dict[str, str]  # The versions of the targets, by package.
    recipes: list[str]  # The recipes of which a hook was applied.
    # `running`, `ended`, or `failed` by an exception. A run whose process is gone counts as `unfinished`: it was
    # killed, or left by `os._exit`.
    state: str
    earlier: list[Attempt] = []  # The attempts before the run was resumed, oldest first.
    nodes: list[RunNode] = []  # The Ray nodes that the run worked on.
    cut_off: str = ""  # The first captures without a meta file that nobody writes any more.
    ended: Seconds | None = None  # The end, in seconds since the epoch.
    error: str = ""  # The type of the exception that ended the process, or `SIGINT`.
    exception: Raised | None = None  # That exception.
    # The processes that were dead when a run ended by an exception, and the one whose exception it was; the likely
    # cause first. Of other runs commands find them when they read.
    died: list[Death] = []
    no_hooks: str = ""  # Why no hook was applied in any process, where none was.


class Moment(Struct, frozen=True):
    """One moment on both clocks of a host."""

    unix_ns: Ns = 0  # Nanoseconds since the epoch, by the wall clock, which may be set.
    monotonic_ns: Ns = 0  # Nanoseconds of the monotonic clock, which nobody sets.


class Clock(Struct, frozen=True):
    """The time of a capture."""

    start: Moment = Moment()  # Its start.
    stop: Moment = Moment()  # Its stop.


@structs.complete
class CaptureMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`global_step_<step>/<capture>.meta.json`: a capture that is complete or has failed."""

    step: Number | None  # The global step.
    role: str  # The role; of a whole step all roles of the process, joined by `+`.
    stage: str  # The stage.
    rank: Number | None  # The global rank.
    replica: Number | None  # The replica of the rollout engine, null in a trainer.
    part: str  # The part of the replica.
    tool: str  # `torch`, `npu`, `nsys` or `memory`; `none` if nothing is recorded here, as `reason` says.
    contents: list[str]  # The words of `AUTOPROF_CONTENTS` that are recorded.
    left_out: list[str]  # The words and tool options that this release of the tool does not know.
    window: str  # The window, by the setting or request that opened it.
    host: str  # The host.
    pid: Number | None  # The process.
    clock: Clock  # The start and stop of the capture.
    versions: dict[str, str]  # The versions of autoprof, the targets and the tools, by package.
    bytes: Size  # The size of the trace.
    state: str  # `complete`, `truncated` or `failed`.
    reason: str  # Why it is not complete, or what else is to be said of it.
    stage_kind: str = ""  # The stage's [kind](recipes.md#kinds), where it has one.
    slowest: str = ""  # Why these ranks were captured, where the slowest were asked for.
    steps: list[Number] = []  # All steps that a whole-step capture holds.
    stages: list[Any] = []  # The stages that a whole-step capture holds.
    # Whether the trace holds work of a GPU; written only where something may have prevented it.
    device_events: bool | None = None
    device_reason: str = ""  # What may have prevented it, where the trace holds none.


class MergedMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`global_step_<step>/*merged*.meta.json`: a merged trace."""

    step: Number | None  # The global step, null where the traces are no step's.
    tool: str  # `merge`.
    merged: list[str]  # The traces in it.
    cut: dict[str, str]  # The traces that are merged up to a damaged place, with the reason.
    left_out: dict[str, str]  # The traces that are not in it, with the reason.
    versions: dict[str, str]  # The version of autoprof.
    bytes: Size  # The size of the merged trace.
    state: str  # `complete` or `failed`.
    reason: str  # Why it failed.
    said: list[str]  # What the command said besides, of clocks for example.
    role: str = ""  # The role, of a replica's traces.
    stage: str = ""  # The stage, of a replica's traces.
    replica: Number | None = None  # The replica.


class OutOfMemoryMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`oom/<host>.pid<pid>.meta.json`: a snapshot of CUDA's allocator when it ran out of memory."""

    tool: str  # `memory`.
    host: str  # The host.
    pid: Number  # The process.
    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    device: Number  # The number of the device.
    asked_bytes: Size  # The bytes that were asked for.
    total_bytes: Size  # The memory of the device.
    free_bytes: Size  # The bytes that were free.
    versions: dict[str, str]  # The versions of the tools, by package.
    bytes: Size  # The size of the snapshot.
    state: str  # `complete`.
    reason: str  # Empty.
    step: Number | None = None  # The step of the capture that was going on, if one was.
    role: str = ""  # Its role.
    stage: str = ""  # Its stage.
    stage_kind: str = ""  # The stage's [kind](recipes.md#kinds), where it has one.
    rank: Number | None = None  # Its rank.
    replica: Number | None = None  # Its replica.
    part: str = ""  # Its part.


class HookEntry(Struct):
    """One hook in one process."""

    module: str = ""  # The module of the function.
    attribute: str = ""  # The function in it.
    behaviour: str = ""  # What the hook does.
    state: str = "unknown"  # `applied`, `skipped` or `failed`.
    reason: str = ""  # Why it was skipped, or why it failed.
    called: Seconds | None = None  # The first call, in seconds since the epoch; null before it.


class ErrorEntry(Struct):
    """An error of autoprof's own, in one place of one process."""

    count: Size = 0  # How often it happened.
    last: str = ""  # The last one.


@structs.complete
class HooksFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`hooks/<host>-<pid>.json`: the hooks of one process."""

    host: str  # The host.
    node: str = ""  # Ray's id of the node.
    ray: str = ""  # The address of the node's Ray cluster.
    pid: Number  # The process.
    parent: Number  # Its parent process.
    process: str  # Its command line, or the title that Ray gave it.
    python: str  # The version of Python.
    versions: dict[str, str]  # The versions of the targets that it imported, by package.
    hooks: dict[str, HookEntry]  # Its hooks, by recipe and name.
    errors: dict[str, ErrorEntry]  # autoprof's own errors, by place.


class Offset(Struct, frozen=True, kw_only=True):
    """A line of `clocks/<host>-<pid>.jsonl`: another host's clock minus the trainer's.

    A host that does not answer within half a minute has no line.
    """

    host: str  # The other host.
    offset_ns: Ns  # By how much its clock is ahead, in nanoseconds.
    error_ns: Ns  # The bound of the error: half of the round trip.
    unix_ns: Ns  # The time of the measurement, by the trainer's clock.


class Missing(Struct, frozen=True):
    """Something of the run that was not collected."""

    node: str = ""  # Ray's id of the node.
    host: str = ""  # Its host name.
    path: str = ""  # The file; empty where it is all that the node has.
    reason: str = ""  # Why it is not here.

    @property
    def line(self) -> str:
        """Return it in words."""
        where = f"{self.host} ({self.node[:8]})" if self.node else ""
        return ": ".join(filter(None, [where, self.path, self.reason]))


class NodeState(Struct, frozen=True, kw_only=True):
    """A node of the cluster, and its part of the run."""

    id: str = ""  # Ray's id of the node.
    host: str = ""  # Its host name.
    # `here`, its disk is this one; `collected`; `incomplete`, something is missing; `nothing`, the run left nothing
    # there; `no autoprof`, nor could it; `dead`; `no answer`; `unreadable`.
    state: str = ""
    directory: str = ""  # The run directory there.
    files: Size = 0  # The number of files of its part; of those that were here before, too.
    bytes: Size = 0  # Their size.
    fetched: Size = 0  # The bytes that were fetched.


@structs.complete
class CollectedFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`collected.json`: the result of collecting the run's parts."""

    run: str  # The run's id.
    directory: str  # Its directory here.
    nodes: list[NodeState]  # The nodes, with their parts.
    missing: list[Missing]  # What was not collected.
    left_out: list[Missing]  # What was not meant to come: links, names that lead elsewhere.
    when: Seconds | None = None  # The time, in seconds since the epoch.

    @property
    def fetched(self) -> int:
        """Return the bytes that were fetched from all nodes."""
        return sum(node.fetched for node in self.nodes)


# More tokens than any engine makes in a span.
Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**12)] | Annotated[float, Meta(ge=0, le=1e12)]
# A value that names one of many. Spans have few of them.
Id: TypeAlias = str | int | float | bool


class MemoryState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of a process and of what limits it."""

    resident_bytes: Size = 0  # The process's resident memory.
    peak_bytes: Size = 0  # Its peak.
    cgroup: str = ""  # The folder of its control group, in which `kills` is counted.
    used_bytes: Size = 0  # The memory that is used of the lowest limit above it; of the machine, where it has none.
    used_peak_bytes: Size = 0  # The peak of that, where the kernel keeps it.
    limit_bytes: Size = 0  # The limit.
    kills: Size = 0  # How many processes of the group the kernel has killed for memory.
    machine_kills: Size = 0  # How many of the machine.


class ProcessLine(Struct, frozen=True, kw_only=True, tag_field="kind", tag="process"):
    """The first line of a process in `timeline/<host>-<pid>.jsonl`. A later process with the same pid adds another."""

    host: str  # The host.
    pid: Number  # The process.
    clock: Moment  # The moment of writing, by both clocks.
    version: str  # The version of autoprof.
    ticks: Number = 0  # Its start time, as in `run.json`.
    namespace: Number = 0  # The id of the namespace of its pid, 0 if unknown: containers have equal pids.
    boot: str = ""  # The machine's id since its boot.
    stderr: str = ""  # The file that its stderr is, where that is its own, as those of Ray's workers.
    memory: MemoryState = MemoryState()  # Its memory then.


class BegunLine(Struct, frozen=True, omit_defaults=True, gc=False, tag_field="kind", tag="begun"):
    """A line of a span that has begun and not ended; it is open until a line of the same span follows.

    Steps, stages and windows have one at once. Other spans have one when they are older than ten seconds, of the 256
    oldest. It stands there again after 1 MB of other lines. A later `begun` of the same name, role, rank and ids ends
    an earlier one, too.
    """

    span: str  # The kind of the span.
    name: str  # Its name.
    step: Number | None  # The trainer's step, null where the process does not know it.
    role: str  # The role.
    rank: Number | None  # The rank, null for none.
    start_ns: Ns  # The start, in nanoseconds since the epoch, by the host's clock.
    ids: Mapping[str, Id | None] = {}  # Which of many it is.
    stage_kind: str = ""  # The [kind](recipes.md#kinds) of a stage, where it has one.


class DroppedLine(Struct, frozen=True, omit_defaults=True, gc=False, tag_field="kind", tag="dropped"):
    """A line of a span that has begun and is left out."""

    span: str  # The kind of the span.
    name: str  # Its name.
    start_ns: Ns  # Its start.


class ExitLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="exit"):
    """A process's last line, at its exit. It is missing where it was killed, crashed, or left by `os._exit`."""

    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    error: str = ""  # The exception that nobody caught.
    exception: Raised | None = None  # The same with its stack.
    peak_bytes: Size = 0  # The peak of its resident memory.


class RaisedLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="raised"):
    """A line of an exception that has left a step or a stage, the innermost one, or a reward or a sample.

    A process has 50 at most of stages, and 20 of samples in 1 MB of other lines, two of a name and type.
    """

    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    span: str  # The kind of the span.
    name: str  # Its name.
    step: Number | None  # The step.
    role: str  # The role.
    rank: Number | None  # The rank.
    exception: Raised  # The exception.


class MemoryLine(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="memory"):
    """A line of memory: when the process has grown by an eighth, and when the kernel has killed somebody for memory.

    Each process looks every ten seconds.
    """

    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    memory: MemoryState  # The memory.


class Line(Struct, frozen=True, omit_defaults=True, gc=False):
    """A line of `timeline/<host>-<pid>.jsonl`: one span, written when it has ended.

    Steps, stages and windows are written at once. Spans of single samples are written together: when there are 256,
    when the first is a second old, with the next stage, when nothing is going on in the process any more, and at exit.
    So a process that is killed loses what ended in its last second. A line is whole or not there. Lines hold no
    prompts, answers or arguments, only the ids that recipes name.

    A file grows by some 230 bytes for each span of a sample: 0.35 MB in a step of 512 samples, 3.6 GB in 10,000 such
    steps, and 75 MB without them (`AUTOPROF_DISABLE='verl/sample*'`).
    """

    kind: str  # The kind of the span.
    name: str  # Its name.
    step: Number | None  # The trainer's step, null where the process does not know it.
    role: str  # The role.
    rank: Number | None  # The rank, null for none.
    start_ns: Ns  # The start, in nanoseconds since the epoch, by the host's clock.
    end_ns: Ns  # The start plus the duration by the monotonic clock.
    error: str | None = None  # The type of the exception that ended it.
    ids: Mapping[str, Id | None] = {}  # Which of many it is: the sample, the request, the replica.
    counts: Mapping[str, Count | None] = {}  # What was counted, such as tokens.
    stage_kind: str = ""  # The [kind](recipes.md#kinds) of a stage or timer, where it has one.


# The kind of a `ProcessLine`.
PROCESS = "process"
# The name of a `profiling` span: a thread exports the trace, beside the stages of the process.
EXPORT = "export"
# The kinds of lines that stand for no span, as they begin.
_OPEN = tuple(f'{{"kind":"{kind}"'.encode() for kind in ("begun", "dropped", "exit", "raised", "memory"))


def is_span(line: bytes) -> bool:
    """Return whether a line may be a span's or a process's, and not one of what is open."""
    return not line.startswith(_OPEN)


# The kinds of spans, with their ids and counts.
SPAN_KINDS = {
    "step": "the trainer's step; a generation batch, where there is no trainer",
    "stage": "a stage, or another call of a process: `rollout` in the trainer, `generate_sequences` of an agent loop",
    "timer": (
        "one of the trainer's own timers, by its own name: verl's `marked_timer`, in the trainer's process. Timers "
        "nest, and `step` begins a moment before the step"
    ),
    "sample": (
        "the agent loop of one sample: `sample` (its prompt in the data set), `rollout` (which answer to it), `agent`; "
        "`validate`, which is true, in a validation"
    ),
    "turn": (
        "one generation in a sample, as its agent loop sees it: the sample's ids, `request` (the conversation); "
        "`prompt_tokens`, `response_tokens`"
    ),
    "tool": "one call of a tool in a sample, by the tool's name: the sample's ids",
    "reward": "the score of a sample: the sample's ids",
    "request": (
        "one generation in the server's process, which knows no step: `replica`, `request` (verl's for this turn "
        "alone); `prompt_tokens`, `response_tokens`"
    ),
    "window": "a recording of an engine, from start to stop: `replica`",
    "profiling": (
        "the cost of a capture for the run: `profiler start` (Kineto's first one takes seconds), `profiler stop`, "
        "`export` of the trace in a thread, `writing` where a process waits for the file: `replica`"
    ),
}


# The folders of requests by a person, and by a step that takes too long.
STACKS, HANGS = "stacks", "hangs"
# No file of a process is larger; a hang has two, of its stacks and of torch.
MOST_BYTES = 1 << 19
# How the file begins that says who asked, and why.
WHY = "why.json"


class OpenSpan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A span that has begun and not ended, as on the timeline."""

    kind: str = ""  # The kind of the span.
    name: str = ""  # Its name.
    step: Number | None = None  # The step.
    role: str = ""  # The role.
    rank: Number | None = None  # The rank.
    start_ns: Ns = 0  # The start, in nanoseconds since the epoch.
    ids: Mapping[str, Id | None] = {}  # Which of many it is.
    stage_kind: str = ""  # The kind of the stage.


class Thread(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A thread and its stack, the outermost function first."""

    name: str = ""  # Its name, as Python knows it; empty for one that it does not know.
    ident: Number = 0  # Python's number of it.
    native: Number = 0  # The kernel's number of it.
    main: bool = False  # Whether it is the main thread.
    frames: list[Frame] = []  # Its functions.
    spans: list[Number] = []  # The spans that it works on, by their places in `spans`.


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A task of asyncio and the coroutines that await each other, the outermost first."""

    name: str = ""  # Its name.
    frames: list[Frame] = []  # Its coroutines.
    waits_on: str = ""  # What the innermost one awaits, such as `Future` or `Task-7`.
    spans: list[Number] = []  # The spans that it works on, by their places in `spans`.
    thread: Number = 0  # Python's number of the thread that runs it now; 0 for one that waits.


@structs.complete
class Why(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stacks/<time>/why.json` and `hangs/step_<step>/why.json`: who asked all processes where they stand, and why."""

    host: str = ""  # The host of the process that asked.
    pid: Number = 0  # That process.
    unix_ns: Ns = 0  # When it asked, in nanoseconds since the epoch.
    step: Number | None = None  # The step that takes too long.
    since_ns: Ns = 0  # When that step began.
    condition: str = ""  # The condition of `AUTOPROF_WHEN`.
    reason: str = ""  # The reason in words.


@structs.complete
class ProcessStacks(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stacks/<time>/<host>-<pid>.json` and `hangs/step_<step>/<host>-<pid>.json`: where one process stood."""

    host: str  # The host.
    pid: Number  # The process.
    unix_ns: Ns  # The time, in nanoseconds since the epoch.
    process: str = ""  # Its command line, or the title that Ray gave it.
    rank: Number | None = None  # The rank.
    by: str = ""  # `itself`, or the tool that looked from outside.
    left_out: list[str] = []  # What is not told, and why.
    spans: list[OpenSpan] = []  # The spans that were open, oldest first.
    threads: list[Thread] = []  # The main thread first.
    tasks: list[Task] = []  # The tasks of asyncio.
    # Sizes in bytes by name: `resident`, `peak_resident`, `host_used`, `host_total`, `cgroup_used`, `cgroup_limit`,
    # `device_used`, `device_total`. Of devices it is what torch holds there, of those that the process uses.
    memory: dict[str, Size] = {}
    # The state of an engine by name: `running`, `waiting`, `free_blocks`, `total_blocks`, `longest_s`, `longest`.
    engine: dict[str, Count | str] = {}
    flight_record: str = ""  # The file beside this one with torch's record of its collectives.
