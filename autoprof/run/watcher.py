"""Thread that checks every ten seconds for open spans that take too long and for requests for stacks.

`threading` does not know the thread, so that no program finds it. It ends before a fork; the child starts its own with
the first call of a hook, and from Python 3.13 the parent continues with its next span. The watcher also checks the file
to which `faulthandler` writes the stacks of a crash.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` in C, as in base/interrupts.py
import _thread
import faulthandler
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol
from weakref import ref

import msgspec

from autoprof.base import files, identity, interrupts, log, process, threads
from autoprof.base.originals import io, os, time
from autoprof.base.units import seconds as in_words
from autoprof.config.conditions import HANG, Condition
from autoprof.config.settings import Settings
from autoprof.run import stacks
from autoprof.run.timeline import Span, Timeline
from autoprof.rundir import file_names, layout
from autoprof.rundir.layout import CRASHES, RunDir
from autoprof.rundir.records import HANGS, MAX_STACKS_BYTES, STACKS, WHY, Why

# Without a condition of the user's both must be passed, and the time alone while there is no median.
TIME_S, FACTOR = 1800.0, 5.0
# So many ended steps, or stages of a name, make a median.
FEWEST = 3
# So often all processes write where they stand, unless a condition says more or less.
AT_MOST = 3
# The folder of what belongs to no step, and how much longer that takes than a step may: processes that know no step
# leave it to the trainer, which looks every ten seconds.
NO_STEP = "no_step"
_LATER_S = 25.0
# Stages that take long where nothing is wrong, outside of any step: of those that are no step's, they are left out.
_LONG = ("validate", "checkpoint")


class Hangable(Protocol):
    """The run of this process, as the watch for hangs sees it."""

    @property
    def settings(self) -> Settings:
        """Return its settings."""

    @property
    def rundir(self) -> RunDir:
        """Return its directory."""

    @property
    def timeline(self) -> Timeline:
        """Return the timeline of this process."""

    @property
    def speaks(self) -> bool:
        """Return whether this process says what concerns the whole run."""


class Limit(NamedTuple):
    """Limit of a duration: seconds, and multiples of the median."""

    text: str
    seconds: float = 0.0
    factor: float = 0.0

    def passed(self, took: float, usual: float | None, endless: bool = False) -> bool:
        """Return whether it is passed; `endless` is what may go on for ever where nothing is wrong."""
        if usual is None:
            return bool(self.seconds) and took > self.seconds and not (endless and self.factor)
        return took > self.seconds and took > self.factor * usual


def hang_limits(conditions: Iterable[Condition]) -> tuple[list[Limit], int]:
    """Return the limits, of which one is to be passed, and how often all processes write where they stand."""
    given = [condition for condition in conditions if condition.what == HANG]
    if any(condition.off for condition in given):
        return [], 0
    if not given:
        text = f"{in_words(TIME_S)} and {FACTOR:g} times the median"
        return [Limit(text, TIME_S, FACTOR)], AT_MOST
    found = [Limit(str(each), each.seconds, 0.0 if each.unit else each.above) for each in given]
    return found, max(condition.at_most for condition in given)


class HangWatch:
    """The watch for hangs of one process."""

    def __init__(self, run: Hangable) -> None:
        self._run = run
        self._limits, self._at_most = hang_limits(run.settings.when)
        # What was judged as hanging, by the name of its folder: once each.
        self._seen = set(self._folders())
        self._said = set(self._seen)

    def look(self) -> None:
        """Ask all processes where they stand if something takes too long here; say where one has done so.

        Raises:
            OSError: The folder can't be made.
        """
        if not self._limits:
            return
        try:
            if (span := watched_span(self._run.timeline.open())) is not None:
                self._judge(span)
        finally:
            if self._run.speaks:
                self._say()

    def _judge(self, span: Span) -> None:
        line = span.line
        name = NO_STEP if line.step is None else f"step_{line.step:06d}"
        if name in self._seen:
            return
        took = (time.monotonic_ns() - span.begun_ns) / 1e9
        late = took if line.step is not None else took - _LATER_S
        usual = usual_s(self._run.timeline.took, line.span, line.name)
        # A batch of a server that is never idle.
        endless = line.span == "step" and line.role == "rollout"
        limit = next((limit for limit in self._limits if limit.passed(late, usual, endless)), None)
        if limit is None or (line.step is None and self._asked_since(time.time_ns() - round(took * 1e9))):
            return
        self._seen.add(name)
        there = self._folders()
        if name in there or len(there) >= self._at_most or layout.switched_off(self._run.rundir):
            return
        whose = line.name if line.span == "step" else f"{line.span} {line.name}"
        if line.step is not None:
            whose = f"step {line.step}" if line.span == "step" else f"{whose} of step {line.step}"
        times = f", {took / usual:.1f} times the median of {in_words(usual)}" if usual else ""
        self._ask(
            name,
            Why(
                host=identity.HOST,
                pid=os.getpid(),
                unix_ns=time.time_ns(),
                step=line.step,
                since_ns=line.start_ns,
                condition=limit.text,
                reason=f"{whose} has taken {in_words(took)}{times}",
            ),
        )

    def _asked_since(self, unix_ns: int) -> bool:
        """Return whether all processes have written where they stood since then, for a step's sake."""
        place = self._run.rundir.path / HANGS
        try:
            return any(os.stat(place / name / WHY).st_mtime_ns > unix_ns for name in self._folders())
        except OSError as error:  # somebody removes it
            interrupts.pass_on(error)
            return False

    def _ask(self, name: str, why: Why) -> None:
        """Make the folder with its `why.json` in it, unless another process has done so first."""
        place = self._run.rundir.path / HANGS
        self._run.rundir.make(place)
        # Who looks at requests leaves out names that begin so.
        part = place / f".{name}.{os.urandom(4).hex()}{file_names.PART}"
        try:
            layout.write_json(part / WHY, why)
            os.rename(part, place / name)
        except OSError as error:
            interrupts.pass_on(error)
            files.remove(str(part))
            if not os.path.isdir(place / name):
                raise

    def _say(self) -> None:
        """Say in one line which folders are new."""
        for name in self._folders():
            if name in self._said:
                continue
            self._said.add(name)
            run = self._run.rundir.path
            try:
                content = files.read(run / HANGS / name / WHY, MAX_STACKS_BYTES)
                reason = msgspec.json.decode(content, type=Why).reason
            except (OSError, ValueError) as error:  # it is somebody else's
                interrupts.pass_on(error)
                continue
            folder = run / HANGS / name
            log.warning_aside(f"{reason}; stacks are in {folder}; autoprof doctor {run} says who is late")

    def _folders(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._run.rundir.path / HANGS) if not name.startswith("."))
        except OSError as error:  # nothing has hung
            interrupts.pass_on(error)
            return []


