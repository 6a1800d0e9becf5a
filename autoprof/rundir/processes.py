"""Reader of the last state of each process of a run, with its open spans, and of a summary of all processes.

The state of a process comes from the last lines of its journal.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, structs

from autoprof.base import files, identity, seam
from autoprof.base.originals import io, os
from autoprof.rundir import cache, file_names, journal
from autoprof.rundir.cache import Stamp
from autoprof.rundir.layout import CRASHES, RunDir
from autoprof.rundir.records import (
    BegunLine,
    DroppedLine,
    ErrorLine,
    ExitLine,
    HookLine,
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


class ProcessState(Struct, kw_only=True):
    """Last known state of a process, with its open spans. All times are in nanoseconds since the epoch.

    Attributes:
        state: `running`: the process exists. `exited`: the process wrote an exit line. `gone`: the process no longer
            exists and wrote no exit line, for example because it was killed. `elsewhere`: the process belongs to
            another host or container, so its state is unknown.
        error: The type of the exception that ended the process, or an empty text.
        spans: The open spans, the oldest first.
        begun_ns: The time of the first journal line.
        last_ns: The last sign of life: the latest time in the journal, or the time of the crash.
        moved_ns: The last time at which a span began or ended, or at which the process began or exited.
        exception: The exception that ended the process, with its stack.
        raised: The last exception that left a step or a stage; None if an outer span shows that it was caught.
        ended: The stage that ended last.
        stepped: The step that ended last.
        lost: The exceptions that left samples and rewards.
        within: The name of the innermost stage, timer or span of a sample that the exception `raised` left.
        drives: True if the process has begun a step.
        damaged: The number of lines at the end of the journal that can't be decoded.
        boot: The boot id of the machine.
        stderr: The file to which the process writes its stderr, if no other process writes to that file.
        memory: The memory at the start of the process, and the memory in the last journal line that has it.
        parent: The id of the parent process.
        process: The command line of the process, or the title that Ray gave it.
        node: Ray's id of the node.
        versions: Dict from package to version, for the targets that the process imported.
        hooks: Dict from the name of a hook to the last journal line of that hook.
        errors: Dict from a place in autoprof to the last journal line about an error there.
        file: The journal.
        ticks: The start time of the process, as in `run.json`.
        namespace: The id of the pid namespace of the process, or 0 if unknown.
    """

    host: str
    pid: int
    ticks: int
    namespace: int = 0
    state: str = ELSEWHERE
    error: str = ""
    last_ns: int
    spans: list[OpenSpan] = []
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
    parent: int = 0
    process: str = ""
    node: str = ""
    versions: dict[str, str] = {}
    hooks: dict[str, HookLine] = {}
    errors: dict[str, ErrorLine] = {}


def read(
    run: str | Path, running: bool = True, most: int | None = None, named: Collection[int] = ()
) -> list[ProcessState]:
    """Return the last states of the processes of a run that have a journal. Skip journals that can't be read.

    Args:
        run: The run directory.
        running: False to skip processes that are running, and processes that exited without an exception. This process
            itself is not skipped.
        most: The maximum number of processes; the processes that wrote last are kept. None for all processes.
        named: The pids of processes that are not skipped even if `running` is false.
    """
    paths = RunDir(Path(run)).lines("journal")
    if most is not None and len(paths) > most:
        paths = sorted(sorted(paths, key=_mtime, reverse=True)[:most])
    kept_pids = frozenset((os.getpid(), *named))
    chosen_paths = (
        path for path in paths if running or file_names.process_of(path.name)[1] in kept_pids or not _is_well(path)
    )
    return without_replaced([state for path in chosen_paths if (state := last_state(path)) is not None])


def without_replaced(states: Sequence[ProcessState]) -> list[ProcessState]:
    """Return the processes. If a process became another program by `os.exec`, mark the earlier program as exited.

    `exec` keeps the pid and the start time, but the new program writes a new journal.
    """

    def key(state: ProcessState) -> tuple[str, int, int, int]:
        return state.host, state.pid, state.ticks, state.namespace

    last_begin_ns: dict[tuple[str, int, int, int], int] = {}
    for state in states:
        last_begin_ns[key(state)] = max(last_begin_ns.get(key(state), 0), state.begun_ns)
    return [
        structs.replace(state, state=EXITED, spans=[])
        if state.ticks and state.begun_ns < last_begin_ns[key(state)]
        else state
        for state in states
    ]


def _mtime(path: Path) -> float:
    status = files.status(path)
    return status.st_mtime if status is not None else 0.0


def ends(
    states: Iterable[ProcessState], going_on: bool, now_ns: int, shifts_ns: Mapping[str, int] | None = None
) -> list[int]:
    """Return for each process the time until which its open spans are known to be open, by the clock of its host.

    For a running process, and for a process of another host while the run is running, this time is the current time.
    For every other process, this time is the last sign of life of the process, because later lines of other processes
    say nothing about it.

    Args:
        states: The processes.
        going_on: True if the run is running.
        now_ns: The current time, in nanoseconds since the epoch.
        shifts_ns: Dict from host to the nanoseconds to add to the times of that host. The sums are times of one clock.
    """
    shifts = shifts_ns or {}
    return [
        now_ns - shifts.get(state.host, 0) if open_until_now(state.state, going_on) else state.last_ns
        for state in states
    ]


def open_until_now(state: str, going_on: bool) -> bool:
    """Return True if the open spans of a process are still open now.

    Args:
        state: The state of the process.
        going_on: True if the run is running.
    """
    return state == RUNNING or (state == ELSEWHERE and going_on)


def without_past(
    states: Iterable[ProcessState], started_ns: int, shifts_ns: Mapping[str, int] | None = None
) -> list[ProcessState]:
    """Return the processes, and remove the open spans that are obsolete.

    In a resumed run, the open spans of earlier attempts are obsolete. The open spans of a dead process are obsolete as
    soon as a step has begun after its death.

    Args:
        states: The processes.
        started_ns: The start of the run, or of its last attempt if it was resumed.
        shifts_ns: Dict from host to the nanoseconds to add to the times of that host. The sums are times of one clock.
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
    """Return the start of the last step that a process has begun; 0 if it has begun no step."""
    open_steps = [span.start_ns for span in state.spans if span.kind == "step"]
    return max([*open_steps, state.stepped.start_ns if state.stepped is not None else 0])


