"""Rewriter of one trace's events, so that they can share a file with events of other traces.

The rewriter replaces process ids, and the ids of flows and of asynchronous events, by unique ids. It shifts times to
the common base. Everything else stays as written. Spans of the timeline are laid out in tracks: nested spans share a
track, spans that overlap without nesting do not.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from autoprof.rundir import layout
from autoprof.rundir.records import CaptureMeta, Line
from autoprof.traces.reader import NO_JSON, Reader, TraceError, check_name

_SAMPLE_KINDS = frozenset(("sample", "turn", "tool", "reward"))


class SpanLane(Struct, eq=False):
    """One track of the timeline: the spans that viewers show in one row.

    Attributes:
        name: The name of the track.
        spans: The spans of the track, ordered by start.
        open: Used during the layout: the ends of the spans that are open in the track, outermost first, in ns.
        group: Used during the layout: the group of the spans that are open in the track (see `_group`).
    """

    name: str
    spans: list[Line]
    open: list[int] = msgspec.field(default_factory=list)
    group: tuple[str, ...] = ()


def lay_out(spans: Iterable[Line]) -> list[SpanLane]:
    """Return the tracks for the spans of one process: first stages and timers, then samples, then requests."""
    kinds = {"": _KindLanes(""), "samples": _KindLanes("samples"), "requests": _KindLanes("requests")}
    for number, span in enumerate(sorted(spans, key=lambda each: (each.start_ns, -each.end_ns))):
        kind, group = _group(span, number)
        lane = kinds[kind].lane_for(span, group)
        lane.open.append(span.end_ns)
        lane.spans.append(span)
    return [lane for kind in kinds.values() for lane in kind.lanes]


class _KindLanes:
    """Tracks of one kind: stages, samples or requests.

    A process may have thousands of tracks, so no operation searches through all of them.
    """

    def __init__(self, name: str) -> None:
        self.lanes: list[SpanLane] = []
        self._name = name
        # Two heaps: the numbers of the tracks without open spans; (end of the outermost span, number of the track) for
        # each track with open spans.
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._of_group: dict[tuple[str, ...], list[SpanLane]] = {}

    def lane_for(self, span: Line, group: tuple[str, ...]) -> SpanLane:
        """Return a track of the same group in which the span nests in the open spans.

        If no such track exists, return the first track without open spans. If every track has open spans, return a new
        track.
        """
        while self._busy and self._busy[0][0] <= span.start_ns:
            self._release_track(heapq.heappop(self._busy)[1])
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

    def _release_track(self, number: int) -> None:
        lane = self.lanes[number]
        lane.open.clear()
        group_lanes = self._of_group[lane.group]
        group_lanes.remove(lane)
        if not group_lanes:
            del self._of_group[lane.group]
        heapq.heappush(self._free, number)


def _group(span: Line, number: int) -> tuple[str, tuple[str, ...]]:
    """Return the kind of track that a span needs, and the group of the span.

    A span shares a track only with spans of the same group that are open at the same time.
    """
    if span.kind in _SAMPLE_KINDS:
        names = ("sample", "rollout", "validate")
        return "samples", tuple(str(span.ids.get(name, "")) for name in names)
    return ("requests", (str(number),)) if span.kind == "request" else ("", ())


Pid = int | float | str | None
Field = Raw | UnsetType
# Maximum number of processes in a trace. No valid trace has more.
_MAX_PROCESSES = 50_000
# Phases (`ph`) of events whose `id` must be unique in the whole file: flows, asynchronous events, and the older form of
# asynchronous events.
_SHARED_IDS = frozenset("stfbneSTpF")
_PROCESS_EVENTS = frozenset((b'"process_name"', b'"process_labels"', b'"process_sort_index"'))


class RewrittenEvent(msgspec.Struct, gc=False, omit_defaults=True):
    """An event with the fields of the trace event format, in Kineto's order. Viewers know no other fields."""

    ph: str = ""  # Empty for the events that `reader.check_name` describes.
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


