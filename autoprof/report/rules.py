"""Rules that find causes of lost time: in captures, in ranks and replicas, in steps, and in samples. Registry of them.

docs/findings.md describes each rule. `findings.py` adds the number of the step to each finding, and the file of the
capture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import TypeAlias, TypeVar

import msgspec

from autoprof.base import units
from autoprof.base.units import seconds
from autoprof.base.units import share as percent
from autoprof.report import model
from autoprof.report.details import place_of
from autoprof.report.model import (
    OTHER,
    OWN,
    CaptureFigures,
    Finding,
    SampleRow,
    SkewRow,
    StageGap,
    StepFigures,
    StepRow,
    ToolRow,
    listed,
    several,
)
from autoprof.report.overview import (
    LEAST_S,
    LEAST_SHARE,
    MAX_OWN_SHARE,
    REGULAR,
    WARM_UP,
    own_seconds,
    own_stages,
    without_autoprof,
)


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and the usual seconds of each stage in the steps around it.

    If too few steps are around the step, `usual` and `where_done` are empty.

    Attributes:
        row: The row of the step.
        usual: Dict from the name of each stage to its median seconds in the steps around the step. A step without the
            stage counts as 0.
        where_done: The same, but the median is computed only from steps that have the stage.
    """

    row: StepRow
    usual: Mapping[str, float]
    where_done: Mapping[str, float] = {}


T = TypeVar("T")
Rule: TypeAlias = Callable[[T], Iterable[Finding]]

# Rules that compare a step of the run with the steps around it.
ROW_RULES: list[Rule[Around]] = []
# Rules for the steps in detail.
STEP_RULES: list[Rule[StepFigures]] = []
# Rules for the captures of the steps in detail.
CAPTURE_RULES: list[Rule[CaptureFigures]] = []
# All kinds of findings that rules return.
KINDS: list[str] = []


def rule(rules: list[Rule[T]], *kinds: str) -> Callable[[Rule[T]], Rule[T]]:
    """Return a decorator that adds a rule to one of the lists above, and the kinds of its findings to `KINDS`."""

    def register(function: Rule[T]) -> Rule[T]:
        rules.append(function)
        KINDS.extend(kind for kind in kinds if kind not in KINDS)
        return function

    return register


def matters(seconds: float, step_s: float) -> bool:
    """Return True if a loss of `seconds` is enough for a finding about a step that takes `step_s` seconds."""
    return seconds >= max(LEAST_S, LEAST_SHARE * step_s)


def is_judged(seconds: float, own_s: float) -> bool:
    """Return True if autoprof's own time is at most a fifth of `seconds`. Otherwise the seconds show no cause."""
    return own_s <= MAX_OWN_SHARE * seconds


# Smallest share of a capture in which an idle device is a finding.
IDLE_SHARE = 0.4
# Smallest share of a capture in which communication without compute at the same time is a finding.
BARE_SHARE = 0.15
# Share of the device's memory from which the memory is nearly full.
FULL_SHARE = 0.92


