"""Reader of the processes of a run: the state of each process, and its spans that have begun and not ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from msgspec import Struct, structs

from autoprof.base import identity, interrupts
from autoprof.base.originals import os
from autoprof.rundir import file_names, tails
from autoprof.rundir.layout import CRASHES, RunDir
from autoprof.rundir.records import (
    BegunLine,
    DroppedLine,
    ExitLine,
    Line,
    MemoryLine,
    MemoryState,
    Moment,
    OpenSpan,
    ProcessLine,
    Raised,
    RaisedLine,
)

RUNNING, GONE, EXITED, ELSEWHERE = "running", "gone", "exited", "elsewhere"
# Used if a timeline has no process line.
_UNKNOWN = ProcessLine(host="", pid=0, clock=Moment(), version="")


class ProcessState(Struct, frozen=True, kw_only=True):
    """One process of the run: its state and its open spans. All times are in nanoseconds since the epoch.

    Attributes:
        state: `running`; `exited`: it wrote an exit line; `gone`: it no longer exists and wrote no exit line, for
            example because it was killed; `elsewhere`: it belongs to another host or container, so its state is
            unknown.
        error: The type of the exception that ended it, or an empty text.
        begun_ns: The time of its first line.
        last_ns: Its last sign of life: the end of its timeline, or its crash.
        moved_ns: The last time at which a span began or ended, or the process began.
        exception: The exception that ended it, with its stack.
        raised: The last exception that left a step or a stage, if no outer span shows that it was caught.
        ended: The last ended stage.
        stepped: The last ended step.
        lost: The exceptions that left samples and rewards.
        within: The innermost stage, timer or span of a sample that the exception `raised` left.
        boot: The boot id of its machine.
        stderr: The file of its stderr, if no other process writes to it.
        memory: The memory at its start, and in its last line with memory.
        file: Its timeline file.
    """

    host: str
    pid: int
    ticks: int
    state: str
    error: str
    last_ns: int
    spans: list[OpenSpan]
    file: Path
    exception: Raised | None = None
    raised: RaisedLine | None = None
    ended: Line | None = None
    stepped: Line | None = None
    begun_ns: int = 0
    moved_ns: int = 0
    lost: list[RaisedLine] = []
    within: str = ""
    boot: str = ""
    stderr: str = ""
    memory: tuple[MemoryState, MemoryState] = (MemoryState(), MemoryState())


def read(
    run: str | Path, running: bool = True, most: int | None = None, named: Collection[int] = ()
) -> list[ProcessState]:
    """Return the processes of a run that have a timeline. Skip unreadable files.

    Args:
        run: The run directory.
        running: False to skip processes that are running or have exited without an exception, except this process.
        most: The maximum number of processes, the latest writers; None for all.
        named: The pids of processes that are never skipped.
    """
    paths = RunDir(Path(run)).lines("timeline")
    if most is not None and len(paths) > most:
        paths = sorted(sorted(paths, key=_mtime, reverse=True)[:most])
    processes = []
    for path in paths:
        try:
            if running or _may_be_dead(path, named):
                processes.append(_process(path))
        except OSError as error:
            interrupts.pass_on(error)
    return processes


def _may_be_dead(path: Path, named: Collection[int]) -> bool:
    """Return True if a process may have died, is this process, or is named. Read only the ends of its timeline."""
    host, pid = file_names.process_of(path.name)
    if host != identity.HOST or pid in (os.getpid(), *named):
        return True
    end_lines = tails.first_and_last(path)
    if end_lines is None:
        return True
    first_line, last_line = end_lines
    if isinstance(last_line, ExitLine):
        return bool(last_line.error)
    first = first_line if isinstance(first_line, ProcessLine) else _UNKNOWN
    return not pid or _state(host, pid, first, exited=False) == GONE


def ends(
    states: Iterable[ProcessState], going_on: bool, now_ns: int, shifts_ns: Mapping[str, int] | None = None
) -> list[int]:
    """Return the time until which the spans of each process are known to be open, by the clock of its host.

    For a running process, and for a process of another host while the run is running, this is the current time. For all
    others it is their own last sign of life, because later lines of other processes say nothing about them.

    Args:
        states: The processes.
        going_on: True if the run is running.
        now_ns: The current time, in nanoseconds since the epoch.
        shifts_ns: Nanoseconds to add to the times of each host, to bring them onto one clock.
    """
    shifts = shifts_ns or {}
    return [
        now_ns - shifts.get(state.host, 0) if open_until_now(state.state, going_on) else state.last_ns
        for state in states
    ]


def open_until_now(state: str, going_on: bool) -> bool:
    """Return True if the spans of a process in this state are open now. `going_on`: the run is running."""
    return state == RUNNING or (state == ELSEWHERE and going_on)


def without_past(
    states: Iterable[ProcessState], started_ns: int, shifts_ns: Mapping[str, int] | None = None
) -> list[ProcessState]:
    """Return the processes without obsolete open spans.

    The open spans of earlier attempts are obsolete in a resumed run. The open spans of a dead process are obsolete once
    another step has begun.

    Args:
        states: The processes.
        started_ns: The start of the run, or of its last attempt if it was resumed.
        shifts_ns: Nanoseconds to add to the times of each host, to bring them onto one clock.
    """
    states, shifts = list(states), shifts_ns or {}
    last_step_ns = max((_stepped_ns(state) + shifts.get(state.host, 0) for state in states), default=0)
    since = {GONE: max(started_ns, last_step_ns), ELSEWHERE: started_ns}
    return [
        structs.replace(state, spans=[])
        if state.last_ns + shifts.get(state.host, 0) < since.get(state.state, 0)
        else state
        for state in states
    ]


def _stepped_ns(state: ProcessState) -> int:
    """Return the start of the last step that a process has begun; 0 without a step."""
    open_steps = [span.start_ns for span in state.spans if span.kind == "step"]
    return max([*open_steps, state.stepped.start_ns if state.stepped is not None else 0])


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError as error:
        interrupts.pass_on(error)
        return 0.0


class _OpenSpans:
    """The open spans of a process, updated line by line."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str, int], BegunLine] = {}
        # The last span of each kind, name, role, rank and ids. An earlier one that is still open never wrote its end.
        self._last: dict[tuple[object, ...], tuple[str, str, int]] = {}

    def begin(self, line: BegunLine) -> None:
        span = (line.span, line.name, line.start_ns)
        # Only one step is open at a time.
        key = ("step",) if line.span == "step" else (line.span, line.name, line.role, line.rank, str(line.ids))
        before = self._last.get(key)
        if before is not None and before != span:
            self._spans.pop(before, None)
        self._last[key] = span
        self._spans[span] = line

    def end(self, kind: str, name: str, start_ns: int) -> None:
        self._spans.pop((kind, name, start_ns), None)

    def spans(self) -> list[OpenSpan]:
        return [_open(line) for line in sorted(self._spans.values(), key=lambda line: line.start_ns)]


