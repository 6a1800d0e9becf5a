"""Registry of rules, rules for captures, and rules for ranks that are slower than others.

docs/findings.md describes each rule. Rules for captures find idle devices, communication, full memory and incomplete
files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import TypeAlias

import msgspec

from autoprof.base import units
from autoprof.base.units import seconds
from autoprof.base.units import share as percent
from autoprof.report.figures.captures import place_of
from autoprof.report.figures.words import several
from autoprof.report.model import CaptureFigures, Finding, SkewRow, StepFigures, StepRow

# Smallest cost of a finding: LEAST_S is in seconds, LEAST_SHARE is a share of the step. The larger of both applies.
LEAST_S, LEAST_SHARE = 1.0, 0.03


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


StepRule: TypeAlias = Callable[[StepFigures], Iterable[Finding]]
RowRule: TypeAlias = Callable[[Around], Iterable[Finding]]
CaptureRule: TypeAlias = Callable[[CaptureFigures], Iterable[Finding]]

# Rules for every step of the run.
ROW_RULES: list[RowRule] = []
# Rules for the steps in detail.
STEP_RULES: list[StepRule] = []
# Rules for the captures of the steps in detail.
CAPTURE_RULES: list[CaptureRule] = []
# All kinds of findings that rules return.
KINDS: list[str] = []


def row_rule(*kinds: str) -> Callable[[RowRule], RowRule]:
    """Return a decorator that registers a rule for the row of a step in the overview, and the kinds of its findings."""
    return lambda rule: _register(ROW_RULES, rule, kinds)


def step_rule(*kinds: str) -> Callable[[StepRule], StepRule]:
    """Return a decorator that registers a rule for a step in detail, and the kinds of its findings."""
    return lambda rule: _register(STEP_RULES, rule, kinds)


def capture_rule(*kinds: str) -> Callable[[CaptureRule], CaptureRule]:
    """Return a decorator that registers a rule for a capture, and the kinds of its findings."""
    return lambda rule: _register(CAPTURE_RULES, rule, kinds)


def _register(
    rules: list[Callable[..., Iterable[Finding]]], rule: Callable[..., Iterable[Finding]], kinds: Iterable[str]
) -> Callable[..., Iterable[Finding]]:
    rules.append(rule)
    KINDS.extend(kind for kind in kinds if kind not in KINDS)
    return rule


def matters(seconds: float, of: float) -> bool:
    """Return True if a loss of `seconds` is enough for a finding about a step that takes `of` seconds."""
    return seconds >= max(LEAST_S, LEAST_SHARE * of)


# Smallest share of a capture in which an idle device is a finding.
IDLE_SHARE = 0.4
# Smallest share of a capture in which communication without compute at the same time is a finding.
BARE_SHARE = 0.15
# Share of the device's memory from which the memory is nearly full.
FULL_SHARE = 0.92


@capture_rule("cpu_bound", "device_idle")
def idle(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a device that does nothing for two fifths of a capture."""
    for device in capture.devices:
        lost_s = device.idle * device.seconds
        if device.idle < IDLE_SHARE or lost_s < LEAST_S:
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
            step=capture.step,
            file=capture.file,
        )


@capture_rule("communication")
def communication(capture: CaptureFigures) -> Iterator[Finding]:
    """Find devices that communicate for 15 % of a capture without computing at the same time."""
    for device in capture.devices:
        bare_share = device.communication * (1 - (device.overlap or 0.0))
        if bare_share < BARE_SHARE or bare_share * device.seconds < LEAST_S:
            continue
        yield Finding(
            kind="communication",
            text=f"step {capture.step}: {place_of(capture)} communicated for {seconds(bare_share * device.seconds)} in "
            f"which {device.device} computed nothing",
            evidence=[
                f"communication {percent(device.communication)} of {seconds(device.seconds)}",
                f"{percent(device.overlap or 0.0)} of it overlapped with compute",
                *(
                    f"{each.name}: {seconds(each.total_us / 1e6)} in {each.calls} calls"
                    for each in capture.kernels
                    if any(word in each.name.lower() for word in ("nccl", "hccl", "rccl", "allreduce", "hcom"))
                ),
            ][:4],
            seconds=bare_share * device.seconds,
            step=capture.step,
            file=capture.file,
        )