def watched_span(spans: Iterable[Span]) -> Span | None:
    """Return the span that is watched, of those that are open, the oldest first."""
    found = None
    for span in spans:
        if span.kind == "step":
            # One before it was interrupted where it should have ended.
            found = span
        elif found is None and span.kind in ("stage", "request") and span.line.stage_kind not in _LONG:
            found = span
    return found


def usual_s(took: Mapping[tuple[str, str], Iterable[int]], kind: str, name: str) -> float | None:
    """Return the median of the seconds that spans of a kind and name took; None while too few have ended."""
    # Without `statistics`, which imports much.
    durations = sorted(took.get((kind, name), ()))
    middle = len(durations) // 2
    return (durations[middle] + durations[~middle]) / 2e9 if len(durations) >= FEWEST else None


# The signals that `faulthandler` handles.
_SIGNALS = (_signal.SIGSEGV, _signal.SIGFPE, _signal.SIGABRT, _signal.SIGBUS, _signal.SIGILL)
# Bytes that a dump may have: SIGXFSZ must not end the process in place of the signal of the crash.
_LARGEST = 1 << 20
# Python 3.14 would also walk the stack of C, which may hang where memory is damaged.
_ARGUMENTS: dict[str, Any] = {"all_threads": True} | ({"c_stack": False} if sys.version_info >= (3, 14) else {})


