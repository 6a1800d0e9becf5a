"""Plots of a report, as input for plotly: steps over time, the lanes of a step, its samples.

Colours are tokens that the page replaces, for light and dark themes. Patterns distinguish stages of one kind, so that
nothing depends on colour alone (Okabe and Ito 2008, Color Universal Design). Names are escaped, because plotly reads
its texts as HTML. They never appear in hover templates, where plotly would expand `%{...}`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from autoprof.base import units
from autoprof.report.figures import words
from autoprof.report.figures.words import OTHER
from autoprof.report.model import Lane, Part, SampleFigures, StepFigures, StepRow

_FAMILIES = {
    words.GENERATION: "generation",
    words.SCORING: "scoring",
    words.TRAINING: "training",
    words.SYNC: "weights",
    words.VALIDATION: "keeping",
    words.CHECKPOINT: "keeping",
    words.REWARD: "reward",
}
# Style families of names that only this page uses.
_OWN = {OTHER: "idle", "waiting": "idle", "turn": "generation", "samples": "generation", "requests": "generation"}
# Patterns for the names of one kind, in this order.
PATTERNS = ("", "/", ".", "x", "\\", "-", "|", "+")
TOKEN = "@"


class Look(msgspec.Struct, frozen=True):
    """A colour as a token of the style sheet, and plotly's name of a pattern."""

    colour: str
    pattern: str


def family(name: str, stage_kind: str = "") -> str:
    """Return the style sheet's name for a stage's kind of work, by its kind, or else by the stage's name."""
    if name.startswith("tool "):
        return "tool"
    return _OWN.get(name) or _FAMILIES.get(words.meaning(name, stage_kind=stage_kind), "more")


def choose_looks(names: Iterable[str], kinds: Mapping[str, str] | None = None) -> dict[str, Look]:
    """Return a look for each name. Names of one kind share a colour and differ in their pattern.

    Args:
        names: The names.
        kinds: The kinds of stages that their names don't show, by name.
    """
    known = kinds or {}
    looks: dict[str, Look] = {}
    counts: dict[str, int] = {}
    for name in names:
        if name not in looks:
            kind = family(name, known.get(name, ""))
            count = counts[kind] = counts.get(kind, -1) + 1
            looks[name] = Look(f"{TOKEN}{kind}", PATTERNS[count % len(PATTERNS)])
    return looks


Plot = dict[str, Any]
# More bars would slow the page and be thinner than a pixel.
MAX_BARS = 300
# More marks would hide each other.
MAX_MARKS = 300


def text(name: str) -> str:
    """Return a name, escaped and shortened, for plotly."""
    return html.escape(units.short(name), quote=False)