# The process line that is used if a journal has no process line.
_UNKNOWN = ProcessLine(host="", pid=0, clock=Moment(), version="")
# Number of bytes at the beginning of a journal in which the lines of hooks are.
_HEAD_BYTES = 48 << 10
# Number of bytes at the end of a journal from which the last state is read. If lines before the last part are needed,
# the next larger number is tried.
_TAIL_BYTES = (96 << 10, 1 << 20, 4 << 20)
# Number of bytes at the end of a journal that are always read, because they contain the stage that ended last.
_RECENT_BYTES = 4 << 10
_PROCESS_LINE, _HOOK_LINE, _RAISED_LINE = (b'\n{"kind":"%s"' % kind for kind in (b"process", b"hook", b"raised"))
_HOOK_LINES = re.compile(rb"^%b.*" % _HOOK_LINE[1:], re.MULTILINE)


class _Ends(NamedTuple):
    """The bytes at the beginning of a journal, and the last whole lines of the journal.

    Attributes:
        head: The bytes at the beginning. The last line of them may be cut off.
        tail: The last lines; all lines if the journal is short.
        is_whole: True if `tail` has all lines.
    """

    head: bytes
    tail: bytes
    is_whole: bool

    @property
    def process(self) -> ProcessLine:
        """Return the first line of the journal, or `_UNKNOWN` if it is not a process line."""
        first = journal.decoded(self.head.partition(b"\n")[0])
        return first if isinstance(first, ProcessLine) else _UNKNOWN

    @property
    def last(self) -> journal.AnyLine | Line | None:
        """Return the last line of the journal, or None if that line is damaged."""
        return journal.decoded(self.tail.rstrip(b"\n").rpartition(b"\n")[2])


def _ends(path: str | Path, length: int = _TAIL_BYTES[0]) -> _Ends | None:
    """Return the beginning and the last lines of a journal. Return None if the journal can't be read.

    The last lines have at most `length` bytes in total.
    """
    with seam.suppress(OSError), io.open(files.opened(path), "rb") as file:
        head = file.read(_HEAD_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - length))
        text = file.read(min(size, length))
        return _Ends(head, text if size <= length else text.partition(b"\n")[2], size <= length)
    return None


