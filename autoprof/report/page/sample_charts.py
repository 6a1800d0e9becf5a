"""Plots of a step's samples: the parts of the longest, and how many were done over time."""

from __future__ import annotations

from autoprof.base import units
from autoprof.report.model.samples import Part, SampleFigures
from autoprof.report.page import colours
from autoprof.report.page.charts import Plot, axis, bar, layout, rows_axis, text

_LONGEST = 24
_PARTS = ("turn", "tool", "reward", "waiting")


def longest(figures: SampleFigures) -> Plot:
    """Plot the longest samples by their parts."""
    shown = figures.longest[:_LONGEST]
    ordered = sorted((part for sample in shown for part in sample.parts), key=_place_of)
    given = colours.looks(map(_title, ordered))
    y = [place + 0.5 for place in range(len(shown))]
    data = []
    for title in given:
        spent = [[part for part in sample.parts if _title(part) == title] for sample in shown]
        took = [sum(part.seconds for part in parts) for parts in spent]
        counts = [sum(part.count for part in parts) for parts in spent]
        data.append(
            bar(
                title,
                given[title],
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


def done(figures: SampleFigures) -> Plot:
    """Plot how many samples were done over time, the wait for the last few shaded."""
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
