"""Data of a step's samples: durations, their parts, the causes of long durations, and the last samples of the step.

A part of a sample is the time of one activity: turns, the calls of one tool, rewards, or waiting.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import TypeAlias

import msgspec

from autoprof.base.intervals import segments
from autoprof.report.model import Part, SampleFigures, SampleRow, SpanRow, Tail, ToolRow
from autoprof.rundir.records import Id, Line

INSIDE = ("turn", "tool", "reward")
WAITING = "waiting"

# Key of a part: the kind, and for a tool the name of the tool.
Which: TypeAlias = tuple[str, str]
# Dict from the key of each part to its seconds and its number of calls.
Parts: TypeAlias = Mapping[Which, tuple[float, int]]


def _which(span: Line) -> Which:
    """Return the key of the part to which a turn, a tool call or a reward belongs."""
    return span.kind, span.name if span.kind == "tool" else ""


def parts_of(inside: Sequence[Line], start_ns: int, end_ns: int) -> Parts:
    """Return the parts of a sample from `start_ns` to `end_ns`. The sum of their seconds is the sample's duration.

    If several spans inside the sample run at the same time, each moment counts for the span that began last.
    """
    calls = Counter(map(_which, inside))
    spent: dict[Which, int] = dict.fromkeys(calls, 0)
    spans = [(f"{each.kind} {_which(each)[1]}", each.start_ns, each.end_ns) for each in inside]
    previous_end, waited_ns, pauses = start_ns, 0, 0
    for name, start, end in segments(spans, start_ns, end_ns):
        kind, _, tool = name.partition(" ")
        spent[kind, tool] += end - start
        waited_ns += start - previous_end
        pauses += start > previous_end
        previous_end = end
    pauses += end_ns > previous_end
    parts = {which: (took / 1e9, calls[which]) for which, took in spent.items()}
    return parts | {(WAITING, ""): ((waited_ns + end_ns - previous_end) / 1e9, pauses)}


def usual(of_samples: Sequence[Parts]) -> dict[Which, float]:
    """Return the median seconds of each part over all samples. Omit parts that fewer than half of the samples have."""
    counts = Counter(which for parts in of_samples for which in parts)
    common_parts = [which for which, count in counts.items() if 2 * count >= len(of_samples)]
    return {which: median(parts.get(which, (0.0, 0))[0] for parts in of_samples) for which in common_parts}


def held_by(parts: Parts, usual: Mapping[Which, float]) -> str:
    """Return the part whose seconds exceed the median of this part by most, such as `turn` or `tool search`.

    Args:
        parts: The parts of a sample. If this dict is empty, the returned text is empty.
        usual: The median seconds of each part over all samples.
    """
    if not parts:
        return ""
    kind, name = max(parts, key=lambda which: parts[which][0] - usual.get(which, 0.0))
    return f"{kind} {name}".strip()


def summed(of_samples: Iterable[Parts]) -> list[Part]:
    """Return the sum of each part over all samples, the longest part first."""
    sums: dict[Which, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for parts in of_samples:
        for which, (seconds, calls) in parts.items():
            sums[which] = sums[which][0] + seconds, sums[which][1] + calls
    totals = [Part(kind=kind, name=name, seconds=total, count=calls) for (kind, name), (total, calls) in sums.items()]
    return sorted(totals, key=lambda part: -part.seconds)


_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_MAX_POINTS = 300
_MAX_LONGEST = 50
_MAX_NAMED = 20
# The tail contains at most one twentieth of the samples.
TAIL_PART = 20
# A step with fewer samples than this number has no tail.
MIN_SAMPLES = 8

Ids: TypeAlias = Mapping[str, Id | None]
_Key = tuple[int | str, ...]
# Names of ids that autoprof's own recipes give to samples. Other recipes may have names of their own.
_OWN_NAMES = ("sample", "rollout")
# Names of ids that do not tell samples apart.
_SHARED_NAMES = ("agent", "validate")


class Sample(msgspec.Struct, frozen=True, gc=False):
    """A sample: its span, and the number of the journal with the span."""

    file: int
    line: Line

    @property
    def label(self) -> str:
        return sample_label(self.line.ids, self.line.name)

    def lane(self, label: str) -> str:
        """Return the label of the lane with the sample's role, if the label does not have it."""
        role = self.line.role
        return label if not role or label.startswith(role) else f"{role} ({label})"


def sample_label(ids: Ids, name: str) -> str:
    """Return the label of a sample, such as `prompt 17, rollout 3`.

    A sample without ids has its name as the label.
    """
    words = {"sample": "prompt"}
    return ", ".join(f"{words.get(key, key)} {ids[key]}" for key in _id_names(ids)) or name