@rule(CAPTURE_RULES, "cpu_bound", "device_idle")
def idle(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a device that does nothing for two fifths of a capture."""
    for device in capture.devices:
        # The device may also wait for another process that starts or stops a profiler.
        lost_s = device.idle * device.seconds - capture.own_s
        if not is_judged(device.seconds, capture.own_s) or lost_s < max(LEAST_S, IDLE_SHARE * device.seconds):
            continue
        is_cpu_bound = capture.bound == "cpu"
        yield Finding(
            kind="cpu_bound" if is_cpu_bound else "device_idle",
            text=f"step {capture.step}: {device.device} did nothing for {percent(device.idle)} of {place_of(capture)}"
            + (", it waited for the CPU" if is_cpu_bound else ""),
            evidence=[
                f"compute {percent(device.compute)} of {seconds(device.seconds)}",
                f"communication {percent(device.communication)}, copies {percent(device.copy)}",
                *([capture.reason] if capture.reason else []),
                *(f"{each.name}: {seconds(each.self_us / 1e6)} by itself" for each in capture.operators[:3]),
            ],
            seconds=lost_s,
        )


@rule(CAPTURE_RULES, "communication")
def communication(capture: CaptureFigures) -> Iterator[Finding]:
    """Find devices that communicate for 15 % of a capture without computing at the same time."""
    for device in capture.devices:
        bare_s = device.communication * (1 - (device.overlap or 0.0)) * device.seconds - capture.own_s
        if not is_judged(device.seconds, capture.own_s) or bare_s < max(LEAST_S, BARE_SHARE * device.seconds):
            continue
        yield Finding(
            kind="communication",
            text=f"step {capture.step}: {place_of(capture)} communicated for {seconds(bare_s)} in which "
            f"{device.device} computed nothing",
            evidence=[
                f"communication {percent(device.communication)} of {seconds(device.seconds)}",
                f"{percent(device.overlap or 0.0)} of it overlapped with compute",
                *(
                    f"{each.name}: {seconds(each.total_us / 1e6)} in {each.calls} calls"
                    for each in capture.kernels
                    if any(word in each.name.lower() for word in ("nccl", "hccl", "rccl", "allreduce", "hcom"))
                ),
            ][:4],
            seconds=bare_s,
        )


@rule(CAPTURE_RULES, "memory")
def memory(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a device whose memory is nearly full."""
    peak, total = capture.memory_peak_bytes, capture.memory_total_bytes
    if peak is not None and total and peak >= FULL_SHARE * total:
        yield Finding(
            kind="memory",
            text=f"step {capture.step}: {place_of(capture)} took {percent(peak / total)} of the device's memory",
            evidence=[f"{units.size(peak)} of {units.size(total)}"],
        )


@rule(CAPTURE_RULES, "bad_capture")
def bad_capture(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a capture that is truncated, failed or unfinished, or can't be read."""
    if capture.state != "complete":
        yield Finding(
            kind="bad_capture",
            text=f"step {capture.step}: the capture of {place_of(capture)} is {capture.state}",
            evidence=[capture.reason] if capture.reason else [],
        )


# Smallest ratio to the median of the other ranks, or of the other replicas, at which a rank or replica is slow.
RANK_RATIO, REPLICA_RATIO = 1.2, 1.3


# Smallest ratio to each other rank at which a rank is slow in a warm-up step.
WARM_UP_RATIO = 2.0
# Meanings of stages that rank 0 may prepare alone in a warm-up step, as with downloads, folders and connections.
_PREPARED = (OTHER, model.SYNC, model.CHECKPOINT, model.VALIDATION)


def slow_in_warm_up(step: StepFigures) -> Iterator[Finding]:
    """Find ranks that take twice as long as each other rank for a stage of a warm-up step.

    Imports, compilation and loads take a similar time in all ranks. Stages that rank 0 may prepare alone are left out.
    """
    for skew in step.skews:
        usual_s = max((row.seconds for row in skew.rows if row.label != skew.slowest), default=skew.slowest_s)
        is_prepared = skew.slowest.endswith(" rank 0") and _meaning(step, skew.stage) in _PREPARED
        is_slow = skew.slowest_s >= WARM_UP_RATIO * usual_s and matters(skew.waited_s, step.seconds)
        if skew.of == "rank" and is_slow and not is_prepared:
            yield Finding(
                kind="slow_rank",
                text=f"step {step.number} ({step.kind}): {skew.slowest} was slow in {skew.stage}: "
                f"{seconds(skew.slowest_s)}, the others at most {seconds(usual_s)}",
                evidence=[_row(row) for row in skew.rows[:4]],
                seconds=skew.waited_s,
                step=step.number,
                file=next((row.file for row in skew.rows if row.label == skew.slowest), None),
            )


@rule(STEP_RULES, "slow_rank", "slow_replica")
def skewed(step: StepFigures) -> Iterator[Finding]:
    """Find slow ranks and replicas.

    A rank is slow if it takes 1.2 times as long as the other ranks for a stage. A replica is slow if it takes 1.3 times
    as long as the other replicas for the same work. In a warm-up step, only much slower ranks are found.
    """
    if step.kind == WARM_UP:
        yield from slow_in_warm_up(step)
        return
    reported = set()
    for skew in step.skews:
        ratio = REPLICA_RATIO if skew.of == "replica" else RANK_RATIO
        slow = skew.slowest_s >= ratio * skew.median_s and matters(skew.waited_s, step.seconds)
        # A slow stage makes the stages around it slow too. So each rank is reported only once.
        if not slow or skew.slowest in reported:
            continue
        reported.add(skew.slowest)
        per_token = " for the same work" if skew.of == "replica" else ""
        yield Finding(
            kind=f"slow_{skew.of}",
            text=f"step {step.number}: {skew.slowest} was slow in {skew.stage}: {seconds(skew.slowest_s)}, the others "
            f"{seconds(skew.median_s)} in the median{per_token}",
            evidence=[_row(row) for row in skew.rows[:4]]
            + ([f"the fastest: {skew.rows[-1].label}, {seconds(skew.rows[-1].seconds)}"] if len(skew.rows) > 4 else []),
            seconds=skew.waited_s,
            file=next((row.file for row in skew.rows if row.label == skew.slowest), None),
        )
    yield from _waited_for(step, reported)


def _row(row: SkewRow) -> str:
    recorded = ", recorded" if row.recorded else ""
    return f"{row.label}: {seconds(row.seconds)} in {several(row.calls, 'call')}{recorded}"


def _waited_for(step: StepFigures, reported: set[str]) -> Iterator[Finding]:
    """Find a rank that takes 1.2 times as long as the other ranks outside of collectives.

    The other ranks wait for the slow rank in collectives, so the stage ends at the same time in all ranks. So only the
    traces of several ranks show the slow rank. autoprof's own time, for which ranks wait too, is subtracted.
    """
    stages: dict[tuple[str, str], dict[int, CaptureFigures]] = defaultdict(dict)
    for capture in step.captures:
        if not is_judged(capture.seconds or 0.0, capture.own_s):
            continue
        if capture.rank is not None and capture.replica is None and capture.collectives_s is not None:
            stages[capture.role, capture.stage][capture.rank] = capture
    for (role, stage), captures in stages.items():
        if len(captures) < 2:
            continue
        slow, *others = sorted(captures.values(), key=lambda capture: -_seconds_outside_collectives(capture))
        label, usual_s = f"{role} rank {slow.rank}", median(_seconds_outside_collectives(other) for other in others)
        waited_s = median(max(0.0, (other.collectives_s or 0.0) - other.own_s) for other in others)
        waited_s -= slow.collectives_s or 0.0
        if (
            label in reported
            or _seconds_outside_collectives(slow) < RANK_RATIO * usual_s
            or not matters(waited_s, step.seconds)
        ):
            continue
        reported.add(label)
        yield Finding(
            kind="slow_rank",
            text=f"step {step.number}: {label} was slow in {stage}: {seconds(_seconds_outside_collectives(slow))} "
            f"outside of collectives, the others {seconds(usual_s)} in the median; they waited for it",
            evidence=[
                f"{role} rank {each.rank}: {seconds(each.collectives_s or 0.0)} of {seconds(each.seconds or 0.0)} in "
                f"collectives"
                for each in (slow, *others[:3])
            ]
            + ([f"{step.captures_left_out} captures of further ranks were not read"] if step.captures_left_out else []),
            seconds=waited_s,
            file=slow.file,
        )


def _seconds_outside_collectives(capture: CaptureFigures) -> float:
    """Return the seconds of a capture outside of collectives."""
    return max(0.0, (capture.seconds or 0.0) - (capture.collectives_s or 0.0))


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


@rule(ROW_RULES, "weight_sync")
def weight_sync(around: Around) -> Iterator[Finding]:
    """Find weight sync that takes twice as long as in other steps with a weight sync."""
    row = around.row
    took_s = model.seconds_of(own_stages(row), model.SYNC, row.kinds)
    usual_s = model.seconds_of({name: around.where_done.get(name, 0.0) for name in row.stages}, model.SYNC, row.kinds)
    if usual_s and took_s >= SYNC_RATIO * usual_s and matters(took_s - usual_s, row.usual_s):
        yield Finding(
            kind="weight_sync",
            text=f"step {row.number}: weight sync took {seconds(took_s)}, usually {seconds(usual_s)}",
            evidence=[
                f"{name}: {seconds(row.stages[name])}, usually {seconds(around.where_done.get(name, 0.0))}"
                for name in row.stages
                if model.meaning(name, stage_kind=row.kinds.get(name, "")) == model.SYNC
            ]
            + [f"the step: {seconds(row.seconds)}, usually {seconds(row.usual_s)}"],
            seconds=took_s - usual_s,
        )


@rule(ROW_RULES, "slow_step", "checkpoint", "validation", "no_stage")
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
    meaning = model.meaning(stage, stage_kind=row.kinds.get(stage, ""))
    kind = {model.CHECKPOINT: "checkpoint", model.VALIDATION: "validation"}.get(meaning, "slow_step")
    if not row.stages.keys() - {OTHER, OWN}:
        kind = "no_stage"  # a capture needs a stage
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
    )


@rule(ROW_RULES, "no_stage")
def no_stage(around: Around) -> Iterator[Finding]:
    """Find a step in which no stage runs for over a fifth of the step, or for 1 s and 3 % of the step at one time.

    If the stack of the driver was sampled, the sentence names the place where it was longest. A step without any stage
    has no such finding: a note of the report names it.
    """
    row, gap = around.row, _costly_gap(around.row)
    if gap is None:
        return
    longest = gap.end_s - gap.start_s
    kind = "" if row.kind == REGULAR else f" ({row.kind})"
    places = [f"{seconds(place.seconds)} {place.place}" for place in gap.places]
    said = [text for text, place in zip(places, gap.places, strict=True) if place.seconds >= _PLACE_SHARE * gap.seconds]
    said = said[:_MAX_PLACES] or places[:1]
    stacks = [place.frames for place in gap.places[:1] if len(place.frames) > 1]
    part = ", " if longest >= NEARLY_ALL * gap.seconds else f": {seconds(longest)} of it "
    yield Finding(
        kind="no_stage",
        text=f"step {row.number}{kind}: no stage ran for {seconds(gap.seconds)}, {percent(gap.share)} of the step"
        f"{part}{_place(gap)}{f': about {model.listed(said)}' if said else ''}",
        evidence=[f"about {each}" for each in places[len(said) :]]
        + [f"{stack[-1]}, called by {model.listed(reversed(stack[:-1]))}" for stack in stacks]
        + [f"the longest part: from {seconds(gap.start_s)} to {seconds(gap.end_s)} after the step's start"]
        + ([f"usually {seconds(around.usual[OTHER])}"] if OTHER in around.usual else []),
        seconds=gap.seconds,
    )


# Maximum number of places in the sentence about time without a stage, and the smallest share of this time for a place.
_MAX_PLACES, _PLACE_SHARE = 3, 0.1


def _costly_gap(step: StepRow | StepFigures) -> StageGap | None:
    gap = step.no_stage
    least = NO_STAGE_S if step.kind == REGULAR else LEAST_S
    return gap if gap is not None and gap.seconds >= least and (gap.after or gap.before) else None


def _place(gap: StageGap) -> str:
    if gap.after and gap.before:
        return f"between {gap.after} and {gap.before}"
    return f"before {gap.before}" if gap.before else f"after {gap.after}"


@rule(STEP_RULES, "slow_tool", "slow_reward", "sample_tail")
def find_sample_tail(step: StepFigures) -> Iterator[Finding]:
    """Find a step whose generation waits for the last few samples, at most one in twenty of the samples."""
    samples = step.samples
    if samples is None or samples.tail is None:
        return
    last_samples = samples.tail
    waited_s = _waited_for_generation_s(step, samples.end_s - last_samples.waited_s, samples.end_s)
    if not _is_generation_judged(step):
        return
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
        file=rows[0].file if rows else None,
    )


