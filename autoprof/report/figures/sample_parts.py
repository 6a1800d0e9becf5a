"""Parts of a sample's time: turns, tools, its reward, and waiting if none of them goes on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TypeAlias

import msgspec

from autoprof.base.intervals import segments
from autoprof.report.model.samples import Part

INSIDE = ("turn", "tool", "reward")
WAITING = "waiting"

# The kind of a part, and of a tool its name; seconds and calls by these.
Which: TypeAlias = tuple[str, str]
Parts: TypeAlias = Mapping[Which, tuple[float, int]]


class Inside(msgspec.Struct, frozen=True, gc=False):
    """A turn, a tool call or a score."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    error: str | None
    prompt: float | None
    response: float | None

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def which(self) -> Which:
        return self.kind, self.name if self.kind == "tool" else ""


def parts_of(inside: Sequence[Inside], start_ns: int, end_ns: int) -> Parts:
    """Return seconds and calls of a sample by kind, which sum up to the sample's.

    Of tools that are called at once, each moment has the one that began last.
    """
    calls = Counter(each.which for each in inside)
    spent: dict[Which, int] = dict.fromkeys(calls, 0)
    spans = [(f"{each.kind} {each.which[1]}", each.start_ns, each.end_ns) for each in inside]
    at, waited, pauses = start_ns, 0, 0
    for name, start, end in segments(spans, start_ns, end_ns):
        kind, _, tool = name.partition(" ")
        spent[kind, tool] += end - start
        waited += start - at
        pauses += start > at
        at = end
    pauses += end_ns > at
    found = {which: (took / 1e9, calls[which]) for which, took in spent.items()}
    return found | {(WAITING, ""): ((waited + end_ns - at) / 1e9, pauses)}


def usual(of_samples: Sequence[Parts]) -> dict[Which, float]:
    """Return the median over all samples; 0 for kinds that fewer than half of them have."""
    counts = Counter(which for parts in of_samples for which in parts)
    common = [which for which, count in counts.items() if 2 * count >= len(of_samples)]
    return {which: median(parts.get(which, (0.0, 0))[0] for parts in of_samples) for which in common}


def held_by(parts: Parts, usual: Mapping[Which, float]) -> str:
    """Return the kind by which a sample exceeds the median most, such as `turn` or `tool search`; or empty."""
    if not parts:
        return ""
    kind, name = max(parts, key=lambda which: parts[which][0] - usual.get(which, 0.0))
    return f"{kind} {name}".strip()


def summed(of_samples: Iterable[Parts]) -> list[Part]:
    """Sum the parts of all samples, the most seconds first."""
    sums: dict[Which, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for parts in of_samples:
        for which, (seconds, calls) in parts.items():
            sums[which] = sums[which][0] + seconds, sums[which][1] + calls
    found = [Part(kind=kind, name=name, seconds=total, count=calls) for (kind, name), (total, calls) in sums.items()]
    return sorted(found, key=lambda each: -each.seconds)
