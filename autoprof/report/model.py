"""Structs of a report: runs, steps, lanes, captures, samples, findings and comparisons."""

from __future__ import annotations

import msgspec


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """Sum over all calls of an operator, a kernel or a function in a capture."""

    name: str  # Its name in the trace.
    category: str  # The trace's `cat`: cpu_op, kernel, gpu_memcpy, user_annotation, python_function ...
    calls: int  # The number of calls.
    total_us: float  # Microseconds, including the functions that it called.
    self_us: float  # Microseconds, excluding the functions that it called.


class DeviceShares(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of a device while it was recorded, as shares of `seconds`."""

    device: str  # Its name in the trace.
    seconds: float  # Seconds from the first to the last event of the trace.
    compute: float  # Share of kernels other than communication.
    communication: float  # Share of NCCL, HCCL and similar kernels, also while other kernels ran.
    copy: float  # Share of copies and memsets.
    idle: float  # Share of time in which the device did nothing.
    overlap: float | None = None  # Share of the communication during which compute ran too; None without communication.


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of one kind in an engine."""

    passes: int  # The number of passes.
    seconds: float  # Their time on the device, or on the host if the trace lacks the former.
    tokens: int | None = None  # The scheduled tokens; None if the trace lacks them.


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of an engine in a capture. A pass with both prefill and decode is `mixed`."""

    engine: str
    passes: int
    prefill: Phase
    decode: Phase
    mixed: Phase
    other: Phase


class CaptureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One capture."""

    name: str  # The capture's name: its file name without the ending.
    step: int  # The global step.
    role: str
    stage: str
    file: str  # The file, relative to the run.
    state: str  # `complete`, `truncated`, `failed`, `unfinished`, or `damaged` if the file can't be read.
    tool: str  # `torch`, `npu`, `nsys`, `memory` or `none`.
    bytes: int  # The size of its files.
    rank: int | None = None
    replica: int | None = None
    host: str | None = None
    pid: int | None = None
    part: str = ""  # The part of a replica's engine: `frontend`, or a worker with its ranks.
    opens_with: str = ""  # The program that opens the file; empty for Perfetto.
    start_s: float | None = None  # Seconds from the step's start to the first event; None if unknown.
    seconds: float | None = None  # Seconds from the first to the last event.
    # Seconds in collectives, including the wait for other ranks; None if the trace has none.
    collectives_s: float | None = None
    events: int | None = None
    operators: list[Operator] = []  # Operators of the host by own time, at most 50.
    kernels: list[Operator] = []  # Kernels of the devices by own time, at most 50.
    devices: list[DeviceShares] = []
    engine: EngineFigures | None = None
    memory_peak_bytes: int | None = None  # Peak memory of the device, or of the host if no device is recorded.
    memory_total_bytes: int | None = None  # Memory of the device; None if unknown.
    # `cpu` if the device waits for the CPU, `device` if the CPU waits for the device; None if unknown.
    bound: str | None = None
    reason: str = ""  # The reason for the state, or for missing figures.
    window: str = ""  # The reason for the capture, from its meta file.
    slowest: str = ""  # The reason why this rank was chosen, if the slowest ranks were requested.
    stage_kind: str = ""  # The stage's kind in the vocabulary of all trainers; empty if it has none.


class SpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One span of the timeline. `kind` is timer, stage, sample, turn, tool, reward, request or window."""

    name: str
    kind: str
    start_s: float
    end_s: float
    ids: dict[str, str | int | float | bool | None] = {}
    error: str | None = None
    stage_kind: str = ""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of one process in a step under one role."""

    # `actor rank 3`, `rollout replica 1`, `agent_loop 2` or `trainer`; with host and pid if two are the same.
    label: str
    role: str
    host: str
    pid: int
    # The longest spans, by start. Turns, tools and rewards of samples are in `SampleFigures.longest` instead.
    spans: list[SpanRow]
    # Seconds of the step that at least one span covers. Spans that are left out count; autoprof's own don't.
    busy_s: float
    idle_s: float  # The other seconds of the step.
    file: str  # The journal.
    rank: int | None = None
    replica: int | None = None
    left_out: int = 0  # The number of spans that are not in `spans`.


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """A time in a step in which no process generated, scored or trained."""

    start_s: float  # Its start, in seconds from the step's start.
    end_s: float  # Its end.
    after: str  # The span that ended before it, as `stage of lane`.
    before: str  # The span that began after it.
    between: str  # `generation and training` if it lies between those two, else `stages`.
    within: str  # The driver's timer or stage that covers at least half of it, or `other`.


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the step's critical path: a stage of the driver, and the worker's span that ended last in it."""

    stage: str
    start_s: float
    end_s: float
    held_by: str | None = None


class SkewRow(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one rank or replica in a stage, over all its calls in the step."""

    label: str
    seconds: float
    calls: int
    file: str
    recorded: bool = False  # True if a profiler recorded during one of the calls. Recorded calls take longer.


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """The same stage of a step in several ranks or replicas."""

    stage: str
    role: str
    of: str  # `rank` or `replica`.
    count: int  # The number of ranks or replicas.
    median_s: float  # The median seconds of the others.
    slowest: str  # The label of the slowest one, as in `rows`. Recorded ones count only if all were recorded.
    slowest_s: float  # The seconds of the slowest one.
    waited_s: float  # Seconds that the others waited for the slowest one.
    rows: list[SkewRow]  # The ranks or replicas by seconds, longest first, at most 64.


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a sample in one activity: `turn` (generation), `tool` with its name, `reward` or `waiting`."""

    kind: str
    name: str
    seconds: float
    count: int


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: one answer to one prompt."""

    label: str  # `prompt 17, rollout 3`.
    sample: str  # The prompt's id, from the data set or the trainer.
    rollout: int | None  # The number of this answer among the answers to the prompt.
    agent: str | None  # The agent loop's name.
    lane: str  # The label of its lane.
    file: str
    start_s: float
    end_s: float
    seconds: float
    # The part with the largest excess over other samples, such as `tool search`. Empty if unknown, because several
    # samples with the same ids ran at once.
    held_by: str
    parts: list[Part]  # Its seconds by activity, longest first.
    spans: list[SpanRow]  # Its turns, tools and rewards, by start.
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    error: str | None = None


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """The last samples of a step: the batch waited for them after all others had ended."""

    count: int  # The number of last samples.
    of: int  # The number of samples in the step.
    waited_s: float  # Seconds that the batch waited for them.
    samples: list[str]  # Their labels, the last to end first, at most 20.
    held_by: str  # The `SampleRow.held_by` that most of them have.


class ToolRow(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one tool in a step. `slowest` is the label of the sample with the longest call."""

    name: str
    calls: int
    errors: int
    seconds: float
    median_s: float
    max_s: float
    slowest: str


class SampleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a step, without validation."""

    count: int  # The number of samples.
    failed: int  # The number of samples that ended with an exception.
    start_s: float  # The start of the first sample, in seconds from the step's start.
    end_s: float  # The end of the last sample, likewise.
    mean_s: float  # The mean duration.
    quantiles_s: dict[str, float]  # Durations at 0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99 and 1.
    # Points (seconds from the step's start, number of samples done by then), at most 300.
    done: list[tuple[float, int]]
    parts: list[Part]  # Seconds of all samples by activity.
    tools: list[ToolRow]  # The tools that were called, by seconds.
    longest: list[SampleRow]  # The longest samples, longest first, at most 50, including the samples of the tail.
    tail: Tail | None = None  # The last few samples, which the batch waited for.


# Version of the format of `--json`. It rises when a field is removed or changes its meaning.
SCHEMA = 1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of a rule."""

    kind: str  # The rule's name.
    text: str  # One sentence with the figures.
    evidence: list[str]  # Lines with the figures and names behind the sentence.
    # Its cost: seconds of the step, or per step on average if `step` is None. Findings are sorted by it.
    seconds: float
    step: int | None = None  # The step; None for a finding about the run.
    file: str | None = None  # The trace or journal behind it.


class StageShare(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one stage over the steps that `RunFigures.basis` names; `autoprof's own` over all steps."""

    # The name of the timer or stage, `other`, or `autoprof's own`: time in which autoprof starts or stops a profiler,
    # or waits for its files.
    name: str
    seconds: float  # Seconds in these steps together.
    share: float | None  # Share of these steps' time without autoprof's own; None for `autoprof's own`.
    steps: int  # The number of steps that have the stage.
    median_s: float  # Median seconds over the steps that have an entry for it.
    kind: str = ""  # Its kind in the vocabulary of all trainers; empty if it has none.


class StageGap(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a step in which no stage and no timer ran, without autoprof's own time."""

    seconds: float  # Its length.
    share: float  # Its share of the step without autoprof's own time.
    start_s: float  # The start of its longest part, in seconds from the step's start.
    end_s: float  # The end of its longest part.
    after: str  # The stage that ended before the longest part; empty if none did.
    before: str  # The stage that began after the longest part; empty if none did.


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step in the run's overview."""

    number: int  # The trainer's global step.
    start_ns: int  # Its start, in ns since the epoch.
    seconds: float  # Its duration.
    captured: bool  # True if it has captures.
    slow: bool  # True if it took much longer than the steps around it (docs/findings.md has the limits).
    usual_s: float  # The median of the steps around it.
    # Seconds by stage, each second counted once. `other` and, last, `autoprof's own` complete the sum to `seconds`.
    stages: dict[str, float]
    samples: int | None = None  # The number of samples generated for it.
    # Prompt tokens that the engines received. Later turns of a sample count earlier ones again.
    prompt_tokens: int | None = None
    response_tokens: int | None = None  # Tokens that the engines generated.
    tokens_per_s: float | None = None  # `response_tokens` divided by the step's seconds, for all devices together.
    recorded: dict[str, float] = {}  # Seconds of each stage in which a profiler recorded.
    # Seconds by which these stages took longer than usual. Recording slows work, so they are not counted in findings.
    slowed: dict[str, float] = {}
    error: str | None = None  # The type of the exception that ended the step.
    kinds: dict[str, str] = {}  # The kinds of stages that their names don't show, by name.
    # `warm-up` (the first step of each start of the trainer), `captured` (a profiler recorded in a process), or
    # `regular`.
    kind: str = "regular"
    no_stage: StageGap | None = None  # The time in which no stage ran, if it is over a fifth of the step.


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One step in detail."""

    number: int
    start_ns: int
    seconds: float
    stages: dict[str, float]  # As in `StepRow`.
    # The lanes: trainer, actors, ref, critic, reward, agent loops, rollout, each by rank or replica. If there are many,
    # the busiest and the idlest of each role.
    lanes: list[Lane]
    gaps: list[Gap]  # The 100 longest gaps, by start.
    samples: SampleFigures | None
    skews: list[Skew]  # The skews by `waited_s`, longest first.
    weight_sync_s: float  # Seconds in which weights were sent.
    path: list[PathPart]  # The critical path.
    captures: list[CaptureFigures]  # The captures; at most 16 of each stage.
    findings: list[Finding]  # The findings of this step, by seconds.
    gaps_left_out: int = 0  # The number of other gaps.
    lanes_left_out: int = 0  # The number of other lanes.
    captures_left_out: int = 0  # The number of other captures.
    # The seconds of recording if only some replicas were recorded, else 0. Recorded replicas are slower.
    apart_s: float = 0.0
    kinds: dict[str, str] = {}  # As in `StepRow`.
    captured_for: list[str] = []  # The reasons for its captures other than `AUTOPROF_STEPS`: a condition, or a trigger.
    kind: str = "regular"  # As in `StepRow`.
    no_stage: StageGap | None = None  # As in `StepRow`.


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure on both sides."""

    # `step` (seconds a step), `stage` (seconds a step), `operator` (own seconds a capture), `rate` (tokens/s) or
    # `samples` (seconds).
    kind: str
    name: str  # The stage, operator or figure. For a `stage` that the two sides name differently, its kind.
    unit: str  # `s` or `1/s`.
    a: float | None  # The figure of side `a`; None if it has none.
    b: float | None  # The figure of side `b`.
    change: float  # `b` less `a`. A missing figure counts as 0.
    worse: bool  # True if the change is for the worse.
    where: str = ""  # The place of an operator, or both names of a stage that the two sides name differently.


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two steps or two runs."""

    a: str  # The label of the side to compare with.
    b: str  # The label of the side of the report.
    rows: list[ComparisonRow]  # The rows, the largest slowdown first.
    findings: list[Finding]  # The findings, the costliest first.
    basis: list[str] = []  # For each side that is a run, its label and `RunFigures.basis`.


class OpenSpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """An open span: it has begun and not ended."""

    process: str  # The host and pid of its process.
    state: str  # `running`, `gone` if the process was killed, or `elsewhere` if this host or container can't see it.
    kind: str  # The kind of the span.
    name: str  # Its name, such as the name of a stage or a tool.
    where: str  # Its role with rank or replica, and the ids of its sample or request.
    start_ns: int  # Its start, in ns since the epoch.
    age_s: float  # Seconds that it has been open, until now or until the last sign of life of its process.
    step: int | None = None  # The global step; None if unknown.


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A whole report."""

    id: str
    path: str
    command: str
    state: str
    started_ns: int | None  # The start of the run, in ns since the epoch.
    hosts: list[str]
    versions: dict[str, str]
    # The steps by number. A step that ran again after the run was resumed is listed once, with its last run.
    steps: list[StepRow]
    stages: list[StageShare]  # The stages by seconds, then `other`, then `autoprof's own`.
    median_s: float | None  # The median seconds of these steps.
    # Generated tokens of these steps divided by their seconds; None if the timeline has no counts.
    tokens_per_s: float | None
    findings: list[Finding]  # The findings of the run and of its steps, by seconds.
    details: list[StepFigures]  # The steps in detail.
    comparison: Comparison | None  # The comparison with another run or step; None if none was requested.
    notes: list[str]  # Remarks on the figures themselves: lines left out, files that could not be read.
    kinds: list[StageShare] = []  # The same for kinds of stages: each is the sum of its stages.
    verdict: str = ""  # A sentence for a run without findings. It names the part that could not be judged.
    autoprof: str = ""
    # Open spans: steps first, then the oldest first. Spans of earlier attempts are omitted.
    open: list[OpenSpanRow] = []
    open_left_out: int = 0  # The number of open spans that are not in `open`.
    going_on: bool = False  # True if the run is running. Ages of its running processes then end now.
    # Words for the steps from which `stages`, `kinds`, `median_s` and `tokens_per_s` were computed (the regular steps,
    # else the captured ones, else the warm-ups), and the number of the others.
    basis: str = ""
    schema: int = SCHEMA
