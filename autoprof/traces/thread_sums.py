"""Sums for each operator, thread and device, computed from events in the order of their starts."""

from __future__ import annotations

from msgspec import Struct

from autoprof.traces import device_sums
from autoprof.traces.device_sums import DeviceSums, EngineSums, Passes, parsed
from autoprof.traces.event_rows import EventData, Id, Key

# Categories of events that are not summed. Kineto's own track has one such event, which covers the whole capture.
_NOT_SUMMED = frozenset(("Trace",))
# Tolerance when two times are compared. As floats, microseconds since Kineto's base are exact to within one nanosecond.
_ROUNDING_US = 0.0005
_ANNOTATION = "user_annotation"
_Slot = tuple[int, "_Thread | None", "device_sums.Unions | None", int]


class OperatorSums(Struct, frozen=True, kw_only=True):
    """Sums over all calls of one operator: all events with the same name and category.

    Attributes:
        name: The name of the operator in the trace.
        category: The `cat` of the events. For threads of the host: `cpu_op`, `user_annotation`, `python_function`,
            `cuda_runtime`, ... For devices: `kernel`, `gpu_memcpy`, `gpu_memset`. Empty if the events have no `cat`.
        calls: The number of calls.
        total_us: Microseconds of the calls from start to end, including inner calls.
        self_us: Microseconds of the calls without inner calls in the same thread. On a device it equals `total_us`.
    """

    name: str
    category: str
    calls: int
    total_us: float
    self_us: float


class ThreadSums(Struct, frozen=True, kw_only=True):
    """Sums of one thread of the host.

    `busy_us` is the number of microseconds in which at least one event of the thread was open.
    """

    pid: int | float | str | None
    tid: int | float | str | None
    name: str
    events: int
    busy_us: float


class _Thread:
    """State of a thread while the events of the thread are added.

    Attributes:
        ends: The ends of the open events, outermost first.
        operators: The numbers of the operators of the open events, outermost first.
        events: The number of the thread's events.
        busy_us: Microseconds in which at least one event was open.
        busy_until: The last end of the events that `busy_us` includes.
    """

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.operators: list[int] = []
        self.events = 0
        self.busy_us = 0.0
        self.busy_until = float("-inf")

    def busy(self, start: float, end: float) -> None:
        """Add the time of an event to `busy_us`. The event must not be nested in another event."""
        if end > self.busy_until:
            self.busy_us += end - max(start, self.busy_until)
            self.busy_until = end


def _take(inner_us: list[float], thread: _Thread, start: float, end: float) -> None:
    """Count the time of an event as inner time of the open events, although the event ends after some of these events.

    A `record_function` can be such an event: it begins within the Python call that enters the `record_function`, and
    ends after this call. Each moment counts as own time of the event that began last.

    Args:
        inner_us: The inner time of each operator, in microseconds. It is changed.
        thread: The thread of the event.
        start: The start of the event.
        end: The end of the event.
    """
    for open_end, operator in zip(reversed(thread.ends), reversed(thread.operators), strict=True):
        if open_end > start:
            inner_us[operator] += min(end, open_end) - start
            start = open_end
        if open_end >= end:
            return


def _device_order(device: Id) -> tuple[int, float, str]:
    """Return a sort key for ids of devices. It puts numbers first, then None, then texts."""
    if isinstance(device, str):
        return 2, 0.0, device
    return (0, device, "") if device is not None else (1, 0.0, "")


