"""Charts of a report: the times of all steps, the lanes of a step, the samples of a step.

A chart is a struct of bars and paths that templates/charts.html draws. Positions are percentages, so a chart fits any
width, and its texts keep their size. The styles of the page give each kind of stage one colour, in all charts. The name
of a stage is inside its bar and in its hover text, so that no information depends on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from autoprof.base import units
from autoprof.report import model
from autoprof.report.beside import RunRow
from autoprof.report.model import OTHER, OWN, Lane, Part, SampleFigures, StepFigures, StepRow

_FAMILIES = {
    model.GENERATION: "generation",
    model.SCORING: "scoring",
    model.TRAINING: "training",
    model.SYNC: "weights",
    model.VALIDATION: "keeping",
    model.CHECKPOINT: "keeping",
    model.REWARD: "reward",
}
# Colours of names that are not stages, such as the parts of samples.
_OTHER_NAMES = {
    OTHER: "idle",
    "waiting": "idle",
    OWN: "own",
    "turn": "generation",
    "samples": "generation",
    "requests": "generation",
}
# Titles of the colours in the key of a chart, in the order of the key.
TITLES = {
    "generation": "generation",
    "reward": "reward",
    "scoring": "scoring",
    "training": "training",
    "weights": "weight sync",
    "keeping": "validation, checkpoint",
    "tool": "tools",
    "more": "other stages",
    "idle": "no stage, waiting",
    "own": "autoprof",
}
# Maximum number of bars in the chart of steps. More bars would be thinner than a pixel.
MAX_BARS = 300
# Maximum number of bars with gaps between them.
_MAX_APART = 100
# Maximum number of marks of one kind in a chart. More marks would hide each other.
MAX_MARKS = 300


def family(name: str, stage_kind: str = "") -> str:
    """Return the name of the colour that the style sheet has for a stage or another name.

    Args:
        name: The name of the stage.
        stage_kind: The kind of the stage. If empty, the colour is chosen by the name.
    """
    if name.startswith("tool "):
        return "tool"
    return _OTHER_NAMES.get(name) or _FAMILIES.get(model.meaning(name, stage_kind=stage_kind), "more")


def key_of(families: Iterable[str]) -> list[str]:
    """Return the colours that a chart uses, in the order of the key."""
    used = set(families)
    return [each for each in TITLES if each in used]


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A bar in a row of a chart.

    Attributes:
        name: The name inside the bar.
        family: The colour.
        left: The start of the bar, in percent of the chart's width.
        width: The length of the bar, in percent of the chart's width.
        title: The hover text.
        row: The number of the line within the row.
        strength: The opacity, from 0 to 1.
    """

    name: str
    family: str
    left: float
    width: float
    title: str
    row: int = 0
    strength: float = 1.0


class Row(msgspec.Struct, frozen=True):
    """A row of bars: its label, the number of its lines, and the bars."""

    label: str
    lines: int
    bars: list[Bar]


class AxisTick(msgspec.Struct, frozen=True):
    """A label of an axis, and its position in percent."""

    at: float
    text: str


class Shade(msgspec.Struct, frozen=True, kw_only=True):
    """A shaded time, in percent of the chart's width. `text` is shown in it if it is wide enough."""

    left: float
    width: float
    title: str
    text: str = ""


class RowsChart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart with a row of bars for each lane or sample.

    Attributes:
        rows: The rows, from top to bottom.
        ticks: The labels of the horizontal axis.
        axis: The quantity and the unit of the horizontal axis.
        key: The colours of the chart.
        shades: The shaded times.
        left_out: The number of spans that are not drawn.
    """

    rows: list[Row]
    ticks: list[AxisTick]
    axis: str
    key: list[str]
    shades: list[Shade] = []
    left_out: int = 0


class Path(msgspec.Struct, frozen=True):
    """Path of an area or of a line: the colour, and the path in units of the chart's view box."""

    family: str
    d: str


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A mark above a bar: `slow` or `captured`, its position in percent, and the hover text."""

    kind: str
    left: float
    bottom: float
    title: str


class Hover(msgspec.Struct, frozen=True):
    """The hover texts of a bar and of its rate. `x` and `width` are in units of the chart's view box."""

    x: float
    width: float
    title: str
    rate: str


