"""Reader of the last state of each process of a run, with its open spans, and of a summary of all processes.

The state of a process comes from the last lines of its journal, or from the cache of a large run if the journal has not
changed.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from autoprof.base import files, identity, seam
from autoprof.base.originals import io, os, time
from autoprof.base.redact import redacted, writable
from autoprof.rundir import file_names, journal, layout
from autoprof.rundir.layout import CRASHES, RunDir, Stamp
from autoprof.rundir.records import (
    HANGS,
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
    StacksLine,
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
        moved_ns: The last time at which a span began or ended, at which an engine was seen to work on its batch, or at
            which the process began or exited.
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
        process: The command line of the process, or the title that Ray gave it. For a running process of this host, its
            present title.
        node: Ray's id of the node.
        ray: The address of the node's Ray cluster.
        versions: Dict from package to version, for the targets that the process imported.
        hooks: Dict from the name of a hook to the last journal line of that hook.
        errors: Dict from a place in autoprof to the last journal line about an error there.
        file: The path of the journal, relative to the run directory.
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
    file: str
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
    ray: str = ""
    versions: dict[str, str] = {}
    hooks: dict[str, HookLine] = {}
    errors: dict[str, ErrorLine] = {}


def read(
    run: str | Path, most: int | None = None, write_cache: bool = False, all_spans: bool = True
) -> list[ProcessState]:
    """Return the last states of the processes of a run that have a journal. Skip journals that can't be read.

    Args:
        run: The run directory.
        most: The maximum number of processes; the processes that wrote last are kept. None for all processes.
        write_cache: True to write the states of a large run into its cache.
        all_spans: False to read the spans of a process only if it may have died, in about half the time.
    """
    paths = RunDir(Path(run)).lines("journal")
    if most is not None and len(paths) > most:
        paths = sorted(sorted(paths, key=_mtime, reverse=True)[:most])
    stamps = {path.name: current for path in paths if (current := layout.stamp(path)) is not None}
    is_large = layout.is_large(stamps)
    cached = _read_cache(Path(run), stamps) if is_large else {}
    read_one = fold if all_spans else _fold_if_died
    folds = {path: folded for path in paths if (folded := cached.get(path.name) or read_one(path)) is not None}
    _share_hooks(folds.values())
    # Write the cache again if more than a tenth of the states were not in the cache.
    if write_cache and is_large and len(folds) - len(cached) > len(stamps) // 10:
        _write_cache(Path(run), stamps, {path.name: folded for path, folded in folds.items() if path.name in stamps})
    return mark_replaced([at_present(folded, path) for path, folded in folds.items()])


def mark_replaced(states: Sequence[ProcessState]) -> list[ProcessState]:
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
_TAIL_BYTES = (64 << 10, 1 << 20, 4 << 20)
# Number of bytes at the end of a journal that are always read, because they contain the stage that ended last.
_RECENT_BYTES = 4 << 10
_PROCESS_LINE = b'\n{"kind":"process"'
# The kinds of lines that are not about spans, in the form of `journal.OTHER_KINDS`.
_NO_SPANS = journal.OTHER_KINDS - {b"begu", b"drop"}
_HOOK_LINES = re.compile(rb'^{"kind":"hook".*', re.MULTILINE)


def _ends(path: Path, length: int) -> tuple[bytes, bytes, bool] | None:
    """Return the bytes at the beginning of a journal, the last whole lines, and True if these are all lines.

    Return None if the journal can't be read. The last lines have at most `length` bytes in total. The last line of the
    beginning may be cut off.
    """
    with seam.suppress(OSError), io.open(files.opened(path), "rb") as file:
        head = file.read(_HEAD_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - length))
        text = file.read(min(size, length))
        return head, text if size <= length else text.partition(b"\n")[2], size <= length
    return None


def _fold_if_died(path: Path) -> ProcessState | None:
    """Return what `fold` returns. If the process did not die and raised no exception, leave out its spans."""
    folded = fold(path, spans=False)
    if folded is None or not (folded.error or folded.raised or folded.lost or at_present(folded, path).state == GONE):
        return folded
    return fold(path)


def fold(path: Path, spans: bool = True) -> ProcessState | None:
    """Return the state of a process after the last line of its journal, or None if the journal can't be read.

    If the journal has no exit line, the attribute `state` is empty, because it depends on the time and the host of the
    reader. `at_present` adds it. If `spans` is false, the state has no spans.
    """
    history = None
    for length in _TAIL_BYTES:
        if (ends := _ends(path, length)) is None:
            return None
        head, tail, is_whole = ends
        history = _History(path, head, is_whole)
        if history.read(tail, is_whole, spans):
            break
    return history.ended() if history is not None else None


def exited(run: Path, host: str, pid: int, ticks: int) -> ProcessState | None:
    """Return the state of a process of the run, or None if the process wrote no exit line.

    The function opens the journals of the process by name and does not list the folder, which may be large.
    """
    stem = f"{host}-{pid}"
    for number in itertools.count(1):
        state = fold(run / "journal" / f"{stem}{f'.{number}' if number > 1 else ''}{file_names.LINES}")
        if state is None or (state.state == EXITED and ticks in (0, state.ticks)):
            return state
    return None


@functools.lru_cache(maxsize=64)
def _hook_lines(text: bytes) -> list[HookLine]:
    """Return the decoded lines of hooks. The result is cached, because similar ranks have the same lines of hooks."""
    lines = (journal.decoded(line) for line in text.split(b"\n"))
    return [line for line in lines if isinstance(line, HookLine)]


@functools.lru_cache(maxsize=1024)
def _shared_line(line: HookLine) -> HookLine:
    """Return the same object for all equal lines, to save memory."""
    return line


class _History:
    """The state of a process while its journal is read: each journal line updates the state."""

    def __init__(self, path: Path, head: bytes, is_whole: bool) -> None:
        """Set the state after the first line of the journal. Unless the whole journal is read, also read its hooks.

        The lines of the hooks are at the beginning of the journal.
        """
        first_line = journal.decoded(head.partition(b"\n")[0])
        process = first_line if isinstance(first_line, ProcessLine) else _UNKNOWN
        host, pid = file_names.process_of(path.name)
        self.state = ProcessState(
            host=host,
            pid=pid,
            ticks=process.ticks,
            namespace=process.namespace,
            # The process line is missing if the disk was full or the file was just made. The process may be running.
            state="" if process.pid else ELSEWHERE,
            file=writable(f"journal/{path.name}"),
            begun_ns=process.clock.unix_ns,
            last_ns=process.clock.unix_ns,
            moved_ns=process.clock.unix_ns,
            boot=process.boot,
            stderr=process.stderr,
            memory=(process.memory, process.memory),
            parent=process.parent,
            process=process.process,
            node=process.node,
            ray=process.ray,
            versions=process.versions,
        )
        self._exit: ExitLine | None = None
        self._begun: dict[tuple[str, str, int], BegunLine] = {}
        # The last span of each kind, name, role, rank and ids. If an earlier span with the same values is still open,
        # the process never wrote its end.
        self._latest: dict[tuple[object, ...], tuple[str, str, int]] = {}
        # The start of the span `state.within`, which the exception `state.raised` left.
        self._within_ns = 0
        for line in _hook_lines(b"" if is_whole else b"\n".join(_HOOK_LINES.findall(head))):
            self.state.hooks[line.hook] = line

    def read(self, text: bytes, is_whole_journal: bool, spans: bool) -> bool:
        """Update the state from the last lines of the journal. Return False if earlier lines are also needed.

        Args:
            text: The lines at the end of the journal.
            is_whole_journal: True if `text` is the whole journal. If so, every line is read; if not, the lines of the
                last part.
            spans: False to leave out the lines of spans.
        """
        begin = 0 if is_whole_journal else text.rfind(_PROCESS_LINE, 0, max(0, len(text) - _RECENT_BYTES)) + 1
        texts = list(filter(None, text[begin:].split(b"\n")))
        if not spans:
            texts = [line_text for line_text in texts if line_text[9:13] in _NO_SPANS]
        lines = journal.all_decoded(texts)
        for line, line_text in zip(lines, texts, strict=True):
            if line is not None:
                self.add(line)
            elif line_text.strip() and not journal.is_foreign(line_text):
                self.state.damaged += 1
        if is_whole_journal:
            return True
        part = lines[0] if lines else None
        if not isinstance(part, ProcessLine):
            return False
        self.state.drives |= part.steps > 0
        return not part.raised and (self.state.stepped is not None or not part.steps or not spans)

    def add(self, line: journal.AnyLine | Line) -> None:
        """Update the state by the next journal line."""
        match line:
            case BegunLine():
                self._begin_span(line)
            case Line():
                self._end_span(line)
            case DroppedLine():
                self._begun.pop((line.span, line.name, line.start_ns), None)
            case HookLine():
                self.state.hooks[line.hook] = _shared_line(line)
            case ErrorLine():
                self.state.errors[line.where] = line
            case ProcessLine():
                self._begin_part(line)
            case _:
                self.state.last_ns = max(self.state.last_ns, line.unix_ns)
                self._add_event(line)

    def _add_event(self, line: ExitLine | RaisedLine | MemoryLine | StacksLine) -> None:
        match line:
            case StacksLine():
                pass
            case MemoryLine():
                self.state.memory = self.state.memory[0], line.memory
                if line.moved:
                    self._note_progress(line.unix_ns)
            case ExitLine():
                self._exit = line
            case RaisedLine(span="step" | "stage"):
                self.state.raised = line
            case _:
                self.state.lost.append(line)

    def _begin_part(self, line: ProcessLine) -> None:
        state = self.state
        state.process, state.node, state.ray, state.versions = line.process, line.node, line.ray, line.versions
        state.memory = state.memory[0], line.memory
        state.last_ns = max(state.last_ns, line.clock.unix_ns)
        for name, outcome in line.hooks.items():
            hook = state.hooks.get(name) or HookLine(hook=name)
            called, outcome = outcome == "called", "applied" if outcome == "called" else outcome
            if (hook.state, hook.called) != (outcome, called):
                state.hooks[name] = _shared_line(structs.replace(hook, state=outcome, called=called))

    def _begin_span(self, line: BegunLine) -> None:
        """Add the span of a `begun` line to the open spans."""
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
        self._note_progress(line.start_ns)

    def _end_span(self, line: Line) -> None:
        """Remove an ended span from the open spans. Forget an exception that the program has caught."""
        state = self.state
        self._begun.pop((line.kind, line.name, line.start_ns), None)
        self._note_progress(line.end_ns)
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

    def _note_progress(self, unix_ns: int) -> None:
        """Store `unix_ns` as the time of the last change of a span, if it is the newest."""
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
    last_ns = max(folded.last_ns, _dumped_ns(path, folded.last_ns)) if state in (GONE, ELSEWHERE) else folded.last_ns
    # Ray changes the title with each method of an actor.
    title = title_of(folded.pid) if state == RUNNING else ""
    return structs.replace(folded, state=state, last_ns=last_ns, process=title or folded.process)


_MAX_TITLE_CHARS, _MAX_COMMAND_BYTES = 200, 4096


def title_of(pid: int) -> str:
    """Return the title that `ps` shows for a process on this host, without secrets.

    Return an empty text if the title is unknown, or if it says only that multiprocessing spawned the process.
    """
    words = [word for word in files.text(f"/proc/{pid}/cmdline", _MAX_COMMAND_BYTES).split("\0") if word]
    if not words or "--multiprocessing-fork" in words:
        return ""
    title = redacted(words[:4])
    if len(words) == 1:  # a title and not a command line, so undo the shell quoting
        title = shlex.split(title)[0]
    return title if len(title) <= _MAX_TITLE_CHARS else f"{title[:_MAX_TITLE_CHARS]}..."


# Maximum time from the last line of a journal to the time of the file. The times of copied files are later.
_COPIED_NS = 60_000_000_000


def _dumped_ns(path: Path, last_ns: int) -> int:
    """Return the time at which a process last wrote its stacks: for a hang, at a crash or when SIGTERM killed it.

    The time is in nanoseconds since the epoch. It is 0 if the process wrote none, or if the files were copied.

    Args:
        path: The journal of the process.
        last_ns: The latest time in the journal.
    """
    host, pid = file_names.process_of(path.name)
    run = path.parent.parent
    hangs = [run / HANGS / name / f"{host}-{pid}{file_names.JSON}" for name in files.names_in(run / HANGS)]
    written = [files.status(each) for each in (path, run / CRASHES / f"{host}-{pid}.txt", *hangs)]
    times = [status.st_mtime_ns if status is not None and status.st_size else 0 for status in written]
    return max(times[1:]) if times[0] <= last_ns + _COPIED_NS else 0


def _live_state(host: str, pid: int, namespace: int, ticks: int) -> str:
    """Return `running`, `gone` or `elsewhere` for a process that wrote no exit line.

    A process of another container is `elsewhere`, because another process may have its pid here.
    """
    if host != identity.HOST or namespace not in (0, identity.pid_namespace()):
        return ELSEWHERE
    return RUNNING if is_alive(pid, ticks) else GONE


def without_end(run: str | Path) -> list[ProcessState]:
    """Return the processes of a run that wrote an exit line some time ago and are running on this host.

    Only the journals of pids that exist are read, because `autoprof ls` calls this function for every run.
    """
    folder = Path(run, "journal")
    names = [name for name in files.names_in(folder) if name.endswith(file_names.LINES) and _may_be_alive(name)]
    states = [state for name in names if (state := fold(folder / name)) is not None]
    written_before_ns = time.time_ns() - round(2e9 * layout.look_s())
    last_begin_ns = {
        (state.host, state.pid): state.begun_ns for state in sorted(states, key=lambda each: each.begun_ns)
    }
    return [
        state
        for state in states
        if state.state == EXITED
        and state.last_ns < written_before_ns
        and _live_state(state.host, state.pid, state.namespace, state.ticks) == RUNNING
        # Otherwise the process has become another program by `os.exec`.
        and last_begin_ns[state.host, state.pid] == state.begun_ns
    ]


def _may_be_alive(journal: str) -> bool:
    """Return True if the pid in the name of a journal exists on this host. It may belong to another process."""
    host, pid = file_names.process_of(journal)
    return host == identity.HOST and files.exists(f"/proc/{pid}")


def is_alive(pid: int, ticks: int) -> bool:
    """Return True if the process with this pid and start time is running on this host.

    `ticks` is the start time. It must match because pids are reused. If it is 0 (unknown), only the pid must match.
    """
    began = identity.start_ticks(pid)
    return began is not None and ticks in (0, began)


# Name of the part of the cache with the states of processes.
_PART = "processes"


class _CachedStates(Struct, array_like=True):
    """The part `processes` of the cache.

    Attributes:
        states: Dict from the name of a journal to its stamp, the state after its last line without hooks, and an index
            of `hooks`.
        hooks: The different dicts of hooks. Similar ranks have equal hooks, so they are stored once.
    """

    states: dict[str, tuple[Stamp, ProcessState, int]]
    hooks: list[dict[str, HookLine]]


def _read_cache(run: Path, stamps: Mapping[str, Stamp]) -> dict[str, ProcessState]:
    """Return the cached states of the processes whose journals have not changed, by the name of the journal."""
    cached = layout.get_cached(run, _PART, _CachedStates) or _CachedStates({}, [])
    all_hooks = [{name: _shared_line(line) for name, line in hooks.items()} for hooks in cached.hooks]
    return {
        name: structs.replace(state, hooks=all_hooks[number])
        for name, (stamp, state, number) in cached.states.items()
        if stamps.get(name) == stamp and number < len(all_hooks)
    }


def _write_cache(run: Path, stamps: Mapping[str, Stamp], states: Mapping[str, ProcessState]) -> None:
    """Write states into the cache. `stamps` and `states` are dicts from the name of a journal."""
    all_hooks = {id(state.hooks): state.hooks for state in states.values()}
    numbers = {key: number for number, key in enumerate(all_hooks)}
    cached = {
        name: (stamps[name], structs.replace(state, hooks={}), numbers[id(state.hooks)])
        for name, state in states.items()
    }
    layout.put_cached(run, _PART, _CachedStates(cached, list(all_hooks.values())))


def _share_hooks(states: Iterable[ProcessState]) -> None:
    """Make processes with equal hooks share one dict, to save memory. Equal lines are one object (`_shared_line`)."""
    all_hooks: dict[tuple[int, ...], dict[str, HookLine]] = {}
    for state in states:
        state.hooks = all_hooks.setdefault(tuple(map(id, state.hooks.values())), state.hooks)


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


def summary(states: Iterable[ProcessState], versions: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of `run.json` that summarize all processes of a run: `hosts`, `versions` and `recipes`.

    Args:
        states: The processes.
        versions: Dict from package to version. These versions are added to those in the journals.
    """
    hosts: set[str] = set()
    recipes: set[str] = set()
    all_versions = dict(versions)
    for state in states:
        hosts.add(state.host)
        all_versions.update(state.versions)
        recipes.update(
            name.partition("/")[0] for name, hook in state.hooks.items() if hook.called or hook.state == "applied"
        )
    return {"hosts": sorted(hosts), "versions": all_versions, "recipes": sorted(recipes)}


def ray_address(directory: RunDir) -> str:
    """Return the address of the run's Ray cluster from the newest journal that has one, or an empty text.

    A loopback address is used only on the host that wrote it, because on another host it names another cluster.
    """
    for path in sorted(directory.lines("journal"), key=_mtime, reverse=True):
        state = fold(path)
        if state is not None and state.ray and (state.host == identity.HOST or not state.ray.startswith(_LOOPBACK)):
            return state.ray
    return ""