def bar(name: str, look: Look, **more: Any) -> Plot:
    """Return a trace of bars with the look of `name`."""
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
    """Return the layout that all plots share."""
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
    """Return an axis with its title, unit included."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "@grid",
        "linecolor": "@line",
        "zerolinecolor": "@line",
        "automargin": True,
        **more,
    }


def rows_axis(at: Sequence[float], labels: Sequence[str], end: float) -> Plot:
    """Return an axis of named rows, from the top down to `end`."""
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
    """Plot step time over steps, stacked by stage, with marks on slow and captured steps, and tokens a second below.

    There must be at least one step. With more than `MAX_BARS` steps, a bar is the mean of several steps; slow steps
    keep their own marks.
    """
    groups = _groups(steps)
    names = [name for name in looks if any(name in step.stages for step in steps)]
    x = [group[0].number if len(group) == 1 else (group[0].number + group[-1].number) / 2 for group in groups]
    titles = [_group_title(group) for group in groups]
    wide = max(1, groups[0][-1].number - groups[0][0].number + 1)
    data = []
    for name in names:
        spent = [sum(step.stages.get(name, 0.0) for step in group) / len(group) for group in groups]
        data.append(
            bar(
                name,
                looks[name],
                x=x,
                y=[round(each, 4) for each in spent],
                width=wide * 0.94,
                customdata=[[title, units.seconds(took)] for title, took in zip(titles, spent, strict=True)],
                hovertemplate="%{customdata[0]}: %{customdata[1]}<extra>%{fullData.name}</extra>",
            )
        )
    data += _marks(steps)
    rates = [_mean([step.tokens_per_s for step in group]) for group in groups]
    plot = layout(420, barmode="stack", bargap=0, hovermode="closest", yaxis=axis("seconds a step", rangemode="tozero"))
    ends = [steps[0].number - wide * 0.8, steps[-1].number + wide * 0.8]
    plot["xaxis"] = axis(
        "step", range=ends, zeroline=False, **({"dtick": 1, "tick0": 0} if len(x) <= 20 else {"tickformat": "d"})
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
    slow = sorted((step for step in steps if step.slow), key=lambda step: step.usual_s - step.seconds)[:MAX_MARKS]
    captured = [step for step in steps if step.captured]
    top = max((step.seconds for step in steps), default=0.0)
    marks = []
    if slow:
        texts = [f"step {s.number}: {units.seconds(s.seconds)}, usual {units.seconds(s.usual_s)}" for s in slow]
        marks.append(_mark("slow step", "triangle-down", "@warn", slow, [s.seconds + top * 0.03 for s in slow], texts))
    if captured:
        kept = captured[:: -(-len(captured) // MAX_MARKS)]
        texts = [f"step {s.number}: captured, {units.seconds(s.seconds)}" for s in kept]
        marks.append(_mark("captured step", "diamond", "@text", kept, [s.seconds + top * 0.08 for s in kept], texts))
    return marks


def _mark(name: str, symbol: str, colour: str, steps: Sequence[StepRow], y: list[float], texts: list[str]) -> Plot:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [step.number for step in steps],
        "y": y,
        "marker": {"symbol": symbol, "size": 10, "color": colour, "line": {"width": 1, "color": "@page"}},
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
    }


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


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# Kinds of spans that run in large numbers at the same time. The plot shows their number over time.
CROWDS = {"sample": "samples", "request": "requests"}
_MAX_ROWS = 4
_BINS = 160
# Share of the step below which a span is merged with neighbours of the same name.
_NARROW = 1 / 1200


class Placed(msgspec.Struct, frozen=True):
    """A bar of a lane: one span, or several narrow ones of the same name.

    Attributes:
        count: The number of spans in the bar; for a crowd, the number of spans at a time.
        or_more: True if some spans of a crowd are unknown.
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
    """Plot processes against time. Time in which no process works is shaded.

    Returns:
        The plot, and the number of spans in its lanes that are not drawn.
    """
    whole = max(step.seconds, 1e-9)
    bars: dict[str, list[tuple[Placed, float, float, str]]] = {}
    ticks: list[tuple[float, str]] = []
    top = 0.0
    left_out = 0
    for lane in step.lanes:
        placed, too_deep = _place(lane, whole)
        left_out += lane.left_out + too_deep
        crowds = sorted({span.kind for span in lane.spans if span.kind in CROWDS})
        depth = max([each.row + 1 for each in placed] + [0]) + len(crowds) or 1
        ticks.append((top + depth / 2, units.short(lane.label, 34)))
        for each in placed:
            bars.setdefault(each.name, []).append((each, top + each.row + 0.5, 1.0, lane.label))
        for place, kind in enumerate(crowds):
            row = top + depth - len(crowds) + place + 0.5
            for each, strength in _crowd(lane, kind, whole):
                bars.setdefault(each.name, []).append((each, row, strength, lane.label))
        top += depth + 0.35
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
    row_px = 20 if top <= 40 else 15
    plot = layout(round(110 + top * row_px), barmode="overlay", hovermode="closest", shapes=[], annotations=[])
    plot["xaxis"] = axis("seconds from the step's start", range=[0, whole * 1.005], zeroline=False)
    plot["yaxis"] = rows_axis([at for at, _ in ticks], [label for _, label in ticks], top)
    for gap in step.gaps:
        _shade(plot, gap.start_s, gap.end_s, whole)
    return {"data": data, "layout": plot}, left_out


def _bar_text(bar_of: Placed) -> str:
    time = f"{units.seconds(bar_of.end - bar_of.start)}, from {units.seconds(bar_of.start)}"
    if bar_of.kind in CROWDS:
        count = f"{bar_of.count} or more" if bar_of.or_more else f"{bar_of.count}"
        return f"{count} at a time, from {units.seconds(bar_of.start)} to {units.seconds(bar_of.end)}"
    if bar_of.count > 1:
        return f"{bar_of.count} times within {time}"
    return f"{time}, ended by {text(bar_of.error)}" if bar_of.error else time