class StepsChart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart with a bar for each step, and with the generated tokens per second below.

    Attributes:
        width: The width of the view box. Its height is 100.
        paths: The bars of each stage.
        hovers: The hover text of each bar.
        marks: The marks of slow and captured steps.
        x_ticks: The labels of the horizontal axis.
        y_ticks: The labels of the axis of seconds.
        rate_ticks: The labels of the axis of tokens per second.
        rate: The line of tokens per second. Empty if no tokens are known.
        key: The colours of the chart.
    """

    width: float
    paths: list[Path]
    hovers: list[Hover]
    marks: list[Mark]
    x_ticks: list[AxisTick]
    y_ticks: list[AxisTick]
    rate_ticks: list[AxisTick]
    rate: str
    key: list[str]


class DoneChart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart of the number of ended samples over time. The view box has 1000 by 100 units."""

    area: str
    x_ticks: list[AxisTick]
    y_ticks: list[AxisTick]
    shade: Shade | None


def ticks(top: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from 0 to `top`."""
    if top <= 0 or not math.isfinite(top):
        return [0.0]
    rough = top / count
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [round(unit * place, 12) for place in range(int(top / unit + 1e-9) + 1)]


def _axis(top: float, show: str = "seconds", count: int = 5) -> list[AxisTick]:
    """Return the labels of an axis from 0 to `top`. `show` is `seconds` or `number`."""
    shown = units.seconds if show == "seconds" else units.number
    return [
        AxisTick(round(100 * value / top, 2) if top else 0.0, _trimmed(shown(value))) for value in ticks(top, count)
    ]


def _trimmed(text: str) -> str:
    """Return a figure without zeros at its end: `2 s` for `2.00 s`."""
    figure, space, unit = text.partition(" ")
    return (figure.rstrip("0").rstrip(".") if "." in figure else figure) + space + unit


def steps_chart(steps: Sequence[StepRow], kinds: Mapping[str, str]) -> StepsChart:
    """Return a chart with a bar for each step, which is stacked from the times of the stages.

    Slow and captured steps have marks. If there are more than `MAX_BARS` steps, a bar is the mean of several steps, but
    each slow step still has a mark.

    Args:
        steps: The steps. There must be at least one step.
        kinds: The kind of each stage by its name, in the order of the stack.
    """
    groups = _groups(steps)
    shown_names = [name for name in kinds if any(name in step.stages for step in steps)]
    means = [{name: fmean(step.stages.get(name, 0.0) for step in group) for name in shown_names} for group in groups]
    # Space for the marks above the highest bar.
    top = 1.12 * max([sum(each.values()) for each in means] + [step.seconds for step in steps if step.slow] + [1e-9])
    first, last = steps[0].number, steps[-1].number
    step_range = max(1, groups[0][-1].number - first + 1)
    width = last - first + step_range
    starts = [group[0].number - first for group in groups]
    families = {name: family(name, kinds[name]) for name in shown_names}
    rates = [_mean_rate(group) for group in groups]
    top_rate = 1.1 * max([rate for rate in rates if rate is not None], default=0.0)
    return StepsChart(
        width=width,
        paths=_stacks(means, starts, step_range, top, families),
        hovers=[
            _hover(start, step_range, group, mean) for start, group, mean in zip(starts, groups, means, strict=True)
        ],
        marks=_marks(steps, width, top),
        x_ticks=_step_ticks(first, last, width),
        y_ticks=_axis(top),
        rate_ticks=_axis(top_rate, "number", 3) if top_rate else [],
        rate=_line([(start + step_range / 2, rate) for start, rate in zip(starts, rates, strict=True)], top_rate),
        key=key_of(families.values()),
    )


def runs_chart(runs: Sequence[RunRow], kinds: Mapping[str, str]) -> StepsChart:
    """Return a chart with a bar for each run, which is stacked from the times of its stages, and its tokens per second.

    Args:
        runs: The runs, in the order of the bars.
        kinds: The kind of each stage by its name, in the order of the stack.
    """
    families = {name: family(name, kind) for name, kind in kinds.items()}
    means = [{name: run.stages.get(name, 0.0) for name in kinds} for run in runs]
    top = 1.05 * max([sum(mean.values()) for mean in means] + [1e-9])
    top_rate = 1.1 * max([run.tokens_per_s or 0.0 for run in runs], default=0.0)
    hovers = []
    for number, (run, mean) in enumerate(zip(runs, means, strict=True)):
        stages = [f"{units.short(name)}: {units.seconds(took)}" for name, took in reversed(list(mean.items())) if took]
        title = f"{number + 1}: {units.short(run.id)}: {units.seconds(run.median_s)} a step"
        rate_text = f"{units.short(run.id)}: {units.number(run.tokens_per_s)} tokens/s"
        hovers.append(Hover(number, 1, "\n".join([title, *stages]), rate_text))
    return StepsChart(
        width=max(1, len(runs)),
        paths=_stacks(means, range(len(runs)), 1, top, families),
        hovers=hovers,
        marks=[],
        x_ticks=_step_ticks(1, len(runs), len(runs)) if runs else [],
        y_ticks=_axis(top),
        rate_ticks=_axis(top_rate, "number", 3) if top_rate else [],
        rate=_line([(number + 0.5, run.tokens_per_s) for number, run in enumerate(runs)], top_rate),
        key=key_of(families.values()),
    )


def _groups(steps: Sequence[StepRow]) -> list[Sequence[StepRow]]:
    size = -(-len(steps) // MAX_BARS) or 1
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _stacks(
    means: Sequence[Mapping[str, float]],
    starts: Sequence[int],
    step_range: int,
    top: float,
    families: Mapping[str, str],
) -> list[Path]:
    """Return the bars of each stage as a path. The bars of a stage are on top of the bars of the stages before it."""
    heights = [0.0] * len(means)
    # Between many bars, gaps would look like stripes.
    gap = 0.04 * step_range if len(means) <= _MAX_APART else 0.0
    paths = []
    for name, colour in families.items():
        parts = []
        for place, (mean, start) in enumerate(zip(means, starts, strict=True)):
            height = 100 * mean[name] / top
            if height >= 0.01:
                begin, bar_width = f"{start + gap:.6g} {100 - heights[place]:.5g}", step_range - 2 * gap
                parts.append(f"M{begin}h{bar_width:.5g}v{-height:.4g}h{-bar_width:.5g}z")
            heights[place] += height
        paths.append(Path(colour, "".join(parts)))
    return paths


def _hover(start: int, step_range: int, group: Sequence[StepRow], mean: Mapping[str, float]) -> Hover:
    """Return the hover texts of a bar: the step, its seconds, and the seconds of its stages from top to bottom."""
    name = f"step {group[0].number}"
    if len(group) > 1:
        name = f"mean of steps {group[0].number} to {group[-1].number}"
    seconds = units.seconds(fmean(step.seconds for step in group))
    title = f"{name}: {seconds}" if len(group) > 1 else f"{name} ({group[0].kind}): {seconds}"
    stages = [f"{units.short(stage)}: {units.seconds(took)}" for stage, took in reversed(list(mean.items())) if took]
    rate_text = f"{name}: {units.number(_mean_rate(group))} tokens/s"
    return Hover(start, step_range, "\n".join([title, *stages]), rate_text)


def _marks(steps: Sequence[StepRow], width: float, top: float) -> list[Mark]:
    slow_steps = sorted((step for step in steps if step.slow), key=lambda step: step.usual_s - step.seconds)[:MAX_MARKS]
    captured_steps = [step for step in steps if step.captured]
    captured_steps = captured_steps[:: -(-len(captured_steps) // MAX_MARKS) or 1]
    slow_texts = [f"slow: {units.seconds(step.seconds)}, usually {units.seconds(step.usual_s)}" for step in slow_steps]
    captured_texts = [f"captured: {units.seconds(step.seconds)}" for step in captured_steps]
    return [
        Mark(
            kind=kind,
            left=round(100 * (step.number - steps[0].number + 0.5) / width, 2),
            bottom=round(min(96.0, 100 * step.seconds / top), 2),
            title=f"step {step.number}, {text}",
        )
        for kind, marked_steps, texts in (
            ("captured", captured_steps, captured_texts),
            ("slow", slow_steps, slow_texts),
        )
        for step, text in zip(marked_steps, texts, strict=True)
    ]


def _step_ticks(first: int, last: int, width: float) -> list[AxisTick]:
    unit = max(1, round([*ticks(last - first, 10), 1.0][1])) if last > first else 1
    numbers = range(-(-first // unit) * unit, last + 1, unit)
    return [AxisTick(round(100 * (number - first + 0.5) / width, 2), f"{number}") for number in numbers]


def _line(points: Iterable[tuple[float, float | None]], top: float) -> str:
    """Return a path through the points with a value. The path has a break where a value is unknown."""
    parts, is_drawing = [], False
    for x, value in points:
        if value is not None and top:
            parts.append(f"{'L' if is_drawing else 'M'}{x:.6g} {100 - 100 * value / top:.4g}")
            # A line of one point is visible because of its round ends.
            parts += [] if is_drawing else ["h0"]
        is_drawing = value is not None
    return "".join(parts)


def _mean_rate(steps: Sequence[StepRow]) -> float | None:
    rates = [step.tokens_per_s for step in steps if step.tokens_per_s is not None]
    return fmean(rates) if rates else None


# Crowds: kinds of spans of which many run at the same time, and the name of the bars for each kind. The chart does not
# show the single spans, but the number of spans that run at each time.
CROWDS = {"sample": "samples", "request": "requests"}
_MAX_LINES = 4
_BINS = 160
# A span that is shorter than this share of the step is merged with neighbouring spans of the same name.
_NARROW = 1 / 1200


class Placed(msgspec.Struct, frozen=True):
    """A bar in a lane: one span, several narrow spans of the same name, or a part of a crowd (see `CROWDS`).

    Attributes:
        name: The name of the bar.
        kind: The kind of the spans.
        start: The start of the bar, in seconds from the step's start.
        end: The end of the bar, in seconds from the step's start.
        row: The number of the line within the lane.
        count: The number of spans in the bar. For a crowd, the number of spans that run at the same time.
        or_more: True if the number of spans in a crowd may be larger, because some spans of the lane are unknown.
        error: The exception that ended a span of the bar.
        stage_kind: The kind of the stage. Empty if the bar is no stage.
    """

    name: str
    kind: str
    start: float
    end: float
    row: int
    count: int = 1
    or_more: bool = False
    error: str | None = None
    stage_kind: str = ""


def lanes_chart(step: StepFigures, kinds: Mapping[str, str]) -> RowsChart:
    """Return a chart of the lanes of a step over time. Times in which no process works are shaded.

    Args:
        step: The step.
        kinds: The kinds of stages by their names, for spans that don't have a kind.
    """
    whole_s = max(step.seconds, 1e-9)
    rows, left_out = [], 0
    for lane in step.lanes:
        placed_bars, too_deep = _place(lane, whole_s)
        left_out += lane.left_out + too_deep
        lines = max([each.row + 1 for each in placed_bars] + [0])
        bars = [_bar(each, whole_s, kinds, 1.0) for each in placed_bars]
        for kind in sorted({span.kind for span in lane.spans if span.kind in CROWDS}):
            crowd = [
                (msgspec.structs.replace(each, row=lines), strength) for each, strength in _crowd(lane, kind, whole_s)
            ]
            bars += [_bar(each, whole_s, kinds, strength) for each, strength in crowd]
            lines += 1
        rows.append(Row(units.short(lane.label, 34), lines or 1, bars))
    shades = [
        _shade(gap.start_s, gap.end_s, whole_s, f"idle {units.seconds(gap.end_s - gap.start_s)}") for gap in step.gaps
    ]
    families = (bar.family for row in rows for bar in row.bars)
    axis_title = "seconds from the step's start"
    return RowsChart(
        rows=rows,
        ticks=_axis(whole_s, count=8),
        axis=axis_title,
        key=key_of(families),
        shades=shades,
        left_out=left_out,
    )


def _bar(placed: Placed, whole_s: float, kinds: Mapping[str, str], strength: float) -> Bar:
    stage_kind = placed.stage_kind or kinds.get(placed.name, "")
    return Bar(
        name=units.short(placed.name),
        family="own" if placed.kind == model.PROFILING else family(placed.name, stage_kind),
        left=round(100 * placed.start / whole_s, 3),
        width=round(100 * (placed.end - placed.start) / whole_s, 3),
        title=f"{units.short(placed.name)}: {_bar_text(placed)}",
        row=placed.row,
        strength=round(strength, 2),
    )


def _shade(start_s: float, end_s: float, whole_s: float, text: str) -> Shade:
    width = round(100 * (end_s - start_s) / whole_s, 3)
    return Shade(left=round(100 * start_s / whole_s, 3), width=width, title=text, text=text if width > 6 else "")


def _bar_text(placed: Placed) -> str:
    time = f"{units.seconds(placed.end - placed.start)}, from {units.seconds(placed.start)}"
    if placed.kind in CROWDS:
        count = f"{placed.count} or more" if placed.or_more else f"{placed.count}"
        return f"{count} at a time, from {units.seconds(placed.start)} to {units.seconds(placed.end)}"
    if placed.count > 1:
        return f"{placed.count} times within {time}"
    return f"{time}, ended by {units.short(placed.error)}" if placed.error else time


def _place(lane: Lane, whole_s: float) -> tuple[list[Placed], int]:
    """Put the spans of a lane into lines. An inner span is placed below the span around it.

    Returns:
        The bars, and the number of spans that are not placed because `_MAX_LINES` lines are not enough.
    """
    spans = sorted(
        (span for span in lane.spans if span.kind not in CROWDS), key=lambda span: (span.start_s, -span.end_s)
    )
    rows: list[list[Placed]] = []
    too_deep = 0
    for span in spans:
        row = next((row for row, bars in enumerate(rows) if span.start_s >= bars[-1].end - 1e-9), len(rows))
        if row >= _MAX_LINES:
            too_deep += 1
            continue
        new_bar = Placed(
            span.name, span.kind, span.start_s, span.end_s, row, error=span.error, stage_kind=span.stage_kind
        )
        if row == len(rows):
            rows.append([new_bar])
        elif rows[row][-1].name == span.name and _is_too_narrow(rows[row][-1], new_bar, whole_s):
            last_bar = rows[row][-1]
            merged_fields = {"end": new_bar.end, "count": last_bar.count + 1, "error": last_bar.error or new_bar.error}
            rows[row][-1] = msgspec.structs.replace(last_bar, **merged_fields)
        else:
            rows[row].append(new_bar)
    return [each for row in rows for each in row], too_deep


def _is_too_narrow(last_bar: Placed, new_bar: Placed, whole_s: float) -> bool:
    narrow_s = whole_s * _NARROW
    return (
        new_bar.start - last_bar.end < narrow_s
        and min(last_bar.end - last_bar.start, new_bar.end - new_bar.start) < narrow_s
    )


def _crowd(lane: Lane, kind: str, whole_s: float) -> list[tuple[Placed, float]]:
    """Return bars that show how many spans of a kind run at each time, each with its opacity from 0 to 1."""
    changes: dict[float, int] = {}
    for span in lane.spans:
        if span.kind == kind:
            start, end = (round(at / whole_s * _BINS) / _BINS * whole_s for at in (span.start_s, span.end_s))
            end = max(end, start + whole_s / _BINS)
            changes[start] = changes.get(start, 0) + 1
            changes[end] = changes.get(end, 0) - 1
    bars: list[Placed] = []
    count, start_s = 0, 0.0
    for time in sorted(changes):
        if count and changes[time]:
            bars.append(Placed(CROWDS[kind], kind, start_s, time, 0, count, lane.left_out > 0))
        if changes[time]:
            start_s = time
        count += changes[time]
    max_count = max((each.count for each in bars), default=1)
    return [(each, 0.25 + 0.7 * each.count / max_count) for each in bars]


_MAX_SAMPLES = 24
_PARTS = ("turn", "tool", "reward", "waiting")


def longest_chart(figures: SampleFigures) -> RowsChart:
    """Return a chart with a bar for each of the longest samples, which is stacked from the parts of the sample."""
    shown_samples = figures.longest[:_MAX_SAMPLES]
    whole_s = max((sum(part.seconds for part in sample.parts) for sample in shown_samples), default=0.0) or 1.0
    rows = []
    for sample in shown_samples:
        bars, start_s = [], 0.0
        for part in sorted(sample.parts, key=_place_of):
            title = _title(part)
            bar = Bar(
                name=units.short(title),
                family=family(title),
                left=round(100 * start_s / whole_s, 3),
                width=round(100 * part.seconds / whole_s, 3),
                title=f"{units.short(title)}: {units.seconds(part.seconds)}, {units.count(part.count, 'time')}",
            )
            bars.append(bar)
            start_s += part.seconds
        rows.append(Row(units.short(sample.label, 30), 1, bars))
    key = key_of(bar.family for row in rows for bar in row.bars)
    return RowsChart(rows=rows, ticks=_axis(whole_s, count=8), axis="seconds of the sample", key=key)


def done_chart(figures: SampleFigures) -> DoneChart:
    """Return a chart of the number of ended samples over time. The time of the wait for the last samples is shaded."""
    top_s = max(figures.end_s, *(at for at, _ in figures.done), 1e-9)
    top = max(1, *(count for _, count in figures.done))
    parts, last_count = ["M0 100"], 0
    for at, count in figures.done:
        x = f"{1000 * at / top_s:.5g}"
        parts.append(f"L{x} {100 - 100 * last_count / top:.4g}L{x} {100 - 100 * count / top:.4g}")
        last_count = count
    parts.append(f"L1000 {100 - 100 * last_count / top:.4g}L1000 100z")
    shade = None
    if figures.tail is not None:
        last_text = "the last one" if figures.tail.count == 1 else f"the last {figures.tail.count}"
        wait_text = f"{units.seconds(figures.tail.waited_s)} for {last_text}"
        shade = _shade(max(0.0, figures.end_s - figures.tail.waited_s), figures.end_s, top_s, wait_text)
    return DoneChart(area="".join(parts), x_ticks=_axis(top_s, count=8), y_ticks=_axis(top, "number", 4), shade=shade)


def _title(part: Part) -> str:
    return f"tool {part.name}" if part.kind == "tool" else part.kind


def _place_of(part: Part) -> int:
    return _PARTS.index(part.kind) if part.kind in _PARTS else len(_PARTS)
