"""Results of the benchmarks: kept in results.json, shown in RESULTS.md.

A run of a benchmark replaces its own section. Other sections do not change; each has its date and its machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from bench.paired import Goal, Spread, Table, Verdict, judge
from bench.processes import ROOT

STORE = ROOT / "bench" / "results.json"
PAGE = ROOT / "bench" / "RESULTS.md"

_INTRODUCTION = """\
# Results

`make bench` measures autoprof and similar tools (peers) side by side and writes this page. In each turn every case runs
once, in a different order each time, and ratios are taken within the turn. The tables show the median over the turns,
and in brackets the range of their middle half. With fewer than four turns, it is the range of all.
"""


class Findings(msgspec.Struct, kw_only=True):
    """Measurements of one benchmark, and its goals.

    Attributes:
        notes: Cases that were left out, with the reason, and other remarks.
    """

    tables: list[Table]
    goals: list[Goal] = []
    notes: list[str] = []


class Section(msgspec.Struct, kw_only=True):
    """A benchmark's part of the results."""

    name: str
    about: str
    machine: str
    date: str
    quick: bool
    turns: int
    minutes: float
    findings: Findings


def load(path: Path = STORE) -> dict[str, Section]:
    """Load the saved sections, by name."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Section]) if path.exists() else {}


def save(sections: Iterable[Section], path: Path = STORE, page: Path = PAGE) -> None:
    """Save these sections, and write the page."""
    by_name = {section.name: section for section in sections}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(by_name), indent=1) + b"\n")
    page.write_text(render(list(by_name.values())))


def render(sections: Sequence[Section]) -> str:
    """Return the whole page."""
    goals = [row for section in sections for row in _goal_rows(section)]
    parts = [_INTRODUCTION]
    if goals:
        parts.append("## Goals\n\n" + grid(["benchmark", "goal", "measured", ""], goals, texts=2) + "\n")
    return "\n".join([*parts, *(_section(section) for section in sections)])


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return a Markdown table with aligned columns. The first `texts` columns are texts, the others numbers."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    ruler = [f"{'-' * (width - 1)}{'-' if column < texts else ':'}" for column, width in enumerate(widths)]
    return "\n".join([line(header), line(ruler), *map(line, rows)])


def show(table: Table) -> str:
    """Return one table."""
    header = ["", table.unit, f"to “{table.base}”"] + ([f"more, {table.unit}"] if table.differences else [])
    rows = []
    for case in table.values:
        row = [case, number(table.spread(case).middle), spread(table.ratio(case)) if case != table.base else "1"]
        if table.differences:
            row.append(number(table.difference(case).middle) if case != table.base else "")
        rows.append(row)
    return grid(header, rows)


def spread(found: Spread) -> str:
    """Return a ratio: its median, and the range of its middle half."""
    middle, low, high = (_ratio(value) for value in found)
    return f"{middle} ({low} to {high})" if low != high else middle


def number(value: float) -> str:
    """Return a number with three significant digits, and with all digits before the point."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _section(section: Section) -> str:
    title, _, about = section.about.partition("\n")
    how = f"{section.date}, {section.machine}; {_count(section.turns, 'turn')}, {section.minutes:.1f} min"
    quick = " A quick run: too few turns to rely on." if section.quick else ""
    parts = [f"## {section.name}: {title}", about.strip(), f"*{how}.*{quick}"]
    for table in section.findings.tables:
        parts += [f"**{table.title}**", show(table)]
    parts += ["\n".join(f"* {line}" for line in [*_goal_lines(section), *section.findings.notes])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _goal_rows(section: Section) -> list[list[str]]:
    return [
        [section.name, goal.text, spread(verdict.ratio), _word(verdict)]
        for goal in section.findings.goals
        if (verdict := judge(goal, section.findings.tables)) is not None
    ]


def _goal_lines(section: Section) -> list[str]:
    lines = []
    for goal in section.findings.goals:
        verdict = judge(goal, section.findings.tables)
        if verdict is None:
            lines.append(f"Goal: {goal.text}. Not measured.")
            continue
        said = f"Goal: {goal.text}. **{_word(verdict).capitalize()}**, {spread(verdict.ratio)}."
        if verdict.noise is not None:
            said += f" Noise: turns of the same case differ by {verdict.noise:.1%}."
        lines.append(said if verdict.met is not False else f"{said} To reach it: {goal.remedy}")
    return lines


def _word(verdict: Verdict) -> str:
    return {True: "met", False: "missed", None: "undecided"}[verdict.met]


def _count(amount: int, what: str) -> str:
    return f"{amount} {what}" if amount == 1 else f"{amount} {what}s"
