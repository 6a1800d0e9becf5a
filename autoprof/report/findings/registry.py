"""Registry of rules, and their shared parts. docs/findings.md describes each rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec

from autoprof.report.model import CaptureFigures, Finding, StepFigures, StepRow

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
