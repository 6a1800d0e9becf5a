"""Registry of rules, and the rules for captures and for skews between ranks. docs/findings.md describes each rule.

Rules for captures find idle devices, communication, full memory and incomplete files.
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

# Smallest cost of a finding: in seconds, and as a share of the step.
LEAST_S, LEAST_SHARE = 1.0, 0.03


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """A step's row, and the usual seconds of its stages by name. The latter are empty if too few steps are around it.

    Attributes:
        usual: The median of the steps around it, in seconds. A step without the stage counts as 0.
        where_done: The median of the steps around it that have the stage, in seconds.
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
# All kinds of findings.
KINDS: list[str] = []


def row_rule(*kinds: str) -> Callable[[RowRule], RowRule]:
    """Register a rule that looks at a step in the run's overview, and the kinds of its findings."""
    return lambda rule: _register(ROW_RULES, rule, kinds)


def step_rule(*kinds: str) -> Callable[[StepRule], StepRule]:
    """Register a rule that looks at a step in detail, and the kinds of its findings."""
    return lambda rule: _register(STEP_RULES, rule, kinds)


def capture_rule(*kinds: str) -> Callable[[CaptureRule], CaptureRule]:
    """Register a rule that looks at a capture, and the kinds of its findings."""
    return lambda rule: _register(CAPTURE_RULES, rule, kinds)


def _register(
    rules: list[Callable[..., Iterable[Finding]]], rule: Callable[..., Iterable[Finding]], kinds: Iterable[str]
) -> Callable[..., Iterable[Finding]]:
    rules.append(rule)
    KINDS.extend(kind for kind in kinds if kind not in KINDS)
    return rule


def matters(seconds: float, of: float) -> bool:
    """Return True if these seconds, of a step with `of` seconds, are enough for a finding."""
    return seconds >= max(LEAST_S, LEAST_SHARE * of)


# Share of a capture from which an idle device is a finding.
IDLE_SHARE = 0.4
# Share of a capture from which communication without compute beside it is a finding.
BARE_SHARE = 0.15
# Share of the device's memory from which it is nearly full.
FULL_SHARE = 0.92


@capture_rule("cpu_bound", "device_idle")
def idle(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a device that does nothing for two fifths of a capture."""
    for device in capture.devices:
        lost = device.idle * device.seconds
        if device.idle < IDLE_SHARE or lost < LEAST_S:
            continue
        bound = capture.bound == "cpu"
        yield Finding(
            kind="cpu_bound" if bound else "device_idle",
            text=f"step {capture.step}: {device.device} did nothing for {percent(device.idle)} of {place_of(capture)}"
            + (", it waited for the CPU" if bound else ""),
            evidence=[
                f"compute {percent(device.compute)} of {seconds(device.seconds)}",
                f"communication {percent(device.communication)}, copies {percent(device.copy)}",
                *([capture.reason] if capture.reason else []),
                *(f"{each.name}: {seconds(each.self_us / 1e6)} by itself" for each in capture.operators[:3]),
            ],
            seconds=lost,
            step=capture.step,
            file=capture.file,
        )


@capture_rule("communication")
def communication(capture: CaptureFigures) -> Iterator[Finding]:
    """Find communication without compute beside it that takes 15 % of a capture."""
    for device in capture.devices:
        bare = device.communication * (1 - (device.overlap or 0.0))
        if bare < BARE_SHARE or bare * device.seconds < LEAST_S:
            continue
        yield Finding(
            kind="communication",
            text=f"step {capture.step}: {place_of(capture)} communicated for {seconds(bare * device.seconds)} in which "
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
            seconds=bare * device.seconds,
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
    """Find a capture that was cut off, failed or can't be read."""
    if capture.state != "complete":
        yield Finding(
            kind="bad_capture",
            text=f"step {capture.step}: the capture of {place_of(capture)} is {capture.state}",
            evidence=[capture.reason] if capture.reason else [],
            seconds=0.0,
            step=capture.step,
            file=capture.file,
        )


# Ratio to the median of the others from which a rank, or a replica, is slow.
RANK_RATIO, REPLICA_RATIO = 1.2, 1.3


@step_rule("slow_rank", "slow_replica")
def skewed(step: StepFigures) -> Iterator[Finding]:
    """Find a rank that takes 1.2 times as long as the others for a stage, or a replica 1.3 times for its requests."""
    reported = set()
    for skew in step.skews:
        ratio = REPLICA_RATIO if skew.of == "replica" else RANK_RATIO
        slow = skew.slowest_s >= ratio * skew.median_s and matters(skew.waited_s, step.seconds)
        # A slow stage makes the stages around it slow too, so a rank is reported once.
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
    """Find a rank that takes 1.2 times as long as the others outside of collectives.

    The others wait for it in collectives, so all stages end at the same time. Only traces of several ranks show it.
    """
    stages: dict[tuple[str, str], dict[int, CaptureFigures]] = defaultdict(dict)
    for capture in step.captures:
        if capture.rank is not None and capture.replica is None and capture.collectives_s is not None:
            stages[capture.role, capture.stage][capture.rank] = capture
    for (role, stage), captures in stages.items():
        if len(captures) < 2:
            continue
        slow, *others = sorted(captures.values(), key=lambda capture: -_own_s(capture))
        label, usual = f"{role} rank {slow.rank}", median(_own_s(other) for other in others)
        waited = median(other.collectives_s or 0.0 for other in others) - (slow.collectives_s or 0.0)
        if label in reported or _own_s(slow) < RANK_RATIO * usual or not matters(waited, step.seconds):
            continue
        reported.add(label)
        yield Finding(
            kind="slow_rank",
            text=f"step {step.number}: {label} was slow in {stage}: {seconds(_own_s(slow))} outside of "
            f"collectives, the others {seconds(usual)} in the median; they waited for it",
            evidence=[
                f"{role} rank {each.rank}: {seconds(each.collectives_s or 0.0)} of {seconds(each.seconds or 0.0)} in "
                f"collectives"
                for each in (slow, *others[:3])
            ]
            + ([f"{step.captures_left_out} captures of further ranks were not read"] if step.captures_left_out else []),
            seconds=waited,
            step=step.number,
            file=slow.file,
        )


def _own_s(capture: CaptureFigures) -> float:
    """Return the seconds of a capture outside of collectives."""
    return max(0.0, (capture.seconds or 0.0) - (capture.collectives_s or 0.0))
