"""Samples of a step."""

from __future__ import annotations

import msgspec

from autoprof.report.model.lanes import SpanRow


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
