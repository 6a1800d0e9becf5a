"""The watcher: a thread that flushes the timeline each second, and looks for hangs and requests for stacks every 10 s.

In a step without an open stage, it also samples the stack of the thread that runs the steps (`gaps.GapSampler`).

The module `threading` does not know the thread, so programs do not find it. The thread ends before a fork. The child
starts its own watcher at the first call of a hook. In the parent, the watcher starts again after the fork; from Python
3.13 on, it starts again with the next span. The watcher also checks the file to which `faulthandler` writes the stacks
of a crash or of a kill.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C, as in base/seam.py
import _thread
import faulthandler
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import ref

from autoprof.base import files, identity, log, process, seam
from autoprof.base.originals import os, time
from autoprof.base.units import seconds as in_words
from autoprof.config.selection import HANG, Condition
from autoprof.config.settings import Settings
from autoprof.run import snapshot
from autoprof.run.gaps import GapSampler
from autoprof.run.journal import Span, Timeline
from autoprof.rundir import file_names, layout
from autoprof.rundir.layout import CRASHES, RunDir
from autoprof.rundir.records import HANGS, STACKS, WHY, BegunLine, Why
from autoprof.rundir.runs import label, loop_of

# Default limits of the duration of a span: in seconds, and as a multiple of the median. A span that exceeds both limits
# hangs. As long as the median is unknown, a span that exceeds the first limit hangs.
TIME_S, FACTOR = 1800.0, 5.0
# Number of ended steps, or of ended stages with the same name, from which a median is used.
MIN_FOR_MEDIAN = 3
# Default of the maximum number of hangs in a run for which all processes write their stacks.
AT_MOST = 3
# Folder for a hang of a span that has no step. The limit of such a span is longer, so that the trainer, which checks
# every ten seconds, can report the hanging step first.
NO_STEP = "no_step"
_NO_STEP_DELAY_S = 25.0
# Kinds of stages that may take long outside of a step although nothing hangs.
_LONG_KINDS = ("validate", "checkpoint")


class WatchedRun(Protocol):
    """The attributes of `Runtime` that the watcher reads: settings, directory of the run, timeline of this process."""

    settings: Settings
    rundir: RunDir
    timeline: Timeline

    @property
    def speaks(self) -> bool:
        """Return True if this process logs messages for the whole run."""

    @property
    def decides(self) -> bool:
        """Return True if this process answers triggers."""

    def restore(self) -> None:
        """Write this process's files again if the run directory was moved or removed. Never raises."""


class Limit(NamedTuple):
    """Limit of the duration of a span.

    Attributes:
        text: The limit as a text for messages.
        seconds: The limit in seconds; 0 for none.
        factor: The limit as a multiple of the median; 0 for none.
    """

    text: str
    seconds: float = 0.0
    factor: float = 0.0

    def passed(self, took: float, usual: float | None) -> bool:
        """Return True if a duration exceeds the limit.

        Args:
            took: The duration in seconds.
            usual: The median of such durations, in seconds; None if the median is unknown.
        """
        if usual is None:
            return bool(self.seconds) and took > self.seconds
        return took > self.seconds and took > self.factor * usual


def hang_limits(conditions: Iterable[Condition]) -> tuple[list[Limit], int]:
    """Return the limits of the duration of a span, and the maximum number of hangs for which stacks are written.

    A span that exceeds one of the limits hangs. The list is empty if a condition switches the watch for hangs off.

    Args:
        conditions: The conditions of `AUTOPROF_WHEN`.
    """
    hang_conditions = [condition for condition in conditions if condition.what == HANG]
    if any(condition.off for condition in hang_conditions):
        return [], 0
    if not hang_conditions:
        text = f"{in_words(TIME_S)} and {FACTOR:g} times the median"
        return [Limit(text, TIME_S, FACTOR)], AT_MOST
    limits = [
        Limit(str(condition), condition.seconds, 0.0 if condition.unit else condition.above)
        for condition in hang_conditions
    ]
    return limits, max(condition.at_most for condition in hang_conditions)


