"""Sorted rows of a trace's events. The needed memory does not grow with the number of events.

A row has 20 bytes: start, duration, and a number that identifies name, category, process and thread. A trace consists
of a few blocks whose events are already in order. So rows are kept in sorted runs, and the runs are merged at the end.
A run here is a sorted sequence of rows.
"""

from __future__ import annotations

import heapq
import tempfile
from array import array
from collections.abc import Callable, Iterator
from typing import IO, Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from autoprof.traces.reader import check_name

Row = tuple[float, float, int]
# Number of rows of a full run. A full run takes 2.6 MB.
RUN_ROWS = 128 << 10
# Maximum number of runs in memory. If there are more, the oldest run is moved to a file.
RUNS_IN_MEMORY = 8
# Number of rows that are read from the file at once.
_BLOCK_ROWS = 8 << 10


class Rows:
    """Rows of the shape (start, negative duration, number).

    Rows are added in any order. They are read in the order of their starts. If events start at the
    same time, the longest comes first.
    """

    def __init__(self) -> None:
        self._starts, self._lengths, self._numbers = array("d"), array("d"), array("I")
        self._in_order = True
        self._last = (float("-inf"), 0.0)
        self._runs: list[_Run] = []
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def extend(self, rows: list[Row]) -> None:
        """Add rows.

        Raises:
            OSError: The temporary file can't be written, for example because the disk is full.
        """
        if not rows:
            return
        rows.sort()
        starts, lengths, numbers = zip(*rows, strict=True)
        if rows[0][:2] < self._last:
            self._in_order = False
        self._last = max(self._last, rows[-1][:2])
        self._starts.extend(starts)
        self._lengths.extend(lengths)
        self._numbers.extend(numbers)
        if len(self._starts) >= RUN_ROWS:
            self._end_run()

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows in order. The rows can be read only once."""
        self._end_run()
        lanes: list[list[_Run]] = []
        for run in self._runs:
            lane = next((lane for lane in lanes if lane[-1].last <= run.first), None)
            if lane is None:
                lanes.append([run])
            else:
                lane.append(run)
        lane_rows = [self._read(lane) for lane in lanes]
        return lane_rows[0] if len(lane_rows) == 1 else heapq.merge(*lane_rows)

    def _end_run(self) -> None:
        if not self._starts:
            return
        columns = (self._starts, self._lengths, self._numbers)
        if not self._in_order:
            starts, lengths, numbers = zip(*sorted(zip(*columns, strict=True)), strict=True)
            columns = (array("d", starts), array("d", lengths), array("I", numbers))
        run = _Run(columns)
        self._runs.append(run)
        runs_in_memory = [each for each in self._runs if each.columns is not None]
        if len(runs_in_memory) > RUNS_IN_MEMORY:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="autoprof-")  # noqa: SIM115
            runs_in_memory[0].move(self._file)
        self._starts, self._lengths, self._numbers = array("d"), array("d"), array("I")
        self._in_order = True
        self._last = (float("-inf"), 0.0)

    def _read(self, lane: list[_Run]) -> Iterator[Row]:
        for run in lane:
            if run.columns is not None:
                yield from zip(*run.columns, strict=True)
                continue
            assert self._file is not None
            for first_row in range(0, run.count, _BLOCK_ROWS):
                yield from run.block(self._file, first_row, min(_BLOCK_ROWS, run.count - first_row))


class _Run:
    """A sorted sequence of rows, in memory or in the temporary file.

    Attributes:
        columns: The starts, the negative durations and the numbers of the rows. None if the rows are in the file.
        count: The number of rows.
        first: The start and the negative duration of the first row.
        last: The start and the negative duration of the last row.
    """

    def __init__(self, columns: tuple[array[float], array[float], array[int]]) -> None:
        self.columns: tuple[array[float], array[float], array[int]] | None = columns
        self.count = len(columns[0])
        self.first = (columns[0][0], columns[1][0])
        self.last = (columns[0][-1], columns[1][-1])
        self._places: list[int] = []

    def move(self, file: IO[bytes]) -> None:
        """Move the rows from memory to the end of the file."""
        assert self.columns is not None
        file.seek(0, 2)
        for column in self.columns:
            self._places.append(file.tell())
            column.tofile(file)
        self.columns = None

    def block(self, file: IO[bytes], first_row: int, count: int) -> Iterator[Row]:
        """Return `count` rows from the file, from the row with the index `first_row`."""
        starts, lengths, numbers = array("d"), array("d"), array("I")
        columns: tuple[array[Any], ...] = (starts, lengths, numbers)
        for place, column in zip(self._places, columns, strict=True):
            file.seek(place + first_row * column.itemsize)
            column.fromfile(file, count)
        return zip(starts, lengths, numbers, strict=True)


Id = int | float | str | None
# Category, name, process and thread of a row.
Key = tuple[str, str, Id, Id]

# Maximum number of distinct keys that are summed separately. Some programs put a number into every name.
MAX_NAMES = 50_000
OTHER_NAMES = "(other names)"
# Maximum number of devices. No host has more.
_MAX_DEVICES = 1_000
# 30,000 years. Larger times are invalid, and would make sums invalid.
_MAX_US = 1e18
_Us = Annotated[float, Meta(ge=-_MAX_US, le=_MAX_US)]


class Event(Struct, gc=False):
    ph: str = ""  # Empty for the events that `reader.check_name` describes.
    name: str = ""
    cat: str = ""
    pid: Id = None
    tid: Id = None
    ts: _Us | str = 0.0
    dur: _Us | str = 0.0
    args: Raw | UnsetType = UNSET


decode: Callable[[bytes], list[Event]] = msgspec.json.Decoder(list[Event]).decode


_Number = TypeVar("_Number", int, float)


def _time(value: _Number, text: float | str) -> _Number:
    if not abs(value) <= _MAX_US:
        raise ValueError(f"{str(text)[:40]!r} is not a time")
    return value


class _Memory(Struct, rename={"allocated": "Total Allocated", "reserved": "Total Reserved", "type": "Device Type"}):
    allocated: int = 0
    reserved: int = 0
    type: int = 0
    id: int = msgspec.field(default=0, name="Device Id")


_decode_memory = msgspec.json.Decoder(_Memory).decode


class EventData:
    """Data that is collected from the events of a trace: rows, descriptions and memory peaks.

    Attributes:
        rows: One row for each event with a duration.
        count: The number of all events.
        keys: The keys of the rows. The number in a row is the index of its key in this list.
        descriptions: Names and labels of processes. Dict from (event name and field, such as `process_name.name`;
            process id) to the text.
        peaks: Memory peaks. Dict from (type of the device, number of the device) to the peaks [allocated bytes,
            reserved bytes].
        whole_us: If the trace has times as text, the time to which the starts of the rows are relative, in µs since the
            epoch. Else 0.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.count = 0
        self.keys: list[Key] = []
        self._numbers: dict[Key, int] = {}
        self.descriptions: dict[tuple[str, Id], str] = {}
        self.peaks: dict[tuple[int, int], list[int]] = {}
        self.whole_us = 0

    def events(self, events: list[Event]) -> None:
        """Add the data of some events.

        Raises:
            ValueError: A time is invalid, or an event has no `ph`.
            msgspec.DecodeError: The arguments of an event are not valid JSON.
        """
        self.count += len(events)
        numbers, rows = self._numbers, []
        for event in events:
            if event.ph == "X":
                key = (event.cat, event.name, event.pid, event.tid)
                number = numbers.get(key)
                if number is None:
                    number = self._number(key)
                start, length = event.ts, event.dur
                if type(start) is not float:
                    start = self._start(start)
                if type(length) is not float:
                    length = _time(float(length), length)
                if length < 0:
                    # Older Kineto can write negative durations; newer releases prevent them (output_json.cpp,
                    # handleActivity).
                    length = 0.0
                rows.append((start, -length, number))
            elif event.ph == "i" and event.name == "[memory]":
                self._memory(event)
            elif event.ph == "M":
                self._add_description(event)
            elif not event.ph:
                check_name(event.name)
        self.rows.extend(rows)

    def _number(self, key: Key) -> int:
        if len(self._numbers) >= MAX_NAMES:
            key = (key[0], OTHER_NAMES, key[2], key[3])
            if len(self.keys) >= 2 * MAX_NAMES:
                key = ("", OTHER_NAMES, None, None)
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def _start(self, text: float | str) -> float:
        """Return a start as microseconds since `whole_us`, the whole microseconds of the first start.

        torch_npu writes starts as a text with the microseconds since the epoch, because a float would lose the
        nanoseconds.
        """
        digits, _, fraction = str(text).partition(".")
        whole = _time(int(digits), text)
        self.whole_us = self.whole_us or whole
        return whole - self.whole_us + float(f"0.{fraction or 0}")

    def _memory(self, event: Event) -> None:
        if event.args is UNSET:
            return
        memory = _decode_memory(event.args)
        if (memory.type, memory.id) not in self.peaks and len(self.peaks) >= _MAX_DEVICES:
            return
        peak = self.peaks.setdefault((memory.type, memory.id), [0, 0])
        peak[0] = max(peak[0], memory.allocated)
        peak[1] = max(peak[1], memory.reserved)

    def _add_description(self, event: Event) -> None:
        arguments: Any = msgspec.json.decode(event.args) if event.args is not UNSET else {}
        for name, value in arguments.items() if isinstance(arguments, dict) else ():
            if isinstance(value, str) and len(self.descriptions) < 2 * MAX_NAMES:
                self.descriptions[f"{event.name}.{name}", event.pid] = value
