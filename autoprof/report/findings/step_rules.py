"""Rules of steps: causes of a slow step, and idle workers."""

from __future__ import annotations

from collections.abc import Iterator

from autoprof.base.units import seconds
from autoprof.base.units import share as percent
from autoprof.report.figures import words
from autoprof.report.figures.overview import REGULAR, own_seconds, own_stages
from autoprof.report.figures.words import OTHER, OWN, listed, several
from autoprof.report.findings.rules import LEAST_S, Around, matters, row_rule, step_rule
from autoprof.report.model import Finding, SampleRow, StageGap, StepFigures, StepRow, ToolRow

# Weight sync is long if it takes at least this number of times its usual time.
SYNC_RATIO = 2.0
# Smallest share of the step at which rewards in the driver are slow.
REWARD_SHARE = 0.1
# Smallest share of the samples' time at which rewards in the samples are slow.
SAMPLE_REWARD_SHARE = 0.25
# Smallest number of seconds without a stage at which a regular step has a finding. The number is small, because most
# other steps lose this time too.
NO_STAGE_S = 0.1
# If the longest part of the time without a stage is at least this share of the time, it is reported as the whole time.
NEARLY_ALL = 0.95
# Smallest share of the samples' time at which tools are a finding.
TOOL_SHARE = 0.3


@row_rule("weight_sync")
def weight_sync(around: Around) -> Iterator[Finding]:
    """Find weight sync that takes twice as long as in other steps with a weight sync."""
    row = around.row
    took_s = words.seconds_of(own_stages(row), words.SYNC, row.kinds)
    usual_s = words.seconds_of({name: around.where_done.get(name, 0.0) for name in row.stages}, words.SYNC, row.kinds)
    if usual_s and took_s >= SYNC_RATIO * usual_s and matters(took_s - usual_s, row.usual_s):
        yield Finding(
            kind="weight_sync",
            text=f"step {row.number}: weight sync took {seconds(took_s)}, usually {seconds(usual_s)}",
            evidence=[
                f"{name}: {seconds(row.stages[name])}, usually {seconds(around.where_done.get(name, 0.0))}"
                for name in row.stages
                if words.meaning(name, stage_kind=row.kinds.get(name, "")) == words.SYNC
            ]
            + [_length(row)],
            seconds=took_s - usual_s,
            step=row.number,
        )


@row_rule("slow_step", "checkpoint", "validation")
def slow_step(around: Around) -> Iterator[Finding]:
    """Find a step that takes 1.2 times as long as the steps around it, and that no other finding explains."""
    row = around.row
    if not row.slow:
        return
    took_s = own_seconds(row)
    own_stage_s = own_stages(row)
    excess_s = {name: value - around.usual.get(name, 0.0) for name, value in own_stage_s.items()}
    by_excess = sorted(excess_s, key=lambda name: -excess_s[name])
    stage = by_excess[0]
    if stage == OTHER and _costly_gap(row) is not None:
        return
    meaning = words.meaning(stage, stage_kind=row.kinds.get(stage, ""))
    kind = {words.CHECKPOINT: "checkpoint", words.VALIDATION: "validation"}.get(meaning, "slow_step")
    yield Finding(
        kind=kind,
        text=f"step {row.number} took {seconds(took_s)}, usually {seconds(row.usual_s)}: "
        f"{seconds(excess_s[stage])} more {'outside of all stages' if stage == OTHER else f'in {stage}'}",
        evidence=[
            f"{name}: {seconds(own_stage_s[name])}, usually {seconds(around.usual.get(name, 0.0))}"
            for name in by_excess[:3]
            if excess_s[name] > 0
        ]
        + ([f"{OWN}: {seconds(row.stages[OWN])} more"] if row.stages.get(OWN) else [])
        + ([f"recorded work took {seconds(slower)} longer than usual"] if (slower := sum(row.slowed.values())) else []),
        seconds=took_s - row.usual_s,
        step=row.number,
    )