class HangWatch:
    """The part of the watcher that finds a hanging span in this process and requests the stacks of all processes."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._limits, self._at_most = hang_limits(run.settings.when)
        # Names of the folders for hangs that are already known. Each hang is handled only once.
        self._seen = set(self._folders())
        self._reported = set(self._seen)

    def look(self) -> None:
        """Request the stacks of all processes if a span of this process takes too long.

        If this process logs the messages for the whole run, also log the new requests of all processes.

        Raises:
            OSError: The folder for the hang can't be made.
        """
        if not self._limits:
            return
        try:
            spans = self._run.timeline.open()
            if (span := watched_span(spans)) is not None:
                self._check_span(span)
            elif not spans:
                self._check_stillness()
        finally:
            if self._run.speaks:
                self._log_requests()

    def _check_span(self, span: Span) -> None:
        """Ask for the stacks of all processes if an open span lasts longer than a limit."""
        line = span.line
        loop = loop_of(line) if line.span == "step" else 1
        # In a later loop, a process without steps may have asked before under the name of the step alone.
        may_be_known = line.step is None or loop > 1
        name = NO_STEP if line.step is None else layout.hang_name(line.step, loop)
        if name in self._seen:
            return
        # A batch of an engine lasts until the engine is idle. It hangs if the engine does not work.
        is_batch = line.span == "step" and line.role == "rollout"
        begun_ns = max(span.begun_ns, self._run.timeline.moved_ns) if is_batch else span.begun_ns
        duration_s = (time.monotonic_ns() - begun_ns) / 1e9
        judged_s = duration_s if line.step is not None else duration_s - _NO_STEP_DELAY_S
        median_s = usual_s(self._run.timeline.durations_ns, line.span, line.name)
        limit = next((limit for limit in self._limits if limit.passed(judged_s, median_s)), None)
        if limit is None or (may_be_known and self._asked_since(time.time_ns() - round(duration_s * 1e9))):
            return
        times = f", {duration_s / median_s:.1f} times the median of {in_words(median_s)}" if median_s else ""
        why = Why(
            host=identity.HOST,
            pid=os.getpid(),
            unix_ns=time.time_ns(),
            step=line.step,
            since_ns=line.start_ns + begun_ns - span.begun_ns,
            condition=limit.text,
            reason=f"{_subject(line)} has {'had no output for' if is_batch else 'taken'} {in_words(duration_s)}{times}",
        )
        self._ask_once(name, why)

    def _check_stillness(self) -> None:
        """Ask for the stacks of all processes if no span has begun or ended in the run for longer than a limit.

        Only the process that logs the messages for the run checks this, and the process that drives the steps. An
        engine without requests is not checked.
        """
        timeline, run = self._run.timeline, self._run
        if timeline.work is not None:
            return
        drives = run.decides and any(kind == "step" for kind, _ in timeline.durations_ns)
        if NO_STEP in self._seen or not (run.speaks or drives) or not timeline.written_ns:
            return
        still_s = (time.monotonic_ns() - timeline.written_ns) / 1e9
        steps = [took for (kind, name), took in timeline.durations_ns.items() if kind == "step"]
        median_s = usual_s({("step", ""): steps[0]}, "step", "") if steps else None
        limit = next((limit for limit in self._limits if limit.passed(still_s, median_s)), None)
        if limit is None or self._changed_since(time.time() - max(still_s / 2, limit.seconds)):
            return
        now_ns = time.time_ns()
        why = Why(
            host=identity.HOST,
            pid=os.getpid(),
            unix_ns=now_ns,
            since_ns=now_ns - round(still_s * 1e9),
            condition=limit.text,
            reason=f"no step is open, and nothing has begun or ended for {in_words(still_s)}",
        )
        self._ask_once(NO_STEP, why)

    def _changed_since(self, unix_s: float) -> bool:
        """Return True if a process of the run has written a journal line since a time."""
        folder = self._run.rundir.path / "journal"
        statuses = (files.status(folder / name) for name in files.names_in(folder))
        return any(status is not None and status.st_mtime > unix_s for status in statuses)

    def _ask_once(self, name: str, why: Why) -> None:
        """Ask for the stacks of all processes, unless this was done before or too often."""
        self._seen.add(name)
        existing = self._folders()
        if name in existing or len(existing) >= self._at_most or layout.switched_off(self._run.rundir):
            return
        self._ask_for_stacks(name, why)

    def _asked_since(self, unix_ns: int) -> bool:
        """Return True if stacks were requested because of a hang after `unix_ns` (nanoseconds since the epoch)."""
        folder = self._run.rundir.path / HANGS
        statuses = (files.status(folder / name / WHY) for name in self._folders())
        return any(status is not None and status.st_mtime_ns > unix_ns for status in statuses)

    def _ask_for_stacks(self, name: str, why: Why) -> None:
        """Make the folder `name` with a `why.json`, unless another process has already made the folder.

        The new folder is the request: every process that sees it writes its stacks into it.
        """
        folder = self._run.rundir.path / HANGS
        self._run.rundir.make(folder)
        # Watchers ignore names that begin with a dot.
        part = folder / f".{name}.{os.urandom(4).hex()}{file_names.PART}"
        try:
            layout.write_json(part / WHY, why)
            os.rename(part, folder / name)
        except OSError as error:
            seam.pass_on(error)
            files.remove(str(part))
            if not os.path.isdir(folder / name):
                raise

    def _log_requests(self) -> None:
        """Log one line for each new request for stacks because of a hang."""
        for name in self._folders():
            if name in self._reported:
                continue
            self._reported.add(name)
            run = self._run.rundir.path
            folder = run / HANGS / name
            if reason := layout.read_json(folder / WHY, Why).reason:  # otherwise, another program made the folder
                log.warning_aside(
                    f"{reason}; stacks are in {folder}; autoprof doctor {run} shows which process is late"
                )

    def _folders(self) -> list[str]:
        return _visible(self._run.rundir.path / HANGS)


def _subject(line: BegunLine) -> str:
    """Return the name of an open span for a message: `step 5`, or `stage update_actor of step 5`."""
    if line.span == "step":
        return line.name if line.step is None else f"step {label(line.step, loop_of(line))}"
    return f"{line.span} {line.name}" if line.step is None else f"{line.span} {line.name} of step {line.step}"


def _visible(folder: Path) -> list[str]:
    """Return the names in a folder, except names that begin with a dot. Folders with such names are not complete."""
    return [name for name in files.names_in(folder) if not name.startswith(".")]


def watched_span(spans: Iterable[Span]) -> Span | None:
    """Return the newest open step. If no step is open, return the oldest open stage or request, or None.

    The watcher checks the duration of this span. Stages that may take long, such as validation, are omitted.

    Args:
        spans: The open spans, the oldest first.
    """
    watched = None
    for span in spans:
        if span.line.span == "step":
            # If an older step is also open, it was interrupted and never wrote its end.
            watched = span
        elif watched is None and span.line.span in ("stage", "request") and span.line.stage_kind not in _LONG_KINDS:
            watched = span
    return watched


def usual_s(took: Mapping[tuple[str, str], Iterable[int]], kind: str, name: str) -> float | None:
    """Return the median duration in seconds of the ended spans of a kind and name. Return None if too few have ended.

    `took` is a dict from kind and name to durations in nanoseconds.
    """
    # `statistics` is not used, because it imports many modules.
    durations = sorted(took.get((kind, name), ()))
    middle = len(durations) // 2
    return (durations[middle] + durations[~middle]) / 2e9 if len(durations) >= MIN_FOR_MEDIAN else None


# The signals of crashes, which `faulthandler` handles.
_SIGNALS = (_signal.SIGSEGV, _signal.SIGFPE, _signal.SIGABRT, _signal.SIGBUS, _signal.SIGILL)
# Maximum size of a crash dump in bytes. If the process has a lower limit for file sizes, no dump is written, because
# the signal SIGXFSZ would replace the signal of the crash.
_MAX_DUMP_BYTES = 1 << 20
# Python 3.14 would also walk the C stack, which may hang if memory is damaged.
_ARGUMENTS: dict[str, Any] = {"all_threads": True} | ({"c_stack": False} if sys.version_info >= (3, 14) else {})
# A descriptor that no file can have. A dump to it is lost.
_NO_DESCRIPTOR = (1 << 31) - 2


class _CrashFile(files.HeldFile):
    """The open crash file of this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._hold(files.create(path, held=True))

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._descriptor