class Summing:
    """Sums over all rows of a trace.

    Attributes:
        first_us: The start of the first event, in microseconds.
        last_us: The last end of an event, in microseconds.
    """

    def __init__(self, data: EventData) -> None:
        self._data = data
        self._operators: dict[tuple[bool, str, str], int] = {}
        self._threads: dict[tuple[Id, Id], _Thread] = {}
        self._devices: dict[Id, device_sums.Unions] = {}
        self._collectives = device_sums.Unions()
        slots = [self._slot(key) for key in data.keys]
        # These lists have an element for each operator, and a last element for the rows that are not summed.
        # `_inner_us` is the time of inner calls.
        self._calls = [0] * (len(self._operators) + 1)
        self._total_us, self._inner_us = [0.0] * len(self._calls), [0.0] * len(self._calls)
        self.first_us, self.last_us = float("inf"), float("-inf")
        self._run(slots)

    def _slot(self, key: Key) -> _Slot:
        """Return where the rows with a key are added.

        Returns:
            Four values: the number of the operator; the thread, or None; the union of intervals, or None; and the kind
            of interval for this union. The number is -1 if the rows are not summed.
        """
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
        total_us, inner_us = self._total_us, self._inner_us
        counts = [0] * len(slots)
        first_us, last_us = self.first_us, self.last_us
        for start, negative_length, number in self._data.rows:
            counts[number] += 1
            operator, thread, unions, kind = slots[number]
            if operator < 0:
                continue
            total_us[operator] -= negative_length
            end = start - negative_length
            if end > last_us:
                last_us = end
                first_us = min(first_us, start)
            if unions is not None:
                unions.add(start, end, kind)
            if thread is None:
                continue
            ends, operators = thread.ends, thread.operators
            last_passed_end = start + _ROUNDING_US
            while ends and ends[-1] <= last_passed_end:
                ends.pop()
                operators.pop()
            if not ends:
                thread.busy(start, end)
            elif end <= ends[-1] + _ROUNDING_US:
                inner_us[operators[-1]] -= negative_length
            else:
                _take(inner_us, thread, start, end)
                thread.busy(start, end)
            ends.append(end)
            operators.append(operator)
        self.first_us, self.last_us = first_us, last_us
        for count, (operator, thread, _, _) in zip(counts, slots, strict=True):
            self._calls[operator] += count
            if thread is not None:
                thread.events += count

    def operators(self, on_device: bool) -> list[OperatorSums]:
        """Return the sums of each operator on the devices or in threads of the host, the longest own time first."""
        sums = [
            OperatorSums(
                name=name,
                category=category,
                calls=self._calls[number],
                total_us=self._total_us[number],
                self_us=max(0.0, self._total_us[number] - self._inner_us[number]),
            )
            for (of_device, category, name), number in self._operators.items()
            if of_device is on_device
        ]
        return sorted(sums, key=lambda each: (-each.self_us, each.name))

    def threads(self) -> list[ThreadSums]:
        """Return the sums of the host's threads, the busiest thread first."""
        sums = [
            ThreadSums(
                pid=pid,
                tid=tid,
                name=self._description("thread_name.name", pid, tid),
                events=thread.events,
                busy_us=thread.busy_us,
            )
            for (pid, tid), thread in self._threads.items()
        ]
        return sorted(sums, key=lambda each: -each.busy_us)

    def devices(self) -> list[DeviceSums]:
        """Return the sums of the devices, ordered by the ids of the devices."""
        span = max(0.0, self.last_us - self.first_us)
        sums = []
        for pid, unions in self._devices.items():
            name = self._description("process_labels.labels", pid) or self._description("process_name.name", pid)
            sums.append(unions.sums(pid, name, span))
        return sorted(sums, key=lambda each: _device_order(each.device))

    def collectives_us(self) -> float | None:
        """Return the microseconds in collectives on the device that has most of them.

        If no device ran collectives, return the microseconds in collectives on the host. Return None if the host ran
        none either.
        """
        by_device = [unions.communication_us for unions in self._devices.values()]
        return max(by_device, default=0.0) or self._collectives.communication_us or None

    def engine(self) -> EngineSums | None:
        """Return the sums of an engine's forward passes. Return None if the trace has no annotations of such passes."""
        passes = Passes()
        for (_, category, name), number in self._operators.items():
            if category in (_ANNOTATION, device_sums.ANNOTATION) and (annotation := parsed(name)):
                passes.add(annotation, self._calls[number], self._total_us[number], category == device_sums.ANNOTATION)
        return passes.sums()