@row_rule("no_stage")
def no_stage(around: Around) -> Iterator[Finding]:
    """Find a step in which no stage runs for over a fifth of the step.

    A step without any stage has no such finding: a note of the report names it.
    """
    row, gap = around.row, _costly_gap(around.row)
    if gap is None:
        return
    longest = gap.end_s - gap.start_s
    kind = "" if row.kind == REGULAR else f" ({row.kind})"
    part = ", " if longest >= NEARLY_ALL * gap.seconds else f": {seconds(longest)} of it "
    yield Finding(
        kind="no_stage",
        text=f"step {row.number}{kind}: no stage ran for {seconds(gap.seconds)}, {percent(gap.share)} of the step"
        f"{part}{_place(gap)}",
        evidence=[f"the longest part: from {seconds(gap.start_s)} to {seconds(gap.end_s)} after the step's start"]
        + ([f"usually {seconds(around.usual[OTHER])}"] if OTHER in around.usual else []),
        seconds=gap.seconds,
        step=row.number,
    )


def _costly_gap(step: StepRow | StepFigures) -> StageGap | None:
    gap = step.no_stage
    least = NO_STAGE_S if step.kind == REGULAR else LEAST_S
    return gap if gap is not None and gap.seconds >= least and (gap.after or gap.before) else None


def _place(gap: StageGap) -> str:
    if gap.after and gap.before:
        return f"between {gap.after} and {gap.before}"
    return f"before {gap.before}" if gap.before else f"after {gap.after}"


@step_rule("slow_tool", "slow_reward", "sample_tail")
def tail(step: StepFigures) -> Iterator[Finding]:
    """Find a step whose generation waits for the last few samples, at most one in twenty of the samples."""
    samples = step.samples
    if samples is None or samples.tail is None:
        return
    last_samples = samples.tail
    waited_s = _waited(step, samples.end_s - last_samples.waited_s, samples.end_s)
    if not matters(waited_s, step.seconds) or (last_samples.held_by in ("", "turn") and waited_s <= step.apart_s):
        return
    rows = [row for label in last_samples.samples for row in samples.longest if row.label == label]
    rows.sort(key=lambda row: row.held_by != last_samples.held_by)
    text = f"step {step.number}: generation waited {seconds(waited_s)} for "
    text += f"{last_samples.count} of {last_samples.of} samples"
    part, _, name = last_samples.held_by.partition(" ")
    kind, cause = "sample_tail", listed(last_samples.samples, 3)
    if part == "tool":
        kind = "slow_tool"
        cause = f"tool {name} took {seconds(_seconds(rows[0], part, name))} in {cause}"
    elif part == "reward":
        kind = "slow_reward"
        cause = f"the reward took {seconds(_seconds(rows[0], part, ''))} in {cause}"
    elif part == "waiting":
        cause = f"{cause}, which did nothing for {seconds(_seconds(rows[0], part, ''))}"
    evidence = [_sample(row) for row in rows[:5]]
    evidence.append(
        f"samples take {seconds(samples.quantiles_s['0.5'])} in the median, "
        f"{seconds(samples.quantiles_s['0.95'])} at the 95th percentile"
    )
    evidence += [_tool(tool) for tool in samples.tools if part == "tool" and tool.name == name]
    yield Finding(
        kind=kind,
        text=f"{text}: {cause}",
        evidence=evidence,
        seconds=waited_s,
        step=step.number,
        file=rows[0].file if rows else None,
    )


@step_rule("idle_gap")
def idle_gap(step: StepFigures) -> Iterator[Finding]:
    """Find a time between two stages in which no worker does anything.

    Times in which the driver computes rewards are left out, because `reward` is a separate rule for them.
    """
    for gap in step.gaps:
        gap_s = gap.end_s - gap.start_s
        if gap.within == OTHER and _costly_gap(step) is not None:
            continue
        if not matters(gap_s, step.seconds) or _meaning(step, gap.within) == words.REWARD:
            continue
        between_text = "between generation and training " if gap.between != "stages" else ""
        meanwhile = "in no stage" if gap.within == OTHER else f"in {gap.within}"
        yield Finding(
            kind="idle_gap",
            text=f"step {step.number}: {between_text}no worker did anything for {seconds(gap_s)}; "
            f"the driver was {meanwhile}",
            evidence=[
                f"from {seconds(gap.start_s)} to {seconds(gap.end_s)} after the step's start",
                f"after {gap.after}",
                f"before {gap.before}",
            ],
            seconds=gap_s,
            step=step.number,
            file=_driver(step),
        )


