"""Rewriter of one trace's events, so that they can share a file with those of other traces.

Process ids, ids of flows and of asynchronous events, and the base of the clock are made unique; everything else is kept
as written. Spans of the timeline are laid out in tracks: nested spans share one, overlapping spans do not.
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


class Lane(Struct, eq=False):
    """One track: what it is called, its spans by their starts, and while it is laid out the ends of what is open in it,
    each inside of the one before."""

    name: str
    spans: list[Line]
    open: list[int] = msgspec.field(default_factory=list)
    group: tuple[str, ...] = ()


def lay_out(spans: Iterable[Line]) -> list[Lane]:
    """Return the tracks of one process: first the stages and timers, then samples, then requests."""
    kinds = {"": _Kind(""), "samples": _Kind("samples"), "requests": _Kind("requests")}
    for number, span in enumerate(sorted(spans, key=lambda each: (each.start_ns, -each.end_ns))):
        kind, group = _group(span, number)
        lane = kinds[kind].lane_for(span, group)
        lane.open.append(span.end_ns)
        lane.spans.append(span)
    return [lane for kind in kinds.values() for lane in kind.lanes]


class _Kind:
    """The tracks of spans of one kind. There may be thousands at once, so none is looked for."""

    def __init__(self, name: str) -> None:
        self.lanes: list[Lane] = []
        self._name = name
        # Those with nothing open, the first before the others; and the others by when their outermost span ends.
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._of_group: dict[tuple[str, ...], list[Lane]] = {}

    def lane_for(self, span: Line, group: tuple[str, ...]) -> Lane:
        """Return the track of the same group in which the span nests, else the first that is free, else a new one."""
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
        self.lanes.append(Lane(f"{self._name or 'stages'} {count}" if self._name or self.lanes else "stages", []))
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
    """Return which tracks a span belongs to, and what it may lie inside of there."""
    if span.kind in _OF_SAMPLES:
        names = ("sample", "rollout", "validate")
        return "samples", tuple(str(span.ids.get(name, "")) for name in names)
    return ("requests", (str(number),)) if span.kind in _ALONE else ("", ())


Pid = int | float | str | None
Field = Raw | UnsetType
# No trace has as many.
_MOST_PROCESSES = 50_000
# Phases whose `id` holds in the whole file: flows, asynchronous events, and the older form of these.
_SHARED_IDS = frozenset("stfbneSTpF")
_PROCESS = frozenset((b'"process_name"', b'"process_labels"', b'"process_sort_index"'))


class Event(msgspec.Struct, gc=False, omit_defaults=True):
    """The fields of the trace event format, in the order in which Kineto writes them. Others no viewer knows."""

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


class _NearEvent(Event, gc=False, omit_defaults=True):
    ts: float | str | UnsetType = UNSET  # type: ignore[assignment]


_decoder = msgspec.json.Decoder(list[Event])
_near_decoder = msgspec.json.Decoder(list[_NearEvent])
_encoder = msgspec.json.Encoder()


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One trace that is merged.

    Attributes:
        path: The file.
        label: How its processes are named.
        detail: What else is said of its processes.
        shift_ns: What is added to its times.
        near: Whether a float holds its times to the nanosecond.
        name: What it is called where something is said of it.
    """

    path: Path
    label: str
    detail: str = ""
    shift_ns: int = 0
    near: bool = False
    name: str = ""


