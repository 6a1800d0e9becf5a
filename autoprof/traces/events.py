"""Columns of a trace's events that the sums need, kept while it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from autoprof.traces.sorted_rows import Rows

Id = int | float | str | None
# What a row's number stands for: category, name, process and thread.
Key = tuple[str, str, Id, Id]

# Names beyond this many are summed up as one: some put a number into every name.
MOST_NAMES = 50_000
OTHER_NAMES = "(other names)"
# No host has as many.
_MOST_DEVICES = 1_000
# In µs, 30,000 years: what is more is no time, and what it is added to is none any more.
_MOST_US = 1e18
_Us = Annotated[float, Meta(ge=-_MOST_US, le=_MOST_US)]


class Event(Struct, gc=False):
    ph: str
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
    if not abs(value) <= _MOST_US:
        raise ValueError(f"{str(text)[:40]!r} is no time")
    return value


class _Memory(Struct, rename={"allocated": "Total Allocated", "reserved": "Total Reserved", "type": "Device Type"}):
    allocated: int = 0
    reserved: int = 0
    type: int = 0
    id: int = msgspec.field(default=0, name="Device Id")


_decode_memory = msgspec.json.Decoder(_Memory).decode


class Taken:
    """A row for each event that has a duration, and what else counts.

    Attributes:
        count: All events.
        keys: What the numbers of the rows stand for.
        said: What describes processes and threads, by the event's name and field, process and thread.
        peaks: Bytes allocated and reserved, by type and number of the device.
        whole_us: What starts count from where the trace gives them as text; else 0.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.count = 0
        self.keys: list[Key] = []
        self._numbers: dict[Key, int] = {}
        self.said: dict[tuple[str, Id, Id], str] = {}
        self.peaks: dict[tuple[int, int], list[int]] = {}
        self.whole_us = 0

    def events(self, events: list[Event]) -> None:
        """Take some events.

        Raises:
            ValueError: A time is none.
            msgspec.DecodeError: What an event says beside its times is not what it should be.
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
                    # Kineto has guarded against such times since they were seen (output_json.cpp, handleActivity).
                    length = 0.0
                rows.append((start, -length, number))
            elif event.ph == "i" and event.name == "[memory]":
                self._memory(event)
            elif event.ph == "M":
                self._describe(event)
        self.rows.extend(rows)

    def _number(self, key: Key) -> int:
        if len(self._numbers) >= MOST_NAMES:
            key = (key[0], OTHER_NAMES, key[2], key[3])
            if len(self.keys) >= 2 * MOST_NAMES:
                key = ("", OTHER_NAMES, None, None)
        number = self._numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def _start(self, text: float | str) -> float:
        """Return the microseconds since the first time.

        torch_npu writes them since the epoch as text, since no float holds them to the nanosecond.
        """
        said, _, rest = str(text).partition(".")
        whole = _time(int(said), text)
        self.whole_us = self.whole_us or whole
        return whole - self.whole_us + float(f"0.{rest or 0}")

    def _memory(self, event: Event) -> None:
        if event.args is UNSET:
            return
        said = _decode_memory(event.args)
        if (said.type, said.id) not in self.peaks and len(self.peaks) >= _MOST_DEVICES:
            return
        peak = self.peaks.setdefault((said.type, said.id), [0, 0])
        peak[0] = max(peak[0], said.allocated)
        peak[1] = max(peak[1], said.reserved)

    def _describe(self, event: Event) -> None:
        arguments: Any = msgspec.json.decode(event.args) if event.args is not UNSET else {}
        if isinstance(arguments, dict):
            for name, value in arguments.items():
                if isinstance(value, str) and len(self.said) < 2 * MOST_NAMES:
                    thread = event.tid if event.name == "thread_name" else None
                    self.said[f"{event.name}.{name}", event.pid, thread] = value
