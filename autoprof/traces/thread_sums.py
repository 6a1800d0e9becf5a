"""Sums by operator, thread and device, of events that come by their starts."""

from __future__ import annotations

from msgspec import Struct

from autoprof.traces import device_sums
from autoprof.traces.device_sums import DeviceSums, EngineSums, Passes, parsed
from autoprof.traces.event_rows import Id, Key, Taken

# Kineto's own track of the capture as a whole.
_NOT_SUMMED = frozenset(("Trace",))
# Times have nanoseconds; as a float, microseconds since Kineto's base are right to within one.
_ROUNDING_US = 0.0005
_ANNOTATION = "user_annotation"
_Slot = tuple[int, "_Thread | None", "device_sums.Unions | None", int]


class OperatorSums(Struct, frozen=True, kw_only=True):
    """All calls of one name in one category.

    Attributes:
        name: As the trace has it.
        category: `cat` of the trace: `cpu_op`, `user_annotation`, `python_function`, `cuda_runtime`, ... for what a
            thread of the host did, `kernel`, `gpu_memcpy`, `gpu_memset` for a device; empty where the trace says none.
        calls: How often.
        total_us: From start to end, those inside of it included.
        self_us: Without what ran inside of it in the same thread. For a device the same as `total_us`.
    """

    name: str
    category: str
    calls: int
    total_us: float
    self_us: float


class ThreadSums(Struct, frozen=True, kw_only=True):
    """One thread of the host: `busy_us` is the time in which any event of it was open."""

    pid: int | float | str | None
    tid: int | float | str | None
    name: str
    events: int
    busy_us: float


class _Thread:
    """A thread while its events come by their starts: those that are open, as their ends and their operators."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.operators: list[int] = []
        self.events = 0
        self.busy_us = 0.0
        self.busy_until = float("-inf")

    def busy(self, start: float, end: float) -> None:
        """Count an event that is not inside of another."""
        if end > self.busy_until:
            self.busy_us += end - max(start, self.busy_until)
            self.busy_until = end


def _take(inside: list[float], thread: _Thread, start: float, end: float) -> None:
    """Give the time of an event that outlives what it began in to it alone, as that of the one that began last.

    A `record_function` does so: it begins in a call of Python's that enters it.
    """
    for before, operator in zip(reversed(thread.ends), reversed(thread.operators), strict=True):
        if before > start:
            inside[operator] += min(end, before) - start
            start = before
        if before >= end:
            return


def _device_order(device: Id) -> tuple[int, float, str]:
    """Return the order: numbers, then those without one, then words."""
    if isinstance(device, str):
        return 2, 0.0, device
    return (0, device, "") if device is not None else (1, 0.0, "")


class Summing:
    """Adds up the rows of a trace.

    Attributes:
        first_us: Where the first event starts.
        last_us: Where the last one ends.
    """

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self._operators: dict[tuple[bool, str, str], int] = {}
        self._threads: dict[tuple[Id, Id], _Thread] = {}
        self._devices: dict[Id, device_sums.Unions] = {}
        self._collectives = device_sums.Unions()
        slots = [self._slot(key) for key in taken.keys]
        # By operator, and behind all one for what is not summed. `inside`: what ran inside of its calls.
        self._calls = [0] * (len(self._operators) + 1)
        self._total, self._inside = [0.0] * len(self._calls), [0.0] * len(self._calls)
        self.first_us, self.last_us = float("inf"), float("-inf")
        self._run(slots)

    def _slot(self, key: Key) -> _Slot:
        """Return where a row goes: its operator, its thread or its device, and what it is there."""
        category, name, pid, tid = key
        if category in _NOT_SUMMED:
            return -1, None, None, 0
        kind = device_sums.kind(category, name, self._said("process_name.name", pid))
        operator = self._operators.setdefault((kind is not None, category, name), len(self._operators))
        if kind is None:
            thread = self._threads.setdefault((pid, tid), _Thread())
            collective = device_sums.host_collective(category, name)
            return operator, thread, self._collectives if collective else None, device_sums.COMMUNICATION
        if kind == device_sums.UNCOUNTED:
            return operator, None, None, kind
        return operator, None, self._devices.setdefault(pid, device_sums.Unions()), kind

    def _said(self, what: str, pid: Id, tid: Id = None) -> str:
        return self._taken.said.get((what, pid, tid), "")

    def _run(self, slots: list[_Slot]) -> None:
        total, inside = self._total, self._inside
        counts = [0] * len(slots)
        first, last = self.first_us, self.last_us
        for start, minus, number in self._taken.rows:
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
        """Return the sums by name and category, the most own time first."""
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
                name=self._said("thread_name.name", pid, tid),
                events=thread.events,
                busy_us=thread.busy_us,
            )
            for (pid, tid), thread in self._threads.items()
        ]
        return sorted(found, key=lambda each: -each.busy_us)

    def devices(self) -> list[DeviceSums]:
        """Return each device, by its number."""
        span = max(0.0, self.last_us - self.first_us)
        found = []
        for pid, unions in self._devices.items():
            name = self._said("process_labels.labels", pid) or self._said("process_name.name", pid)
            found.append(unions.sums(pid, name, span))
        return sorted(found, key=lambda each: _device_order(each.device))

    def collectives_us(self) -> float | None:
        """Return how long collectives went on: on the device with most of them, or else on the host."""
        found = [unions.communication_us for unions in self._devices.values()]
        return max(found, default=0.0) or self._collectives.communication_us or None

    def engine(self) -> EngineSums | None:
        """Return the passes of an engine."""
        passes = Passes()
        for (_, category, name), number in self._operators.items():
            if category in (_ANNOTATION, device_sums.ANNOTATION) and (found := parsed(name)):
                passes.add(found, self._calls[number], self._total[number], category == device_sums.ANNOTATION)
        return passes.sums()
