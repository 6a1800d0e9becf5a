"""The promises on cost, compared with torch.profiler by hand."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.facts import Fact, row
from bench.gpu.workbench import Workbench

TURNS = 7


@row(120)
def cost(bench: Workbench) -> Iterator[Fact]:
    """Stop, captured stage, and a step outside of windows"""
    turns, rounds = (TURNS, 100) if bench.gpu else (2, 3)
    given = ["--turns", str(turns), "--rounds", str(rounds)]
    took = bench.program("cost", *given, steps=f"0:{turns + 1}").said["medians"]

    def ratio(case: str, base: str) -> tuple[float, str]:
        value = took[case] / took[base]
        return value, f"{value:.3f} ({took[case] * 1e3:.2f} to {took[base] * 1e3:.2f} ms)"

    value, figure = ratio("outside", "alone")
    yield bench.shown("a step outside of windows, to the work alone: at most 1.05", figure, value <= 1.05)
    value, figure = ratio("captured", "by hand")
    yield bench.shown("a captured stage, to torch.profiler by hand: at most 1", figure, value <= 1.0)
    value, figure = ratio("captured stop", "by hand stop")
    yield bench.shown("its stop, to torch.profiler's stop and export: at most 1", figure, value <= 1.0)
