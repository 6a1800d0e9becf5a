"""Open spans that tell who is late: samples that wait longer than their like, ranks in an earlier stage than others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from autoprof.base.units import seconds
from autoprof.report.figures import standing
from autoprof.report.figures.hangs import Process
from autoprof.report.figures.open_now import where
from autoprof.report.figures.standing import Said
from autoprof.report.figures.words import several
from autoprof.rundir import tails
from autoprof.rundir.layout import RunDir
from autoprof.rundir.stacks import OpenSpan

# A sample waits that is older than `standing.OLD_S` and so many times as old as the median of so many of its like.
TIMES, FEWEST = 5, 3
_MOST_FILES = 8


class Spans(msgspec.Struct, frozen=True):
    """The open spans of one process, and up to when that is known."""

    host: str
    pid: int
    spans: Sequence[OpenSpan]
    end_ns: int
    process: Process | None = None


def samples(run: str, found: Sequence[Spans], stands_s: float | None) -> Iterator[Said]:
    """Tell of samples, turns, tools and rewards that wait far longer than their like, the oldest first.

    Args:
        run: The run's directory.
        found: The open spans of its processes.
        stands_s: The age of a step that is known to stand, for which spans without any like are told, too.
    """
    least = standing.OLD_S if stands_s is None else min(standing.OLD_S, stands_s / 2)
    inner: dict[tuple[str, int, str], tuple[OpenSpan, Spans]] = {}
    for of in found:
        for place, span in enumerate(of.spans):
            if span.kind in standing.OF_SAMPLES:
                ids = {name: span.ids.get(name) for name in ("sample", "rollout", "validate")}
                key = of.host, of.pid, str(ids if ids["sample"] is not None else place)
                if key not in inner or inner[key][0].start_ns <= span.start_ns:
                    inner[key] = span, of
    groups: dict[tuple[str, str], list[tuple[float, OpenSpan, Spans]]] = defaultdict(list)
    for span, of in inner.values():
        if (age := (of.end_ns - span.start_ns) / 1e9) >= least:
            groups[span.kind, span.name].append((age, span, of))
    for (kind, name), old in sorted(groups.items(), key=lambda each: -max(age for age, _, _ in each[1])):
        old.sort(key=lambda each: -each[0])
        took = _took(run, [of for _, _, of in old], kind, name)
        usual = median(took) if len(took) >= FEWEST else None
        late = [each for each in old if usual is None or each[0] >= TIMES * usual]
        if late and (usual is not None or stands_s is not None):
            yield _sample(kind, name, late, usual, [of.process for of in found if of.process is not None])


def _sample(
    kind: str,
    name: str,
    late: Sequence[tuple[float, OpenSpan, Spans]],
    usual: float | None,
    processes: Sequence[Process],
) -> Said:
    age, span, of = late[0]
    inside = f"in {kind} {name}" if kind != "sample" else "with no turn or tool open"
    work = next((each for each in of.process.working if span in each.spans), None) if of.process is not None else None
    here = f"; it is in {work.place}" if work is not None else ""
    if (work is None or not work.own) and (asked := standing.elsewhere(processes)):
        here = f"; {asked}"
    who = where(msgspec.structs.replace(span, role="")) or name
    text = f"{who} waits {seconds(age)} {inside}{here}"
    if len(late) > 1:
        thing = "request" if kind == "request" else "sample"
        text = f"{several(len(late), thing)} wait up to {seconds(age)} {inside}{here}"
    evidence = [f"{where(each)}: {seconds(since)}, {who.host} {who.pid}" for since, each, who in late[:4]]
    evidence += [f"usually {seconds(usual)}"] if usual is not None else []
    return Said(text, evidence, f"timeline/{of.host}-{of.pid}.jsonl")


def _took(run: str, found: Sequence[Spans], kind: str, name: str) -> list[float]:
    """Return how long spans with this name took that ended last, in the files of these processes."""
    stems = list(dict.fromkeys(f"{of.host}-{of.pid}" for of in found))[:_MOST_FILES]
    there = {path.stem: path for path in RunDir(Path(run)).lines("timeline")}
    return [
        (line.end_ns - line.start_ns) / 1e9
        for stem in stems
        if stem in there
        for line in tails.spans(there[stem])
        if line.kind == kind and line.name == name
    ]


def stages(found: Sequence[Spans], labels: Mapping[tuple[str, int], str]) -> Iterator[Said]:
    """Tell of ranks that are in an earlier stage than the others of their role, or in none."""
    groups: dict[str, list[tuple[Spans, OpenSpan]]] = defaultdict(list)
    for of in found:
        own = [span for span in of.spans if span.kind == "stage" and span.rank is not None]
        if own:
            groups[labels.get((of.host, of.pid)) or own[-1].role].append((of, own[-1]))
    for members in groups.values():
        first: dict[tuple[int | None, str], int] = {}
        for _, span in members:
            key = span.step, span.name
            first[key] = min(first.get(key, span.start_ns), span.start_ns)
        if len(first) < 2:
            continue
        behind = min(first, key=lambda key: (key[0] if key[0] is not None else 0, first[key]))
        late = [(of, span) for of, span in members if (span.step, span.name) == behind]
        others = [span for _, span in members if (span.step, span.name) != behind]
        if len(late) > len(others):
            continue
        of, span = late[0]
        age = max((each.end_ns - other.start_ns) / 1e9 for each, other in late)
        ranks = [other.rank for _, other in late if other.rank is not None]
        at = {each.process.place for each, _ in late if each.process is not None and each.process.place}
        here = f"; {standing.plural(ranks, 'it is', 'they are')} in {at.pop()}" if len(at) == 1 else ""
        most = Counter(other.name for other in others).most_common(1)[0][0]
        who = f"{standing.ranks(ranks, span.role)} {standing.plural(ranks, 'is', 'are')}"
        text = f"{who} in {span.name} since {seconds(age)}"
        yield Said(f"{text}, {several(len(others), 'other')} in {most}{here}", [], f"timeline/{of.host}-{of.pid}.jsonl")