class _Output:
    """The file for the dumps of crashes, or of kills. Only `faulthandler` holds a reference to this object.

    Args:
        file: The crash file; None if dumps shall be lost.
    """

    def __init__(self, file: _CrashFile | None) -> None:
        self.file = file

    def fileno(self) -> int:
        """Return the descriptor of the file. `faulthandler` calls this method."""
        return _NO_DESCRIPTOR if self.file is None else self.file.fileno()

    def flush(self) -> None:
        """Do nothing. The method exists because `faulthandler` calls it."""


def begin_crash_file(run: RunDir) -> None:
    """Make `faulthandler` write stacks of this process to a file if it crashes, or if SIGTERM kills it. Never raises.

    Do nothing for signals that the program handles itself.
    """
    if _state.crash_file is not None:
        return
    try:
        crashes = not (faulthandler.is_enabled() or _handled(_SIGNALS))
        # A forked child has the registration of its parent. The kernel protects process 1 from unhandled signals.
        kills = _held(_state.kills) or not (os.getpid() == 1 or _handled([_signal.SIGTERM]))
        if not (crashes or kills):
            return
        files.check_size(_MAX_DUMP_BYTES)
        file = _make_crash_file(run)
        _state.crash_file, _state.crash_path = ref(file), file.path
        # No Python code that could fork runs between the two lines of each block.
        if crashes:
            _state.crashes = ref(output := _Output(file))
            faulthandler.enable(output, **_ARGUMENTS)
        if kills:
            _write_kills(file)
    except (OSError, RuntimeError) as error:  # no descriptor is free, the disk is full, or files may not be large
        seam.pass_on(error)
        log.debug(f"a crash of this process will not write its stacks: {type(error).__name__}: {error}")


