"""Structs of a report's data: runs, steps, lanes, captures, samples, findings and comparisons.

The module also has the functions that write words of the report's texts, such as plurals and lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from autoprof.base import units
from autoprof.config import values
from autoprof.traces.clocks import loop_title
from autoprof.traces.flame import FlameThread
from autoprof.traces.summary import EngineFigures, Operator

# Name of the part of a step that no timer and no stage covers.
OTHER = "other"
# Kind of the spans in which autoprof starts or stops a profiler, or waits for a file.
PROFILING = "profiling"
# Name under which the time of these spans is listed among the stages of a step. It is the last row, and the time is not
# part of the 100 %.
OWN = "autoprof's own"
GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
SYNC, VALIDATION, CHECKPOINT, REWARD = "weight sync", "validation", "checkpoint", "reward"

# Meanings of stages that findings and colours distinguish, and the kinds of stages that have each meaning.
_KINDS_OF_MEANINGS = {
    GENERATION: "generate",
    SCORING: "log_prob ref_log_prob values",
    TRAINING: "update_actor update_critic optimizer",
    SYNC: "weight_sync",
    VALIDATION: "validate",
    CHECKPOINT: "checkpoint",
    REWARD: "reward",
}
_BY_KIND = {kind: meaning for meaning, meant in _KINDS_OF_MEANINGS.items() for kind in meant.split()}
_BY_NAME = {"mini_batch": TRAINING}
# Meanings of spans that belong to samples and engines, by the kind of the span.
_MEANINGS_OF_SPANS = {
    "sample": GENERATION,
    "turn": GENERATION,
    "request": GENERATION,
    "window": GENERATION,
    "reward": REWARD,
}


def meaning(name: str, kind: str = "stage", stage_kind: str = "") -> str:
    """Return the meaning of a span: a constant of this module, such as `TRAINING`, or `OTHER`.

    Args:
        name: The name of the span.
        kind: The kind of the span.
        stage_kind: The kind of the stage. If empty, it is derived from the name. This works for well-known names only.
    """
    return _MEANINGS_OF_SPANS.get(kind) or _BY_KIND.get(stage_kind or values.kind_of(name)) or _BY_NAME.get(name, OTHER)


def seconds_of(stages: Mapping[str, float], wanted: str, kinds_of: Mapping[str, str]) -> float:
    """Return the sum of the seconds of all stages with the meaning `wanted`.

    Args:
        stages: Dict from the name of each stage to its seconds.
        wanted: The meaning.
        kinds_of: Dict from the names of stages to their kinds, if the names don't show the kinds.
    """
    return sum(took for name, took in stages.items() if meaning(name, stage_kind=kinds_of.get(name, "")) == wanted)


def open_title(going_on: bool) -> str:
    """Return the title of the table of open spans. `going_on` is True for a run that is running."""
    return "Open now" if going_on else "Open at its end"


def several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Join names with commas. If there are more than `most` names, list the first `most` and count the others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def name_ranks(numbers: Sequence[int], role: str) -> str:
    """Return a text that names some ranks, such as `actor ranks 3, 5`."""
    names = f"{plural(numbers, 'rank', 'ranks')} {listed(map(str, numbers), 8)}"
    return f"{role} {names}" if role else names


def plural(things: Sequence[object], one: str, many: str) -> str:
    """Return `one` if there is one thing, else `many`."""
    return one if len(things) == 1 else many


# Text that is shown for a comparison without rows.
NOTHING_COMMON = "nothing to compare: neither side has steps that ended, or traces"
NOTHING_SLOWER = "nothing became much slower"


class DeviceShares(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of a device while it was recorded. Each share is the share of `seconds` in which the activity ran."""

    device: str  # The name of the device in the trace.
    seconds: float  # Seconds from the first to the last event of the trace.
    compute: float  # Share of kernels other than communication.
    communication: float  # Share of NCCL, HCCL and similar kernels, including the time in which other kernels ran too.
    copy: float  # Share of copies and memsets.
    idle: float  # Share of the time in which the device did nothing.
    # Share of the communication time in which other kernels ran too. None if the device did not communicate.
    overlap: float | None = None


class CaptureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The data that the report shows for one capture."""

    name: str  # The capture's name: the name of its file without the ending.
    step: int  # The global step.
    role: str
    stage: str
    file: str  # The path of the file, relative to the directory of the run.
    state: str  # `complete`, `truncated`, `failed`, `unfinished`, or `damaged` if the file can't be read.
    tool: str  # `torch`, `npu`, `nsys`, `memory` or `none`.
    bytes: int  # The size of the capture's files.
    rank: int | None = None
    replica: int | None = None
    host: str | None = None
    pid: int | None = None
    part: str = ""  # The part of a replica's engine that was recorded: `frontend`, or a worker with its ranks.
    opens_with: str = ""  # The program that opens the file. Empty if this is Perfetto.
    start_s: float | None = None  # Seconds from the step's start to the first event of the trace. None if unknown.
    seconds: float | None = None  # Seconds from the first to the last event of the trace.
    # Seconds in collectives, including the wait for other ranks. None if the trace has no collectives.
    collectives_s: float | None = None
    # Seconds of `seconds` in which autoprof started, stopped or exported a recording in any process.
    own_s: float = 0.0
    events: int | None = None
    # At most 50 operators of the host, the longest own time first. Threads beside the stage come last. autoprof's own
    # frames are left out.
    operators: list[Operator] = []
    kernels: list[Operator] = []  # At most 50 kernels of the devices, the longest own time first.
    devices: list[DeviceShares] = []
    engine: EngineFigures | None = None
    memory_peak_bytes: int | None = None  # Peak memory of the device. If no device was recorded, of the host.
    memory_total_bytes: int | None = None  # Total memory of the device. None if unknown.
    # `cpu` if the device waits for the CPU, `device` if the CPU waits for the device. None if it is unclear.
    bound: str | None = None
    reason: str = ""  # The reason for `state` and for `bound`, or the reason why data is missing.
    window: str = ""  # The reason for the capture, from its meta file.
    slowest: str = ""  # If the slowest ranks were requested, the reason why this rank was chosen.
    stage_kind: str = ""  # The stage's kind in the vocabulary of all trainers. Empty if the stage has no such kind.
    flame: list[FlameThread] = []  # Flame graphs of at most 4 threads of the host, the thread with most calls first.


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
    """Spans of one process under one role in a step. The timeline shows them in one row."""

    # A label such as `actor rank 3`, `rollout replica 1`, `agent_loop 2` or `trainer`. If two lanes would have the same
    # label, their labels contain the host and the pid.
    label: str
    role: str
    host: str
    pid: int
    # The longest spans, ordered by start. Turns, tools and rewards of samples are in `SampleFigures.longest` instead.
    spans: list[SpanRow]
    # Seconds of the step that at least one span covers. Spans that are missing in `spans` count too, but spans of
    # autoprof's own time don't.
    busy_s: float
    idle_s: float  # Seconds of the step that no span covers.
    file: str  # The name of the journal.
    rank: int | None = None
    replica: int | None = None
    left_out: int = 0  # The number of spans that are not in `spans`.


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """A time in a step in which no process generated, scored or trained."""

    start_s: float  # The start of the gap, in seconds from the step's start.
    end_s: float  # The end of the gap, in seconds from the step's start.
    after: str  # The span that ended at the start of the gap, as `stage of lane`.
    before: str  # The span that began at the end of the gap, as `stage of lane`.
    between: str  # `generation and training` if the gap is between generation and scoring or training, else `stages`.
    within: str  # The driver's timer or stage that covers at least half of the gap, or `other`.


class PathPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step's critical path: the driver's stage or `other`, and the worker's span that ended last in it."""

    stage: str
    start_s: float
    end_s: float
    held_by: str | None = None


