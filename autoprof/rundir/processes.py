"""Processes of a run: their last states, with their open spans, and a summary of their hooks.

The state of a process is read from the last lines of its journal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct, structs

from autoprof.base import files, identity, interrupts
from autoprof.base.originals import io, os
from autoprof.rundir import decoder, file_names, journal
from autoprof.rundir.layout import CRASHES, RunDir
from autoprof.rundir.records import (
    BegunLine,
    DroppedLine,
    ExitLine,
    HooksFile,
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


class ProcessState(Struct, frozen=True, kw_only=True):
    """Last state of a process, with its open spans. All times are in nanoseconds since the epoch.

    Attributes:
        state: `running`; `exited`: it wrote an exit line; `gone`: it no longer exists and wrote no exit line, for
            example because it was killed; `elsewhere`: it belongs to another host or container, so its state is
            unknown.
        error: The type of the exception that ended it, or an empty text.
        begun_ns: The time of its first line.
        last_ns: Its last sign of life: the end of its journal, or its crash.
        moved_ns: The last time at which a span began or ended, or the process began or exited.
        exception: The exception that ended it, with its stack.
        raised: The last exception that left a step or a stage, if no outer span shows that it was caught.
        ended: The last ended stage.
        stepped: The last ended step.
        lost: The exceptions that left samples and rewards.
        within: The innermost stage, timer or span of a sample that the exception `raised` left.
        drives: True if it has begun a step.
        damaged: The number of lines at the end of its journal that can't be decoded.
        boot: The boot id of its machine.
        stderr: The file of its stderr, if no other process writes to it.
        memory: The memory at its start, and in its last line with memory.
        file: Its journal.
        ticks: Its start time, as in `run.json`.
        namespace: The id of its pid namespace, or 0.
    """

    host: str
    pid: int
    ticks: int
    namespace: int = 0
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
    drives: bool = False
    damaged: int = 0
    boot: str = ""
    stderr: str = ""
    memory: tuple[MemoryState, MemoryState] = (MemoryState(), MemoryState())


def read(
    run: str | Path, running: bool = True, most: int | None = None, named: Collection[int] = ()
) -> list[ProcessState]:
    """Return the last states of the processes of a run that have a journal. Skip unreadable files.

    Args:
        run: The run directory.
        running: False to skip processes that are running or have exited without an exception, except this process.
        most: The maximum number of processes, the latest writers; None for all.
        named: The pids of processes that are never skipped.
    """
    paths = RunDir(Path(run)).lines("timeline")
    if most is not None and len(paths) > most:
        paths = sorted(sorted(paths, key=_mtime, reverse=True)[:most])
    wanted = None if running else frozenset((os.getpid(), *named))
    states = []
    for path in paths:
        with interrupts.suppress(OSError):
            if (state := _last_state(path, wanted)) is not None:
                states.append(state)
    return _without_replaced(states)


def _without_replaced(states: Sequence[ProcessState]) -> list[ProcessState]:
    """Return the processes; those that became another program by `os.exec` have exited.

    `exec` keeps the pid and the start time, and the new program writes a file of its own.
    """

    def key(state: ProcessState) -> tuple[str, int, int, int]:
        return state.host, state.pid, state.ticks, state.namespace

    begun: dict[tuple[str, int, int, int], int] = {}
    for state in states:
        begun[key(state)] = max(begun.get(key(state), 0), state.begun_ns)
    return [
        structs.replace(state, state=EXITED, spans=[]) if state.ticks and state.begun_ns < begun[key(state)] else state
        for state in states
    ]


def _mtime(path: Path) -> float:
    with interrupts.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


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


# Used if a journal has no process line.
_UNKNOWN = ProcessLine(host="", pid=0, clock=Moment(), version="")
# Bytes at the end of a file from which the last state is read. A larger part is read if lines before it matter.
_TAIL_BYTES = (96 << 10, 512 << 10, 4 << 20)
# Bytes at the end that are always read, because they have the last ended stage.
_RECENT_BYTES = 16 << 10
_LISTING = b'\n{"kind":"memory"'


def _last_state(path: Path, wanted: Collection[int] | None) -> ProcessState | None:
    """Return the last state of a process. If `wanted` is set, return None for other processes that did not die or fail.

    Raises:
        OSError: The file can't be read.
    """
    host, pid = file_names.process_of(path.name)
    with io.open(files.opened(path), "rb") as file:
        first = journal.decoded(file.readline(_TAIL_BYTES[0]))
        process = first if isinstance(first, ProcessLine) else _UNKNOWN
        size = file.seek(0, os.SEEK_END)
        text = _tail(file, size, _TAIL_BYTES[0])
        last = journal.decoded(text.rstrip(b"\n").rpartition(b"\n")[2])
        exit_line = last if isinstance(last, ExitLine) else None
        state = _state(host, pid, process, exit_line is not None)
        well = state == RUNNING or (exit_line is not None and not exit_line.error)
        if wanted is not None and well and pid not in wanted:
            return None
        history = _History(process)
        if size > len(text) and exit_line is not None and not (exit_line.error or exit_line.raised or exit_line.steps):
            history.add(exit_line)
        elif not history.read(text, size <= len(text)):
            for length in _TAIL_BYTES[1:]:
                history = _History(process)
                if history.read(_tail(file, size, length), size <= length):
                    break
    return history.state(path, host, pid, state)


def _tail(file: BinaryIO, size: int, length: int) -> bytes:
    """Return whole lines from the end of a file, together at most `length` bytes."""
    file.seek(max(0, size - length))
    text = file.read(length)
    return text if size <= length else text.partition(b"\n")[2]


class _History:
    """State of a process, updated line by line."""

    def __init__(self, process: ProcessLine) -> None:
        self._process = process
        self._begun: dict[tuple[str, str, int], BegunLine] = {}
        # The last span of each kind, name, role, rank and ids. An earlier one that is still open never wrote its end.
        self._latest: dict[tuple[object, ...], tuple[str, str, int]] = {}
        self._last_ns = self._moved_ns = process.clock.unix_ns
        self._memory = process.memory
        self._exit: ExitLine | None = None
        self._stage: Line | None = None
        self._step: Line | None = None
        self._lost: list[RaisedLine] = []
        # The exception that left a step or a stage, and the innermost span that it left.
        self._raised: RaisedLine | None = None
        self._within, self._within_ns = "", 0
        self._drives = False
        self._damaged = 0

    def read(self, text: bytes, whole: bool) -> bool:
        """Add lines, from the last list of the open spans on. Return False if earlier lines matter too.

        Args:
            text: The lines at the end of the file.
            whole: True if these are all lines of the file.
        """
        listing, begin = None, 0 if whole else len(text) - _RECENT_BYTES
        while listing is None and begin > 0 and (begin := text.rfind(_LISTING, 0, begin)) >= 0:
            line = journal.decoded(text[begin + 1 : text.find(b"\n", begin + 1)])
            listing = line if isinstance(line, MemoryLine) and line.open is not None else None
        for each in text[max(0, begin) :].split(b"\n"):
            if (event := journal.decoded(each)) is not None:
                self.add(event)
            elif each.strip() and not journal.is_foreign(each):
                self._damaged += 1
        self._drives |= listing is not None and listing.steps > 0
        return whole or (listing is not None and not listing.raised and (self._step is not None or not listing.steps))

    def add(self, line: journal.AnyLine | Line) -> None:
        """Add the next line."""
        if isinstance(line, Line):
            self._end(line)
        elif isinstance(line, BegunLine):
            self._begin(line)
        elif isinstance(line, DroppedLine):
            self._begun.pop((line.span, line.name, line.start_ns), None)
        elif not isinstance(line, ProcessLine):
            self._last_ns = max(self._last_ns, line.unix_ns)
            if isinstance(line, MemoryLine):
                self._memory = line.memory
            elif isinstance(line, ExitLine):
                self._exit = line
            elif line.span in ("step", "stage"):
                self._raised = line
            else:
                self._lost.append(line)

    def _begin(self, line: BegunLine) -> None:
        span = (line.span, line.name, line.start_ns)
        self._drives |= line.span == "step"
        # Only one step is open at a time.
        key = ("step",) if line.span == "step" else (line.span, line.name, line.role, line.rank, str(line.ids))
        before = self._latest.get(key)
        if before is not None and before != span:
            self._begun.pop(before, None)
        self._latest[key] = span
        self._begun[span] = line
        self._moved(line.start_ns)

    def _end(self, line: Line) -> None:
        self._begun.pop((line.kind, line.name, line.start_ns), None)
        self._moved(line.end_ns)
        if line.kind == "stage":
            self._stage = line
        elif line.kind == "step":
            self._step, self._drives = line, True
        if line.error is None:
            # A span around the exception that ended without an error shows that it was caught.
            raised_in = self._raised is not None and line.start_ns < self._raised.unix_ns
            if line.kind == "step" or (line.kind == "stage" and raised_in):
                self._raised, self._within, self._within_ns = None, "", 0
        elif line.kind != "step" and line.start_ns >= self._within_ns:
            self._within, self._within_ns = line.name, line.start_ns

    def _moved(self, unix_ns: int) -> None:
        self._last_ns, self._moved_ns = max(self._last_ns, unix_ns), max(self._moved_ns, unix_ns)

    def state(self, path: Path, host: str, pid: int, state: str) -> ProcessState:
        """Return the state of the process after the last line."""
        process, exit_line = self._process, self._exit
        begun = sorted(self._begun.values(), key=lambda line: line.start_ns) if state != EXITED else []
        return ProcessState(
            host=host,
            pid=pid,
            ticks=process.ticks,
            namespace=process.namespace,
            state=state,
            error=exit_line.error if exit_line is not None else "",
            begun_ns=process.clock.unix_ns,
            last_ns=max(self._last_ns, _crashed_ns(path)) if state == GONE else self._last_ns,
            spans=[_open_span(line) for line in begun],
            file=path,
            exception=exit_line.exception if exit_line is not None else None,
            raised=self._raised,
            ended=self._stage,
            stepped=self._step,
            moved_ns=max(self._moved_ns, exit_line.unix_ns) if exit_line is not None else self._moved_ns,
            lost=self._lost,
            within=self._within,
            drives=self._drives or (exit_line is not None and exit_line.steps > 0),
            damaged=self._damaged,
            boot=process.boot,
            stderr=process.stderr,
            memory=(process.memory, self._memory),
        )


def _open_span(line: BegunLine) -> OpenSpan:
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


def _crashed_ns(path: Path) -> int:
    """Return the time of a process's crash, in nanoseconds since the epoch; 0 without a crash dump."""
    with interrupts.suppress(OSError):
        host, pid = file_names.process_of(path.name)
        status = os.stat(path.parent.parent / CRASHES / f"{host}-{pid}.txt")
        return status.st_mtime_ns if status.st_size else 0
    return 0


