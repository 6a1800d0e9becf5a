"""A run and its steps, findings, and a comparison."""

from __future__ import annotations

import msgspec

from autoprof.report.model.captures import CaptureFigures
from autoprof.report.model.lanes import Gap, Lane, PathPart, Skew
from autoprof.report.model.samples import SampleFigures

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