def _id_names(ids: Ids) -> tuple[str, ...]:
    """Return the names of the ids of a sample that tell it apart from others."""
    names = tuple(name for name in _OWN_NAMES if ids.get(name) is not None)
    return names or tuple(name for name, value in ids.items() if value is not None and name not in _SHARED_NAMES)


class Samples:
    """Collector of the samples of one step."""

    def __init__(self) -> None:
        self.all: list[Sample] = []
        self._inside: dict[_Key, list[Line]] = {}
        self._all_inside: list[tuple[int, Line]] = []
        self._names: tuple[str, ...] = _OWN_NAMES
        self._keys_of_equal_samples: set[_Key] = set()

    def add(self, file: int, line: Line) -> None:
        """Add a span of the kind sample, turn, tool or reward. Ignore spans of a validation.

        Args:
            file: The number of the journal that contains the span.
            line: The span.
        """
        if line.ids.get("validate"):
            return
        if line.kind == "sample":
            self.all.append(Sample(file, line))
        else:
            self._all_inside.append((file, line))

    def figures(self, zero_ns: int, lanes: Sequence[str], files: Sequence[str]) -> SampleFigures | None:
        """Return the data of the samples. Return None if the step has no samples.

        Args:
            zero_ns: The start of the step.
            lanes: The label of the lane that contains the samples of each journal, by the number of the journal.
            files: The name of each journal, by the number of the journal.
        """
        if not self.all:
            return None
        if not any(sample.line.ids.get(name) is not None for sample in self.all for name in _OWN_NAMES):
            self._names = tuple(sorted({name for sample in self.all for name in _id_names(sample.line.ids)}))
        grouped = defaultdict(list)
        for file, line in self._all_inside:
            grouped[_key(file, line.ids, self._names)].append(line)
        self._inside = grouped
        self._keys_of_equal_samples = _keys_of_equal_samples(self.all, self._names)
        for each in self._inside.values():
            each.sort(key=_start)
        longest_first = sorted(self.all, key=lambda sample: sample.line.start_ns - sample.line.end_ns)
        parts = [self._parts_of_sample(sample) for sample in longest_first]
        median_parts = usual(parts)
        held_by_part = [held_by(part, median_parts) for part in parts]
        lengths = [(sample.line.end_ns - sample.line.start_ns) / 1e9 for sample in reversed(longest_first)]
        ends = sorted((sample.line.end_ns - zero_ns) / 1e9 for sample in longest_first)
        tail, tail_indexes = _tail(longest_first, held_by_part)
        shown_indexes = sorted({*range(min(len(longest_first), _MAX_LONGEST - len(tail_indexes))), *tail_indexes})
        return SampleFigures(
            count=len(longest_first),
            failed=sum(sample.line.error is not None for sample in longest_first),
            start_s=min((sample.line.start_ns - zero_ns) / 1e9 for sample in longest_first),
            end_s=ends[-1],
            mean_s=fmean(lengths),
            quantiles_s={f"{at:g}": _quantile(lengths, at) for at in _QUANTILES},
            done=_thinned_points([(end, count) for count, end in enumerate(ends, 1)]),
            tail=tail,
            parts=summed(parts),
            tools=self._tool_rows(longest_first),
            longest=[
                _row(
                    sample,
                    self._spans_inside(sample),
                    held_by_part[index],
                    parts[index],
                    zero_ns,
                    lanes[sample.file],
                    files[sample.file],
                )
                for index in shown_indexes
                for sample in [longest_first[index]]
            ],
        )

    def _spans_inside(self, sample: Sample) -> list[Line]:
        """Return the spans inside a sample: the spans with the ids of the sample that begin while the sample runs.

        Return an empty list if another sample has the same ids at the same time.
        """
        key = _key(sample.file, sample.line.ids, self._names)
        spans = self._inside.get(key, []) if key not in self._keys_of_equal_samples else []
        return spans[
            bisect_left(spans, sample.line.start_ns, key=_start) : bisect_right(spans, sample.line.end_ns, key=_start)
        ]

    def _parts_of_sample(self, sample: Sample) -> Parts:
        """Return the parts of a sample. Return an empty dict if another sample has the same ids at the same time."""
        if _key(sample.file, sample.line.ids, self._names) in self._keys_of_equal_samples:
            return {}
        return parts_of(self._spans_inside(sample), sample.line.start_ns, sample.line.end_ns)

    def _tool_rows(self, samples: Iterable[Sample]) -> list[ToolRow]:
        """Return a row for each tool that the samples called."""
        calls: dict[str, list[tuple[float, str, bool]]] = defaultdict(list)
        for sample in samples:
            for each in self._spans_inside(sample):
                if each.kind == "tool":
                    calls[each.name].append(((each.end_ns - each.start_ns) / 1e9, sample.label, each.error is not None))
        rows = [
            ToolRow(
                name=name,
                calls=len(of_tool),
                errors=sum(failed for _, _, failed in of_tool),
                seconds=sum(took for took, _, _ in of_tool),
                median_s=median(took for took, _, _ in of_tool),
                max_s=max(of_tool)[0],
                slowest=max(of_tool)[1],
            )
            for name, of_tool in calls.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)