@rule(STEP_RULES, "idle_gap")
def idle_gap(step: StepFigures) -> Iterator[Finding]:
    """Find a time between two stages in which no worker does anything.

    Times in which the driver computes rewards are left out, because `reward` is a separate rule for them.
    """
    for gap in step.gaps:
        gap_s = gap.end_s - gap.start_s
        if gap.within == OTHER and _costly_gap(step) is not None:
            continue
        if not matters(gap_s, step.seconds) or _meaning(step, gap.within) == model.REWARD:
            continue
        if gap.within in step.own_shares:
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
            file=_driver(step),
        )


@rule(STEP_RULES, "slow_reward")
def reward(step: StepFigures) -> Iterator[Finding]:
    """Find rewards for which the driver waits for a tenth of the step, or that take a quarter of the samples' time."""
    stages = {
        name: took - step.slowed.get(name, 0.0) for name, took in step.stages.items() if name not in step.own_shares
    }
    step_s = sum(without_autoprof(step.stages).values()) - sum(step.slowed.values())
    took_s = model.seconds_of(stages, model.REWARD, step.kinds)
    if took_s >= REWARD_SHARE * step_s and matters(took_s, step.seconds):
        yield Finding(
            kind="slow_reward",
            text=f"step {step.number}: the driver waited {seconds(took_s)} for rewards, "
            f"{percent(took_s / step_s)} of the step",
            evidence=[
                f"{name}: {seconds(value)}" for name, value in stages.items() if _meaning(step, name) == model.REWARD
            ],
            seconds=took_s,
            file=_driver(step),
        )
    yield from _part_of_samples(step, "reward", SAMPLE_REWARD_SHARE, "slow_reward", "their reward")


