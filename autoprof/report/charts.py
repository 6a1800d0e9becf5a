"""Plots of a report, as input for plotly: the times of all steps, the lanes of a step, the samples of a step.

Colours are tokens. The page replaces a token by a colour of the light or dark theme. Stages of one kind have the same
colour and different patterns, so that no information depends on colour alone (Okabe and Ito 2008, Color Universal
Design). Names are escaped, because plotly interprets texts as HTML. Names are never part of a hover template, because
plotly would expand `%{...}` in a template.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from autoprof.base import units
from autoprof.report import model
from autoprof.report.model import OTHER, Gap, Lane, Part, SampleFigures, StepFigures, StepRow

_FAMILIES = {
    model.GENERATION: "generation",
    model.SCORING: "scoring",
    model.TRAINING: "training",
    model.SYNC: "weights",
    model.VALIDATION: "keeping",
    model.CHECKPOINT: "keeping",
    model.REWARD: "reward",
}
# Style families of names that are not stages, such as the parts of samples.
_OWN = {OTHER: "idle", "waiting": "idle", "turn": "generation", "samples": "generation", "requests": "generation"}
# Patterns of names that have the same colour. The first name gets the first pattern.
PATTERNS = ("", "/", ".", "x", "\\", "-", "|", "+")
TOKEN = "@"


class Look(msgspec.Struct, frozen=True):
    """The look of a bar: the colour as a token of the style sheet, and the pattern by plotly's name."""

    colour: str
    pattern: str


def family(name: str, stage_kind: str = "") -> str:
    """Return the name of the colour that the style sheet has for a stage or another name.

    Args:
        name: The name of the stage.
        stage_kind: The kind of the stage. If empty, the colour is chosen by the name.
    """
    if name.startswith("tool "):
        return "tool"
    return _OWN.get(name) or _FAMILIES.get(model.meaning(name, stage_kind=stage_kind), "more")


def choose_looks(names: Iterable[str], kinds: Mapping[str, str] | None = None) -> dict[str, Look]:
    """Return a dict from each name to its look. Names of one family have the same colour and different patterns.

    Args:
        names: The names of stages and other bars.
        kinds: Dict from the names of stages to their kinds, if the names don't show the kinds.
    """
    known_kinds = kinds or {}
    looks: dict[str, Look] = {}
    counts: dict[str, int] = {}
    for name in names:
        if name not in looks:
            look_family = family(name, known_kinds.get(name, ""))
            index = counts[look_family] = counts.get(look_family, -1) + 1
            looks[name] = Look(f"{TOKEN}{look_family}", PATTERNS[index % len(PATTERNS)])
    return looks


Plot = dict[str, Any]
# Maximum number of bars in a plot. More bars would slow the page, and would be thinner than a pixel.
MAX_BARS = 300
# Maximum number of marks of one kind in a plot. More marks would hide each other.
MAX_MARKS = 300


def text(name: str) -> str:
    """Return a shortened and escaped name, which plotly shows as it is."""
    return html.escape(units.short(name), quote=False)


def bar(name: str, look: Look, **more: Any) -> Plot:
    """Return plotly's data for a group of bars that have the same name and look. `more` are additional fields."""
    marker: Plot = {"color": look.colour, "line": {"width": 0.5, "color": "@page"}}
    if look.pattern:
        marker["pattern"] = {
            "shape": look.pattern,
            "size": 6,
            "solidity": 0.35,
            "fillmode": "overlay",
            "fgcolor": "@page",
        }
    return {"type": "bar", "name": text(name), "marker": marker, **more}


def layout(height: int, **more: Any) -> Plot:
    """Return the layout that all plots have in common. `height` is in pixels; `more` are additional fields."""
    return {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 12, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "@text"},
        "hoverlabel": {"bgcolor": "@panel", "bordercolor": "@line", "font": {"color": "@text"}, "align": "left"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        **more,
    }