def _shade(plot: Plot, start: float, end: float, whole: float) -> None:
    area = {"type": "rect", "x0": start, "x1": end, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    plot["shapes"].append({**area, "fillcolor": "@gap", "line": {"width": 0}})
    if end - start > whole * 0.06:
        label = {"x": (start + end) / 2, "y": 0, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        plot["annotations"].append({**label, "text": f"idle<br>{units.seconds(end - start)}", "font": {"size": 11}})


def _place(lane: Lane, whole: float) -> tuple[list[Placed], int]:
    """Put spans into rows, inner spans below outer ones. Return the bars, and the number of spans that are too deep."""
    spans = sorted(
        (span for span in lane.spans if span.kind not in CROWDS), key=lambda span: (span.start_s, -span.end_s)
    )
    ends: list[float] = []
    rows: list[list[Placed]] = []
    too_deep = 0
    for span in spans:
        row = next((row for row, end in enumerate(ends) if span.start_s >= end - 1e-9), len(ends))
        if row >= _MAX_ROWS:
            too_deep += 1
            continue
        if row == len(ends):
            ends.append(span.end_s)
            rows.append([])
        ends[row] = span.end_s
        last = rows[row][-1] if rows[row] else None
        new = Placed(span.name, span.kind, span.start_s, span.end_s, row, error=span.error)
        if last and last.name == span.name and _narrow(last, new, whole):
            both = {"end": new.end, "count": last.count + 1, "error": last.error or new.error}
            rows[row][-1] = msgspec.structs.replace(last, **both)
        else:
            rows[row].append(new)
    return [each for row in rows for each in row], too_deep


def _narrow(last: Placed, new: Placed, whole: float) -> bool:
    narrow = whole * _NARROW
    return new.start - last.end < narrow and min(last.end - last.start, new.end - new.start) < narrow


def _crowd(lane: Lane, kind: str, whole: float) -> list[tuple[Placed, float]]:
    """Return bars with the number of spans of a kind at a time, each with its opacity from 0 to 1."""
    moments: dict[float, int] = {}
    for span in lane.spans:
        if span.kind == kind:
            start, end = (round(at / whole * _BINS) / _BINS * whole for at in (span.start_s, span.end_s))
            end = max(end, start + whole / _BINS)
            moments[start] = moments.get(start, 0) + 1
            moments[end] = moments.get(end, 0) - 1
    bars: list[Placed] = []
    count, since = 0, 0.0
    for moment in sorted(moments):
        if count and moments[moment]:
            bars.append(Placed(CROWDS[kind], kind, since, moment, 0, count, lane.left_out > 0))
        if moments[moment]:
            since = moment
        count += moments[moment]
    most = max((each.count for each in bars), default=1)
    return [(each, 0.25 + 0.7 * each.count / most) for each in bars]


_MAX_SAMPLES = 24
_PARTS = ("turn", "tool", "reward", "waiting")


def longest_plot(figures: SampleFigures) -> Plot:
    """Plot the longest samples by their parts."""
    shown = figures.longest[:_MAX_SAMPLES]
    ordered = sorted((part for sample in shown for part in sample.parts), key=_place_of)
    looks = choose_looks(map(_title, ordered))
    y = [place + 0.5 for place in range(len(shown))]
    data = []
    for title in looks:
        spent = [[part for part in sample.parts if _title(part) == title] for sample in shown]
        took = [sum(part.seconds for part in parts) for parts in spent]
        counts = [sum(part.count for part in parts) for parts in spent]
        data.append(
            bar(
                title,
                looks[title],
                orientation="h",
                x=[round(each, 5) for each in took],
                y=y,
                customdata=[
                    [text(sample.label), units.seconds(each), count]
                    for sample, each, count in zip(shown, took, counts, strict=True)
                ],
                hovertemplate="<b>%{fullData.name}</b> %{customdata[1]}, %{customdata[2]} times"
                "<br>%{customdata[0]}<extra></extra>",
            )
        )
    plot = layout(max(220, 120 + 19 * len(shown)), barmode="stack", bargap=0.12, hovermode="closest")
    plot["xaxis"] = axis("seconds of the sample", rangemode="tozero")
    plot["yaxis"] = rows_axis(y, [units.short(sample.label, 30) for sample in shown], len(shown))
    return {"data": data, "layout": plot}


def done_plot(figures: SampleFigures) -> Plot:
    """Plot the number of ended samples over time, with the wait for the last few shaded."""
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
        start = figures.end_s - figures.tail.waited_s
        area = {"type": "rect", "x0": start, "x1": figures.end_s, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
        plot["shapes"].append({**area, "fillcolor": "@gap", "line": {"width": 0}})
        last = "the last one" if figures.tail.count == 1 else f"the last {figures.tail.count}"
        waits = f"{units.seconds(figures.tail.waited_s)} for {last}"
        plot["annotations"].append(
            {"x": figures.end_s, "y": 0.05, "yref": "paper", "xanchor": "right", "showarrow": False, "text": waits}
        )
    return {"data": [line], "layout": plot}


def _title(part: Part) -> str:
    return f"tool {part.name}" if part.kind == "tool" else part.kind


def _place_of(part: Part) -> int:
    return _PARTS.index(part.kind) if part.kind in _PARTS else len(_PARTS)
