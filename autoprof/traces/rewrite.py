"""Rewriter of one trace's events, so that they can share a file with events of other traces.

It replaces process ids and the ids of flows and asynchronous events by unique ones, and shifts times to the common
base. Everything else stays as written. Spans of the timeline are laid out in tracks: nested spans share a track,
overlapping spans do not.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from autoprof.rundir.records import Line
from autoprof.traces.reader import NO_JSON, Reader, TraceError

_OF_SAMPLES = frozenset(("sample", "turn", "tool", "reward"))
_ALONE = frozenset(("request",))


class SpanLane(Struct, eq=False):
    """One track of the timeline.

    Attributes:
        name: Its name.
        spans: Its spans, by start.
        open: The ends of its open spans during the layout, outermost first.
        group: The group of its open spans during the layout.
    """

    name: str
    spans: list[Line]
    open: list[int] = msgspec.field(default_factory=list)
    group: tuple[str, ...] = ()


def lay_out(spans: Iterable[Line]) -> list[SpanLane]:
    """Return the tracks of one process: first the stages and timers, then samples, then requests."""
    kinds = {"": _Kind(""), "samples": _Kind("samples"), "requests": _Kind("requests")}
    for number, span in enumerate(sorted(spans, key=lambda each: (each.start_ns, -each.end_ns))):
        kind, group = _group(span, number)
        lane = kinds[kind].lane_for(span, group)
        lane.open.append(span.end_ns)
        lane.spans.append(span)
    return [lane for kind in kinds.values() for lane in kind.lanes]


class _Kind:
    """Tracks of spans of one kind. There may be thousands, so no operation searches through all of them."""

    def __init__(self, name: str) -> None:
        self.lanes: list[SpanLane] = []
        self._name = name
        # Heaps: numbers of tracks without open spans, and (end of the outermost span, number) of the others.
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._of_group: dict[tuple[str, ...], list[SpanLane]] = {}

    def lane_for(self, span: Line, group: tuple[str, ...]) -> SpanLane:
        """Return the track of the same group in which the span nests, else the first free track, else a new one."""
        while self._busy and self._busy[0][0] <= span.start_ns:
            self._release(heapq.heappop(self._busy)[1])
        for lane in self._of_group.get(group, ()):
            while lane.open[-1] <= span.start_ns:
                lane.open.pop()
            if span.end_ns <= lane.open[-1]:
                return lane
        number = heapq.heappop(self._free) if self._free else self._add()
        lane = self.lanes[number]
        lane.group = group
        self._of_group.setdefault(group, []).append(lane)
        heapq.heappush(self._busy, (span.end_ns, number))
        return lane

    def _add(self) -> int:
        count = len(self.lanes) + 1
        self.lanes.append(SpanLane(f"{self._name or 'stages'} {count}" if self._name or self.lanes else "stages", []))
        return count - 1

    def _release(self, number: int) -> None:
        lane = self.lanes[number]
        lane.open.clear()
        same = self._of_group[lane.group]
        same.remove(lane)
        if not same:
            del self._of_group[lane.group]
        heapq.heappush(self._free, number)


def _group(span: Line, number: int) -> tuple[str, tuple[str, ...]]:
    """Return the kind of tracks for a span, and its group. A span nests only in spans of the same group."""
    if span.kind in _OF_SAMPLES:
        names = ("sample", "rollout", "validate")
        return "samples", tuple(str(span.ids.get(name, "")) for name in names)
    return ("requests", (str(number),)) if span.kind in _ALONE else ("", ())


Pid = int | float | str | None
Field = Raw | UnsetType
# More than any trace has.
_MAX_PROCESSES = 50_000
# Phases whose `id` is valid in the whole file: flows, asynchronous events, and the older form of the latter.
_SHARED_IDS = frozenset("stfbneSTpF")
_PROCESS = frozenset((b'"process_name"', b'"process_labels"', b'"process_sort_index"'))


class RewrittenEvent(msgspec.Struct, gc=False, omit_defaults=True):
    """Fields of the trace event format, in Kineto's order. Viewers know no other fields."""

    ph: str
    cat: Field = UNSET
    name: Field = UNSET
    pid: Pid = ""
    tid: Field = UNSET
    ts: Field = UNSET
    dur: Field = UNSET
    args: Field = UNSET
    id: Field = UNSET
    bp: Field = UNSET
    s: Field = UNSET
    id2: Field = UNSET
    scope: Field = UNSET
    bind_id: Field = UNSET
    flow_in: Field = UNSET
    flow_out: Field = UNSET
    tts: Field = UNSET
    tdur: Field = UNSET
    cname: Field = UNSET
    sf: Field = UNSET
    stack: Field = UNSET
    esf: Field = UNSET
    estack: Field = UNSET