class Tally(msgspec.Struct):
    """The events and bytes of JSON that were written.

    Attributes:
        cut: Where the trace's end is missing, in words.
        refused: Why nothing was taken of it, else empty.
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
    """Write the events of a trace, divided by commas, up to where it is cut off.

    Args:
        source: The trace.
        number: Its number among the traces that are merged, from 0. The order in viewers goes by it.
        of: How many traces are merged.
        write: Takes the bytes, a piece at a time.
        progress: Is told how many more bytes of the file are read.

    Raises:
        TraceError: The trace can't be read.
    """
    tally = Tally()
    processes = _Processes(source, number, of)
    new = processes.new
    shift_ns = source.shift_ns
    near = bool(shift_ns) and source.near
    # Whole microseconds are added without a rounding, which leaves a small number.
    whole_us, rest_ns = float(shift_ns // 1000), float(shift_ns % 1000)

    def put(events: list[Event]) -> None:
        if events:
            text = (b",\n" if tally.events else b"") + _encoder.encode(events)[1:-1]
            tally.events += len(events)
            tally.bytes += len(text)
            write(text)

    with Reader(source.path, partial=True) as reader:
        read = 0
        decode: Callable[[bytes], list[Event]] = _near_decoder.decode if near else _decoder.decode  # type: ignore[assignment]
        for events in reader.chunks(decode):
            described = False
            progress(reader.place - read)
            read = reader.place
            try:
                for event in events:
                    if event.ph == "M" and _describes_process(event):
                        processes.describe(event)
                        described = True
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
            put([event for event in events if not _describes_process(event)] if described else events)
        tally.cut = reader.cut
    put(processes.descriptions())
    return tally


class _Processes:
    """The processes of one trace: their new ids, and what the trace says of them."""

    def __init__(self, source: Source, number: int, of: int) -> None:
        self._source = source
        self._number = number
        self._ids = itertools.count(1 + number, of)
        self.new: dict[Pid, int] = {}
        self._said: dict[Pid, dict[str, Any]] = {}

    def pid(self, old: Pid) -> int:
        """Return the id that stands for one of this trace, in no other trace."""
        new = self.new.get(old)
        if new is None:
            if len(self.new) >= _MOST_PROCESSES:
                raise ValueError(f"there are more than {_MOST_PROCESSES} processes")
            new = self.new[old] = next(self._ids)
        return new

    def describe(self, event: Event) -> None:
        """Keep what an event says of its process."""
        arguments = msgspec.json.decode(event.args) if event.args is not UNSET else {}
        if isinstance(arguments, dict):
            said = self._said.setdefault(event.pid, {}) if len(self._said) < _MOST_PROCESSES else {}
            said.update({name: arguments[name] for name in ("name", "labels", "sort_index") if name in arguments})

    def descriptions(self) -> list[Event]:
        """Return the processes in their old order, behind those of the traces before; Kineto's own tracks behind all.

        Those without events are left out: Kineto describes every device of a host.
        """

        def order(old: Pid) -> tuple[bool, float]:
            place = self._said.get(old, {}).get("sort_index", 0)
            return isinstance(old, str), place if isinstance(place, (int, float)) else 0

        found: list[Event] = []
        for place, old in enumerate(sorted(self.new, key=order)):
            said = self._said.get(old, {})
            labels, name = str(said.get("labels", "")), str(said.get("name", ""))
            if isinstance(old, str):
                kind, behind = old or "window", 1_000_000
            else:
                kind, behind = "host" if labels in ("", "CPU") else labels, 0
            details = [self._source.detail, name and f"{name} {old}"]
            found += description(
                self.new[old],
                f"{self._source.label} ({kind})",
                ", ".join(filter(None, details)),
                behind + self._number * 1000 + min(place, 999),
            )
        return found


def description(pid: int, name: str, labels: str, place: int) -> list[Event]:
    """Return the events that say what a process is called and where viewers show it."""
    return [
        Event(ph="M", name=Raw(what), pid=pid, tid=Raw(b"0"), args=Raw(_encoder.encode(arguments)))
        for what, arguments in (
            (b'"process_name"', {"name": name}),
            (b'"process_labels"', {"labels": labels}),
            (b'"process_sort_index"', {"sort_index": place}),
        )
    ]


def _describes_process(event: Event) -> bool:
    return event.ph == "M" and event.name is not UNSET and bytes(event.name) in _PROCESS


def _shifted(ts: Raw | str, shift_ns: int) -> Raw:
    """Return a time in µs moved by ns.

    Microseconds since the epoch as a float are right to 250 ns, so they stay whole.
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

    It stays a number where it is one: Perfetto drops flows whose id is a word.
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
    """Return a JSON string as text, any other value as it is written."""
    value = msgspec.json.decode(raw)
    return value if isinstance(value, str) else bytes(raw).decode()