def last_state(path: Path) -> ProcessState | None:
    """Return the last state of the process that wrote the journal `path`, or None if the journal can't be read."""
    folded = fold(path)
    return at_present(folded, path) if folded is not None else None


def fold(path: Path) -> ProcessState | None:
    """Return the state of a process after the last line of its journal, or None if the journal can't be read.

    If the journal has no exit line, the attribute `state` is empty, because it depends on the time and the host of the
    reader. `at_present` adds it.
    """
    history = None
    for length in _TAIL_BYTES:
        if (ends := _ends(path, length)) is None:
            return None
        history = _History(path, ends)
        if history.read(ends.tail, ends.is_whole):
            break
    return history.ended() if history is not None else None


def exit_line(run: Path, host: str, pid: int, ticks: int) -> ExitLine | None:
    """Return the exit line of a process of the run, or None if the process wrote no exit line.

    The function opens the journals of the process by name and does not list the folder, which may be large.
    """
    stem = str(run / "journal" / f"{host}-{pid}")
    for number in itertools.count(1):
        ends = _ends(f"{stem}.{number}{file_names.LINES}" if number > 1 else f"{stem}{file_names.LINES}")
        if ends is None:  # the process has no journal with this number
            return None
        last_line, process = ends.last, ends.process
        if process.pid and ticks in (0, process.ticks) and isinstance(last_line, ExitLine):
            return last_line
    return None


def _is_well(path: Path) -> bool:
    """Return True if a process is running or has exited without an exception, so that it did not die.

    For a process of another host, return True if its journal has no `raised` line. Return True if the journal can't be
    read.
    """
    ends = _ends(path, _RECENT_BYTES)
    if ends is not None and not ends.tail:  # the last line is longer than _RECENT_BYTES
        ends = _ends(path)
    if ends is None:
        return True
    if isinstance(last_line := ends.last, ExitLine):
        return not last_line.error
    process = ends.process
    host, pid = file_names.process_of(path.name)
    state = _live_state(host, pid, process.namespace, process.ticks) if process.pid else ELSEWHERE
    if state != ELSEWHERE:
        return state == RUNNING
    text = b"\n" + (_ends(path) or ends).tail
    begin = text.rfind(_PROCESS_LINE)
    part = journal.decoded(text[begin + 1 : text.find(b"\n", begin + 1)]) if begin >= 0 else None
    return isinstance(part, ProcessLine) and not part.raised and text.find(_RAISED_LINE, begin) < 0


@functools.lru_cache(maxsize=64)
def _hook_lines(text: bytes) -> list[HookLine]:
    """Return the decoded lines of hooks. The result is cached, because similar ranks have the same lines of hooks."""
    lines = (journal.decoded(line) for line in text.split(b"\n"))
    return [line for line in lines if isinstance(line, HookLine)]


@functools.lru_cache(maxsize=1024)
def _shared(line: HookLine) -> HookLine:
    """Return the same object for all equal lines, to save memory."""
    return line


