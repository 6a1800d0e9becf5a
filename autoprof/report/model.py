"""Structs of a report: runs, steps, lanes, captures, samples, findings and comparisons."""

from __future__ import annotations

import msgspec


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator, a kernel or a function in a capture, all its calls together.

    Attributes:
        category: The trace's `cat`: cpu_op, kernel, gpu_memcpy, user_annotation, python_function ...
        total_us: With what it called.
        self_us: Without.
    """

    name: str
    category: str
    calls: int
    total_us: float
    self_us: float


class DeviceShares(msgspec.Struct, frozen=True, kw_only=True):
    """A device's activity while it was recorded, as shares of `seconds`.

    Attributes:
        device: As the trace names it.
        compute: Kernels other than communication.
        communication: NCCL's, HCCL's and the like, whether or not something else ran beside them.
        copy: Copies and memsets.
        idle: Nothing.
        overlap: Of the communication's time, the share in which compute ran, too; None without communication.
    """

    device: str
    seconds: float
    compute: float
    communication: float
    copy: float
    idle: float
    overlap: float | None = None


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes of an engine of one kind. `tokens` are those that were scheduled, where the trace says."""

    passes: int
    seconds: float
    tokens: int | None = None


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The forward passes of an engine in a capture. A pass with both prefill and decode is `mixed`."""

    engine: str
    passes: int
    prefill: Phase
    decode: Phase
    mixed: Phase
    other: Phase


class CaptureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One capture.

    Attributes:
        stage_kind: The stage's kind in the vocabulary of all trainers, where it has one.
        state: `complete`, `truncated`, `failed`, `unfinished`, or `damaged` where the file can't be read.
        part: Of a replica's engine: `frontend`, or a worker by its ranks.
        tool: `torch`, `npu`, `nsys`, `memory` or `none`.
        opens_with: What opens the file, where it is not Perfetto.
        seconds: From the first to the last event.
        collectives_s: Of that, in collectives, waiting for other ranks included; None where the trace shows none.
        operators: Of the host, by own time, at most 50.
        kernels: Of the devices, by own time, at most 50.
        memory_peak_bytes: By the device or, without one, the host.
        bound: `cpu` or `device`: which of the two the other waits for; None where the trace does not tell.
        reason: Why it is in this state, or why there are no figures.
        window: Why the step was captured, as its meta file says.
        slowest: Why this rank was, where the slowest were asked for.
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
    """One span: `kind`, `name` and `stage_kind` are the timeline's (`kind`: timer, stage, sample, turn, tool, reward,
    request, window)."""

    name: str
    kind: str
    start_s: float
    end_s: float
    ids: dict[str, str | int | float | bool | None] = {}
    error: str | None = None
    stage_kind: str = ""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of one process in a step under one role.

    Attributes:
        label: `actor rank 3`, `rollout replica 1`, `agent_loop 2`, `trainer`; with host and pid where two are alike.
        spans: By start. Where there are very many, the longest of them; the turns, tools and rewards of samples stand
            in `SampleFigures.longest`.
        left_out: How many spans are not in `spans`.
        busy_s: Seconds of the step in which at least one span goes on, also of those left out, without autoprof's own.
        idle_s: The step's seconds without `busy_s`.
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
    """A time in a step in which none of the processes that generate, train or score did anything.

    Attributes:
        after: The span that ended before it, as `stage of lane`.
        before: The span that began after it.
        between: `generation and training` where it lies between those two, else `stages`.
        within: What the driver did meanwhile: the timer or stage that covers most of it, or `other`.
    """

    start_s: float
    end_s: float
    after: str
    before: str
    between: str
    within: str


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the step's critical path: a stage of the driver, and the lane's span that ended last in it."""

    stage: str
    start_s: float
    end_s: float
    held_by: str | None = None