class SkewRow(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that one rank or replica spent in a stage, summed over its calls in the step."""

    label: str
    seconds: float
    calls: int
    file: str
    recorded: bool = False  # True if a profiler recorded during at least one call. Recorded calls take longer.


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of several ranks or replicas that ran the same stage of a step."""

    stage: str
    role: str
    of: str  # `rank` if ranks are compared, `replica` if replicas are compared.
    count: int  # The number of ranks or replicas.
    median_s: float  # The median of the seconds of all ranks or replicas except the slowest.
    # The label of the slowest rank or replica, as in `rows`. Ranks and replicas that a profiler recorded are considered
    # only if all were recorded.
    slowest: str
    slowest_s: float  # The seconds of the slowest rank or replica.
    waited_s: float  # Seconds that the other ranks or replicas waited for the slowest.
    rows: list[SkewRow]  # At most 64 ranks or replicas, the longest seconds first.


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Time of samples in one activity: `turn` (generation), `tool` with the tool's name, `reward` or `waiting`."""

    kind: str
    name: str
    seconds: float
    count: int


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: one answer to one prompt."""

    label: str  # A label such as `prompt 17, rollout 3`.
    sample: str  # The id of the prompt, from the data set or the trainer.
    rollout: int | None  # The number of this answer among all answers to the prompt.
    agent: str | None  # The name of the agent loop.
    lane: str  # The label of the lane that contains the sample.
    file: str
    start_s: float
    end_s: float
    seconds: float
    # The activity on which the sample spent more time than the median sample, by most, such as `tool search`. Empty if
    # several samples with the same ids ran at the same time: then the time of the activities is unknown.
    held_by: str
    parts: list[Part]  # The seconds of the sample in each activity, longest first.
    spans: list[SpanRow]  # The turns, tools and rewards of the sample, ordered by start.
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    error: str | None = None


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """The last samples of a step, for which the step waited after all other samples had ended."""

    count: int  # The number of the last samples.
    of: int  # The number of all samples in the step.
    waited_s: float  # Seconds that the step waited for the last samples.
    samples: list[str]  # The labels of at most 20 last samples. The sample that ended last comes first.
    held_by: str  # The most frequent `SampleRow.held_by` of the last samples.


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
    """Samples of a step. Samples of a validation are not included."""

    count: int  # The number of samples.
    failed: int  # The number of samples that ended with an exception.
    start_s: float  # The start of the first sample, in seconds from the step's start.
    end_s: float  # The end of the sample that ended last, in seconds from the step's start.
    mean_s: float  # The mean duration of the samples, in seconds.
    # Quantiles of the durations: for each of 0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99 and 1, the seconds.
    quantiles_s: dict[str, float]
    # At most 300 points (seconds from the step's start, number of samples that had ended by then).
    done: list[tuple[float, int]]
    parts: list[Part]  # The seconds of all samples in each activity, longest first.
    tools: list[ToolRow]  # The tools that were called, the longest seconds first.
    longest: list[SampleRow]  # At most 50 samples, the longest first. They include samples of the tail.
    tail: Tail | None = None  # The last few samples, for which the step waited. None if the step has too few samples.


# Version of the format of `--json`. It rises when a field is removed or changes its meaning.
SCHEMA = 1


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of lost time that a rule found."""

    kind: str  # The kind of the finding, such as `slow_rank`.
    text: str  # One sentence that states the cause and its numbers.
    evidence: list[str]  # Texts with the numbers and names on which the sentence is based.
    # The cost: the lost seconds of the step. For a finding about the whole run, the lost seconds per step on average.
    # Findings are sorted by this number.
    seconds: float = 0.0
    step: int | None = None  # The number of the step. None for a finding about the whole run.
    file: str | None = None  # The name of the trace or journal that shows the cause.
    remedy: str = ""  # One sentence with advice. It names settings of the trainer's release, if they help.
    command: str = ""  # A command for a shell that helps to find or remove the cause. Empty if no command helps.
    is_past: bool = False  # True for a step or a run that was stuck and is not any more.


class StageShare(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one stage, summed over the steps that `RunFigures.basis` names.

    The time of `autoprof's own` is summed over all steps. Its median counts only the steps with captures.
    """

    # The name of the timer or stage, `other`, or `autoprof's own`: time in which autoprof starts or stops a profiler,
    # or exports its trace, or a process waits for its files.
    name: str
    seconds: float  # Seconds of the stage, summed over the steps.
    # Share of the stage in the time of these steps. autoprof's own time is not part of the 100 %. None for
    # `autoprof's own`.
    share: float | None
    steps: int  # The number of steps in which the stage ran.
    median_s: float  # Median of the stage's seconds in the steps that list the stage.
    kind: str = ""  # The stage's kind in the vocabulary of all trainers. Empty if the stage has no such kind.


class GapPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the program where the driver was while no stage ran, from samples of its stack."""

    seconds: (
        float  # Seconds in which samples found the driver at this place. They are as exact as the samples' interval.
    )
    # The place, such as `ray.get at replay_buffer.py:88 wait`. For time without samples, the reason, if it is known.
    place: str
    frames: list[str] = []  # The stack of the longest sample at this place, the outermost function first.


class StageGap(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a step in which no stage and no timer ran. autoprof's own time is not included."""

    seconds: float  # The length of this time.
    share: float  # The share of this time in the step. autoprof's own time is not part of the 100 %.
    start_s: float  # The start of the longest part of this time, in seconds from the step's start.
    end_s: float  # The end of the longest part, in seconds from the step's start.
    after: str  # The stage that ended before the longest part. Empty if no stage ended before.
    before: str  # The stage that began after the longest part. Empty if no stage began after.
    # The places of the driver in this time, the longest first. Empty if no samples were taken.
    places: list[GapPlace] = []


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """The data that the run's overview shows for one step."""

    number: int  # The trainer's global step.
    start_ns: int  # The start of the step, in ns since the epoch.
    seconds: float  # The duration of the step.
    captured: bool  # True if the step has captures.
    slow: bool  # True if the step took much longer than the steps around it (docs/findings.md has the limits).
    usual_s: float  # The median of the seconds of the steps around it.
    # Seconds of each stage. Each second counts for one stage only. `other` and, as the last, `autoprof's own` complete
    # the sum to `seconds`.
    stages: dict[str, float]
    samples: int | None = None  # The number of samples that were generated for the step.
    # Prompt tokens that the engines received. If a sample has several turns, the prompt of a turn contains the earlier
    # turns, whose tokens count again.
    prompt_tokens: int | None = None
    response_tokens: int | None = None  # Tokens that the engines generated.
    tokens_per_s: float | None = None  # `response_tokens` divided by the step's seconds, for all devices together.
    recorded: dict[str, float] = {}  # Seconds of each stage in which a profiler recorded.
    # Seconds by which each recorded stage took longer than usual. Recording slows work, so findings don't count these
    # seconds.
    slowed: dict[str, float] = {}
    error: str | None = None  # The type of the exception that ended the step.
    kinds: dict[str, str] = {}  # Kinds of stages, by the name of the stage, if the name does not show the kind.
    # `warm-up` (the first step of each start of the trainer), `captured` (a profiler recorded in a process), `writing
    # traces` (autoprof wrote the traces of an earlier step), or `regular`.
    kind: str = "regular"
    # The time in which no stage ran. None unless it is over a fifth of the step, or has a part of at least a second and
    # 3 % of the step.
    no_stage: StageGap | None = None
    # The share of autoprof's own time in each stage, if it is over a fifth. Findings don't use the seconds of these
    # stages.
    own_shares: dict[str, float] = {}


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The data that the report shows for one step in detail."""

    number: int
    start_ns: int
    seconds: float
    stages: dict[str, float]  # As in `StepRow`.
    # The lanes, in the order trainer, actors, ref, critic, reward, agent loops, rollout. Lanes with the same role are
    # ordered by rank or replica. If a step has too many lanes, only the busiest and the idlest of each role are listed.
    lanes: list[Lane]
    gaps: list[Gap]  # The 100 longest gaps, ordered by start.
    samples: SampleFigures | None
    skews: list[Skew]  # The skews, the longest `waited_s` first.
    weight_sync_s: float  # Seconds in which weights were sent.
    path: list[PathPart]  # The critical path.
    captures: list[CaptureFigures]  # The captures. At most 16 of each stage.
    findings: list[Finding]  # The findings of this step, the costliest first.
    gaps_left_out: int = 0  # The number of gaps that are not in `gaps`.
    lanes_left_out: int = 0  # The number of lanes that are not in `lanes`.
    captures_left_out: int = 0  # The number of captures that are not in `captures`.
    # If only some replicas were recorded, the longest recording of a replica in seconds, else 0. Recorded replicas are
    # slower.
    apart_s: float = 0.0
    kinds: dict[str, str] = {}  # As in `StepRow`.
    # The reasons for the captures of the step: conditions and triggers. `AUTOPROF_STEPS` is not listed.
    captured_for: list[str] = []
    kind: str = "regular"  # As in `StepRow`.
    no_stage: StageGap | None = None  # As in `StepRow`.
    slowed: dict[str, float] = {}  # As in `StepRow`.
    own_shares: dict[str, float] = {}  # As in `StepRow`.
    # The times in which autoprof started, stopped or exported a recording in any process: (start, end), in seconds from
    # the step's start.
    own_times: list[tuple[float, float]] = []


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """One number that both sides of a comparison have, such as the seconds of a stage."""

    # `step` (seconds per step), `stage` (seconds per step that has the stage), `operator` (own seconds per capture),
    # `rate` (tokens/s) or `samples` (seconds).
    kind: str
    name: str  # The name of the stage, operator or number. If the sides name a stage differently, the stage's kind.
    unit: str  # `s` or `1/s`.
    a: float | None  # The number of side `a`. None if side `a` lacks it.
    b: float | None  # The number of side `b`. None if side `b` lacks it.
    change: float  # `b` minus `a`. A missing number counts as 0.
    worse: bool  # True if side `b` is slower than side `a`.
    # The stage and process of an operator. If the sides name a stage differently, both names of the stage. If some
    # steps lack a stage, the number of steps that have it, of side `a` first.
    where: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two steps or two runs. Side `b` is the run or step of the report."""

    a: str  # The label of the run or step with which the report's run or step is compared.
    b: str  # The label of the report's run or step.
    rows: list[ComparisonRow]  # The rows: first the step and its tokens, then the others, the largest slowdown first.
    findings: list[Finding]  # The findings, the costliest first.
    basis: list[str] = []  # For each side that is a run, its label and `RunFigures.basis`.


class OpenSpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """An open span: a span that has begun and has not ended."""

    process: str  # The host and the pid of the process that works on the span.
    # The state of the process: `running`, `gone` if it was killed, or `elsewhere` if this host or container can't see
    # the process.
    state: str
    kind: str  # The kind of the span.
    name: str  # The name of the span, such as the name of a stage or a tool.
    where: str  # The role with rank or replica, and the ids of the sample or request.
    start_ns: int  # The start of the span, in ns since the epoch.
    age_s: float  # Seconds for which the span has been open, until now or until the last sign of life of the process.
    step: int | None = None  # The global step. None if unknown.


class ValidationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A validation outside of steps, such as the validation before the first step."""

    name: str  # The name of the stage.
    start_ns: int  # The start, in ns since the epoch.
    seconds: float
    after: int | None = None  # The number of the step before the validation. None before the first step.
    before: int | None = None  # The number of the next step. None after the last step.

    @property
    def text(self) -> str:
        """Return a text such as `validation before step 1: 12.3 s`."""
        place = f"after step {self.after}" if self.after is not None else f"before step {self.before}"
        place = "without steps" if self.after is None and self.before is None else place
        return f"validation {place}: {units.seconds(self.seconds)}"


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a whole report."""

    id: str
    path: str
    command: str
    state: str
    started_ns: int | None  # The start of the run, in ns since the epoch.
    hosts: list[str]
    versions: dict[str, str]  # The versions of Python, the targets, torch and the GPU driver, by name.
    # The steps, ordered by number. If a step ran again after the run was resumed, only its last execution is listed.
    steps: list[StepRow]
    stages: list[StageShare]  # The stages, the longest seconds first, then `other`, then `autoprof's own`.
    # The median of the seconds of the steps that `basis` names, without the time that autoprof and recording took.
    median_s: float | None
    # Generated tokens of the steps that `basis` names, divided by the seconds of these steps. None if the timeline
    # contains no numbers of tokens.
    tokens_per_s: float | None
    findings: list[Finding]  # The findings of the run and of its steps, the costliest first.
    details: list[StepFigures]  # The steps that the report shows in detail.
    comparison: Comparison | None  # The comparison with another run or step. None if no comparison was requested.
    notes: list[str]  # Remarks on the data of the report: lines that were left out, files that could not be read.
    kinds: list[StageShare] = []  # The kinds of stages. The seconds of a kind are the sum over its stages.
    verdict: str = ""  # A text for a run without findings. It names the parts of the run that could not be judged.
    autoprof: str = ""
    # Open spans: steps first, then the other spans, the oldest first. Spans of earlier attempts are omitted.
    open: list[OpenSpanRow] = []
    open_left_out: int = 0  # The number of open spans that are not in `open`.
    going_on: bool = False  # True if the run is running. Then the ages of spans in running processes count until now.
    # A text that names the steps from which `stages`, `kinds`, `median_s` and `tokens_per_s` were computed, and counts
    # the other steps. The data is computed from the regular steps. A run without regular steps uses the captured steps,
    # and a run without captured steps too uses the warm-ups.
    basis: str = ""
    # Validations outside of steps, in order. Their time is not part of any other data.
    validations: list[ValidationRow] = []
    loop: int = 0  # The number of the loop that this data is about, from 1. 0 if the run has one loop.
    trainer: str = ""  # The class of the trainer; empty if unknown.
    # The loops of a run with several loops: each trainer has one. The data of each loop has the same form as this
    # struct. The steps, the stages and the other data of steps are then empty here.
    loops: list[RunFigures] = []
    schema: int = SCHEMA

    @property
    def title(self) -> str:
        """Return a text such as `loop 2 (GRPOTrainer)`."""
        return loop_title(self.loop, self.trainer)