@capture_rule("memory")
def memory(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a device whose memory is nearly full."""
    peak, total = capture.memory_peak_bytes, capture.memory_total_bytes
    if peak is not None and total and peak >= FULL_SHARE * total:
        yield Finding(
            kind="memory",
            text=f"step {capture.step}: {place_of(capture)} took {percent(peak / total)} of the device's memory",
            evidence=[f"{units.size(peak)} of {units.size(total)}"],
            seconds=0.0,
            step=capture.step,
            file=capture.file,
        )


@capture_rule("bad_capture")
def bad_capture(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a capture that is truncated, failed or unfinished, or can't be read."""
    if capture.state != "complete":
        yield Finding(
            kind="bad_capture",
            text=f"step {capture.step}: the capture of {place_of(capture)} is {capture.state}",
            evidence=[capture.reason] if capture.reason else [],
            seconds=0.0,
            step=capture.step,
            file=capture.file,
        )


# Smallest ratio to the median of the other ranks, or of the other replicas, at which a rank or replica is slow.
RANK_RATIO, REPLICA_RATIO = 1.2, 1.3


@step_rule("slow_rank", "slow_replica")
def skewed(step: StepFigures) -> Iterator[Finding]:
    """Find slow ranks and replicas.

    A rank is slow if it takes 1.2 times as long as the other ranks for a stage. A replica is slow if it takes 1.3 times
    as long as the other replicas for the same work.
    """
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
            step=step.number,
            file=next((row.file for row in skew.rows if row.label == skew.slowest), None),
        )
    yield from _waited_for(step, reported)


def _row(row: SkewRow) -> str:
    recorded = ", recorded" if row.recorded else ""
    return f"{row.label}: {seconds(row.seconds)} in {several(row.calls, 'call')}{recorded}"


def _waited_for(step: StepFigures, reported: set[str]) -> Iterator[Finding]:
    """Find a rank that takes 1.2 times as long as the other ranks outside of collectives.

    The other ranks wait for the slow rank in collectives, so the stage ends at the same time in all ranks. So only the
    traces of several ranks show the slow rank.
    """
    stages: dict[tuple[str, str], dict[int, CaptureFigures]] = defaultdict(dict)
    for capture in step.captures:
        if capture.rank is not None and capture.replica is None and capture.collectives_s is not None:
            stages[capture.role, capture.stage][capture.rank] = capture
    for (role, stage), captures in stages.items():
        if len(captures) < 2:
            continue
        slow, *others = sorted(captures.values(), key=lambda capture: -_own_s(capture))
        label, usual_s = f"{role} rank {slow.rank}", median(_own_s(other) for other in others)
        waited_s = median(other.collectives_s or 0.0 for other in others) - (slow.collectives_s or 0.0)
        if label in reported or _own_s(slow) < RANK_RATIO * usual_s or not matters(waited_s, step.seconds):
            continue
        reported.add(label)
        yield Finding(
            kind="slow_rank",
            text=f"step {step.number}: {label} was slow in {stage}: {seconds(_own_s(slow))} outside of "
            f"collectives, the others {seconds(usual_s)} in the median; they waited for it",
            evidence=[
                f"{role} rank {each.rank}: {seconds(each.collectives_s or 0.0)} of {seconds(each.seconds or 0.0)} in "
                f"collectives"
                for each in (slow, *others[:3])
            ]
            + ([f"{step.captures_left_out} captures of further ranks were not read"] if step.captures_left_out else []),
            seconds=waited_s,
            step=step.number,
            file=slow.file,
        )


def _own_s(capture: CaptureFigures) -> float:
    """Return the seconds of a capture outside of collectives."""
    return max(0.0, (capture.seconds or 0.0) - (capture.collectives_s or 0.0))
