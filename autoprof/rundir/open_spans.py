"""Reader of the open spans of a run: each process's spans that have begun and not ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from msgspec import Struct, structs

from autoprof.base import identity, interrupts
from autoprof.base.originals import os
from autoprof.rundir import tails
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
# Stands for a missing line of a process.
_UNKNOWN = ProcessLine(host="", pid=0, clock=Moment(), version="")


class ProcessState(Struct, frozen=True, kw_only=True):
    """One process of the run: what is open in it, and whether it is there.

    Attributes:
        state: `running`; `exited` as a program exits; `gone` without that, as where it was killed; `elsewhere` where
            that can't be seen from this host or container.
        error: The exception with which it exited.
        begun_ns: The moment of its first line, in nanoseconds since the epoch.
        last_ns: Its last sign of life: the end of its timeline, or its crash.
        moved_ns: The last moment at which a span began or ended, or the process began.
        exception: That exception with its stack.
        raised: The last exception that has left a step or a stage, and that nobody above seems to have caught.
        ended: The last stage that has ended.
        stepped: The last step that has ended.
        lost: The exceptions that have left samples and rewards.
        within: The innermost stage, timer or sample's span that this one has left.
        boot: The machine since its boot.
        stderr: The file that its stderr is, where that is its own.
        memory: The memory at its begin, and as last told.
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
    """Return the processes of a run that have a timeline. Files that can't be read are left out.

    Args:
        run: The run's directory.
        running: Whether processes are told that are running or have exited without an exception, but for this one.
        most: How many processes are read at most, those that wrote last; None for all.
        named: The numbers of processes that are told in any case.
    """
    paths = RunDir(Path(run)).lines("timeline")
    if most is not None and len(paths) > most:
        paths = sorted(sorted(paths, key=_written, reverse=True)[:most])
    found = []
    for path in paths:
        try:
            if running or _is_dead(path, named):
                found.append(_process(path))
        except OSError as error:
            interrupts.pass_on(error)
    return found


def _is_dead(path: Path, named: Collection[int]) -> bool:
    """Return whether a process may have died, or is this one, by the ends of its file; or is one of those named."""
    host, _, digits = path.stem.rpartition("-")
    if host != identity.HOST or (digits.isdecimal() and int(digits) in (os.getpid(), *named)):
        return True
    known = tails.first_and_last(path)
    if known is None:
        return True
    begun, ended = known
    if isinstance(ended, ExitLine):
        return bool(ended.error)
    first = begun if isinstance(begun, ProcessLine) else _UNKNOWN
    return not digits.isdecimal() or _state(host, int(digits), first, exited=False) == GONE


def ends(
    states: Iterable[ProcessState], going_on: bool, now_ns: int, shifts_ns: Mapping[str, int] | None = None
) -> list[int]:
    """Return for each process the moment up to which its spans are known to be open, by the clock of its host.

    This is now for a running process, and for a process of another host while the run is running. For all others it is
    their own last sign of life: later lines of other processes say nothing about them.

    Args:
        states: The processes.
        going_on: True if the run is running.
        now_ns: Now, in nanoseconds since the epoch.
        shifts_ns: Nanoseconds that bring the times of each host onto one clock.
    """
    shifts = shifts_ns or {}
    return [
        now_ns - shifts.get(state.host, 0) if open_until_now(state.state, going_on) else state.last_ns
        for state in states
    ]


def open_until_now(state: str, going_on: bool) -> bool:
    """Return True if a process in this state of a run has its spans open now."""
    return state == RUNNING or (state == ELSEWHERE and going_on)


def without_past(
    states: Iterable[ProcessState], started_ns: int, shifts_ns: Mapping[str, int] | None = None
) -> list[ProcessState]:
    """Return the processes, without the open spans that the run has left behind.

    A resumed run has left behind the open spans of its earlier attempts. Every run has left behind the open spans of a
    dead process once another step has begun.

    Args:
        states: The processes.
        started_ns: The start of the run, or of its last attempt if it was resumed.
        shifts_ns: Nanoseconds that bring the times of each host onto one clock.
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
    """Return the start of the last step that a process has begun, 0 if it has begun none."""
    open_steps = [span.start_ns for span in state.spans if span.kind == "step"]
    return max([*open_steps, state.stepped.start_ns if state.stepped is not None else 0])


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError as error:
        interrupts.pass_on(error)
        return 0.0


class _Open:
    """The spans of a process that have begun and not ended, as its lines come."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str, int], BegunLine] = {}
        # The last span of a name, role, rank and ids: one before it was interrupted where it should have ended.
        self._last: dict[tuple[object, ...], tuple[str, str, int]] = {}

    def begin(self, line: BegunLine) -> None:
        span = (line.span, line.name, line.start_ns)
        # Of steps one is going on.
        who = ("step",) if line.span == "step" else (line.span, line.name, line.role, line.rank, str(line.ids))
        before = self._last.get(who)
        if before is not None and before != span:
            self._spans.pop(before, None)
        self._last[who] = span
        self._spans[span] = line

    def end(self, kind: str, name: str, start_ns: int) -> None:
        self._spans.pop((kind, name, start_ns), None)

    def spans(self) -> list[OpenSpan]:
        return [_open(line) for line in sorted(self._spans.values(), key=lambda line: line.start_ns)]


class _Failure:
    """The exception that has left a step or a stage and that nobody caught, as the lines come."""

    def __init__(self) -> None:
        self.raised: RaisedLine | None = None
        self.within = ""
        self._innermost = 0

    def ended(self, line: Line) -> None:
        """Take a span that has ended: one without an error, around the exception, tells that it was caught."""
        if line.error is None:
            around = line.kind in ("step", "stage") and self.raised is not None and line.start_ns < self.raised.unix_ns
            if around or line.kind == "step":
                self.raised, self.within, self._innermost = None, "", 0
        elif line.kind != "step" and line.start_ns >= self._innermost:
            self._innermost, self.within = line.start_ns, line.name


def _process(path: Path) -> ProcessState:
    host, _, digits = path.stem.rpartition("-")
    pid = int(digits) if digits.isdecimal() else 0
    first, last, ended, open_ones, failure = _UNKNOWN, 0, None, _Open(), _Failure()
    memory = MemoryState()
    stage: Line | None = None
    step: Line | None = None
    moved = 0
    lost: list[RaisedLine] = []
    for line in tails.lines(path):
        if isinstance(line, ProcessLine):
            # A later process with the same number.
            first, last, ended, open_ones, failure = line, line.clock.unix_ns, None, _Open(), _Failure()
            memory, stage, step, lost = line.memory, None, None, []
            moved = last
        elif isinstance(line, BegunLine):
            open_ones.begin(line)
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
            open_ones.end(line.span, line.name, line.start_ns)
        else:
            open_ones.end(line.kind, line.name, line.start_ns)
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
        spans=[] if state == EXITED else open_ones.spans(),
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
    """Return when the process of a timeline crashed, in nanoseconds since the epoch; 0 if it left no stack."""
    try:
        found = os.stat(timeline.parent.parent / CRASHES / f"{timeline.stem}.txt")
        return found.st_mtime_ns if found.st_size else 0
    except OSError as error:
        interrupts.pass_on(error)
        return 0


def _state(host: str, pid: int, first: ProcessLine, exited: bool) -> str:
    """Return the state of a process. The pid of a process in another container is another process here."""
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
