"""Structs of a report: runs, steps, lanes, captures, samples, findings and comparisons."""

from __future__ import annotations

import msgspec


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """Sum over all calls of an operator, a kernel or a function in a capture.

    Attributes:
        name: Its name in the trace.
        category: The trace's `cat`: cpu_op, kernel, gpu_memcpy, user_annotation, python_function ...
        calls: The number of calls.
        total_us: Microseconds, including the functions that it called.
        self_us: Microseconds, excluding the functions that it called.
    """

    name: str
    category: str
    calls: int
    total_us: float
    self_us: float


class DeviceShares(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of a device while it was recorded, as shares of `seconds`.

    Attributes:
        device: Its name in the trace.
        seconds: Seconds from the first to the last event of the trace.
        compute: Share of kernels other than communication.
        communication: Share of NCCL, HCCL and similar kernels, also while other kernels ran.
        copy: Share of copies and memsets.
        idle: Share of time in which the device did nothing.
        overlap: Share of the communication during which compute ran too; None without communication.
    """

    device: str
    seconds: float
    compute: float
    communication: float
    copy: float
    idle: float
    overlap: float | None = None


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of one kind in an engine.

    Attributes:
        passes: The number of passes.
        seconds: Their time on the device, or on the host if the trace lacks the former.
        tokens: The scheduled tokens; None if the trace lacks them.
    """

    passes: int
    seconds: float
    tokens: int | None = None


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of an engine in a capture. A pass with both prefill and decode is `mixed`."""

    engine: str
    passes: int
    prefill: Phase
    decode: Phase
    mixed: Phase
    other: Phase


class CaptureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One capture.

    Attributes:
        name: The capture's name: its file name without the ending.
        step: The global step.
        stage_kind: The stage's kind in the vocabulary of all trainers; empty if it has none.
        file: The file, relative to the run.
        state: `complete`, `truncated`, `failed`, `unfinished`, or `damaged` if the file can't be read.
        part: The part of a replica's engine: `frontend`, or a worker with its ranks.
        tool: `torch`, `npu`, `nsys`, `memory` or `none`.
        bytes: The size of its files.
        opens_with: The program that opens the file; empty for Perfetto.
        start_s: Seconds from the step's start to the first event; None if unknown.
        seconds: Seconds from the first to the last event.
        collectives_s: Seconds in collectives, including the wait for other ranks; None if the trace has none.
        operators: Operators of the host by own time, at most 50.
        kernels: Kernels of the devices by own time, at most 50.
        memory_peak_bytes: Peak memory of the device, or of the host if no device is recorded.
        memory_total_bytes: Memory of the device; None if unknown.
        bound: `cpu` if the device waits for the CPU, `device` if the CPU waits for the device; None if unknown.
        reason: The reason for the state, or for missing figures.
        window: The reason for the capture, from its meta file.
        slowest: The reason why this rank was chosen, if the slowest ranks were requested.
    """

    name: str
    step: int
    role: str
    stage: str
    file: str
    state: str
    tool: str
    bytes: int
    rank: int | None = None
    replica: int | None = None
    host: str | None = None
    pid: int | None = None
    part: str = ""
    opens_with: str = ""
    start_s: float | None = None
    seconds: float | None = None
    collectives_s: float | None = None
    events: int | None = None
    operators: list[Operator] = []
    kernels: list[Operator] = []
    devices: list[DeviceShares] = []
    engine: EngineFigures | None = None
    memory_peak_bytes: int | None = None
    memory_total_bytes: int | None = None
    bound: str | None = None
    reason: str = ""
    window: str = ""
    slowest: str = ""
    stage_kind: str = ""


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
    """Spans of one process in a step under one role.

    Attributes:
        label: `actor rank 3`, `rollout replica 1`, `agent_loop 2` or `trainer`; with host and pid if two are the same.
        spans: The longest spans, by start. Turns, tools and rewards of samples are in `SampleFigures.longest` instead.
        left_out: The number of spans that are not in `spans`.
        busy_s: Seconds of the step that at least one span covers. Spans that are left out count; autoprof's own don't.
        idle_s: The other seconds of the step.
        file: The timeline file.
    """

    label: str
    role: str
    host: str
    pid: int
    spans: list[SpanRow]
    busy_s: float
    idle_s: float
    file: str
    rank: int | None = None
    replica: int | None = None
    left_out: int = 0


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """A time in a step in which no process generated, scored or trained.

    Attributes:
        start_s: Its start, in seconds from the step's start.
        end_s: Its end.
        after: The span that ended before it, as `stage of lane`.
        before: The span that began after it.
        between: `generation and training` if it lies between those two, else `stages`.
        within: The driver's timer or stage that covers at least half of it, or `other`.
    """

    start_s: float
    end_s: float
    after: str
    before: str
    between: str
    within: str


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the step's critical path: a stage of the driver, and the worker's span that ended last in it."""

    stage: str
    start_s: float
    end_s: float
    held_by: str | None = None


class SkewRow(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one rank or replica in a stage, over all its calls in the step.

    Attributes:
        recorded: True if a profiler recorded during one of the calls. Recorded calls take longer.
    """

    label: str
    seconds: float
    calls: int
    file: str
    recorded: bool = False


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """The same stage of a step in several ranks or replicas.

    Attributes:
        of: `rank` or `replica`.
        count: The number of ranks or replicas.
        median_s: The median seconds of the others.
        slowest: The label of the slowest one, as in `rows`. Recorded ones count only if all were recorded.
        slowest_s: The seconds of the slowest one.
        waited_s: Seconds that the others waited for the slowest one.
        rows: The ranks or replicas by seconds, longest first, at most 64.
    """

    stage: str
    role: str
    of: str
    count: int
    median_s: float
    slowest: str
    slowest_s: float
    waited_s: float
    rows: list[SkewRow]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a sample in one activity: `turn` (generation), `tool` with its name, `reward` or `waiting`."""

    kind: str
    name: str
    seconds: float
    count: int


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: one answer to one prompt.

    Attributes:
        label: `prompt 17, rollout 3`.
        sample: The prompt's id, from the data set or the trainer.
        rollout: The number of this answer among the answers to the prompt.
        agent: The agent loop's name.
        lane: The label of its lane.
        held_by: The part with the largest excess over other samples, such as `tool search`. Empty if unknown, because
            several samples with the same ids ran at once.
        parts: Its seconds by activity, longest first.
        spans: Its turns, tools and rewards, by start.
    """

    label: str
    sample: str
    rollout: int | None
    agent: str | None
    lane: str
    file: str
    start_s: float
    end_s: float
    seconds: float
    held_by: str
    parts: list[Part]
    spans: list[SpanRow]
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    error: str | None = None


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """The last samples of a step: the batch waited for them after all others had ended.

    Attributes:
        count: The number of last samples.
        of: The number of samples in the step.
        waited_s: Seconds that the batch waited for them.
        samples: Their labels, the last to end first, at most 20.
        held_by: The `SampleRow.held_by` that most of them have.
    """

    count: int
    of: int
    waited_s: float
    samples: list[str]
    held_by: str


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
    """Samples of a step, without validation.

    Attributes:
        count: The number of samples.
        failed: The number of samples that ended with an exception.
        start_s: The start of the first sample, in seconds from the step's start.
        end_s: The end of the last sample, likewise.
        mean_s: The mean duration.
        quantiles_s: Durations at 0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99 and 1.
        done: Points (seconds from the step's start, number of samples done by then), at most 300.
        tail: The last few samples, which the batch waited for.
        parts: Seconds of all samples by activity.
        tools: The tools that were called, by seconds.
        longest: The longest samples, longest first, at most 50, including the samples of the tail.
    """

    count: int
    failed: int
    start_s: float
    end_s: float
    mean_s: float
    quantiles_s: dict[str, float]
    done: list[tuple[float, int]]
    parts: list[Part]
    tools: list[ToolRow]
    longest: list[SampleRow]
    tail: Tail | None = None


# Version of the format of `--json`. It rises when a field is removed or changes its meaning.
SCHEMA = 1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of a rule.

    Attributes:
        kind: The rule's name.
        text: One sentence with the figures.
        evidence: Lines with the figures and names behind the sentence.
        seconds: Its cost: seconds of the step, or per step on average if `step` is None. Findings are sorted by it.
        step: The step; None for a finding about the run.
        file: The trace or timeline file behind it.
    """

    kind: str
    text: str
    evidence: list[str]
    seconds: float
    step: int | None = None
    file: str | None = None


class StageShare(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one stage over the steps that `RunFigures.basis` names; `autoprof's own` over all steps.

    Attributes:
        name: The name of the timer or stage, `other`, or `autoprof's own`: time in which autoprof starts or stops a
            profiler, or waits for its files.
        seconds: Seconds in these steps together.
        share: Share of these steps' time without autoprof's own; None for `autoprof's own`.
        steps: The number of steps that have the stage.
        median_s: Median seconds over the steps that have an entry for it.
        kind: Its kind in the vocabulary of all trainers; empty if it has none.
    """

    name: str
    seconds: float
    share: float | None
    steps: int
    median_s: float
    kind: str = ""


class StageGap(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a step in which no stage and no timer ran, without autoprof's own time.

    Attributes:
        seconds: Its length.
        share: Its share of the step without autoprof's own time.
        start_s: The start of its longest part, in seconds from the step's start.
        end_s: The end of its longest part.
        after: The stage that ended before the longest part; empty if none did.
        before: The stage that began after the longest part; empty if none did.
    """

    seconds: float
    share: float
    start_s: float
    end_s: float
    after: str
    before: str


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step in the run's overview.

    Attributes:
        number: The trainer's global step.
        start_ns: Its start, in ns since the epoch.
        seconds: Its duration.
        captured: True if it has captures.
        slow: True if it took much longer than the steps around it (docs/findings.md has the limits).
        usual_s: The median of the steps around it.
        stages: Seconds by stage, each second counted once. `other` and, last, `autoprof's own` complete the sum to
            `seconds`.
        samples: The number of samples generated for it.
        prompt_tokens: Prompt tokens that the engines received. Later turns of a sample count earlier ones again.
        response_tokens: Tokens that the engines generated.
        tokens_per_s: `response_tokens` divided by the step's seconds, for all devices together.
        recorded: Seconds of each stage in which a profiler recorded.
        slowed: Seconds by which these stages took longer than usual. Recording slows work, so they are not counted in
            findings.
        error: The type of the exception that ended the step.
        kinds: The kinds of stages that their names don't show, by name.
        kind: `warm-up` (the first step of each start of the trainer), `captured` (a profiler recorded in a process), or
            `regular`.
        no_stage: The time in which no stage ran, if it is over a fifth of the step.
    """

    number: int
    start_ns: int
    seconds: float
    captured: bool
    slow: bool
    usual_s: float
    stages: dict[str, float]
    samples: int | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    tokens_per_s: float | None = None
    recorded: dict[str, float] = {}
    slowed: dict[str, float] = {}
    error: str | None = None
    kinds: dict[str, str] = {}
    kind: str = "regular"
    no_stage: StageGap | None = None


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One step in detail.

    Attributes:
        stages: As in `StepRow`.
        kinds: As in `StepRow`.
        lanes: The lanes: trainer, actors, ref, critic, reward, agent loops, rollout, each by rank or replica. If
            there are many, the busiest and the idlest of each role.
        lanes_left_out: The number of other lanes.
        gaps: The 100 longest gaps, by start.
        gaps_left_out: The number of other gaps.
        skews: The skews by `waited_s`, longest first.
        weight_sync_s: Seconds in which weights were sent.
        path: The critical path.
        findings: The findings of this step, by seconds.
        captures: The captures; at most 16 of each stage.
        captures_left_out: The number of other captures.
        apart_s: The seconds of recording if only some replicas were recorded, else 0. Recorded replicas are slower.
        captured_for: The reasons for its captures other than `AUTOPROF_STEPS`: a condition, or a trigger.
        kind: As in `StepRow`.
        no_stage: As in `StepRow`.
    """

    number: int
    start_ns: int
    seconds: float
    stages: dict[str, float]
    lanes: list[Lane]
    gaps: list[Gap]
    samples: SampleFigures | None
    skews: list[Skew]
    weight_sync_s: float
    path: list[PathPart]
    captures: list[CaptureFigures]
    findings: list[Finding]
    gaps_left_out: int = 0
    lanes_left_out: int = 0
    captures_left_out: int = 0
    apart_s: float = 0.0
    kinds: dict[str, str] = {}
    captured_for: list[str] = []
    kind: str = "regular"
    no_stage: StageGap | None = None


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure on both sides.

    Attributes:
        kind: `step` (seconds a step), `stage` (seconds a step), `operator` (own seconds a capture), `rate` (tokens/s)
            or `samples` (seconds).
        name: The stage, operator or figure. For a `stage` that the two sides name differently, its kind.
        unit: `s` or `1/s`.
        a: The figure of side `a`; None if it has none.
        b: The figure of side `b`.
        change: `b` less `a`. A missing figure counts as 0.
        worse: True if the change is for the worse.
        where: The place of an operator, or both names of a stage that the two sides name differently.
    """

    kind: str
    name: str
    unit: str
    a: float | None
    b: float | None
    change: float
    worse: bool
    where: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two steps or two runs.

    Attributes:
        a: The label of the side to compare with.
        b: The label of the side of the report.
        rows: The rows, the largest slowdown first.
        findings: The findings, the costliest first.
        basis: For each side that is a run, its label and `RunFigures.basis`.
    """

    a: str
    b: str
    rows: list[ComparisonRow]
    findings: list[Finding]
    basis: list[str] = []


class OpenSpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """An open span: it has begun and not ended.

    Attributes:
        process: The host and pid of its process.
        state: `running`, `gone` if the process was killed, or `elsewhere` if this host or container can't see it.
        kind: The kind of the span.
        name: Its name, such as the name of a stage or a tool.
        where: Its role with rank or replica, and the ids of its sample or request.
        start_ns: Its start, in ns since the epoch.
        age_s: Seconds that it has been open, until now or until the last sign of life of its process.
        step: The global step; None if unknown.
    """

    process: str
    state: str
    kind: str
    name: str
    where: str
    start_ns: int
    age_s: float
    step: int | None = None


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A whole report.

    Attributes:
        started_ns: The start of the run, in ns since the epoch.
        steps: The steps by number. A step that ran again after the run was resumed is listed once, with its last run.
        basis: Words for the steps from which `stages`, `kinds`, `median_s` and `tokens_per_s` were computed (the
            regular steps, else the captured ones, else the warm-ups), and the number of the others.
        stages: The stages by seconds, then `other`, then `autoprof's own`.
        kinds: The same for kinds of stages: each is the sum of its stages.
        median_s: The median seconds of these steps.
        tokens_per_s: Generated tokens of these steps divided by their seconds; None if the timeline has no counts.
        findings: The findings of the run and of its steps, by seconds.
        details: The steps in detail.
        comparison: The comparison with another run or step; None if none was requested.
        notes: Remarks on the figures themselves: lines left out, files that could not be read.
        verdict: A sentence for a run without findings. It names the part that could not be judged.
        open: Open spans: steps first, then the oldest first. Spans of earlier attempts are omitted.
        open_left_out: The number of open spans that are not in `open`.
        going_on: True if the run is running. Ages of its running processes then end now.
    """

    id: str
    path: str
    command: str
    state: str
    started_ns: int | None
    hosts: list[str]
    versions: dict[str, str]
    steps: list[StepRow]
    stages: list[StageShare]
    median_s: float | None
    tokens_per_s: float | None
    findings: list[Finding]
    details: list[StepFigures]
    comparison: Comparison | None
    notes: list[str]
    kinds: list[StageShare] = []
    verdict: str = ""
    autoprof: str = ""
    open: list[OpenSpanRow] = []
    open_left_out: int = 0
    going_on: bool = False
    basis: str = ""
    schema: int = SCHEMA