class _History:
    """The state of a process while its journal is read: each journal line updates the state."""

    def __init__(self, path: Path, ends: _Ends) -> None:
        """Set the state after the first line of the journal and the lines of hooks at its beginning."""
        process = ends.process
        host, pid = file_names.process_of(path.name)
        self.state = ProcessState(
            host=host,
            pid=pid,
            ticks=process.ticks,
            namespace=process.namespace,
            # The process line is missing if the disk was full or the file was just made. The process may be running.
            state="" if process.pid else ELSEWHERE,
            file=path,
            begun_ns=process.clock.unix_ns,
            last_ns=process.clock.unix_ns,
            moved_ns=process.clock.unix_ns,
            boot=process.boot,
            stderr=process.stderr,
            memory=(process.memory, process.memory),
            parent=process.parent,
            process=process.process,
            node=process.node,
            versions=process.versions,
        )
        self._exit: ExitLine | None = None
        self._begun: dict[tuple[str, str, int], BegunLine] = {}
        # The last span of each kind, name, role, rank and ids. If an earlier span with the same values is still open,
        # the process never wrote its end.
        self._latest: dict[tuple[object, ...], tuple[str, str, int]] = {}
        # The start of the span `state.within`, which the exception `state.raised` left.
        self._within_ns = 0
        for line in _hook_lines(b"" if ends.is_whole else b"\n".join(_HOOK_LINES.findall(ends.head))):
            self.state.hooks[line.hook] = line

    def read(self, text: bytes, whole: bool) -> bool:
        """Update the state from the last lines of the journal. Return False if earlier lines are also needed.

        Args:
            text: The lines at the end of the journal.
            whole: True if `text` is the whole journal. If so, every line is read; if not, the lines of the last part.
        """
        begin = 0 if whole else text.rfind(_PROCESS_LINE, 0, max(0, len(text) - _RECENT_BYTES)) + 1
        texts = list(filter(None, text[begin:].split(b"\n")))
        for line, line_text in zip(journal.all_decoded(texts), texts, strict=True):
            if line is not None:
                self.add(line)
            elif line_text.strip() and not journal.is_foreign(line_text):
                self.state.damaged += 1
        if whole:
            return True
        part = journal.decoded(text[begin : text.find(b"\n", begin)])
        if not isinstance(part, ProcessLine):
            return False
        self.state.drives |= part.steps > 0
        return not part.raised and (self.state.stepped is not None or not part.steps)

    def add(self, line: journal.AnyLine | Line) -> None:
        """Update the state by the next journal line."""
        match line:
            case BegunLine():
                self._begin(line)
            case Line():
                self._end(line)
            case DroppedLine():
                self._begun.pop((line.span, line.name, line.start_ns), None)
            case HookLine():
                self.state.hooks[line.hook] = _shared(line)
            case ErrorLine():
                self.state.errors[line.where] = line
            case ProcessLine():
                self._begin_part(line)
            case _:
                self.state.last_ns = max(self.state.last_ns, line.unix_ns)
                self._add_event(line)

    def _add_event(self, line: ExitLine | RaisedLine | MemoryLine) -> None:
        match line:
            case MemoryLine():
                self.state.memory = self.state.memory[0], line.memory
            case ExitLine():
                self._exit = line
            case RaisedLine(span="step" | "stage"):
                self.state.raised = line
            case _:
                self.state.lost.append(line)

    def _begin_part(self, line: ProcessLine) -> None:
        state = self.state
        state.process, state.node, state.versions = line.process, line.node, line.versions
        state.memory = state.memory[0], line.memory
        state.last_ns = max(state.last_ns, line.clock.unix_ns)
        for name, outcome in line.hooks.items():
            hook = state.hooks.get(name) or HookLine(hook=name)
            called, outcome = outcome == "called", "applied" if outcome == "called" else outcome
            if (hook.state, hook.called) != (outcome, called):
                state.hooks[name] = _shared(structs.replace(hook, state=outcome, called=called))

    def _begin(self, line: BegunLine) -> None:
        span = (line.span, line.name, line.start_ns)
        self.state.drives |= line.span == "step"
        # A process has only one open step at a time.
        ids = str(line.ids) if line.ids else ""
        key = ("step",) if line.span == "step" else (line.span, line.name, line.role, line.rank, ids)
        earlier_span = self._latest.get(key)
        if earlier_span is not None and earlier_span != span:
            self._begun.pop(earlier_span, None)
        self._latest[key] = span
        self._begun[span] = line
        self._moved(line.start_ns)

    def _end(self, line: Line) -> None:
        state = self.state
        self._begun.pop((line.kind, line.name, line.start_ns), None)
        self._moved(line.end_ns)
        if line.kind == "stage":
            state.ended = line
        elif line.kind == "step":
            state.stepped, state.drives = line, True
        if line.error is None:
            # If a span was open when the exception was raised, and ended without an error, the exception was caught.
            raised_in = state.raised is not None and line.start_ns < state.raised.unix_ns
            if line.kind == "step" or (line.kind == "stage" and raised_in):
                state.raised, state.within, self._within_ns = None, "", 0
        elif line.kind != "step" and line.start_ns >= self._within_ns:
            state.within, self._within_ns = line.name, line.start_ns

    def _moved(self, unix_ns: int) -> None:
        if unix_ns > self.state.moved_ns:
            self.state.moved_ns = unix_ns
            self.state.last_ns = max(self.state.last_ns, unix_ns)

    def ended(self) -> ProcessState:
        """Return the state of the process after the last line of the journal, as `fold` does."""
        state, exit_line = self.state, self._exit
        if exit_line is not None:
            state.state, state.error, state.exception = EXITED, exit_line.error, exit_line.exception
            state.moved_ns = max(state.moved_ns, exit_line.unix_ns)
            state.drives |= exit_line.steps > 0
        else:
            state.spans = [OpenSpan.of(line) for line in sorted(self._begun.values(), key=lambda line: line.start_ns)]
        return state


