"""Structs of the lines of `timeline/<host>-<pid>.jsonl`: spans, what is open, and the process that they are of.

`docs/reference/files.md` is made from them, as from `records`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from autoprof.rundir.records import Moment, Ns, Number, Raised, Size

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