def _start(span: Line) -> int:
    return span.start_ns


def _key(file: int, ids: Ids, names: Sequence[str]) -> _Key:
    return file, *(str(ids.get(name)) for name in names)


def _keys_of_equal_samples(samples: Iterable[Sample], names: Sequence[str]) -> set[_Key]:
    """Return the ids that several samples have at the same time. A span with such ids may belong to any of them.

    verl takes the id of a prompt from the field `extra_info.index` of the data. If the data lacks this field, all
    prompts have the id 0.
    """
    ends: dict[_Key, int] = {}
    shared = set()
    for sample in sorted(samples, key=lambda sample: sample.line.start_ns):
        key = _key(sample.file, sample.line.ids, names)
        if sample.line.start_ns < ends.get(key, 0):
            shared.add(key)
        ends[key] = max(ends.get(key, 0), sample.line.end_ns)
    return shared


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile at `share` (0 to 1) of ordered values. Interpolate linearly between two values."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _thinned_points(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return at most `_MAX_POINTS` of the points. The last third of the result keeps every point, to show the tail."""
    if len(points) <= _MAX_POINTS:
        return points
    tail = points[-_MAX_POINTS // 3 :]
    head = points[: len(points) - len(tail)]
    stride = -(-len(head) // (_MAX_POINTS - len(tail)))
    return head[::stride] + tail


def _tail(samples: Sequence[Sample], held_by_part: Sequence[str]) -> tuple[Tail | None, list[int]]:
    """Return the last samples of a step, and the indexes of the last samples that the report names.

    The last samples are the samples that ended after the longest time in which no sample ended. At most one twentieth
    of all samples can be last samples.

    Args:
        samples: All samples of the step.
        held_by_part: The `SampleRow.held_by` of each sample.
    """
    if len(samples) < MIN_SAMPLES:
        return None, []
    last_to_end_first = sorted(range(len(samples)), key=lambda index: -samples[index].line.end_ns)
    ends = [samples[index].line.end_ns for index in last_to_end_first]
    max_count = max(1, len(last_to_end_first) // TAIL_PART)
    count = max(range(1, max_count + 1), key=lambda count: ends[count - 1] - ends[count])
    named_indexes = last_to_end_first[: min(count, _MAX_NAMED)]
    tail = Tail(
        count=count,
        of=len(last_to_end_first),
        waited_s=(ends[0] - ends[count]) / 1e9,
        samples=[samples[index].label for index in named_indexes],
        held_by=Counter(held_by_part[index] for index in last_to_end_first[:count]).most_common(1)[0][0],
    )
    return tail, named_indexes


def _row(
    sample: Sample, inside: Sequence[Line], held: str, part: Parts, zero_ns: int, lane: str, file: str
) -> SampleRow:
    line = sample.line
    rollout = line.ids.get("rollout")
    counts = [turn.counts for turn in inside if turn.kind == "turn"] or [line.counts]
    prompts = [tokens for each in counts if (tokens := each.get("prompt_tokens")) is not None]
    responses = [tokens for each in counts if (tokens := each.get("response_tokens")) is not None]
    return SampleRow(
        label=sample.label,
        sample=str(line.ids.get("sample", "")),
        rollout=rollout if isinstance(rollout, int) else None,
        agent=str(line.ids.get("agent") or line.name) or None,
        lane=sample.lane(lane),
        file=file,
        start_s=(line.start_ns - zero_ns) / 1e9,
        end_s=(line.end_ns - zero_ns) / 1e9,
        seconds=(line.end_ns - line.start_ns) / 1e9,
        held_by=held,
        parts=summed([part]),
        spans=[
            SpanRow(
                name=each.name,
                kind=each.kind,
                start_s=(each.start_ns - zero_ns) / 1e9,
                end_s=(each.end_ns - zero_ns) / 1e9,
                error=each.error,
            )
            for each in inside
        ],
        prompt_tokens=int(prompts[0]) if prompts else None,
        response_tokens=int(sum(responses)) if responses else None,
        error=line.error,
    )
