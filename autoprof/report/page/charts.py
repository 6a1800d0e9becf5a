"""Plots of the run, as plotly takes them: steps over time.

Colours are tokens, which the page replaces. Names are escaped, since plotly takes its texts for a kind of HTML; they
never stand in templates of hover texts, whose `%{...}` plotly fills in.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from autoprof.base import units
from autoprof.report.model.run import StepRow
from autoprof.report.page.colours import Look

Plot = dict[str, Any]
# More bars than this make a page slow and are thinner than a pixel.
MOST_BARS = 300
# More marks than this hide each other.
MOST_MARKS = 300


def text(name: str) -> str:
    """Return a name as plotly shows it unchanged."""
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
    """Return an axis of rows with names, from above down to `end`."""
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


def run(steps: Sequence[StepRow], looks: dict[str, Look]) -> Plot:
    """Plot step time over steps, stacked by stage, with slow and captured steps marked, and tokens a second below.

    There is at least one step. Of more than `MOST_BARS` a bar is the mean of several; slow steps keep
    marks of their own.
    """
    groups = _groups(steps)
    names = [name for name in looks if any(name in step.stages for step in steps)]
    x = [group[0].number if len(group) == 1 else (group[0].number + group[-1].number) / 2 for group in groups]
    who = [_who(group) for group in groups]
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
                customdata=[[each, units.seconds(took)] for each, took in zip(who, spent, strict=True)],
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
        data.append(_rates(x, rates, who))
    return {"data": data, "layout": plot}


def _groups(steps: Sequence[StepRow]) -> list[Sequence[StepRow]]:
    size = -(-len(steps) // MOST_BARS) or 1
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def _who(group: Sequence[StepRow]) -> str:
    if len(group) == 1:
        return f"step {group[0].number}"
    return f"mean of steps {group[0].number} to {group[-1].number}"


def _marks(steps: Sequence[StepRow]) -> list[Plot]:
    slow = sorted((step for step in steps if step.slow), key=lambda step: step.usual_s - step.seconds)[:MOST_MARKS]
    captured = [step for step in steps if step.captured]
    top = max((step.seconds for step in steps), default=0.0)
    marks = []
    if slow:
        says = [f"step {s.number}: {units.seconds(s.seconds)}, usual {units.seconds(s.usual_s)}" for s in slow]
        marks.append(_mark("slow step", "triangle-down", "@warn", slow, [s.seconds + top * 0.03 for s in slow], says))
    if captured:
        kept = captured[:: -(-len(captured) // MOST_MARKS)]
        says = [f"step {s.number}: captured, {units.seconds(s.seconds)}" for s in kept]
        marks.append(_mark("captured step", "diamond", "@text", kept, [s.seconds + top * 0.08 for s in kept], says))
    return marks


def _mark(name: str, symbol: str, colour: str, steps: Sequence[StepRow], y: list[float], says: list[str]) -> Plot:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [step.number for step in steps],
        "y": y,
        "marker": {"symbol": symbol, "size": 10, "color": colour, "line": {"width": 1, "color": "@page"}},
        "text": says,
        "hovertemplate": "%{text}<extra></extra>",
    }


def _rates(x: list[float], rates: list[float | None], who: list[str]) -> Plot:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 60 else "lines",
        "name": "tokens / s",
        "showlegend": False,
        "x": x,
        "y": rates,
        "yaxis": "y2",
        "line": {"color": "@generation", "width": 2},
        "text": [f"{each}: {units.rate(rate)}" for each, rate in zip(who, rates, strict=True)],
        "hovertemplate": "%{text}<extra>tokens</extra>",
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