def _state(host: str, pid: int, process: ProcessLine, exited: bool) -> str:
    """Return the state of a process. In another container, its pid may belong to a different process."""
    if exited:
        return EXITED
    if host != identity.HOST or process.namespace not in (0, identity.pid_namespace()):
        return ELSEWHERE
    began = identity.start_ticks(pid)
    return RUNNING if began is not None and process.ticks in (0, began) else GONE


# Reason in the hooks file for a hook whose module was not imported.
WAITING = "the module was not imported here"
_LOOPBACK = ("127.", "localhost:", "[::1]:")


def summary(directory: RunDir, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the hosts, versions and used recipes of a run's processes, as fields of `run.json`.

    Unreadable hooks files are skipped.

    Args:
        directory: The run directory.
        versions: Further versions, by package.
    """
    hosts: set[str] = set()
    recipes: set[str] = set()
    all_versions = dict(versions or {})
    for path in directory.hooks_files():
        hooks_file = decoder.read(path, HooksFile)
        if hooks_file.host:
            hosts.add(hooks_file.host)
        all_versions.update(hooks_file.versions)
        recipes |= {key.partition("/")[0] for key, hook in hooks_file.hooks.items() if hook.state == "applied"}
    return {"hosts": sorted(hosts), "versions": all_versions, "recipes": sorted(recipes)}


def ray_address(directory: RunDir) -> str:
    """Return the address of the run's Ray cluster from the newest hooks file that has one, or an empty text.

    A loopback address counts only on the host that wrote it, because on another host it means another cluster.
    """
    for path in sorted(directory.hooks_files(), key=os.path.getmtime, reverse=True):
        hooks_file = decoder.read(path, HooksFile)
        if hooks_file.ray and (hooks_file.host == identity.HOST or not hooks_file.ray.startswith(_LOOPBACK)):
            return hooks_file.ray
    return ""