def at_present(folded: ProcessState, path: Path) -> ProcessState:
    """Return the current state of a process, from its state after the last line of the journal `path`."""
    state = folded.state or _live_state(folded.host, folded.pid, folded.namespace, folded.ticks)
    last_ns = max(folded.last_ns, _crashed_ns(path)) if state == GONE else folded.last_ns
    return structs.replace(folded, state=state, last_ns=last_ns, file=path)


def _crashed_ns(path: Path) -> int:
    """Return the time at which a process crashed, in nanoseconds since the epoch; 0 if it has no crash dump."""
    host, pid = file_names.process_of(path.name)
    status = files.status(path.parent.parent / CRASHES / f"{host}-{pid}.txt")
    return status.st_mtime_ns if status is not None and status.st_size else 0


def _live_state(host: str, pid: int, namespace: int, ticks: int) -> str:
    """Return `running`, `gone` or `elsewhere` for a process that wrote no exit line.

    A process of another container is `elsewhere`, because another process may have its pid here.
    """
    if host != identity.HOST or namespace not in (0, identity.pid_namespace()):
        return ELSEWHERE
    began = identity.start_ticks(pid)
    return RUNNING if began is not None and ticks in (0, began) else GONE


# Name of the part of the cache with the states of processes.
_PART = "processes"


def read_cached(run: Path) -> list[ProcessState]:
    """Return the last states of the processes of a run that have a journal. Skip journals that can't be read."""
    paths = RunDir(run).lines("journal")
    folds = _Folds(run, paths)
    states = [at_present(folded, path) for path in paths if (folded := folds.of(path)) is not None]
    folds.keep()
    return without_replaced(states)


class _CachedFold(Struct, array_like=True):
    """State of a process after the last line of its journal.

    Attributes:
        stamp: The inode, size and time of change of the journal.
        hooks: The index of the process's hooks in `_CachedFolds.hooks`.
        state: The state, without the hooks. Similar ranks have equal hooks, so they are stored once.
    """

    stamp: Stamp
    hooks: int
    state: ProcessState


class _CachedFolds(Struct, array_like=True):
    """The part `processes` of the cache.

    Attributes:
        folds: Dict from the name of a journal to the state of its process.
        hooks: The different dicts of hooks. `_CachedFold.hooks` is an index of this list.
    """

    folds: dict[str, _CachedFold]
    hooks: list[dict[str, HookLine]]


class _Folds:
    """The states of the processes after the last lines of their journals.

    The state of a process comes from the cache if its journal has not changed. Otherwise the journal is read.
    """

    def __init__(self, run: Path, paths: Sequence[Path]) -> None:
        stamps = {path.name: cache.stamp(path) for path in paths}
        self._run = run
        self._stamps = {name: stamp for name, stamp in stamps.items() if stamp is not None}
        self._is_worth = cache.is_worth(self._stamps)
        cached = cache.get(run, _PART, _CachedFolds, _as_path) if self._is_worth else None
        self._cached = cached or _CachedFolds({}, [])
        self._new: dict[str, ProcessState] = {}
        # The dicts of hooks that were read, by the ids of their lines. Processes with equal hooks share one dict.
        self._hooks: dict[tuple[int, ...], dict[str, HookLine]] = {}

    def of(self, path: Path) -> ProcessState | None:
        """Return the state of the process that wrote the journal `path`, as `fold` does.

        Return None if the journal can't be read.
        """
        cached = self._cached.folds.get(path.name)
        if (
            cached is not None
            and cached.stamp == self._stamps.get(path.name)
            and cached.hooks < len(self._cached.hooks)
        ):
            return structs.replace(cached.state, hooks=self._cached.hooks[cached.hooks])
        if (state := fold(path)) is not None:
            state.hooks = self._hooks.setdefault(tuple(map(id, state.hooks.values())), state.hooks)
            self._new[path.name] = state
        return state

    def keep(self) -> None:
        """Write the cache again if more than a tenth of the states were not in the cache."""
        if not self._is_worth or len(self._new) <= len(self._stamps) // 10:
            return
        folds = {name: self._cached.folds[name] for name in self._stamps.keys() & self._cached.folds.keys()}
        hooks = self._cached.hooks
        numbers = {msgspec.msgpack.encode(process_hooks): number for number, process_hooks in enumerate(hooks)}
        for name, state in self._new.items():
            number = numbers.setdefault(msgspec.msgpack.encode(state.hooks), len(hooks))
            if number == len(hooks):
                hooks.append(state.hooks)
            if name in self._stamps:
                folds[name] = _CachedFold(self._stamps[name], number, structs.replace(state, hooks={}))
        cache.put(self._run, _PART, _CachedFolds(folds, hooks), str)