def _write_kills(file: _CrashFile | None) -> None:
    """Make `faulthandler` write the stack of the main thread to `file` before SIGTERM ends this process.

    The first call sets a C handler of SIGTERM, which `signal.getsignal` does not show. It writes the stack, sets the
    default handler and raises SIGTERM again. Later calls change only the file, and never a handler that the program has
    set since. So a fork and the end of the run do not unregister the handler, because that would set the default one.
    """
    is_first = not _held(_state.kills)
    _state.kills = ref(output := _Output(file))
    faulthandler.register(_signal.SIGTERM, output, all_threads=False, chain=True)
    if is_first:
        # If the program registers SIGTERM later and survives it, system calls must restart as without autoprof.
        _signal.siginterrupt(_signal.SIGTERM, False)


def _held(output: ref[_Output] | None) -> bool:
    """Return True if `faulthandler` holds an output."""
    return output is not None and output() is not None


def _make_crash_file(run: RunDir) -> _CrashFile:
    """Make the crash file. Try twice, because a process that ends may remove the folder if the folder is empty."""
    path = str(run.process_file(CRASHES, ".txt"))
    run.make(run.path / CRASHES)
    with seam.suppress(FileNotFoundError):
        return _CrashFile(path)
    run.make(run.path / CRASHES)
    return _CrashFile(path)


def check_crash_file() -> None:
    """Disable the crash file if its descriptor now belongs to another file, or if file sizes are now limited."""
    file = _state.crash_file() if _state.crash_file is not None else None
    limit = files.size_limit()
    if file is not None and not (file.is_own() and (limit is None or limit >= _MAX_DUMP_BYTES)):
        del file
        _state.end_crash_file()


def _handled(signals: Sequence[int]) -> bool:
    """Return True if the program or a C library handles or ignores one of the signals."""
    if any(_signal.getsignal(number) != _signal.SIG_DFL for number in signals):
        return True
    bits = sum(1 << (number - 1) for number in signals)
    lines = (line.partition(":") for line in files.text("/proc/self/status").splitlines())
    values = {name: value for name, _, value in lines}
    return any(int(values.get(name, "-1"), 16) & bits for name in ("SigCgt", "SigIgn"))


