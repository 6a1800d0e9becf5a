"""The plot of a step's lanes against time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autoprof.base import units
from autoprof.report.model.lanes import Lane
from autoprof.report.model.run import StepFigures
from autoprof.report.page.charts import Plot, axis, bar, layout, rows_axis, text
from autoprof.report.page.colours import Look

# Spans that go on beside each other in numbers: shown by how many there are at a time.
CROWDS = {"sample": "samples", "request": "requests"}
# More lanes than this make a plot that nobody reads.
MOST_LANES = 96
_MOST_ROWS = 4
_BINS = 160
# What is narrower than this share of the step is drawn with its neighbours of the same name.
_NARROW = 1 / 1200


class Placed(msgspec.Struct, frozen=True):
    """A bar of the lanes: `count` spans of one name that were too narrow to be drawn alone, or one.

    Attributes:
        count: Of a crowd how many there are at a time, `or_more` where not all of its spans are known.
    """

    name: str
    kind: str
    start: float
    end: float
    row: int
    count: int = 1
    or_more: bool = False
    error: str | None = None


class Chosen(msgspec.Struct, frozen=True):
    """The lanes that are drawn, and the number of those that are not."""

    lanes: list[Lane]
    left_out: int


def choose(lanes: Sequence[Lane]) -> Chosen:
    """Choose the lanes: all, or of very many those of each role that were busiest and idlest."""
    if len(lanes) <= MOST_LANES:
        return Chosen(list(lanes), 0)
    roles: dict[str, list[Lane]] = {}
    for lane in lanes:
        roles.setdefault(lane.role, []).append(lane)
    each = max(2, MOST_LANES // len(roles))
    kept: set[int] = set()
    for of_role in roles.values():
        by_work = sorted(of_role, key=lambda lane: lane.busy_s)
        ends = by_work if len(by_work) <= each else by_work[: each // 2] + by_work[-(each - each // 2) :]
        kept |= set(map(id, ends))
    return Chosen([lane for lane in lanes if id(lane) in kept], len(lanes) - len(kept))


def lanes(step: StepFigures, looks: dict[str, Look]) -> tuple[Plot, int]:
    """Plot processes against time; where none of them works, the time is shaded.

    Returns the plot, and how many spans of the lanes in it are not drawn.
    """
    chosen = choose(step.lanes).lanes
    whole = max(step.seconds, 1e-9)
    bars: dict[str, list[tuple[Placed, float, float, str]]] = {}
    ticks: list[tuple[float, str]] = []
    top = 0.0
    left_out = 0
    for lane in chosen:
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
            customdata=[[text(label), _says(each)] for each, _, _, label in rows],
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


def _says(bar_of: Placed) -> str:
    when = f"{units.seconds(bar_of.end - bar_of.start)}, from {units.seconds(bar_of.start)}"
    if bar_of.kind in CROWDS:
        count = f"{bar_of.count} or more" if bar_of.or_more else f"{bar_of.count}"
        return f"{count} at a time, from {units.seconds(bar_of.start)} to {units.seconds(bar_of.end)}"
    if bar_of.count > 1:
        return f"{bar_of.count} times within {when}"
    return f"{when}, ended by {text(bar_of.error)}" if bar_of.error else when


def _shade(plot: Plot, start: float, end: float, whole: float) -> None:
    area = {"type": "rect", "x0": start, "x1": end, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    plot["shapes"].append({**area, "fillcolor": "@gap", "line": {"width": 0}})
    if end - start > whole * 0.06:
        label = {"x": (start + end) / 2, "y": 0, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        plot["annotations"].append({**label, "text": f"idle<br>{units.seconds(end - start)}", "font": {"size": 11}})


def _place(lane: Lane, whole: float) -> tuple[list[Placed], int]:
    """Put spans into rows, a span inside of another below it, and return how many would be too deep."""
    spans = sorted(
        (span for span in lane.spans if span.kind not in CROWDS), key=lambda span: (span.start_s, -span.end_s)
    )
    ends: list[float] = []
    rows: list[list[Placed]] = []
    too_deep = 0
    for span in spans:
        row = next((row for row, end in enumerate(ends) if span.start_s >= end - 1e-9), len(ends))
        if row >= _MOST_ROWS:
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
    """Return how many spans of a kind there are at a time, as bars, each with its strength from 0 to 1."""
    moments: dict[float, int] = {}
    for span in lane.spans:
        if span.kind == kind:
            start, end = (round(at / whole * _BINS) / _BINS * whole for at in (span.start_s, span.end_s))
            end = max(end, start + whole / _BINS)
            moments[start] = moments.get(start, 0) + 1
            moments[end] = moments.get(end, 0) - 1
    found: list[Placed] = []
    count, since = 0, 0.0
    for moment in sorted(moments):
        if count and moments[moment]:
            found.append(Placed(CROWDS[kind], kind, since, moment, 0, count, lane.left_out > 0))
        if moments[moment]:
            since = moment
        count += moments[moment]
    most = max((each.count for each in found), default=1)
    return [(each, 0.25 + 0.7 * each.count / most) for each in found]
