"""Lanes of a step: spans of its processes, gaps between them, its critical path, and skews between ranks."""

from __future__ import annotations

import msgspec


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
