"""Sums by operator, thread and device, from events in the order of their starts."""

from __future__ import annotations

from msgspec import Struct

from autoprof.traces import device_sums
from autoprof.traces.device_sums import DeviceSums, EngineSums, Passes, parsed
from autoprof.traces.event_rows import EventData, Id, Key

# Kineto's own track with the whole capture.
_NOT_SUMMED = frozenset(("Trace",))
# Tolerance of comparisons: as floats, microseconds since Kineto's base are exact to within one nanosecond.
_ROUNDING_US = 0.0005
_ANNOTATION = "user_annotation"
_Slot = tuple[int, "_Thread | None", "device_sums.Unions | None", int]


class OperatorSums(Struct, frozen=True, kw_only=True):
    """Sum over all calls with one name in one category.

    Attributes:
        name: Its name in the trace.
        category: The trace's `cat`: `cpu_op`, `user_annotation`, `python_function`, `cuda_runtime`, ... for threads of
            the host; `kernel`, `gpu_memcpy`, `gpu_memset` for devices; empty if the trace has none.
        calls: The number of calls.
        total_us: Microseconds from start to end, including inner calls.
        self_us: Microseconds without inner calls in the same thread. For a device it equals `total_us`.
    """

    name: str
    category: str
    calls: int
    total_us: float
    self_us: float


class ThreadSums(Struct, frozen=True, kw_only=True):
    """Sums of one thread of the host. `busy_us` is the time in which at least one of its events was open."""

    pid: int | float | str | None
    tid: int | float | str | None
    name: str
    events: int
    busy_us: float


class _Thread:
    """State of a thread while its events are added: the ends and the operators of its open events, and its sums."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.operators: list[int] = []
        self.events = 0
        self.busy_us = 0.0
        self.busy_until = float("-inf")

    def busy(self, start: float, end: float) -> None:
        """Add an event that is not nested in another."""
        if end > self.busy_until:
            self.busy_us += end - max(start, self.busy_until)
            self.busy_until = end


def _take(inside: list[float], thread: _Thread, start: float, end: float) -> None:
    """Subtract the time of an event from the open events around it, though it ends after some of them.

    A `record_function` is such an event: it begins within the Python call that enters it, and outlives that call. Each
    moment counts for the event that began last.
    """
    for before, operator in zip(reversed(thread.ends), reversed(thread.operators), strict=True):
        if before > start:
            inside[operator] += min(end, before) - start
            start = before
        if before >= end:
            return


def _device_order(device: Id) -> tuple[int, float, str]:
    """Return a sort key: numbers first, then None, then text."""
    if isinstance(device, str):
        return 2, 0.0, device
    return (0, device, "") if device is not None else (1, 0.0, "")


class Summing:
    """Sums over the rows of a trace.

    Attributes:
        first_us: The start of the first event.
        last_us: The end of the last event.
    """

    def __init__(self, data: EventData) -> None:
        self._data = data
        self._operators: dict[tuple[bool, str, str], int] = {}
        self._threads: dict[tuple[Id, Id], _Thread] = {}
        self._devices: dict[Id, device_sums.Unions] = {}
        self._collectives = device_sums.Unions()
        slots = [self._slot(key) for key in data.keys]
        # By operator; the last entry collects rows that are not summed. `inside` is the time of inner calls.
        self._calls = [0] * (len(self._operators) + 1)
        self._total, self._inside = [0.0] * len(self._calls), [0.0] * len(self._calls)
        self.first_us, self.last_us = float("inf"), float("-inf")
        self._run(slots)

    def _slot(self, key: Key) -> _Slot:
        """Return the sums that a row is added to: operator, thread and union of intervals; and its kind on a device."""
        category, name, pid, tid = key
        if category in _NOT_SUMMED:
            return -1, None, None, 0
        kind = device_sums.kind(category, name, self._description("process_name.name", pid))
        operator = self._operators.setdefault((kind is not None, category, name), len(self._operators))
        if kind is None:
            thread = self._threads.setdefault((pid, tid), _Thread())
            collective = device_sums.host_collective(category, name)
            return operator, thread, self._collectives if collective else None, device_sums.COMMUNICATION
        if kind == device_sums.UNCOUNTED:
            return operator, None, None, kind
        return operator, None, self._devices.setdefault(pid, device_sums.Unions()), kind

    def _description(self, what: str, pid: Id, tid: Id = None) -> str:
        return self._data.descriptions.get((what, pid, tid), "")

    def _run(self, slots: list[_Slot]) -> None:
        total, inside = self._total, self._inside
        counts = [0] * len(slots)
        first, last = self.first_us, self.last_us
        for start, minus, number in self._data.rows:
            counts[number] += 1
            operator, thread, unions, kind = slots[number]
            if operator < 0:
                continue
            total[operator] -= minus
            end = start - minus
            if end > last:
                last = end
                first = min(first, start)
            if unions is not None:
                unions.add(start, end, kind)
            if thread is None:
                continue
            ends, operators = thread.ends, thread.operators
            passed = start + _ROUNDING_US
            while ends and ends[-1] <= passed:
                ends.pop()
                operators.pop()
            if not ends:
                thread.busy(start, end)
            elif end <= ends[-1] + _ROUNDING_US:
                inside[operators[-1]] -= minus
            else:
                _take(inside, thread, start, end)
                thread.busy(start, end)
            ends.append(end)
            operators.append(operator)
        self.first_us, self.last_us = first, last
        for count, (operator, thread, _, _) in zip(counts, slots, strict=True):
            self._calls[operator] += count
            if thread is not None:
                thread.events += count

    def operators(self, on_device: bool) -> list[OperatorSums]:
        """Return the sums by name and category, ordered by own time."""
        found = [
            OperatorSums(
                name=name,
                category=category,
                calls=self._calls[number],
                total_us=self._total[number],
                self_us=max(0.0, self._total[number] - self._inside[number]),
            )
            for (device_one, category, name), number in self._operators.items()
            if device_one is on_device
        ]
        return sorted(found, key=lambda each: (-each.self_us, each.name))

    def threads(self) -> list[ThreadSums]:
        """Return the host's threads, the busiest first."""
        found = [
            ThreadSums(
                pid=pid,
                tid=tid,
                name=self._description("thread_name.name", pid, tid),
                events=thread.events,
                busy_us=thread.busy_us,
            )
            for (pid, tid), thread in self._threads.items()
        ]
        return sorted(found, key=lambda each: -each.busy_us)

    def devices(self) -> list[DeviceSums]:
        """Return the devices, ordered by number."""
        span = max(0.0, self.last_us - self.first_us)
        found = []
        for pid, unions in self._devices.items():
            name = self._description("process_labels.labels", pid) or self._description("process_name.name", pid)
            found.append(unions.sums(pid, name, span))
        return sorted(found, key=lambda each: _device_order(each.device))

    def collectives_us(self) -> float | None:
        """Return the microseconds in collectives, on the device with the most or else on the host; None without any."""
        by_device = [unions.communication_us for unions in self._devices.values()]
        return max(by_device, default=0.0) or self._collectives.communication_us or None

    def engine(self) -> EngineSums | None:
        """Return the sums of an engine's passes, or None."""
        passes = Passes()
        for (_, category, name), number in self._operators.items():
            if category in (_ANNOTATION, device_sums.ANNOTATION) and (found := parsed(name)):
                passes.add(found, self._calls[number], self._total[number], category == device_sums.ANNOTATION)
        return passes.sums()