def axis(title: str, **more: Any) -> Plot:
    """Return an axis. `title` names the quantity and the unit; `more` are additional fields."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "@grid",
        "linecolor": "@line",
        "zerolinecolor": "@line",
        "automargin": True,
        **more,
    }


def rows_axis(at: Sequence[float], labels: Sequence[str], end: float) -> Plot:
    """Return a vertical axis with a label for each row of a plot.

    Args:
        at: The vertical position of each row. Position 0 is near the top of the plot.
        labels: The label of each row.
        end: The position of the lower end of the axis.
    """
    return {
        "tickvals": list(at),
        "ticktext": [text(label) for label in labels],
        "range": [end, -0.2],
        "automargin": True,
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": "@page",
    }


def run_plot(steps: Sequence[StepRow], looks: dict[str, Look]) -> Plot:
    """Return a plot with a bar for each step, which is stacked from the times of the stages.

    Slow and captured steps have marks. Below the bars, a second plot shows the generated tokens per second. If there
    are more than `MAX_BARS` steps, a bar is the mean of several steps, but each slow step still has a mark.

    Args:
        steps: The steps. There must be at least one step.
        looks: The look of each stage.
    """
    groups = _groups(steps)
    names = [name for name in looks if any(name in step.stages for step in steps)]
    x = [group[0].number if len(group) == 1 else (group[0].number + group[-1].number) / 2 for group in groups]
    titles = [_group_title(group) for group in groups]
    step_range = max(1, groups[0][-1].number - groups[0][0].number + 1)
    data = []
    for name in names:
        mean_s = [sum(step.stages.get(name, 0.0) for step in group) / len(group) for group in groups]
        data.append(
            bar(
                name,
                looks[name],
                x=x,
                y=[round(each, 4) for each in mean_s],
                width=step_range * 0.94,
                customdata=[[title, units.seconds(seconds)] for title, seconds in zip(titles, mean_s, strict=True)],
                hovertemplate="%{customdata[0]}: %{customdata[1]}<extra>%{fullData.name}</extra>",
            )
        )
    data += _marks(steps)
    rates = [_mean_rate(group) for group in groups]
    plot = layout(420, barmode="stack", bargap=0, hovermode="closest", yaxis=axis("seconds a step", rangemode="tozero"))
    x_range = [steps[0].number - step_range * 0.8, steps[-1].number + step_range * 0.8]
    plot["xaxis"] = axis(
        "step", range=x_range, zeroline=False, **({"dtick": 1, "tick0": 0} if len(x) <= 20 else {"tickformat": "d"})
    )
    if any(rate is not None for rate in rates):
        plot |= {"height": 520, "xaxis": plot["xaxis"] | {"anchor": "y2"}}
        plot["yaxis"] |= {"domain": [0.36, 1]}
        plot["yaxis2"] = axis("tokens / s", domain=[0, 0.26], rangemode="tozero")
        data.append(_rates(x, rates, titles))
    return {"data": data, "layout": plot}


def _groups(steps: Sequence[StepRow]) -> list[Sequence[StepRow]]:
    size = -(-len(steps) // MAX_BARS) or 1
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _group_title(group: Sequence[StepRow]) -> str:
    if len(group) == 1:
        return f"step {group[0].number}"
    return f"mean of steps {group[0].number} to {group[-1].number}"


def _marks(steps: Sequence[StepRow]) -> list[Plot]:
    slow_steps = sorted((step for step in steps if step.slow), key=lambda step: step.usual_s - step.seconds)[:MAX_MARKS]
    captured_steps = [step for step in steps if step.captured]
    captured_steps = captured_steps[:: -(-len(captured_steps) // MAX_MARKS) or 1]
    slow_texts = [f"{units.seconds(step.seconds)}, usual {units.seconds(step.usual_s)}" for step in slow_steps]
    captured_texts = [f"captured, {units.seconds(step.seconds)}" for step in captured_steps]
    # For each kind of mark: its name, its look, its height above the bar as a share of the highest bar, and its steps.
    kinds = (
        ("slow step", "triangle-down", "@warn", 0.03, slow_steps, slow_texts),
        ("captured step", "diamond", "@text", 0.08, captured_steps, captured_texts),
    )
    max_s = max((step.seconds for step in steps), default=0.0)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [step.number for step in marked_steps],
            "y": [step.seconds + max_s * height for step in marked_steps],
            "marker": {"symbol": symbol, "size": 10, "color": colour, "line": {"width": 1, "color": "@page"}},
            "text": [f"step {step.number}: {text}" for step, text in zip(marked_steps, texts, strict=True)],
            "hovertemplate": "%{text}<extra></extra>",
        }
        for name, symbol, colour, height, marked_steps, texts in kinds
        if marked_steps
    ]


def _rates(x: list[float], rates: list[float | None], titles: list[str]) -> Plot:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 60 else "lines",
        "name": "tokens / s",
        "showlegend": False,
        "x": x,
        "y": rates,
        "yaxis": "y2",
        "line": {"color": "@generation", "width": 2},
        "text": [f"{title}: {units.rate(rate)}" for title, rate in zip(titles, rates, strict=True)],
        "hovertemplate": "%{text}<extra>tokens</extra>",
    }


def _mean_rate(steps: Sequence[StepRow]) -> float | None:
    rates = [step.tokens_per_s for step in steps if step.tokens_per_s is not None]
    return sum(rates) / len(rates) if rates else None


# Crowds: kinds of spans of which many run at the same time, and the name of the bars for each kind. The plot does not
# show the single spans, but the number of spans that run at each time.
CROWDS = {"sample": "samples", "request": "requests"}
_MAX_ROWS = 4
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
        row: The number of the row within the lane.
        count: The number of spans in the bar. For a crowd, the number of spans that run at the same time.
        or_more: True if the number of spans in a crowd may be larger, because some spans of the lane are unknown.
        error: The exception that ended a span of the bar.
    """

    name: str
    kind: str
    start: float
    end: float
    row: int
    count: int = 1
    or_more: bool = False
    error: str | None = None


