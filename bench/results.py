"""Results of the benchmarks, which results.json keeps and RESULTS.md shows.

A run of a benchmark replaces the section of this benchmark only. Each section has its own date and machine.
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
    """The measurements of one benchmark, and the goals of the benchmark.

    Attributes:
        notes: Texts about the cases that were left out, each with the reason, and other remarks.
    """

    tables: list[Table]
    goals: list[Goal] = []
    notes: list[str] = []


class Section(msgspec.Struct, kw_only=True):
    """The part of the results that belongs to one benchmark."""

    name: str
    about: str
    machine: str
    date: str
    quick: bool
    turns: int
    minutes: float
    findings: Findings


def load(path: Path = STORE) -> dict[str, Section]:
    """Return the saved sections, by the name of their benchmark."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Section]) if path.exists() else {}


def save(sections: Iterable[Section], path: Path = STORE, page: Path = PAGE) -> None:
    """Save the sections in the file `path`, and write the Markdown page."""
    by_name = {section.name: section for section in sections}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(by_name), indent=1) + b"\n")
    page.write_text(render(list(by_name.values())))


def render(sections: Sequence[Section]) -> str:
    """Return the Markdown page with all goals and sections."""
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
    """Return the Markdown table for one measured quantity."""
    header = ["", table.unit, f"to “{table.base}”"] + ([f"more, {table.unit}"] if table.differences else [])
    rows = []
    for case in table.values:
        row = [case, number(table.spread(case).middle), spread(table.ratio(case)) if case != table.base else "1"]
        if table.differences:
            row.append(number(table.difference(case).middle) if case != table.base else "")
        rows.append(row)
    return grid(header, rows)


def spread(found: Spread) -> str:
    """Return the text for a spread of ratios: the median, and the range of the middle half."""
    middle, low, high = (_ratio(value) for value in found)
    return f"{middle} ({low} to {high})" if low != high else middle


def number(value: float) -> str:
    """Return the text for a number: three significant digits, and all digits before the point."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _section(section: Section) -> str:
    title, _, text = section.about.partition("\n")
    conditions = f"{section.date}, {section.machine}; {_count(section.turns, 'turn')}, {section.minutes:.1f} min"
    quick = " A quick run: too few turns to rely on." if section.quick else ""
    parts = [f"## {section.name}: {title}", text.strip(), f"*{conditions}.*{quick}"]
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
        text = f"Goal: {goal.text}. **{_word(verdict).capitalize()}**, {spread(verdict.ratio)}."
        if verdict.noise is not None:
            text += f" Noise: turns of the same case differ by {verdict.noise:.1%}."
        lines.append(text if verdict.met is not False else f"{text} To reach it: {goal.remedy}")
    return lines


def _word(verdict: Verdict) -> str:
    return {True: "met", False: "missed", None: "undecided"}[verdict.met]


def _count(amount: int, noun: str) -> str:
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"