class _CrashFile:
    """The open file. Nobody but `faulthandler` holds it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = -1
        self._descriptor = files.create(path, held=True)
        self._own = _which(self._descriptor)

    def fileno(self) -> int:
        """Return the descriptor, for `faulthandler`."""
        return self._descriptor

    def flush(self) -> None:
        """Do nothing: `faulthandler` calls it."""

    def is_own(self) -> bool:
        """Return whether the descriptor is this file's: a program may have closed all, and opened others."""
        return _which(self._descriptor) == self._own

    def __del__(self) -> None:
        try:
            if self._descriptor >= 0 and self.is_own():
                os.close(self._descriptor)
        except Exception as error:  # at the end of the interpreter
            interrupts.pass_on(error)


def _which(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError as error:
        interrupts.pass_on(error)
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


class _CrashState(process.State):
    """The crash file of this process, as long as `faulthandler` holds it."""

    def begin(self) -> None:
        self.leave()
        self.file: ref[_CrashFile] | None = None
        self.path = ""

    def in_child(self) -> None:
        # Not the parent's file. The parent's is not removed, either.
        self.path = ""
        self.leave()

    def leave(self) -> None:
        """Disable what is ours, and remove the file if nothing is in it."""
        file = getattr(self, "file", None)
        if file is None:
            return
        path, self.file, self.path = self.path, None, ""
        if file() is not None:
            faulthandler.disable()
        if path:
            with interrupts.suppress(OSError):
                if os.lstat(path).st_size == 0:
                    os.unlink(path)
                    os.rmdir(os.path.dirname(path))


_crash_state = _CrashState()


def begin_crash_file(run: RunDir) -> None:
    """Have a crash of this process leave its stacks, unless the program sees to that itself. Raises nothing."""
    if _crash_state.file is not None:
        return
    try:
        if faulthandler.is_enabled() or _handled():
            return
        files.check_size(_LARGEST)
        file = _made(run)
        # None of Python's code comes between the two that could fork.
        _crash_state.file, _crash_state.path = ref(file), file.path
        faulthandler.enable(file, **_ARGUMENTS)
    except Exception as error:  # no descriptor is free, the disk is full, or files may not be large
        interrupts.pass_on(error)
        log.debug(f"a crash of this process will leave no stack: {type(error).__name__}: {error}")


def _made(run: RunDir) -> _CrashFile:
    """Make the file. Another process that ends may remove the folder while it is empty."""
    path = str(run.process_file(CRASHES, ".txt"))
    run.make(run.path / CRASHES)
    try:
        return _CrashFile(path)
    except FileNotFoundError as error:
        interrupts.pass_on(error)
        run.make(run.path / CRASHES)
        return _CrashFile(path)


def check_crash_file() -> None:
    """Disable it if another file has the descriptor now, or if the program has set a limit of file sizes."""
    file = _crash_state.file() if _crash_state.file is not None else None
    if file is not None and not (file.is_own() and _may_be_written()):
        del file
        _crash_state.leave()


def _may_be_written() -> bool:
    limit = files.size_limit()
    return limit is None or limit >= _LARGEST


def end_crash_file() -> None:
    """Leave no empty file, at the end of the process."""
    _crash_state.leave()


def _handled() -> bool:
    """Return whether the program, or a library of C, handles or ignores one of the signals."""
    if any(_signal.getsignal(number) != _signal.SIG_DFL for number in _SIGNALS):
        return True
    bits = sum(1 << (number - 1) for number in _SIGNALS)
    with io.open("/proc/self/status", "rb", opener=files.descriptor) as file:
        for line in file:
            if line.startswith((b"SigCgt:", b"SigIgn:")) and int(line.split()[1], 16) & bits:
                return True
    return False


# How long it sleeps.
LOOK_S = 10.0
# How long a fork or the end of the process waits for a look that is going on.
_END_S = 1.0
# From Python 3.13 on a fork counts threads, to warn of them, when all that is to be done after it has been done
# (`os_fork_impl` in Modules/posixmodule.c).
_COUNTS_LAST = sys.version_info >= (3, 13)
# How long they wait for its thread to be gone after that.
_EXIT_S = 0.1


class Watched(Protocol):
    """The run of this process, as the watcher sees it."""

    @property
    def settings(self) -> Settings:
        """Return its settings."""

    @property
    def speaks(self) -> bool:
        """Return whether this process says what concerns the whole run."""

    @property
    def rundir(self) -> RunDir:
        """Return its directory."""

    @property
    def timeline(self) -> Timeline:
        """Return the timeline of this process."""


class Watcher:
    """The watcher of one process."""

    def __init__(self, run: Watched) -> None:
        self._run = run
        self._stop, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._native: list[int] = []
        # Those that were there before this process are not meant for it.
        self._answered = set(self._requests())
        self._hangs = HangWatch(run)

    def start(self) -> None:
        """Begin to watch. Raises nothing."""
        stop, ended = _thread.allocate_lock(), _thread.allocate_lock()
        stop.acquire()
        ended.acquire()
        try:
            # Before the start: a signal handler may raise in it, and the thread must end all the same.
            self._stop, self._ended, self._native = stop, ended, []
            threads.start(_thread.start_new_thread, _watch, (self.look, stop, ended, self._native))
        except RuntimeError as error:  # no further thread can be started
            interrupts.pass_on(error)
            stop.release()
            log.info(f"this process is not watched: {error}")

    def start_later(self) -> None:
        """Begin to watch with the next span that begins or ends."""
        timeline, once = self._run.timeline, _thread.allocate_lock()

        def wake() -> None:
            if once.acquire(blocking=False):
                timeline.waking = None
                self.start()

        timeline.waking = wake

    def stop(self) -> None:
        """Stop watching, and wait until the current look ends. Do nothing if the thread has been stopped."""
        stop, self._stop = self._stop, _thread.allocate_lock()
        if stop.locked():  # the thread runs, and has not been stopped
            stop.release()
            if self._ended.acquire(timeout=_END_S):
                _await_exit(self._native)

    def look(self) -> None:
        """Write down what has been open for long, find what takes too long, and answer those who ask."""
        for looker in (self._run.timeline.tell, check_crash_file, self._hangs.look):
            self._try(looker)
        for folder in self._requests():
            if folder not in self._answered:
                self._answered.add(folder)
                self._try(lambda: stacks.write_snapshot(self._run.rundir, self._run.timeline, folder))  # noqa: B023

    def _try(self, work: Callable[[], None]) -> None:
        """Do one of its works, whatever becomes of the others."""
        try:
            work()
        except Exception as error:
            interrupts.pass_on(error)
            full = isinstance(error, OSError)
            text = self._run.rundir.unwritable(error) if full else f"the watcher: {type(error).__name__}: {error}"
            log.warning_aside(text)

    def _requests(self) -> list[str]:
        """Return the folders in which each process is to write where it stands."""
        found = []
        for kind in (STACKS, HANGS):
            place = os.path.join(self._run.rundir.path, kind)
            try:
                found += [os.path.join(place, name) for name in os.listdir(place) if not name.startswith(".")]
            except OSError as error:  # nobody has asked
                interrupts.pass_on(error)
        return found


def _await_exit(native: list[int]) -> None:
    """Wait until the kernel has no such thread any more: from Python 3.12 on a fork warns where it counts more than one
    (`warn_about_fork_with_threads` in Modules/posixmodule.c)."""
    until = time.monotonic() + _EXIT_S
    while native and os.path.exists(f"/proc/self/task/{native[0]}") and time.monotonic() < until:
        time.sleep(0.0001)


def _watch(look: Callable[[], None], stop: _thread.LockType, ended: _thread.LockType, native: list[int]) -> None:
    native.append(_thread.get_native_id())
    try:
        while not stop.acquire(timeout=LOOK_S):
            try:
                look()
            except Exception as error:
                interrupts.pass_on(error)
                log.warning_aside(f"the watcher: {type(error).__name__}: {error}")
    finally:
        ended.release()


class _State(process.State):
    """The watcher of this process."""

    ends = process.WATCH

    def begin(self) -> None:
        if (watcher := getattr(self, "watcher", None)) is not None:
            watcher.stop()
        self.watcher: Watcher | None = None

    def before_fork(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()

    def in_parent(self) -> None:
        if self.watcher is None:
            return
        if _COUNTS_LAST:
            self.watcher.start_later()
        else:
            self.watcher.start()

    def in_child(self) -> None:
        self.watcher = None

    def at_exit(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()
        end_crash_file()


_state = _State()


def start(run: Watched) -> None:
    """Watch this process, if that is not done."""
    if _state.watcher is None:
        begin_crash_file(run.rundir)
        _state.watcher = Watcher(run)
        _state.watcher.start()
        _state.end_first()