def _as_path(kind: type, value: Any) -> Any:
    return kind(value)


# Value of `HookLine.reason` for a hook whose module was not imported.
WAITING = "the module was not imported here"
_LOOPBACK = ("127.", "localhost:", "[::1]:")


def merged_hooks(processes: Iterable[Mapping[str, HookLine]], *states: str) -> dict[str, HookLine]:
    """Return a dict from the name of a hook to the most important line of that hook in any process.

    Args:
        processes: For each process, a dict from the name of a hook to its last line.
        states: The states of hooks, the most important last.
    """

    def importance(hook: HookLine) -> tuple[int, bool]:
        return states.index(hook.state) if hook.state in states else -1, hook.reason != WAITING

    hooks: dict[str, HookLine] = {}
    # In a large run, most processes share one dict of hooks, so each dict is read only once.
    for process in {id(process): process for process in processes}.values():
        for key, hook in process.items():
            best_so_far = hooks.setdefault(key, hook)
            if best_so_far is not hook and importance(hook) > importance(best_so_far):
                hooks[key] = hook
    return hooks


def last_facts(path: Path) -> ProcessLine | None:
    """Return the last process line of a journal. Its field `hooks` has the last states of the hooks.

    Return None if the journal has no process line, or can't be read.
    """
    if (ends := _ends(path)) is None:
        return None
    text = b"\n" + ends.tail
    if (begin := text.rfind(_PROCESS_LINE)) < 0:
        text, begin = b"\n" + ends.head, 0
    process = journal.decoded(text[begin + 1 : text.find(b"\n", begin + 1)])
    if not isinstance(process, ProcessLine):
        return None
    hooks = dict(process.hooks)
    while (begin := text.find(_HOOK_LINE, begin)) >= 0:
        begin += 1
        if isinstance(hook := journal.decoded(text[begin : text.find(b"\n", begin)]), HookLine):
            hooks[hook.hook] = "called" if hook.called else hook.state
    return structs.replace(process, hooks=hooks)


def summary(directory: RunDir, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return fields of `run.json` that summarize all processes of a run: `hosts`, `versions` and `recipes`.

    Args:
        directory: The run directory.
        versions: Dict from package to version. These versions are added to those in the journals.
    """
    hosts: set[str] = set()
    hooks: set[tuple[str, str]] = set()
    all_versions = dict(versions or {})
    for path in directory.lines("journal"):
        if (process := last_facts(path)) is not None:
            hosts.add(process.host)
            all_versions.update(process.versions)
            hooks.update(process.hooks.items())
    recipes = {name.partition("/")[0] for name, state in hooks if state in ("applied", "called")}
    return {"hosts": sorted(hosts), "versions": all_versions, "recipes": sorted(recipes)}


def ray_address(directory: RunDir) -> str:
    """Return the address of the run's Ray cluster from the newest journal that has one, or an empty text.

    A loopback address is used only on the host that wrote it, because on another host it names another cluster.
    """
    for path in sorted(directory.lines("journal"), key=_mtime, reverse=True):
        process = last_facts(path)
        is_here = process is not None and process.host == identity.HOST
        if process is not None and process.ray and (is_here or not process.ray.startswith(_LOOPBACK)):
            return process.ray
    return ""