def lanes_plot(step: StepFigures, looks: dict[str, Look]) -> tuple[Plot, int]:
    """Return a plot of the lanes of a step over time. Times in which no process works are shaded.

    Returns:
        The plot, and the number of spans of these lanes that the plot does not show.
    """
    whole_s = max(step.seconds, 1e-9)
    bars: dict[str, list[tuple[Placed, float, float, str]]] = {}
    ticks: list[tuple[float, str]] = []
    next_y = 0.0
    left_out = 0
    for lane in step.lanes:
        placed_bars, too_deep = _place(lane, whole_s)
        left_out += lane.left_out + too_deep
        crowds = sorted({span.kind for span in lane.spans if span.kind in CROWDS})
        depth = max([each.row + 1 for each in placed_bars] + [0]) + len(crowds) or 1
        ticks.append((next_y + depth / 2, units.short(lane.label, 34)))
        for each in placed_bars:
            bars.setdefault(each.name, []).append((each, next_y + each.row + 0.5, 1.0, lane.label))
        for index, kind in enumerate(crowds):
            row = next_y + depth - len(crowds) + index + 0.5
            for each, strength in _crowd(lane, kind, whole_s):
                bars.setdefault(each.name, []).append((each, row, strength, lane.label))
        next_y += depth + 0.35
    data = []
    for name in [*(name for name in looks if name in bars), *(name for name in bars if name not in looks)]:
        rows = bars[name]
        plot = bar(
            name,
            looks.get(name, Look("@more", "")),
            orientation="h",
            x=[round(each.end - each.start, 6) for each, *_ in rows],
            base=[round(each.start, 6) for each, *_ in rows],
            y=[row for _, row, *_ in rows],
            width=0.86,
            customdata=[[text(label), _bar_text(each)] for each, _, _, label in rows],
            hovertemplate="<b>%{fullData.name}</b> %{customdata[1]}<br>%{customdata[0]}<extra></extra>",
        )
        if any(strength < 1 for _, _, strength, _ in rows):
            plot["marker"]["opacity"] = [round(strength, 2) for _, _, strength, _ in rows]
            plot["marker"]["line"] = {"width": 0}
        data.append(plot)
    row_px = 20 if next_y <= 40 else 15
    plot = layout(round(110 + next_y * row_px), barmode="overlay", hovermode="closest", shapes=[], annotations=[])
    plot["xaxis"] = axis("seconds from the step's start", range=[0, whole_s * 1.005], zeroline=False)
    plot["yaxis"] = rows_axis([y for y, _ in ticks], [label for _, label in ticks], next_y)
    for gap in step.gaps:
        _shade(plot, gap.start_s, gap.end_s)
        if gap.end_s - gap.start_s > whole_s * 0.06:
            plot["annotations"].append(_gap_label(gap))
    return {"data": data, "layout": plot}, left_out


def _bar_text(bar_of: Placed) -> str:
    time = f"{units.seconds(bar_of.end - bar_of.start)}, from {units.seconds(bar_of.start)}"
    if bar_of.kind in CROWDS:
        count = f"{bar_of.count} or more" if bar_of.or_more else f"{bar_of.count}"
        return f"{count} at a time, from {units.seconds(bar_of.start)} to {units.seconds(bar_of.end)}"
    if bar_of.count > 1:
        return f"{bar_of.count} times within {time}"
    return f"{time}, ended by {text(bar_of.error)}" if bar_of.error else time