@rule(STEP_RULES, "tool_time")
def tool_time(step: StepFigures) -> Iterator[Finding]:
    """Find tools that take three tenths of the samples' time."""
    yield from _part_of_samples(step, "tool", TOOL_SHARE, "tool_time", "tools")


@rule(STEP_RULES, "failed_samples")
def failed_samples(step: StepFigures) -> Iterator[Finding]:
    """Find samples that ended with an exception."""
    if step.samples is not None and step.samples.failed:
        failed_rows = [row for row in step.samples.longest if row.error]
        yield Finding(
            kind="failed_samples",
            text=f"step {step.number}: {step.samples.failed} of {step.samples.count} samples ended with an exception",
            evidence=[f"{row.label}: {row.error} after {seconds(row.seconds)}" for row in failed_rows[:5]],
            file=failed_rows[0].file if failed_rows else None,
        )


def _part_of_samples(step: StepFigures, kind: str, share: float, finding: str, thing: str) -> Iterator[Finding]:
    samples = step.samples
    if samples is None or not _is_generation_judged(step):
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
    )


def _waited_for_generation_s(step: StepFigures, start_s: float, end_s: float) -> float:
    """Return the seconds from `start_s` to `end_s` in which the driver waited for generation.

    If the stages of the driver are unknown, all seconds from `start_s` to `end_s` count. autoprof's own time does not
    count.
    """
    parts = [(start_s, end_s)]
    if step.path:
        generation = [part for part in step.path if _meaning(step, part.stage) == model.GENERATION]
        parts = [(max(part.start_s, start_s), min(part.end_s, end_s)) for part in generation]
    return sum(end - start - _own_s(step, start, end) for start, end in parts if start < end)