@step_rule("slow_reward")
def reward(step: StepFigures) -> Iterator[Finding]:
    """Find rewards for which the driver waits for a tenth of the step, or that take a quarter of the samples' time."""
    took_s = words.seconds_of(step.stages, words.REWARD, step.kinds)
    if took_s >= REWARD_SHARE * step.seconds and matters(took_s, step.seconds):
        yield Finding(
            kind="slow_reward",
            text=f"step {step.number}: the driver waited {seconds(took_s)} for rewards, "
            f"{percent(took_s / step.seconds)} of the step",
            evidence=[
                f"{name}: {seconds(value)}"
                for name, value in step.stages.items()
                if _meaning(step, name) == words.REWARD
            ],
            seconds=took_s,
            step=step.number,
            file=_driver(step),
        )
    yield from _part_of_samples(step, "reward", SAMPLE_REWARD_SHARE, "slow_reward", "their reward")


@step_rule("tool_time")
def tool_time(step: StepFigures) -> Iterator[Finding]:
    """Find tools that take three tenths of the samples' time."""
    yield from _part_of_samples(step, "tool", TOOL_SHARE, "tool_time", "tools")


@step_rule("failed_samples")
def failed_samples(step: StepFigures) -> Iterator[Finding]:
    """Find samples that ended with an exception."""
    if step.samples is not None and step.samples.failed:
        failed_rows = [row for row in step.samples.longest if row.error]
        yield Finding(
            kind="failed_samples",
            text=f"step {step.number}: {step.samples.failed} of {step.samples.count} samples ended with an exception",
            evidence=[f"{row.label}: {row.error} after {seconds(row.seconds)}" for row in failed_rows[:5]],
            seconds=0.0,
            step=step.number,
            file=failed_rows[0].file if failed_rows else None,
        )


def _part_of_samples(step: StepFigures, kind: str, share: float, finding: str, thing: str) -> Iterator[Finding]:
    samples = step.samples
    if samples is None:
        return
    samples_s = samples.mean_s * samples.count
    part_s = sum(part.seconds for part in samples.parts if part.kind == kind)
    s_per_sample = part_s / samples.count
    if part_s < share * samples_s or not matters(s_per_sample, step.seconds):
        return
    yield Finding(
        kind=finding,
        text=f"step {step.number}: samples spent {percent(part_s / samples_s)} of their time on {thing}, "
        f"{seconds(s_per_sample)} each on average",
        evidence=[f"{part.kind} {part.name}".strip() + f": {seconds(part.seconds)}" for part in samples.parts]
        + [_tool(tool) for tool in samples.tools[:5] if kind == "tool"],
        seconds=s_per_sample,
        step=step.number,
    )


def _waited(step: StepFigures, start_s: float, end_s: float) -> float:
    """Return the seconds from `start_s` to `end_s` in which the driver waited for generation.

    If the stages of the driver are unknown, all seconds from `start_s` to `end_s` count.
    """
    if not step.path:
        return end_s - start_s
    return sum(
        max(0.0, min(part.end_s, end_s) - max(part.start_s, start_s))
        for part in step.path
        if _meaning(step, part.stage) == words.GENERATION
    )


def _meaning(step: StepFigures, stage: str) -> str:
    return words.meaning(stage, stage_kind=step.kinds.get(stage, ""))


def _seconds(row: SampleRow, kind: str, name: str) -> float:
    return sum(part.seconds for part in row.parts if (part.kind, part.name) == (kind, name))


def _sample(row: SampleRow) -> str:
    parts = listed(f"{part.kind} {part.name}".strip() + f" {seconds(part.seconds)}" for part in row.parts)
    tokens = "" if row.response_tokens is None else f", {row.response_tokens} tokens"
    return f"{row.label}: {seconds(row.seconds)} in {row.lane} ({parts}{tokens})"


def _tool(tool: ToolRow) -> str:
    calls = f"{several(tool.calls, 'call')}, median {seconds(tool.median_s)}"
    return f"tool {tool.name}: {calls}, longest {seconds(tool.max_s)} in {tool.slowest}"


def _length(row: StepRow) -> str:
    return f"the step: {seconds(row.seconds)}, usually {seconds(row.usual_s)}"


def _driver(step: StepFigures) -> str | None:
    return next((lane.file for lane in step.lanes if lane.role == "trainer"), None)