# Time between two checks.
LOOK_S = layout.look_s()
# Time between two flushes of the timeline.
FLUSH_S = 1.0
# Maximum time for which a fork or the exit of the process waits for the end of a running check.
_END_S = 1.0
# From Python 3.13 on, `os.fork` counts the threads, to warn about them, after the handlers in the parent have run
# (`os_fork_impl` in Modules/posixmodule.c). A watcher that such a handler starts would be counted.
_COUNTS_LAST = sys.version_info >= (3, 13)
# Maximum wait after the end of the check until the kernel no longer lists the thread.
_EXIT_S = 0.1


class _Bell:
    """The means to wake or to end one thread of the watcher.

    Attributes:
        closed: True if the thread shall end.
    """

    def __init__(self) -> None:
        self.closed = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a ring, at most `timeout_s`. Return True if the thread may continue."""
        self._lock.acquire(timeout=max(timeout_s, 0.0))
        return not self.closed

    def ring(self) -> None:
        """Wake the thread. Never raises."""
        if self._lock.locked():
            with seam.suppress(RuntimeError):  # another thread was faster
                self._lock.release()

    def close(self) -> None:
        """Make the thread end."""
        self.closed = True
        self.ring()


class Watcher:
    """A thread that flushes the timeline of its process, looks for hangs and answers requests for stacks."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._bell, self._ended = _Bell(), _thread.allocate_lock()
        self._bell.closed = True
        self._native: list[int] = []
        self._gaps = GapSampler(run.timeline, lambda: self._bell.ring()) if run.settings.gap_stacks else None
        # Requests for stacks that are older than this process are not answered.
        self._answered = set(self._requests())
        self._hangs = HangWatch(run)
        self._look_at = time.monotonic() + LOOK_S

    def start(self) -> None:
        """Start the thread. Never raises."""
        bell, ended = _Bell(), _thread.allocate_lock()
        ended.acquire()
        try:
            # Set the attributes before the thread starts. A signal handler may raise during the start, and `stop` must
            # still be able to end the thread.
            self._bell, self._ended, self._native = bell, ended, []
            process.start_thread(_thread.start_new_thread, _watch, (self.tick, self.sample, bell, ended, self._native))
        except RuntimeError as error:  # the limit of threads is reached
            seam.pass_on(error)
            bell.closed = True
            log.info(f"this process is not watched: {error}")

    def start_later(self) -> None:
        """Start the thread when the next span begins or ends."""
        timeline, once = self._run.timeline, _thread.allocate_lock()

        def start_once() -> None:
            if once.acquire(blocking=False):
                timeline.wake = None
                self.start()

        timeline.wake = start_once

    def stop(self) -> None:
        """Stop the thread, and wait until its current check ends. Do nothing if the thread was stopped before."""
        bell = self._bell
        if not bell.closed:  # the thread is running and was not stopped
            bell.close()
            if self._ended.acquire(timeout=_END_S):
                _await_exit(self._native)

    def finish(self) -> None:
        """Write the samples of stacks, after the thread has ended."""
        if self._gaps is not None:
            self._call_guarded(self._gaps.finish)

    def sample(self) -> float:
        """Sample the stack of the thread that runs the steps, if no stage is open. Return the seconds to the next call.

        Return infinity if no sample is needed until the timeline reports a gap.
        """
        seconds: list[float | None] = []
        if self._gaps is not None:
            gaps = self._gaps
            self._call_guarded(lambda: seconds.append(gaps.look()))
        return next((each for each in seconds if each is not None), math.inf)

    def tick(self) -> None:
        """Write the buffered lines of the timeline. If the last `look` was ten seconds ago, also call `look`."""
        self._call_guarded(self._run.timeline.flush)
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + LOOK_S
            self.look()

    def look(self) -> None:
        """Check the files of the run, check the crash file, look for hangs, then answer new requests for stacks."""
        for check in (self._run.timeline.look, self._run.restore, check_crash_file, self._hangs.look):
            self._call_guarded(check)
        for folder in self._requests():
            if folder not in self._answered:
                self._answered.add(folder)
                self._call_guarded(lambda: snapshot.write_snapshot(self._run.rundir, self._run.timeline, folder))  # noqa: B023

    def _call_guarded(self, work: Callable[[], None]) -> None:
        """Call `work`. If `work` raises an error of autoprof, log the error, so that the caller continues."""
        with seam.guard("the watcher", partial(self._run.rundir.report, log_line=log.warning_aside)):
            work()

    def _requests(self) -> list[str]:
        """Return the paths of the folders into which every process must write its stacks. Each is one request."""
        parents = [self._run.rundir.path / kind for kind in (STACKS, HANGS)]
        return [str(parent / name) for parent in parents for name in _visible(parent)]