def _gap_label(gap: Gap) -> Plot:
    return {
        "x": (gap.start_s + gap.end_s) / 2,
        "y": 0,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "text": f"idle<br>{units.seconds(gap.end_s - gap.start_s)}",
        "font": {"size": 11},
    }


def _shade(plot: Plot, start: float, end: float) -> None:
    area = {"type": "rect", "x0": start, "x1": end, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    plot["shapes"].append({**area, "fillcolor": "@gap", "line": {"width": 0}})


def _place(lane: Lane, whole_s: float) -> tuple[list[Placed], int]:
    """Put the spans of a lane into rows. An inner span is placed below the span around it.

    Returns:
        The bars, and the number of spans that are not placed because `_MAX_ROWS` rows are not enough.
    """
    spans = sorted(
        (span for span in lane.spans if span.kind not in CROWDS), key=lambda span: (span.start_s, -span.end_s)
    )
    rows: list[list[Placed]] = []
    too_deep = 0
    for span in spans:
        row = next((row for row, bars in enumerate(rows) if span.start_s >= bars[-1].end - 1e-9), len(rows))
        if row >= _MAX_ROWS:
            too_deep += 1
            continue
        new_bar = Placed(span.name, span.kind, span.start_s, span.end_s, row, error=span.error)
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


def longest_plot(figures: SampleFigures) -> Plot:
    """Return a plot with a bar for each of the longest samples, which is stacked from the parts of the sample."""
    shown_samples = figures.longest[:_MAX_SAMPLES]
    ordered = sorted((part for sample in shown_samples for part in sample.parts), key=_place_of)
    looks = choose_looks(map(_title, ordered))
    y = [index + 0.5 for index in range(len(shown_samples))]
    data = []
    for title in looks:
        parts_of_samples = [[part for part in sample.parts if _title(part) == title] for sample in shown_samples]
        part_s = [sum(part.seconds for part in parts) for parts in parts_of_samples]
        counts = [sum(part.count for part in parts) for parts in parts_of_samples]
        data.append(
            bar(
                title,
                looks[title],
                orientation="h",
                x=[round(each, 5) for each in part_s],
                y=y,
                customdata=[
                    [text(sample.label), units.seconds(each), count]
                    for sample, each, count in zip(shown_samples, part_s, counts, strict=True)
                ],
                hovertemplate="<b>%{fullData.name}</b> %{customdata[1]}, %{customdata[2]} times"
                "<br>%{customdata[0]}<extra></extra>",
            )
        )
    plot = layout(max(220, 120 + 19 * len(shown_samples)), barmode="stack", bargap=0.12, hovermode="closest")
    plot["xaxis"] = axis("seconds of the sample", rangemode="tozero")
    plot["yaxis"] = rows_axis(y, [units.short(sample.label, 30) for sample in shown_samples], len(shown_samples))
    return {"data": data, "layout": plot}


def done_plot(figures: SampleFigures) -> Plot:
    """Return a plot of the number of ended samples over time. The time of the wait for the last samples is shaded."""
    points = figures.done
    plot = layout(250, hovermode="x", showlegend=False, shapes=[], annotations=[])
    plot["xaxis"] = axis("seconds from the step's start", rangemode="tozero")
    plot["yaxis"] = axis("samples done", rangemode="tozero")
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "samples done",
        "x": [round(at, 4) for at, _ in points],
        "y": [count for _, count in points],
        "line": {"shape": "hv", "color": "@generation", "width": 2},
        "fill": "tozeroy",
        "fillcolor": "@fill",
        "text": [f"{count} of {figures.count} done after {units.seconds(at)}" for at, count in points],
        "hovertemplate": "%{text}<extra></extra>",
    }
    if figures.tail is not None:
        _shade(plot, figures.end_s - figures.tail.waited_s, figures.end_s)
        last_text = "the last one" if figures.tail.count == 1 else f"the last {figures.tail.count}"
        wait_text = f"{units.seconds(figures.tail.waited_s)} for {last_text}"
        plot["annotations"].append(
            {"x": figures.end_s, "y": 0.05, "yref": "paper", "xanchor": "right", "showarrow": False, "text": wait_text}
        )
    return {"data": [line], "layout": plot}


def _title(part: Part) -> str:
    return f"tool {part.name}" if part.kind == "tool" else part.kind


def _place_of(part: Part) -> int:
    return _PARTS.index(part.kind) if part.kind in _PARTS else len(_PARTS)