class SkewRow(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of one rank or replica in a stage, in all its calls in the step.

    Attributes:
        recorded: Whether a profiler recorded in one of them, which takes longer.
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
        slowest: The label of the one that took longest, as in `rows`; of those that were not recorded, if there are
            any.
        waited_s: How much longer that was than the median.
        rows: By seconds, longest first, at most 64.
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
    """Seconds of a sample by what it did: `turn` (generation), `tool` with its name, `reward`, `waiting`."""

    kind: str
    name: str
    seconds: float
    count: int


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: one answer to one prompt.

    Attributes:
        label: `prompt 17, rollout 3`.
        sample: The prompt's id, as the data set or the trainer gives it.
        rollout: Which of the answers to this prompt.
        agent: The agent loop's name.
        lane: The label of the lane it ran in.
        held_by: What it spent more time on than other samples do, `tool search` for one. Empty where that is not known:
            several samples with the same ids went on at once.
        parts: Its seconds by what it did, most first.
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
    """The last `count` of a step's `of` samples: the batch waited `waited_s` seconds for them when the rest was done.

    Attributes:
        samples: Their labels, the last one first, at most 20.
        held_by: What held most of them, as in `SampleRow`.
    """

    count: int
    of: int
    waited_s: float
    samples: list[str]
    held_by: str


class ToolRow(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one tool in a step. `slowest` is the label of the sample with the longest call."""

    name: str
    calls: int
    errors: int
    seconds: float
    median_s: float
    max_s: float
    slowest: str


class SampleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of a step, without those of validation.

    Attributes:
        count: How many there are.
        failed: How many ended with an exception.
        quantiles_s: Durations at 0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99 and 1.
        done: How many samples were done when, as (seconds from the step's start, count), at most some hundred points.
        tail: The last few that the batch waited for.
        parts: Seconds of all samples by kind.
        tools: The tools that were called, by seconds.
        longest: The longest samples, longest first, at most 50, those of the tail among them.
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


# The form of what `--json` prints: raised when a field goes or changes its meaning.
SCHEMA = 1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of a rule, in words.

    Attributes:
        kind: The rule's name.
        text: One sentence, with the figures in it.
        evidence: The figures and names behind it, a line each.
        seconds: What it costs a step, by which findings are sorted; where `step` is None, on average.
        step: The step, None for the run.
        file: The trace or timeline file that it comes from.
    """

    kind: str
    text: str
    evidence: list[str]
    seconds: float
    step: int | None = None
    file: str | None = None


class StageShare(msgspec.Struct, frozen=True, kw_only=True):
    """One stage over the steps that `RunFigures.basis` names; `autoprof's own` over all steps.

    Attributes:
        name: The timer's or stage's own name, `other`, or `autoprof's own`: the profiler's start and stop, and waits
            for its files.
        seconds: Of these steps together.
        share: Of the time of these steps without autoprof's own; None for `autoprof's own`.
        steps: In how many steps it was.
        median_s: Of those steps.
        kind: Its kind in the vocabulary of all trainers, where it has one.
    """

    name: str
    seconds: float
    share: float | None
    steps: int
    median_s: float
    kind: str = ""


class StageGap(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step in which no stage ran and no timer, without autoprof's own.

    Attributes:
        seconds: In all.
        share: Of the step without autoprof's own time.
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
        captured: Whether there are captures of it.
        slow: Whether it took much longer than the steps around it (`usual_s`, docs/findings.md says by how much).
        usual_s: The median of the steps around it.
        stages: Seconds by stage, each second counted once; with `other` and, last, `autoprof's own` they sum up to
            `seconds`.
        samples: How many samples were generated for it.
        prompt_tokens: As the engines were given them: the second turn of a sample gives the first again.
        response_tokens: As the engines generated them.
        tokens_per_s: `response_tokens` by the step's seconds, all devices together.
        recorded: Seconds of a stage in which a profiler recorded.
        slowed: Of these, by how much the stage took longer than usual. Recorded work runs slower, so it makes no step
            slow and is no finding.
        error: The type of the exception that ended the step.
        kinds: Kinds of stages by name, where the name does not tell.
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
        lanes: Trainer first, then actors, ref, critic, reward, agent loops, rollout, each by rank or replica.
        gaps: By start, at most the 100 longest.
        gaps_left_out: How many there are besides.
        skews: By `waited_s`, longest first.
        weight_sync_s: Seconds in which weights were sent.
        path: The critical path.
        findings: Those of this step, by seconds.
        captured_for: Why it was captured, where that was not `AUTOPROF_STEPS`: a condition, or who asked for it.
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
    kinds: dict[str, str] = {}
    captured_for: list[str] = []
    kind: str = "regular"
    no_stage: StageGap | None = None


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One figure on both sides.

    Attributes:
        kind: `step` (seconds a step), `stage` (seconds a step; of a kind of stages where the two sides have other names
            for it, which `where` has), `operator` (own seconds a capture), `rate` (tokens/s),
            `samples` (seconds).
        unit: `s` or `1/s`.
        change: `b` less `a`; a side that is not there counts as 0.
        worse: Whether the change is for the worse.
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
    """Two steps or two runs. `b` is the one that was asked for, `a` what it is held against.

    Attributes:
        rows: What became slower by most first.
        basis: For each side that is a run, its label and `RunFigures.basis`.
    """

    a: str
    b: str
    rows: list[ComparisonRow]
    findings: list[Finding]
    basis: list[str] = []


class OpenSpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A span that has begun and not ended.

    Attributes:
        process: Its host and pid.
        state: `running`, `gone` where the process was killed, `elsewhere` where that can't be seen from this host or
            container.
        kind: The kind of the span.
        name: Its name: of a stage, a tool.
        where: Its role with rank or replica, and which of many it is.
        age_s: Seconds that it has been open: up to now, or up to the last sign of life of its process.
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
        started_ns: When the run began.
        steps: By number. A step that ran again after the run was resumed stands there once, as it ran last.
        basis: The steps that `stages`, `kinds`, `median_s` and `tokens_per_s` are of, and the number of the others:
            the regular steps, else the captured ones, else the warm-ups.
        stages: By seconds, then `other`, then `autoprof's own`.
        kinds: The same for kinds of stages, each the sum of its stages, by seconds.
        median_s: The median seconds of these steps.
        tokens_per_s: Generated tokens of these steps by their seconds; None where the timeline has no counts.
        findings: Those of the run and of the steps in `details`, by seconds.
        details: The steps that were chosen.
        comparison: Where there was something to hold it against.
        notes: What a reader should know of the figures themselves: lines left out, files that could not be read.
        verdict: A sentence for a run without findings, with the part that could not be judged.
        open: Open spans, steps first, then the oldest first, without those that the run has left behind.
        open_left_out: How many such spans there are besides.
        going_on: True if the run is running, so that ages of running processes are up to now.
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
