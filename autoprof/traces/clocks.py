"""Clocks of traces and hosts, and attempts of a run.

Kineto's times are relative to a base, which the trace contains. Traces of torch before 2.4 have no base. The run
measures the offsets between the clocks of its hosts. An attempt is one start of a run. A run that is killed and resumed
has several attempts, and may repeat steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from autoprof.base.redact import writable
from autoprof.rundir import file_names
from autoprof.rundir.journal import EVER, Journal, lines
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CaptureMeta, Line, Offset
from autoprof.rundir.runs import CaptureFile, Run, Step, loop_of
from autoprof.traces.reader import NO_JSON, Reader, TraceError

BASE = "baseTimeNanoseconds"
# If the lead of the wall clock over the monotonic clock changes by more than this, the wall clock was set. Smaller
# changes are noise, because the two clocks are not read at the same moment.
_CLOCK_SET_NS = 1_000_000
# Times above this number of microseconds count from the epoch, not from a base. The number is September 2001.
EPOCH_US = 1e15


class Timed(msgspec.Struct):
    ph: str = ""
    ts: float | str = 0.0


def beginning(path: Path) -> tuple[int, float | None]:
    """Return the base of a trace's times, in ns since the epoch, and the time of the first event, in µs.

    The base is 0 if the times count from the epoch. The time is None if no event has a valid time. The first event in
    the file is not always the earliest event. Kineto writes the base before the events; some releases after torch 2.4
    write the base after the events (pytorch/kineto #1054).

    Raises:
        TraceError: The trace can't be read, or has no base, for example because it is truncated.
    """
    with Reader(path, _HEAD_BYTES, accept_truncated=True) as reader:
        if BASE in reader.fields:
            try:
                first_us = _microseconds(next((ts for ts in _times(reader) if ts), None))
            except TraceError:  # `rewrite` reports the error
                first_us = None
            return _number(path, reader.fields[BASE]), first_us
    with Reader(path, accept_truncated=True) as reader:
        times = _times(reader)
        first_ts = next(times, None)
        first_us = _microseconds(first_ts or next((ts for ts in times if ts), first_ts))
        for _ in times:
            pass
        if BASE in reader.fields:
            return _number(path, reader.fields[BASE]), first_us
    if first_ts is None or (_microseconds(first_ts) or 0) > EPOCH_US:
        return 0, first_us
    raise TraceError(f"{path}: the base of its times is missing ({BASE})")


# Number of bytes at the start of a file that usually contain the base and the first event.
_HEAD_BYTES = 16 << 10
_decode_times = msgspec.json.Decoder(list[Timed]).decode


def _times(reader: Reader) -> Iterator[float | str]:
    """Yield the times of a trace's events, except the events that describe processes and threads."""
    for events in reader.chunks(_decode_times):
        yield from (event.ts for event in events if event.ph != "M")


def _microseconds(ts: float | str | None) -> float | None:
    """Return a time as a number. Return None if the time is missing or invalid; `rewrite` reports invalid times."""
    try:
        return None if ts is None else float(ts)
    except ValueError:
        return None


def _number(path: Path, raw: Raw) -> int:
    try:
        return int(msgspec.json.decode(raw))
    except (msgspec.DecodeError, TypeError, ValueError):
        raise TraceError(f"{path}: {BASE} is not a number: {bytes(raw)[:80]!r}") from None


def corrections_ns(metas: Sequence[CaptureMeta]) -> list[int]:
    """Return for each capture the nanoseconds to add to its times, so that the captures of one host agree.

    The captures of a host disagree if its clock was set between two captures. The corrections are computed from the
    clock readings in the meta files. The last reading of a host counts as correct, because clocks are set to become
    more accurate.
    """
    readings: dict[str, list[tuple[int, int]]] = {}
    for meta in metas:
        if reading := _reading(meta):
            readings.setdefault(meta.host, []).append(reading)
    last_leads = {host: max(of_host)[1] for host, of_host in readings.items()}
    corrections = []
    for meta in metas:
        reading = _reading(meta)
        lead_difference = last_leads[meta.host] - reading[1] if reading else 0
        corrections.append(lead_difference if abs(lead_difference) > _CLOCK_SET_NS else 0)
    return corrections


def _reading(meta: CaptureMeta) -> tuple[int, int] | None:
    """Return the start of a capture on the monotonic clock, and the lead of the wall clock over this clock, in ns.

    Return None if the meta file lacks a clock.
    """
    start = meta.clock.start
    return (start.monotonic_ns, start.unix_ns - start.monotonic_ns) if start.monotonic_ns and start.unix_ns else None


MEASURED, AS_SET = "measured", "as-set"
# Largest error of a measured offset that is accepted. Stages take milliseconds, so a larger error could reverse the
# order of stages.
MAX_ERROR_NS = 5_000_000
# Maximum relative drift between two quartz clocks. Each clock may drift by 50 parts per million.
_DRIFT = 100e-6
_ADVICE = f"use --clocks {AS_SET} to merge with uncorrected clocks"


class Clocks(Struct, frozen=True):
    """Measured clock offsets of a run.

    Attributes:
        driver: The host to whose clock the offsets are relative. Empty if no offset was measured.
        offsets: Dict from each host to the offsets of its clock, ordered by the time of the measurement.
    """

    driver: str
    offsets: dict[str, list[Offset]]


def read_offsets(run: Path) -> Clocks:
    """Return the measured clock offsets of a run. Skip truncated lines of the files.

    Raises:
        TraceError: Several hosts measured offsets, so it is unknown to which host the offsets are relative.
        OSError: A file can't be read, or is not a regular file.
    """
    offsets_by_host: dict[str, list[Offset]] = {}
    drivers = set()
    for path in RunDir(run).lines("clocks"):
        drivers.add(file_names.process_of(path.name)[0])
        for line in lines(path):
            try:
                offset = msgspec.json.decode(line, type=Offset)
            except NO_JSON:
                continue
            offsets_by_host.setdefault(offset.host, []).append(offset)
    if len(drivers) > 1:
        hosts = ", ".join(sorted(drivers))
        raise TraceError(f"{run / 'clocks'}: clocks were measured from several hosts ({hosts}); {_ADVICE}")
    for offsets in offsets_by_host.values():
        offsets.sort(key=lambda each: each.unix_ns)
    return Clocks(next(iter(drivers), ""), offsets_by_host)


def offset_ns(clocks: Clocks, host: str, unix_ns: int) -> int:
    """Return the nanoseconds to subtract from the times of a host, to get times on the clock of the driver's host.

    Args:
        clocks: The measured offsets of the run.
        host: The host whose times are to be changed.
        unix_ns: The time of the trace, in ns since the epoch, on the clock of either host.

    Raises:
        TraceError: The offset is unknown, or not known precisely enough.
    """
    if host == clocks.driver:
        return 0
    offsets = clocks.offsets.get(host)
    if not offsets:
        missing_text = f"the clock of {host} was not measured" if clocks.driver else "this run measured no clocks"
        raise TraceError(f"traces of several hosts need measured clocks, but {missing_text}; {_ADVICE}")
    nearest = min(offsets, key=lambda each: abs(each.unix_ns - unix_ns))
    if nearest.error_ns > MAX_ERROR_NS:
        raise TraceError(
            f"the offset of {host}'s clock is too uncertain: {nearest.error_ns / 1e6:.1f} ms, more than "
            f"{MAX_ERROR_NS / 1e6:.0f} ms; {_ADVICE}"
        )
    position = offsets.index(nearest)
    for other in offsets[max(0, position - 1) : position + 2]:
        # If the measurements before and after the trace agree, the clock was not set between them.
        ns_between = abs(other.unix_ns - nearest.unix_ns)
        is_between = min(other.unix_ns, nearest.unix_ns) <= unix_ns <= max(other.unix_ns, nearest.unix_ns)
        offset_difference = abs(other.offset_ns - nearest.offset_ns)
        if is_between and offset_difference > other.error_ns + nearest.error_ns + _DRIFT * ns_between:
            raise TraceError(
                f"the clock of {host} was set while the step ran: {other.offset_ns / 1e6:.1f} ms and "
                f"{nearest.offset_ns / 1e6:.1f} ms were measured around it; {_ADVICE}"
            )
    return nearest.offset_ns


def steps_by_loop(steps: Sequence[Step], attempts: Attempts) -> list[Step]:
    """Return the captured steps of a run with the numbers of their loops in the run, sorted by loop and number.

    Different programs of a run write into the same folder. Such a step becomes a step for each program, with the
    captures that began while the program was training.
    """
    found = []
    for step in steps:
        loops = [number for number, loop in attempts.loops.items() if loop.on_disk == step.loop] or [step.loop]
        for loop in loops:
            of_loop = step.of_loop(loop)
            if len(loops) > 1:
                periods = attempts.periods(loop)
                of_loop.captures = [capture for capture in step.captures if _began_in(capture, periods)]
                of_loop.merged = [capture for capture in step.merged if f".loop{loop}" in f".{capture.name}"]
                of_loop.shares_folder = True
            if of_loop.captures or len(loops) == 1:
                found.append(of_loop)
    return sorted(found, key=lambda each: (each.loop, each.number))


def _began_in(capture: CaptureFile, periods: Sequence[tuple[int, int]]) -> bool:
    start_ns = capture.meta.clock.start.unix_ns
    return any(since <= start_ns < until for since, until in periods)


def programs_of(run: Run, files: Sequence[Journal]) -> dict[int, str]:
    """Return the command of the process of each journal, for `Attempts.finish`.

    A run that was started again repeats its program, perhaps with other arguments. Then the dict is empty.
    """
    if run.info.earlier:
        return {}
    commands = {state.file: state.process for state in run.processes}
    return {number: commands[file.name] for number, file in enumerate(files) if file.name in commands}


_DRIVER_KINDS = ("step", "timer", "stage")
NO_PROGRAMS: Mapping[int, str] = {}


def is_of(line: Line, since_ns: int, until_ns: int) -> bool:
    """Return True if a journal line belongs to the period that runs from `since_ns` to `until_ns`."""
    return line.end_ns > since_ns and line.start_ns < until_ns


def loop_title(number: int, trainer: str) -> str:
    """Return a text such as `loop 2 (GRPOTrainer)`. `trainer` is empty if the class is unknown."""
    return f"loop {number}" + (f" ({writable(trainer)})" if trainer else "")


class TrainerLoop(Struct):
    """Steps of one trainer of a run.

    Attributes:
        trainer: The name of the trainer's class; empty if unknown.
        on_disk: The number of the loop in its process, which the names of step folders contain.
    """

    trainer: str = ""
    on_disk: int = 1


class Attempts:
    """Attempts and loops of a run, which are found from the spans of the run's trainers.

    If a process runs several trainers one after the other, each trainer has a loop. A run that was started once, and in
    which another program trains after the first program, has a loop for each program. So the time of a run consists of
    periods, each with one loop. In a run with one loop, each attempt is a period.

    Attributes:
        starts: The start of each period, in ns since the epoch. `finish` fills this list.
        loop_of: The number of the loop of each period.
        loops: The loops of the run, by number, from 1.
        trainers: The numbers of the journals that contain spans of a trainer.
        first_steps: For each process with steps, the start of the first step of each loop that has ended.
    """

    def __init__(self) -> None:
        # Dict from the number of each trainer's journal to the first start and the last end of the trainer's spans.
        self._lives: dict[int, tuple[int, int]] = {}
        # For each journal, the start of each loop of its process, by number.
        self._loop_starts: dict[int, dict[int, int]] = {}
        self._trainers: dict[tuple[int, int], str] = {}
        self.starts: list[int] = []
        self.loop_of: list[int] = []
        self.loops: dict[int, TrainerLoop] = {}
        self.trainers: set[int] = set()
        self.first_steps: set[int] = set()

    def add(self, file: int, span: Line, start_ns: int, end_ns: int) -> None:
        """Add a span of the journal with the number `file`.

        The spans of a journal must be added in the order in which the journal contains them.
        """
        if span.kind == "step":
            self._add_step(file, span, start_ns)
        if span.role == "trainer" and span.kind in _DRIVER_KINDS:
            start, end = self._lives.get(file, (start_ns, end_ns))
            self._lives[file] = min(start, start_ns), max(end, end_ns)
            self.trainers.add(file)

    def _add_step(self, file: int, span: Line, start_ns: int) -> None:
        number, before_s = loop_of(span), span.ids.get("before_s")
        loop_starts = self._loop_starts.setdefault(file, {})
        if number not in loop_starts:
            self.first_steps.add(start_ns)
            loop_starts[number] = start_ns - (int(before_s * 1e9) if isinstance(before_s, float) else 0)
            self._trainers[file, number] = str(span.ids.get("trainer") or "")

    def finish(self, programs: Mapping[int, str] = NO_PROGRAMS) -> None:
        """Compute the attempts and the loops. Call this method after all spans were added.

        Args:
            programs: Dict from the number of a journal to the command of its process. If the trainers of two attempts
                have different commands, they are different programs. If empty, all trainers are the same program.
        """
        attempts: list[tuple[int, list[int]]] = []
        last_end = -1
        for start, end, file in sorted((*life, file) for file, life in self._lives.items()):
            # Trainers that run at the same time are ranks of one attempt.
            if start >= last_end:
                attempts.append((start, []))
            attempts[-1][1].append(file)
            last_end = max(last_end, end)
        earlier_loops: dict[str, int] = {}
        for start, files in attempts:
            loops_before = earlier_loops.setdefault(programs.get(files[0], ""), max(self.loops, default=0))
            self._add_periods(start, files, loops_before)
        self._lives.clear()

    def _add_periods(self, start: int, files: Sequence[int], loops_before: int) -> None:
        """Add a period for each loop of an attempt.

        Args:
            start: The start of the attempt.
            files: The numbers of the journals of the attempt's trainers.
            loops_before: The number of loops of other programs.
        """
        starts: dict[int, int] = {}
        for file in files:
            for number, loop_start in self._loop_starts.get(file, {}).items():
                starts[number] = min(loop_start, starts.get(number, loop_start))
                trainer = self._trainers[file, number]
                loop = self.loops.setdefault(loops_before + number, TrainerLoop(trainer, number))
                loop.trainer = loop.trainer or trainer
        for place, number in enumerate(sorted(starts) or [1]):
            self.starts.append(starts[number] if place else start)
            self.loop_of.append(loops_before + number)
            self.loops.setdefault(loops_before + number, TrainerLoop("", number))

    @property
    def titles(self) -> dict[int, str]:
        """Return a text such as `loop 2 (GRPOTrainer)` for each loop, by its number."""
        return {number: loop_title(number, loop.trainer) for number, loop in self.loops.items()}

    def periods(self, loop: int) -> list[tuple[int, int]]:
        """Return the start and the end of each period of a loop, as `around` does."""
        ends = [*self.starts[1:], EVER]
        return [
            (start if place else 0, end)
            for place, (start, end, number) in enumerate(zip(self.starts, ends, self.loop_of, strict=False))
            if number == loop
        ]

    def around(self, at_ns: int) -> tuple[int, int]:
        """Return the start and the end of the period that contains the time `at_ns`.

        The first period starts at 0. The last period ends at `EVER`.
        """
        position = bisect_right(self.starts, at_ns)
        since = self.starts[position - 1] if position > 1 else 0
        return since, self.starts[position] if 0 < position < len(self.starts) else EVER