def _await_exit(native: list[int]) -> None:
    """Wait until the kernel no longer lists the thread with the id `native[0]`, at most `_EXIT_S`.

    From Python 3.12 on, a fork warns if the kernel lists more than one thread (`warn_about_fork_with_threads` in
    Modules/posixmodule.c). `native` is empty if the thread has not written its id yet.
    """
    until = time.monotonic() + _EXIT_S
    while native and os.path.exists(f"/proc/self/task/{native[0]}") and time.monotonic() < until:
        time.sleep(0.0001)


def _watch(
    tick: Callable[[], None], sample: Callable[[], float], bell: _Bell, ended: _thread.LockType, native: list[int]
) -> None:
    native.append(_thread.get_native_id())
    period_s = min(FLUSH_S, LOOK_S)
    tick_at = time.monotonic() + period_s
    try:
        wait_s = min(sample(), period_s)
        while bell.wait(wait_s):
            if time.monotonic() >= tick_at:
                tick()
                tick_at = time.monotonic() + period_s
            wait_s = min(sample(), tick_at - time.monotonic())
    finally:
        ended.release()


class _WatcherState(process.State):
    """The watcher of this process, and the crash file while `faulthandler` holds its outputs."""

    ends = process.WATCH
    watcher: Watcher | None = None
    crash_file: ref[_CrashFile] | None = None
    crashes: ref[_Output] | None = None
    kills: ref[_Output] | None = None
    crash_path = ""
    # True if the crash file was begun, or if it was left out because the program handles crashes itself.
    crashes_seen = False

    def reset(self) -> None:
        self.at_exit()
        self.watcher = None
        self.crashes_seen = False

    def before_fork(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()

    def after_fork_in_parent(self) -> None:
        if self.watcher is None:
            return
        if _COUNTS_LAST:
            self.watcher.start_later()
        else:
            self.watcher.start()

    def after_fork_in_child(self) -> None:
        self.watcher = None
        self.crashes_seen = False
        # The child must neither use nor remove the crash file of its parent.
        self.crash_path = ""
        self.end_crash_file()

    def at_exit(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()
            self.watcher.finish()
        self.end_crash_file()
        if _held(self.kills) and _signal.getsignal(_signal.SIGTERM) == _signal.SIG_IGN:
            # The end of the interpreter unregisters SIGTERM, which would set the default handler.
            with seam.suppress(ValueError):  # not the main thread
                _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
                faulthandler.unregister(_signal.SIGTERM)
                _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)

    def end_crash_file(self) -> None:
        """Make `faulthandler` stop using autoprof's crash file. Remove the crash file if it is empty."""
        file, path, self.crash_file, self.crash_path = self.crash_file, self.crash_path, None, ""
        if file is None:
            return
        if _held(self.crashes):
            faulthandler.disable()
        if _held(self.kills):
            _write_kills(None)
        status = files.status(path, follow=False) if path else None
        if status is not None and status.st_size == 0:
            with seam.suppress(OSError):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))


_state = _WatcherState()


def start(run: WatchedRun, hook_called: bool) -> None:
    """Start the watcher of this process, and from the first call of a hook on, the crash file. Both start only once.

    A program may look after its imports whether `faulthandler` is enabled, and enable it if not.

    Args:
        run: The run.
        hook_called: True if a hook was called in this process.
    """
    if hook_called and not _state.crashes_seen:
        _state.crashes_seen = True
        begin_crash_file(run.rundir)
    if _state.watcher is None:
        snapshot.watch_threads()
        _state.watcher = Watcher(run)
        _state.watcher.start()
        _state.register_at_exit()
