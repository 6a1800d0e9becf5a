"""Writer of a process's journal, `journal/<host>-<pid>.jsonl`: one line per span, outcome of a hook, or own error.

Steps, stages and windows are written when they begin and when they end. Spans of samples are buffered for at most a
second, or until a span of another kind is written, because a step may have thousands of them. A journal line is written
whole or not at all. An exception gets a line for the innermost step or stage that it left.
"""

from __future__ import annotations

import re
import sys
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet, ref

import msgspec

from autoprof import __version__
from autoprof.base import files, identity, log, process, seam
from autoprof.base.originals import json, os, threading, time
from autoprof.base.redact import hidden
from autoprof.base.seam import type_name
from autoprof.config import values
from autoprof.run import raised
from autoprof.rundir import journal, memory_state, processes
from autoprof.rundir.layout import MAX_SILENCE_NS, RunDir
from autoprof.rundir.records import (
    LOST_LINES,
    BegunLine,
    DroppedLine,
    ErrorLine,
    ExitLine,
    HookLine,
    Id,
    Line,
    Moment,
    ProcessLine,
    RaisedLine,
    StacksLine,
)

# Kinds of spans that are written immediately, because they are rare. Spans of all other kinds are buffered.
AT_ONCE = ("step", "stage", "window")
# Kinds of spans that have a stage kind. If the caller gives no stage kind, it is derived from the name of the span.
_STAGES = ("stage", "timer")


