"""Registry of rules, and their shared parts. docs/findings.md describes each rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec

from autoprof.report.model import CaptureFigures, Finding, StepFigures, StepRow

# Below so many seconds, and below such a share of the step, nothing is said.
LEAST_S, LEAST_SHARE = 1.0, 0.03


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """A step's row and what its stages usually take; empty where there are too few steps to tell.

    Attributes:
        usual: The median of the steps around, in seconds; 0 of a stage that few of them have.
        where_done: The median of those of them that have the stage.
    """

    row: StepRow
    usual: Mapping[str, float]
    where_done: Mapping[str, float] = {}


StepRule: TypeAlias = Callable[[StepFigures], Iterable[Finding]]
RowRule: TypeAlias = Callable[[Around], Iterable[Finding]]
CaptureRule: TypeAlias = Callable[[CaptureFigures], Iterable[Finding]]

# Each is asked of every step of the run, of each step in detail, and of each of their captures.
ROW_RULES: list[RowRule] = []
STEP_RULES: list[StepRule] = []
CAPTURE_RULES: list[CaptureRule] = []
# The kinds of findings there are.
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
    """Return whether so much of a step is worth a finding."""
    return seconds >= max(LEAST_S, LEAST_SHARE * of)