class _Failure:
    """The uncaught exception that left a step or a stage, updated line by line."""

    def __init__(self) -> None:
        self.raised: RaisedLine | None = None
        self.within = ""
        self._innermost = 0

    def ended(self, line: Line) -> None:
        """Process an ended span. A span around the exception that ended without an error shows that it was caught."""
        if line.error is None:
            around = line.kind in ("step", "stage") and self.raised is not None and line.start_ns < self.raised.unix_ns
            if around or line.kind == "step":
                self.raised, self.within, self._innermost = None, "", 0
        elif line.kind != "step" and line.start_ns >= self._innermost:
            self._innermost, self.within = line.start_ns, line.name


def _process(path: Path) -> ProcessState:
    host, pid = file_names.process_of(path.name)
    first, last, ended, open_now, failure = _UNKNOWN, 0, None, _OpenSpans(), _Failure()
    memory = MemoryState()
    stage: Line | None = None
    step: Line | None = None
    moved = 0
    lost: list[RaisedLine] = []
    for line in tails.lines(path):
        if isinstance(line, ProcessLine):
            # A later process with the same pid begins here.
            first, last, ended, open_now, failure = line, line.clock.unix_ns, None, _OpenSpans(), _Failure()
            memory, stage, step, lost = line.memory, None, None, []
            moved = last
        elif isinstance(line, BegunLine):
            open_now.begin(line)
            last, moved = max(last, line.start_ns), max(moved, line.start_ns)
        elif isinstance(line, ExitLine):
            ended, last = line, max(last, line.unix_ns)
        elif isinstance(line, RaisedLine):
            last = max(last, line.unix_ns)
            if line.span in ("step", "stage"):
                failure.raised = line
            else:
                lost.append(line)
        elif isinstance(line, MemoryLine):
            memory, last = line.memory, max(last, line.unix_ns)
        elif isinstance(line, DroppedLine):
            open_now.end(line.span, line.name, line.start_ns)
        else:
            open_now.end(line.kind, line.name, line.start_ns)
            failure.ended(line)
            stage = line if line.kind == "stage" else stage
            step = line if line.kind == "step" else step
            last, moved = max(last, line.end_ns), max(moved, line.end_ns)
    state = _state(host, pid, first, ended is not None)
    return ProcessState(
        host=host,
        pid=pid,
        ticks=first.ticks,
        state=state,
        error=ended.error if ended is not None else "",
        begun_ns=first.clock.unix_ns,
        last_ns=max(last, _crashed_ns(path)) if state == GONE else last,
        spans=[] if state == EXITED else open_now.spans(),
        file=path,
        exception=ended.exception if ended is not None else None,
        raised=failure.raised,
        ended=stage,
        stepped=step,
        moved_ns=moved,
        lost=lost,
        within=failure.within,
        boot=first.boot,
        stderr=first.stderr,
        memory=(first.memory, memory),
    )


def _crashed_ns(timeline: Path) -> int:
    """Return the time of a process's crash, in nanoseconds since the epoch; 0 without a crash dump."""
    try:
        status = os.stat(timeline.parent.parent / CRASHES / f"{timeline.stem}.txt")
        return status.st_mtime_ns if status.st_size else 0
    except OSError as error:
        interrupts.pass_on(error)
        return 0


def _state(host: str, pid: int, first: ProcessLine, exited: bool) -> str:
    """Return the state of a process. In another container, its pid may belong to a different process."""
    if exited:
        return EXITED
    if host != identity.HOST or first.namespace not in (0, identity.pid_namespace()):
        return ELSEWHERE
    began = identity.start_ticks(pid)
    return RUNNING if began is not None and first.ticks in (0, began) else GONE


def _open(line: BegunLine) -> OpenSpan:
    return OpenSpan(
        kind=line.span,
        name=line.name,
        step=line.step,
        role=line.role,
        rank=line.rank,
        start_ns=line.start_ns,
        ids=line.ids,
        stage_kind=line.stage_kind,
    )