class _NearEvent(RewrittenEvent, gc=False, omit_defaults=True):
    ts: float | str | UnsetType = UNSET  # type: ignore[assignment]


_decoder = msgspec.json.Decoder(list[RewrittenEvent])
_near_decoder = msgspec.json.Decoder(list[_NearEvent])
_encoder = msgspec.json.Encoder()


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A trace to rewrite.

    Attributes:
        path: The file.
        label: The name for its processes.
        detail: Further text about its processes.
        shift_ns: Nanoseconds to add to its times.
        near: True if a float holds its times to the nanosecond.
        name: Its name in messages.
    """

    path: Path
    label: str
    detail: str = ""
    shift_ns: int = 0
    near: bool = False
    name: str = ""


class Tally(msgspec.Struct):
    """Counts of the written events and bytes of JSON.

    Attributes:
        cut: A description of the missing end of a truncated trace; else empty.
        refused: The reason why the trace could not be read; else empty.
    """

    events: int = 0
    bytes: int = 0
    cut: str = ""
    refused: str = ""


def rewrite(
    source: Source,
    number: int,
    of: int,
    write: Callable[[bytes], object],
    progress: Callable[[int], object] = lambda read: None,
) -> Tally:
    """Write the events of a trace, separated by commas. A truncated trace is written up to its end.

    Args:
        source: The trace.
        number: Its number among the merged traces, from 0. Viewers show traces in this order.
        of: The number of merged traces.
        write: Callback for each piece of the output.
        progress: Callback with the number of bytes read since its last call.

    Raises:
        TraceError: The trace can't be read.
    """
    tally = Tally()
    processes = _Processes(source, number, of)
    new = processes.new
    shift_ns = source.shift_ns
    near = bool(shift_ns) and source.near
    # Add whole microseconds first, which needs no rounding. The sum is a small number, so the rest stays exact.
    whole_us, rest_ns = float(shift_ns // 1000), float(shift_ns % 1000)

    def put(events: list[RewrittenEvent]) -> None:
        if events:
            text = (b",\n" if tally.events else b"") + _encoder.encode(events)[1:-1]
            tally.events += len(events)
            tally.bytes += len(text)
            write(text)

    with Reader(source.path, partial=True) as reader:
        read = 0
        decode: Callable[[bytes], list[RewrittenEvent]] = _near_decoder.decode if near else _decoder.decode  # type: ignore[assignment]
        for events in reader.chunks(decode):
            described: list[int] = []
            progress(reader.place - read)
            read = reader.place
            try:
                for place, event in enumerate(events):
                    if event.ph == "M" and _describes_process(event):
                        processes.describe(event)
                        described.append(place)
                        continue
                    event.pid = new.get(event.pid) or processes.pid(event.pid)
                    if event.id is not UNSET and event.ph in _SHARED_IDS:
                        event.id = _own_id(event.id, number, of)
                    if event.bind_id is not UNSET:
                        event.bind_id = _own_id(event.bind_id, number, of)
                    if event.id2 is not UNSET:
                        event.id2 = _own_scopes(event.id2, number, of)
                    if shift_ns:
                        ts: Any = event.ts
                        if ts.__class__ is float:
                            event.ts = round((ts + whole_us) * 1e3 + rest_ns) / 1e3  # type: ignore[assignment]
                        elif ts is not UNSET:
                            event.ts = _shifted(ts, shift_ns)
            except (ValueError, *NO_JSON) as error:
                raise TraceError(f"{source.path}: an event can't be read: {error}") from None
            for place in reversed(described):
                del events[place]
            put(events)
        tally.cut = reader.cut
    put(processes.descriptions())
    return tally


class _Processes:
    """Processes of one trace: their new ids, and their descriptions in the trace."""

    def __init__(self, source: Source, number: int, of: int) -> None:
        self._source = source
        self._number = number
        self._ids = itertools.count(1 + number, of)
        self.new: dict[Pid, int] = {}
        self._described: dict[Pid, dict[str, Any]] = {}

    def pid(self, old: Pid) -> int:
        """Return the new id of a process. No other trace uses it."""
        new = self.new.get(old)
        if new is None:
            if len(self.new) >= _MAX_PROCESSES:
                raise ValueError(f"more than {_MAX_PROCESSES} processes")
            new = self.new[old] = next(self._ids)
        return new

    def describe(self, event: RewrittenEvent) -> None:
        """Keep the description of a process from an event."""
        arguments = msgspec.json.decode(event.args) if event.args is not UNSET else {}
        if isinstance(arguments, dict):
            own = self._described.setdefault(event.pid, {}) if len(self._described) < _MAX_PROCESSES else {}
            own.update({name: arguments[name] for name in ("name", "labels", "sort_index") if name in arguments})

    def descriptions(self) -> list[RewrittenEvent]:
        """Return the descriptions of the processes, in their old order, after the processes of earlier traces.

        Kineto's own tracks come last. Processes without events are left out, because Kineto describes every device of a
        host.
        """

        def order(old: Pid) -> tuple[bool, float]:
            place = self._described.get(old, {}).get("sort_index", 0)
            return isinstance(old, str), place if isinstance(place, (int, float)) else 0

        events: list[RewrittenEvent] = []
        for place, old in enumerate(sorted(self.new, key=order)):
            own = self._described.get(old, {})
            labels, name = str(own.get("labels", "")), str(own.get("name", ""))
            if isinstance(old, str):
                kind, behind = old or "window", 1_000_000
            else:
                kind, behind = "host" if labels in ("", "CPU") else labels, 0
            details = [self._source.detail, name and f"{name} {old}"]
            events += description(
                self.new[old],
                f"{self._source.label} ({kind})",
                ", ".join(filter(None, details)),
                behind + self._number * 1000 + min(place, 999),
            )
        return events


def description(pid: int, name: str, labels: str, place: int) -> list[RewrittenEvent]:
    """Return the events that give a process its name, labels and place in viewers."""
    return [
        RewrittenEvent(ph="M", name=Raw(what), pid=pid, tid=Raw(b"0"), args=Raw(_encoder.encode(arguments)))
        for what, arguments in (
            (b'"process_name"', {"name": name}),
            (b'"process_labels"', {"labels": labels}),
            (b'"process_sort_index"', {"sort_index": place}),
        )
    ]


def _describes_process(event: RewrittenEvent) -> bool:
    return event.ph == "M" and event.name is not UNSET and bytes(event.name) in _PROCESS


def _shifted(ts: Raw | str, shift_ns: int) -> Raw:
    """Return a time in µs, shifted by nanoseconds.

    It computes with integers, because a float of microseconds since the epoch is exact to 250 ns only.
    """
    text = ts.encode() if isinstance(ts, str) else bytes(ts).strip(b'"')
    whole, _, rest = text.partition(b".")
    if whole.isdigit() and (rest.isdigit() or not rest):
        time_ns = int(whole) * 1000 + int((rest + b"00")[:3] or 0) + shift_ns
    else:
        time_ns = round(float(text) * 1000) + shift_ns
    return microseconds(time_ns)


def microseconds(time_ns: int) -> Raw:
    """Return nanoseconds as the microseconds of a trace."""
    return Raw(b"%s%d.%03d" % (b"-" if time_ns < 0 else b"", abs(time_ns) // 1000, abs(time_ns) % 1000))


def _own_id(old: Raw, number: int, of: int) -> Raw:
    """Return an id that no other trace has.

    A number stays a number, because Perfetto drops flows whose id is text.
    """
    text = _text(old)
    try:
        value = int(text, 0)
    except ValueError:
        return Raw(_encoder.encode(f"{number}:{text}"))
    return Raw(b"%d" % (value * of + number))


def _own_scopes(old: Raw, number: int, of: int) -> Raw:
    scopes = msgspec.json.decode(old, type=dict[str, Raw])
    if "global" in scopes:
        scopes["global"] = _own_id(scopes["global"], number, of)
    return Raw(_encoder.encode(scopes))


def _text(raw: Raw) -> str:
    """Return a JSON string as text, and any other value as written."""
    value = msgspec.json.decode(raw)
    return value if isinstance(value, str) else bytes(raw).decode()