def _is_generation_judged(step: StepFigures) -> bool:
    """Return True if autoprof's own time is at most a fifth of the time in which the samples ran."""
    samples = step.samples
    return samples is None or is_judged(samples.end_s - samples.start_s, _own_s(step, samples.start_s, samples.end_s))


def _own_s(step: StepFigures, start_s: float, end_s: float) -> float:
    """Return autoprof's own seconds from `start_s` to `end_s` in any process."""
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in step.own_times)


def _meaning(step: StepFigures, stage: str) -> str:
    return model.meaning(stage, stage_kind=step.kinds.get(stage, ""))


def _seconds(row: SampleRow, kind: str, name: str) -> float:
    return sum(part.seconds for part in row.parts if (part.kind, part.name) == (kind, name))


def _sample(row: SampleRow) -> str:
    parts = listed(f"{part.kind} {part.name}".strip() + f" {seconds(part.seconds)}" for part in row.parts)
    tokens = "" if row.response_tokens is None else f", {row.response_tokens} tokens"
    return f"{row.label}: {seconds(row.seconds)} in {row.lane} ({parts}{tokens})"


def _tool(tool: ToolRow) -> str:
    calls = f"{several(tool.calls, 'call')}, median {seconds(tool.median_s)}"
    return f"tool {tool.name}: {calls}, longest {seconds(tool.max_s)} in {tool.slowest}"


def _driver(step: StepFigures) -> str | None:
    return next((lane.file for lane in step.lanes if lane.role == "trainer"), None)