class Span:
    """A span that begins when the object is created. `end` writes the span.

    Args:
        timeline: The timeline to write to.
        kind: The kind of the span.
        name: The name of the span.
        step: The global step, or None if unknown.
        role: The role of the work, such as `actor`.
        rank: The rank, or None if the process has no rank.
        ids: The ids of the sample or request that the span belongs to.
        stage_kind: The kind of the stage; None to derive the kind from the name.

    Attributes:
        line: The journal line for the start of the span.
        begun_ns: The start by `time.monotonic_ns`.
        beside: True if the span is a stage in another thread or asyncio task than the open step of this process.
        thread: The id of the thread in which the span began. Only spans of the kinds in `AT_ONCE` have this attribute.
        task: A weak reference to the asyncio task in which the span began, or None. Only steps have this attribute.
    """

    __slots__ = ("_life", "_timeline", "begun_ns", "beside", "line", "task", "thread")

    def __init__(
        self,
        timeline: Timeline,
        kind: str,
        name: str,
        *,
        step: int | None,
        role: str,
        rank: int | None,
        ids: Mapping[str, Id] | None = None,
        stage_kind: str | None = None,
    ) -> None:
        if stage_kind is None:
            stage_kind = values.kind_of(name) if kind in _STAGES else ""
        self._timeline = timeline
        self._life = timeline.life
        self.line = BegunLine(kind, name, step, role, rank, time.time_ns(), ids or {}, stage_kind)
        self.begun_ns = time.monotonic_ns()
        # Set all attributes before the watcher can find the span. A signal handler may raise between two lines.
        self.beside = False
        if kind == "step":
            self.task = _current_task()
        if kind in AT_ONCE:
            self.thread = get_ident()
            timeline.last_step = self if kind == "step" else timeline.last_step
            self.beside = kind == "stage" and timeline.has_step_elsewhere(self.thread)
            timeline.announced.add(self)
            timeline.write(self.line)
        elif kind == "timer" and step is not None:
            timeline.announce_early(self)
        if kind == "step":
            timeline.report_gap()

    def end(
        self,
        error: BaseException | None = None,
        counts: Mapping[str, int] | None = None,
        *,
        step: int | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Write the span. Do nothing in a forked child of the process that began the span. Never raises.

        Args:
            error: The exception that ended the span, or None.
            counts: Dict from name to count, such as the number of tokens.
            step: The step, if it was unknown at the start.
            at_ns: The end of the span by `time.monotonic_ns`; None if the span ends now.
        """
        now = time.monotonic_ns() if at_ns is None else at_ns
        if self._life is not self._timeline.life:
            return
        begun_line = self.line
        line = Line(
            begun_line.span,
            begun_line.name,
            begun_line.step if step is None else step,
            begun_line.role,
            begun_line.rank,
            begun_line.start_ns,
            # The duration comes from the monotonic clock, because the wall clock may be set during the span.
            begun_line.start_ns + now - self.begun_ns,
            None if error is None else type_name(error),
            begun_line.ids,
            counts or {},
            begun_line.stage_kind,
            self.beside,
        )
        self._timeline.add(self, line, now, error)

    def drop(self) -> None:
        """End the span without a place on the timeline. If its start was written, write a `dropped` line."""
        timeline = self._timeline
        timeline.running.discard(self)
        if self in timeline.announced:
            timeline.announced.discard(self)
            timeline.write(DroppedLine(self.line.span, self.line.name, self.line.start_ns))
        if self.line.span in _STAGES:
            timeline.stage_ended_ns = time.monotonic_ns()
            timeline.report_gap()


def _current_task() -> ref[Any] | None:
    """Return a weak reference to the asyncio task that is running in this thread, or None."""
    asyncio: Any = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    with seam.suppress(RuntimeError, TypeError):  # the loop or the task is of another library
        return ref(asyncio.current_task())
    return None


AnyLine: TypeAlias = journal.AnyLine | Line
_encoder = msgspec.json.Encoder()


def _encode_lines(lines: Sequence[AnyLine]) -> bytes:
    """Return lines as JSON. Replace lone surrogates, as in file names that are not UTF-8, by question marks."""
    try:
        return _encoder.encode_lines(lines)
    except UnicodeEncodeError as error:
        seam.pass_on(error)
        text = json.dumps(msgspec.to_builtins(lines), ensure_ascii=False)
        return _encoder.encode_lines(json.loads(text.encode(errors="replace")))


# The buffer is written when it has _FLUSH_LINES lines, or when its first line is _FLUSH_AFTER_NS old.
_FLUSH_LINES = 256
_FLUSH_AFTER_NS = 1_000_000_000
# If a write takes longer than _SLOW_WRITE_NS, the disk is too slow, and at most _MAX_LINES lines are buffered.
_SLOW_WRITE_NS = 2_000_000_000
_MAX_LINES = 16 * _FLUSH_LINES
# A process without open spans writes each line immediately, unless it would spend more than 1/20 of its time on this.
_MIN_IDLE_RATIO = 20
# Maximum number of durations that are kept per kind and name, and of pairs of kind and name with durations.
_MAX_DURATIONS, _MAX_NAMES = 100, 256
# The start of a buffered span is written once the span has been open for _LONG_NS. At most _MAX_OPEN starts of open
# spans are written.
_LONG_NS = 10_000_000_000
_MAX_OPEN = 256
# The starts of timers are written immediately, in at most 1/_EARLY_RATIO of the time of the process, and _EARLY_NS.
_EARLY_RATIO, _EARLY_NS = 1000, 20_000_000
# A new part begins after PART_BYTES, because readers read the end of a file. A part is at least 16 times as long as the
# lines at its beginning.
PART_BYTES, _PARTS_RATIO = 32 << 10, 16
_PYTHON = sys.version.split()[0]


class Listener(Protocol):
    """An object that gets each span of this process when the span ends."""

    def hear(self, line: Line) -> None:
        """Process the line of an ended span. Never raises."""


class Timeline:
    """The open spans of one process, and the writer of its journal.

    Any thread may add lines to the buffer. The thread whose line makes the buffer full or too old writes the buffer.
    The file is made when the first lines are written. If the file is moved or removed later, a new file is made.

    Args:
        run: The run directory.
        restore: Callback that is called after a new file has replaced a file that was moved or removed. The run
            directory may be new and empty then.
        head: Function that returns those fields of the process line that may change while the process runs, and the
            lines of hooks and errors for the beginning of a part. Its argument is True if the part begins a file.

    Attributes:
        life: An object that identifies the process. A forked child gets another object.
        running: Open spans of samples. The caller adds them; `Span.end` and `Span.drop` remove them.
        announced: Open spans with a `begun` line.
        last_step: The step that began last.
        durations_ns: Dict from kind and name to the durations of the last ended steps, stages and windows, in
            nanoseconds.
        wake: Callback that is called when a span begins or ends, or None.
        stage_ended_ns: The time at which the last stage or timer ended, by `time.monotonic_ns`.
        gap_began: Callback that is called when a step begins, and when a stage or timer ends, or None. Never raises.
        listener: The object that gets each ended span, or None. A forked child has no listener.
        work: Function whose result changes while the engine of this process works on a batch; None without an engine.
        moved_ns: The last `look` that found a change of this result, by `time.monotonic_ns`; 0 before.
    """

    def __init__(
        self,
        run: RunDir,
        restore: Callable[[], None] = lambda: None,
        head: Callable[[bool], tuple[dict[str, Any], list[HookLine | ErrorLine]]] = lambda whole: ({}, []),
    ) -> None:
        self._run = run
        self._restore = restore
        self._head = head
        self.begin()
        _state.all.add(self)
        _state.register_at_exit()

    def begin(self) -> None:
        """Set the initial state, in a new process or a forked child. The next lines begin a new file.

        A forked child does not keep the lines and locks of its parent.
        """
        self.life = object()
        self.running: set[Span] = set()
        self.announced: set[Span] = set()
        self.last_step: Span | None = None
        self.durations_ns: dict[tuple[str, str], deque[int]] = {}
        self.listener: Listener | None = None
        self.work: Callable[[], object] | None = None
        self._work_done: object = None
        self.moved_ns = 0
        self.wake: Callable[[], None] | None = None
        self.stage_ended_ns = 0
        self.gap_began: Callable[[], None] | None = None
        self._lines: deque[AnyLine] = deque()
        self._writing = threading.Lock()
        self._oldest = 0
        self._written = 0
        self._write_ns = 0
        # The time that was spent on writing starts of timers, and the start of this timeline by `time.monotonic_ns`.
        self._early_ns, self._began_ns = 0, time.monotonic_ns()
        self._steps = 0
        self._exceptions = raised.Exceptions()
        self._memory = memory_state.MemoryWatch()
        run, path = self._run, self._run.process_file("journal")
        self._file = files.OwnFile(path, lambda: run.make(path.parent), lambda: self._part(begins_file=True))
        self.has_file = False
        self._is_replaced = False
        # The bytes since the beginning of the last part, and the bytes after which the next part begins.
        self._size, self._part_size = 0, PART_BYTES
        # The bytes that were written since `raised.Exceptions.again` was called.
        self._limited_size = 0
        # The start of the current write by `time.monotonic_ns`; 0 if no thread is writing.
        self._write_began = 0
        # The number of lines that could not be written, the last reason, and the number that the file reports.
        self._lost, self._lost_reason, self._lost_written = 0, "", 0

    @property
    def written_ns(self) -> int:
        """Return the time of the last write by `time.monotonic_ns`; 0 if nothing was written."""
        return self._written

    def watch_work(self, work: Callable[[], object]) -> None:
        """Compare the results of `work` from now on, because the engine of this process begins a batch."""
        self.work, self._work_done = work, work()

    def has_step_elsewhere(self, thread: int) -> bool:
        """Return True if a step is open in another thread than `thread`, the caller's, or in another asyncio task.

        An asyncio task runs its blocking work in threads, so the stages of these threads are work of the step.
        """
        step = self.last_step
        if step is None or step not in self.announced:
            return False
        if step.task is None:
            return step.thread != thread
        return (task := _current_task()) is not None and task() is not step.task()

    def report_gap(self) -> None:
        """Call `gap_began`, because a time without a stage may have begun."""
        # Read it once, because another thread may reset it.
        if (gap_began := self.gap_began) is not None:
            gap_began()

    def write(self, *lines: BegunLine | DroppedLine | HookLine | ErrorLine | StacksLine | RaisedLine) -> None:
        """Write the line of a span that began or was dropped, or lines of hooks, errors, stacks and dead engines.

        If the disk is too slow, count the lines as lost instead.
        """
        if len(self._lines) < _MAX_LINES or self._has_room(len(lines)):
            self._lines.extend(lines)
            self.flush()
        # Read `wake` once, because another thread may reset it.
        if (wake := self.wake) is not None:
            wake()

    def add(self, span: Span, line: Line, now: int, error: BaseException | None) -> None:
        """Buffer the line of an ended span. Write the buffer if it is full or too old, or if the span is in `AT_ONCE`.

        Args:
            span: The span that has ended.
            line: The journal line for the end of the span.
            now: The end of the span by `time.monotonic_ns`.
            error: The exception that ended the span, or None.
        """
        self.announced.discard(span)
        self.running.discard(span)
        at_once = line.kind in AT_ONCE
        if error is not None:
            at_once |= self._buffer_raised_line(line, error)
        elif at_once:
            key = line.kind, line.name
            if key in self.durations_ns or len(self.durations_ns) < _MAX_NAMES:
                self.durations_ns.setdefault(key, deque(maxlen=_MAX_DURATIONS)).append(now - span.begun_ns)
        self._steps += line.kind == "step"
        if line.kind in _STAGES:
            self.stage_ended_ns = now
            self.report_gap()
        if self.listener is not None:
            self.listener.hear(line)
        if (wake := self.wake) is not None:
            wake()
        lines = self._lines
        if not lines:
            self._oldest = now
        elif len(lines) >= _MAX_LINES and not self._has_room():
            return
        lines.append(line)
        # The cost of a capture's start is written with the begin of its stage, which follows at once.
        waits = bool(self.running) or line.kind == "profiling"
        idle = not waits and now - self._written >= _MIN_IDLE_RATIO * self._write_ns
        # The watcher flushes each second, but it may not be running.
        if at_once or idle or len(lines) >= _FLUSH_LINES or now - self._oldest > _FLUSH_AFTER_NS:
            self.flush()

    def announce_early(self, span: Span) -> None:
        """Write the start of a timer immediately, unless this has taken too much time in this process.

        If C code holds the interpreter's lock in the timer, `look` can't write the start later.
        """
        begin_ns = time.monotonic_ns()
        limit_ns = _EARLY_NS + (begin_ns - self._began_ns) // _EARLY_RATIO
        if self._early_ns < limit_ns and len(self.announced) < _MAX_OPEN:
            self.announced.add(span)
            self.write(span.line)
            self._early_ns += time.monotonic_ns() - begin_ns

    def _has_room(self, count: int = 1) -> bool:
        """Write the full buffer. If another thread's write takes long, count `count` lines as lost and return False."""
        self.flush()
        began = self._write_began
        if len(self._lines) < _MAX_LINES or not began or time.monotonic_ns() - began < _SLOW_WRITE_NS:
            return True
        self._lost, self._lost_reason = self._lost + count, f"a write took over {_SLOW_WRITE_NS // 10**9} s"
        log.warning_once("the disk is too slow for the timeline; spans are left out")
        return False

    def _buffer_raised_line(self, line: Line, error: BaseException) -> bool:
        """Buffer a `raised` line for the exception that leaves a span. Return False if the exception gets no line."""
        raised_line = self._exceptions.line(line, error)
        if raised_line is None or (len(self._lines) >= _MAX_LINES and not self._has_room()):
            return False
        self._lines.append(raised_line)
        return True

    def open(self) -> list[Span]:
        """Return the open spans, the oldest first."""
        # Other threads may change the sets, but no thread can interrupt the copy that `list` makes.
        return sorted({*list(self.announced), *list(self.running)}, key=lambda span: span.begun_ns)

    def look(self) -> None:
        """Do the work that is due every ten seconds.

        If the run directory was moved, begin a new file at the old path. Write the starts of buffered spans that have
        been open for ten seconds. If a span is open and no line was written for 30 seconds, write a memory line as a
        sign of life.
        """
        is_moved = self.has_file and self._file.is_moved()
        if is_moved:
            with self._writing:
                self._sync_or_close(self._file.close)
        now = time.monotonic_ns()
        silent = bool(self.announced) and now - self._written > MAX_SILENCE_NS
        earlier, self._work_done = self._work_done, self.work() if self.work is not None else None
        has_worked = bool(self.announced) and self._work_done != earlier
        if has_worked:
            self.moved_ns = now
        if self.has_file and (line := self._memory.look(silent or is_moved or has_worked)) is not None:
            self._lines.append(msgspec.structs.replace(line, moved=has_worked))
        room = max(_MAX_OPEN - len(self.announced), 0)
        long_spans = [span for span in self.open() if span not in self.announced and now - span.begun_ns > _LONG_NS]
        for span in long_spans[:room]:
            self.announced.add(span)
            # If another thread has just ended the span, the file may have the end before this start. Readers close the
            # span in this case too.
            self._lines.append(span.line)
        self.flush()
        self._sync_or_close(self._file.sync)

    def leave(self) -> None:
        """Write the exit line of this process, if it has a journal, and close the file."""
        self.flush()
        if self.has_file:
            error, exception = raised.exception_type(), raised.uncaught()
            exit_line = ExitLine(
                time.time_ns(), error, exception, memory_state.peak(), self._steps, self._exceptions.count
            )
            self._lines.append(exit_line)
            self.flush()
        self.close()

    def close(self) -> None:
        """Close the file. Later lines open it again."""
        if not self._writing.locked():
            with self._writing:
                self._sync_or_close(self._file.close)

    def _sync_or_close(self, work: Callable[[], None]) -> None:
        """Sync or close the file, and log an error. A network file system reports a full disk only at that time."""
        try:
            work()
        except OSError as problem:
            seam.pass_on(problem)
            log.warning_once(self._run.unwritable(problem))

    def flush(self) -> None:
        """Write the buffer. If another thread is writing, do nothing: that thread also writes these lines."""
        # A signal handler may raise an exception. With `acquire` instead of `with`, the lock could then stay locked.
        while self._lines and not self._writing.locked():
            with self._writing:
                self._write_began = begin_ns = time.monotonic_ns()
                lines: list[AnyLine] = []
                try:
                    lines = [self._lines.popleft() for _ in range(len(self._lines))]
                    self._append(lines)
                except OSError as problem:
                    seam.pass_on(problem)
                    self._lost, self._lost_reason = self._lost + len(lines), problem.strerror or str(problem)
                    log.warning_once(self._run.unwritable(problem))
                finally:
                    self._written = time.monotonic_ns()
                    self._write_ns, self._write_began = self._written - begin_ns, 0
        if self._is_replaced:
            self._is_replaced = False
            if files.exists(self._run.run_json):
                log.warning_once(f"a file of {self._run.path} was moved or removed; autoprof writes a new one")
            self._restore()

    def _append(self, lines: Sequence[AnyLine]) -> None:
        """Append lines to the file, which is made if it does not exist. If a new part is due, begin it."""
        content = _encode_lines(lines)
        if (lost := self._lost) != self._lost_written:
            content = _encode_lines([self._lost_line()]) + content
        if self._size > self._part_size:
            content = self._part() + content
        if self._file.append(content):
            self._is_replaced, self.has_file = self.has_file, True
        self._lost_written = lost
        self._size += len(content)
        self._limited_size += len(content)
        if self._limited_size > raised.LIMIT_BYTES:
            self._limited_size = 0
            self._exceptions.again()

    def _lost_line(self) -> ErrorLine:
        last_error = f"{self._lost} lines of the timeline were lost: {self._lost_reason}"
        return ErrorLine(where=LOST_LINES, count=self._lost, last=last_error)

    def begin_part(self) -> None:
        """Make the file if it does not exist. If it exists, begin a new part with the next line that is written.

        Raises:
            OSError: The file can't be made.
        """
        if self.has_file:
            self._size = self._part_size + 1
        elif not self._writing.locked():
            with self._writing:
                self._append([])

    def _part(self, begins_file: bool = False) -> bytes:
        """Return the lines at the beginning of a part: the process line, the open spans, hooks and errors.

        If `begins_file` is true, the part has the lines of all hooks. Otherwise, it has the lines of failed hooks only.
        """
        pid = os.getpid()
        changing_fields, hook_lines = self._head(begins_file)
        process_line = ProcessLine(
            host=identity.HOST,
            pid=pid,
            clock=Moment(time.time_ns(), time.monotonic_ns()),
            version=__version__,
            ticks=identity.start_ticks(pid) or 0,
            namespace=identity.pid_namespace(),
            boot=identity.machine(),
            parent=os.getppid(),
            python=_PYTHON,
            stderr=identity.own_stderr(),
            memory=self._memory.recent(),
            steps=self._steps,
            raised=self._exceptions.count,
            **changing_fields,
        )
        begun_lines = [span.line for span in self.open() if span in self.announced]
        lost_lines = [self._lost_line()] if self._lost_written else []
        content = _encode_lines([process_line, *begun_lines, *hook_lines, *lost_lines])
        # The part must be longer if these lines are long, for example with many open spans.
        self._size, self._part_size = 0, max(PART_BYTES, _PARTS_RATIO * len(content))
        return content


class _TimelineState(process.State):
    """The timelines of this process. The exit of the process writes their last lines."""

    ends = process.TIMELINE

    def reset(self) -> None:
        for timeline in list(getattr(self, "all", ())):
            timeline.close()
        self.all: WeakSet[Timeline] = WeakSet()

    def after_fork_in_child(self) -> None:
        for timeline in list(self.all):
            timeline.begin()

    def at_exit(self) -> None:
        for timeline in list(self.all):
            timeline.leave()


_state = _TimelineState()


_MAX_VERSION_BYTES = 4096


class LoggedHook(Protocol):
    """The attributes of a hook that `HookLog` reads."""

    @property
    def key(self) -> str:
        """Return the name of the hook, which begins with the name of its recipe: `verl/update-actor`."""

    @property
    def passive(self) -> bool:
        """Return True if this hook alone does not make a process part of a run when it is applied."""

    def described(self) -> dict[str, Any]:
        """Return the fields `module`, `attribute` and `behaviour` of the hook's journal line."""


class HookLog:
    """The outcomes of the hooks in this process, and the errors of autoprof.

    Nothing is written until a hook that is not passive was applied or has failed, because the process may not be a part
    of the run before.

    Args:
        directory: The run directory.
        timeline: The timeline of this process. The timeline calls `head` at the beginning of a part.
        join: Callback that is called before lines are written.
        at_work: Callback that is called after lines were written.

    Attributes:
        hooks: Dict from the name of a hook to the last line of that hook.
        errors: Dict from a place in autoprof to the last line about an error there.
        fired: True if a hook was called in this process.
        node: Ray's id of the node of this process; empty if unknown.
        ray: The address of the node's cluster, HOST:PORT; empty if unknown.
        versions: Dict from package to version, for the targets that this process imported.
    """

    def __init__(
        self, directory: RunDir, timeline: Timeline, join: Callable[[], None], at_work: Callable[[], None]
    ) -> None:
        self._directory = directory
        self._timeline = timeline
        self._join = join
        self._at_work = at_work
        self.fired = False
        self.node = ""
        self.ray = ""
        self._lock = threading.RLock()
        self.hooks: dict[str, HookLine] = {}
        self.versions: dict[str, str] = {}
        self.errors: dict[str, ErrorLine] = {}
        # Lines that are not written yet, by kind (`hook` or `error`) and by the name of the hook or the place.
        self._unwritten: dict[tuple[str, str], HookLine | ErrorLine] = {}
        self._active_target = False
        self._worth_writing = False
        # The facts that the beginning of the last part has.
        self._facts: dict[str, Any] = {}

    def add(self, hook: LoggedHook) -> None:
        """Record that a hook waits until its module is imported. Do nothing if the hook is already known."""
        with self._lock:
            self._active_target |= not hook.passive
            if hook.key not in self.hooks:
                self._set_hook_line(
                    HookLine(hook=hook.key, **hook.described(), state="skipped", reason=processes.WAITING)
                )

    def _set_hook_line(self, line: HookLine) -> None:
        self.hooks[line.hook] = line
        self._unwritten["hook", line.hook] = line

    def applied(self, hook: LoggedHook, reason: str = "") -> None:
        self._set(hook, "applied", reason)

    def skipped(self, hook: LoggedHook, reason: str) -> None:
        self._set(hook, "skipped", reason)

    def failed(self, hook: LoggedHook, reason: str) -> None:
        self._set(hook, "failed", reason)

    def called(self, key: str) -> None:
        """Record that a hook fired. At the first call, write a line."""
        line = self.hooks.get(key)
        if line is not None and not line.called:
            with self._lock:
                self._set_hook_line(msgspec.structs.replace(line, called=True))
            # The driver of a run often only imports the target and calls `ray.init`. No hook of the target is then
            # applied, but the hook of `ray.init` is called.
            self._worth_writing |= self._active_target
            self.fired = True
            self.write()

    def is_applied(self, key: str) -> bool:
        """Return True if a hook is applied in this process."""
        line = self.hooks.get(key)
        return line is not None and line.state == "applied"

    def was_called(self, key: str) -> bool:
        """Return True if a hook has fired in this process."""
        line = self.hooks.get(key)
        return line is not None and line.called

    def begin_anew(self) -> None:
        """Reset the log in a forked child: the hooks of the parent are applied in the child, but not called yet."""
        self._lock = threading.RLock()
        self.errors = {}
        self._facts = {}
        self.fired = False
        self.hooks = {key: msgspec.structs.replace(line, called=False) for key, line in self.hooks.items()}

    def leave(self) -> None:
        """If a target was imported but none of its hooks was applied, write the journal with these hooks.

        The run may have no `run.json` in this case.
        """
        if self._active_target and not self._worth_writing:
            self._timeline.begin_part()

    def error(self, where: str, text: str) -> None:
        """Count an error of autoprof itself at the place `where`, and write a line at some of the counts."""
        with self._lock:
            last_line = self.errors.get(where)
            line = ErrorLine(where=where, count=last_line.count + 1 if last_line is not None else 1, last=hidden(text))
            self.errors[where] = line
        # Write a line only at the counts 1, 2, 4, 8, ..., because a hook may fail in each of a million calls.
        if line.count.bit_count() == 1:
            self._unwritten["error", where] = line
            self.write()

    def switched_off(self, key: str, reason: str) -> None:
        """Record that a hook is disabled in this process from now on."""
        with self._lock:
            if line := self.hooks.get(key):
                self._set_hook_line(msgspec.structs.replace(line, state="failed", reason=reason))
        self.write()

    def _set(self, hook: LoggedHook, state: str, reason: str) -> None:
        self.add(hook)
        with self._lock:
            self._set_hook_line(msgspec.structs.replace(self.hooks[hook.key], state=state, reason=hidden(reason)))
            self._worth_writing |= state != "skipped" and not hook.passive
        self.write()

    def head(self, begins_file: bool) -> tuple[dict[str, Any], list[HookLine | ErrorLine]]:
        """Return fields of the process line that may change, and the lines of hooks and errors, for a new part.

        If `begins_file` is true, all hooks have a line. Otherwise, only hooks that failed have one.
        """
        if begins_file:
            self._unwritten = {}
        lines = list(self.hooks.values())
        states = {line.hook: "called" if line.called else line.state for line in lines}
        states = {key: state for key, state in states.items() if state != "skipped"}
        self._facts = self._new_facts()
        hook_lines = [line for line in lines if begins_file or line.state == "failed"]
        versions = base_versions() | self.versions
        return self._facts | {"hooks": states, "versions": versions}, [*hook_lines, *list(self.errors.values())]

    def _new_facts(self) -> dict[str, Any]:
        return {"process": process_title(), "node": self.node, "ray": self.ray, "versions": dict(self.versions)}

    def write(self) -> None:
        """Write the new lines, if one of the hooks has made this process part of the run. Never raises."""
        if not self._worth_writing:
            return
        # Errors are not passed to the caller, because the caller may be reporting an error of autoprof.
        with seam.guard("the outcomes of hooks can't be written", self._directory.report) as writing:
            # Do not hold the lock here. `_join` may import modules of Ray, and another thread that imports these
            # modules may need the lock.
            self._join()
            if not self._timeline.has_file:
                self._timeline.begin_part()
            if self._unwritten:
                lines, self._unwritten = list(self._unwritten.values()), {}
                if self._new_facts() != self._facts:
                    self._timeline.begin_part()
                self._timeline.write(*lines)
            # The program may be stuck before the first call of a hook, for example in a download.
            self._at_work()
        if writing.failed:
            self._worth_writing = False


def base_versions() -> dict[str, str]:
    """Return the versions of torch, if this process has imported it, and of the driver of the host's GPUs, if any."""
    torch_version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
    nvidia = re.search(r"\d+\.\d[\d.]*", files.text("/proc/driver/nvidia/version", _MAX_VERSION_BYTES))
    amd_version = files.text("/sys/module/amdgpu/version", _MAX_VERSION_BYTES).strip()
    found = {"torch": torch_version, "nvidia driver": nvidia[0] if nvidia else "", "amdgpu driver": amd_version}
    return {name: version for name, version in found.items() if version}


def process_title() -> str:
    """Return the title that `ps` shows for this process. Ray sets the title to the class of the actor.

    For a child that multiprocessing spawned, return the name of the child instead.
    """
    if title := processes.title_of(os.getpid()):
        return title
    import multiprocessing

    return hidden(multiprocessing.current_process().name)