# Maximum number of process ids of a group: one for the process, then one for each of its devices.
_GROUP_SLOTS = 1000
# Lowest process id of a group. No thread of Linux has such an id, so only the timeline's first track gets it too.
_FIRST_GROUP_PID = 5_000_001


class ProcessGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of a merged trace: the process of some traces and of a timeline, as viewers show it.

    Attributes:
        name: The name that viewers show.
        labels: A text that viewers show beside the name: the host and the pid.
        number: The number of the group, from 0. Viewers show the groups in the order of these numbers.
        count: The number of all groups.
    """

    name: str
    labels: str
    number: int
    count: int

    def pid(self, slot: int) -> int:
        """Return the process id in the merged trace: of the process for slot 0, of a device for another slot."""
        return _FIRST_GROUP_PID + self.number + slot * self.count

    def descriptions(self, slot: int, device: str = "") -> list[RewrittenEvent]:
        """Return the events that describe the process, or one of its devices, to viewers."""
        name = f"{self.name} ({device})" if device else self.name
        return description(self.pid(slot), name, self.labels, self.number * _GROUP_SLOTS + slot)


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """A trace to merge.

    Attributes:
        path: The path of the trace.
        label: The name that viewers show for the processes of the trace.
        detail: A text about the processes that viewers show beside `label`, such as the host.
        meta: The content of the capture's meta file.
        shift_ns: Nanoseconds to add to the times of the trace, to get times on the clock of the driver's host.
        near: True if the times of the trace are so small that a float holds them to the nanosecond.
        name: The name of the trace in messages. By default it is the file name.
        pid: The pid of the process that recorded the trace. None if unknown.
        roles: The roles of the capture.
        words: The words of the capture's label that name its rank, such as `replica0 rank1`.
        group: The group of the process. None if the process is unknown.
    """

    path: Path
    label: str
    detail: str = ""
    meta: CaptureMeta = layout.record({}, CaptureMeta)
    shift_ns: int = 0
    near: bool = False
    name: str = ""
    pid: int | None = None
    roles: tuple[str, ...] = ()
    words: str = ""
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.path.name)


class Tally(msgspec.Struct):
    """Result of rewriting one trace.

    Attributes:
        events: The number of events that were written.
        bytes: The number of bytes of JSON that were written.
        cut: The reason why the end of a truncated trace is missing; empty for a complete trace.
        refused: The reason why the trace could not be read; empty if the trace was read.
    """

    events: int = 0
    bytes: int = 0
    cut: str = ""
    refused: str = ""


def rewrite(
    source: Input,
    number: int,
    trace_count: int,
    write: Callable[[bytes], object],
    progress: Callable[[int], object] = lambda read: None,
) -> Tally:
    """Write the events of a trace as JSON, separated by commas. If the trace is truncated, write its readable events.

    Args:
        source: The trace.
        number: The number of the trace among the merged traces, from 0. Viewers show the traces in the order of these
            numbers.
        trace_count: The number of all merged traces.
        write: Function that is called with each piece of the output.
        progress: Function that is called with the number of bytes that were read since the previous call.

    Raises:
        TraceError: The trace can't be read.
    """
    tally = Tally()
    processes = _Processes(source, number, trace_count)
    new = processes.new
    shift_ns = source.shift_ns
    near = bool(shift_ns) and source.near
    # Add whole microseconds first: their sum is not rounded. The sum is small, so adding the rest stays exact.
    whole_us, rest_ns = float(shift_ns // 1000), float(shift_ns % 1000)

    def put(events: list[RewrittenEvent]) -> None:
        if events:
            text = (b",\n" if tally.events else b"") + _encoder.encode(events)[1:-1]
            tally.events += len(events)
            tally.bytes += len(text)
            write(text)

    with Reader(source.path, accept_truncated=True) as reader:
        read = 0
        decode: Callable[[bytes], list[RewrittenEvent]] = _near_decoder.decode if near else _decoder.decode  # type: ignore[assignment]
        for events in reader.chunks(decode):
            left_out: list[int] = []
            progress(reader.place - read)
            read = reader.place
            try:
                for place, event in enumerate(events):
                    if event.ph == "M" and event.name is not UNSET and bytes(event.name) in _PROCESS_EVENTS:
                        processes.note_description(event)
                        left_out.append(place)
                        continue
                    if not event.ph:
                        check_name("" if event.name is UNSET else msgspec.json.decode(event.name, type=str))
                        left_out.append(place)
                        continue
                    event.pid = new.get(event.pid) or processes.pid(event.pid)
                    if event.id is not UNSET and event.ph in _SHARED_IDS:
                        event.id = _unique_id(event.id, number, trace_count)
                    if event.bind_id is not UNSET:
                        event.bind_id = _unique_id(event.bind_id, number, trace_count)
                    if event.id2 is not UNSET:
                        event.id2 = _unique_scopes(event.id2, number, trace_count)
                    if shift_ns:
                        ts: Any = event.ts
                        if ts.__class__ is float:
                            event.ts = round((ts + whole_us) * 1e3 + rest_ns) / 1e3  # type: ignore[assignment]
                        elif ts is not UNSET:
                            event.ts = _shifted_time(ts, shift_ns)
            except (ValueError, *NO_JSON) as error:
                raise TraceError(f"{source.path}: an event can't be read: {error}") from None
            for place in reversed(left_out):
                del events[place]
            put(events)
        tally.cut = reader.cut
    put(processes.descriptions())
    return tally


class _Processes:
    """The processes of one trace: their new ids, and the names, labels and sort indexes that the trace gives them.

    Attributes:
        new: Dict from the old id of a process to its new id.
    """

    def __init__(self, source: Input, number: int, trace_count: int) -> None:
        self._source = source
        self._number = number
        self._ids = itertools.count(1 + number, trace_count)
        self.new: dict[Pid, int] = {}
        # The slots of the group that the trace uses, by the old ids of its processes.
        self._slots: dict[Pid, int] = {}
        self._described: dict[Pid, dict[str, Any]] = {}

    def pid(self, old: Pid) -> int:
        """Return the new id of the process with the id `old`. No other merged trace uses the new id.

        Raises:
            ValueError: The trace has more than `_MAX_PROCESSES` processes.
        """
        new = self.new.get(old)
        if new is None:
            if len(self.new) >= _MAX_PROCESSES:
                raise ValueError(f"more than {_MAX_PROCESSES} processes")
            slot = self._slot(old)
            if slot is None or self._source.group is None:
                new = next(self._ids)
            else:
                new = self._source.group.pid(slot)
                self._slots[old] = slot
            self.new[old] = new
        return new

    def _slot(self, old: Pid) -> int | None:
        """Return the slot of a process in the trace's group. Return None if the process is not of the group.

        Kineto's own tracks, whose ids are texts, belong to the process that it describes as `CPU`.
        """
        if self._source.group is None:
            return None
        if old == self._host_pid or (isinstance(old, str) and self._host_pid is not None):
            return 0
        is_device = isinstance(old, int) and 0 <= old < _GROUP_SLOTS - 1 and old in self._described
        return 1 + int(old) if is_device else None  # type: ignore[arg-type]

    @property
    def _host_pid(self) -> Pid:
        """Return the old id of the process that recorded the trace. Return None if the trace does not describe it."""
        hosts = (old for old, described in self._described.items() if described.get("labels") == "CPU")
        return next(hosts, self._source.pid if self._source.pid in self._described else None)

    def note_description(self, event: RewrittenEvent) -> None:
        """Keep the name, the labels or the sort index of a process, which the event contains."""
        arguments = msgspec.json.decode(event.args) if event.args is not UNSET else {}
        if isinstance(arguments, dict):
            descriptions = self._described.setdefault(event.pid, {}) if len(self._described) < _MAX_PROCESSES else {}
            descriptions.update(
                {name: arguments[name] for name in ("name", "labels", "sort_index") if name in arguments}
            )

    def descriptions(self) -> list[RewrittenEvent]:
        """Return the events that describe the processes of the trace to viewers.

        The sort indexes keep the order of the processes in the trace, and place them after the processes of earlier
        traces. Kineto's own tracks come last. Processes without events are left out, because Kineto describes every
        device of a host.
        """

        def order(old: Pid) -> tuple[bool, float]:
            place = self._described.get(old, {}).get("sort_index", 0)
            return isinstance(old, str), place if isinstance(place, (int, float)) else 0

        events: list[RewrittenEvent] = []
        for place, old in enumerate(sorted(self.new, key=order)):
            described = self._described.get(old, {})
            if self._source.group is not None and old in self._slots:
                slot = self._slots[old]
                events += self._source.group.descriptions(slot, str(described.get("labels", "")) if slot else "")
                continue
            labels, name = str(described.get("labels", "")), str(described.get("name", ""))
            if isinstance(old, str):
                kind, base_index = old or "window", 1_000_000
            else:
                kind, base_index = "host" if labels in ("", "CPU") else labels, 0
            details = [self._source.detail, name and f"{name} {old}"]
            events += description(
                self.new[old],
                f"{self._source.label} ({kind})",
                ", ".join(filter(None, details)),
                base_index + self._number * 1000 + min(place, 999),
            )
        return events


def description(pid: int, name: str, labels: str, place: int) -> list[RewrittenEvent]:
    """Return the events that tell viewers the name, the labels and the position of a process."""
    return [
        RewrittenEvent(ph="M", name=Raw(what), pid=pid, tid=Raw(b"0"), args=Raw(_encoder.encode(arguments)))
        for what, arguments in (
            (b'"process_name"', {"name": name}),
            (b'"process_labels"', {"labels": labels}),
            (b'"process_sort_index"', {"sort_index": place}),
        )
    ]


def _shifted_time(ts: Raw | str, shift_ns: int) -> Raw:
    """Return the time `ts`, which is in µs, plus `shift_ns` nanoseconds, in µs.

    The sum is computed with integers: as a float, a time in microseconds since the epoch is exact to 250 ns only.
    """
    text = ts.encode() if isinstance(ts, str) else bytes(ts).strip(b'"')
    whole, _, rest = text.partition(b".")
    if whole.isdigit() and (rest.isdigit() or not rest):
        time_ns = int(whole) * 1000 + int((rest + b"00")[:3] or 0) + shift_ns
    else:
        time_ns = round(float(text) * 1000) + shift_ns
    return microseconds(time_ns)


def microseconds(time_ns: int) -> Raw:
    """Return a time as the text that a trace has for it: microseconds with three decimals."""
    return Raw(b"%s%d.%03d" % (b"-" if time_ns < 0 else b"", abs(time_ns) // 1000, abs(time_ns) % 1000))


def _unique_id(old: Raw, number: int, trace_count: int) -> Raw:
    """Return a new id for `old` that no other merged trace has.

    If the old id is a number, the new id is a number too, because Perfetto drops flows whose id is a text.
    """
    text = _text(old)
    try:
        value = int(text, 0)
    except ValueError:
        return Raw(_encoder.encode(f"{number}:{text}"))
    return Raw(b"%d" % (value * trace_count + number))


def _unique_scopes(old: Raw, number: int, trace_count: int) -> Raw:
    scopes = msgspec.json.decode(old, type=dict[str, Raw])
    if "global" in scopes:
        scopes["global"] = _unique_id(scopes["global"], number, trace_count)
    return Raw(_encoder.encode(scopes))


def _text(raw: Raw) -> str:
    """Return the content of a JSON string. Return any other JSON value as it is written."""
    value = msgspec.json.decode(raw)
    return value if isinstance(value, str) else bytes(raw).decode()
