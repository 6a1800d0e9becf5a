"""The lock on the profiler of this process, and the states of a capture. Only one capture at a time holds the profiler.

A capture goes from `waiting` over `recording` and `stopped` to `written`. Three verbs end it:

* `stop`: the normal end. The trace is complete.
* `abort`: the captured work is interrupted. The trace contains the work up to the interrupt. The state in the meta file
  is `truncated`.
* `fail`: there is no trace. The state in the meta file is `failed`, and the meta file gives the reason.

| event                                  | waiting            | recording            | stopped         |
|----------------------------------------|--------------------|----------------------|-----------------|
| begin                                  | recording          |                      |                 |
| begin, and this process records        | waiting            |                      |                 |
| begin: no room, suspended, tool raises | written, failed    |                      |                 |
| stop                                   | waiting            | stopped, complete    |                 |
| stop of its stage, no pass was reached | written, failed    |                      |                 |
| abort: error, budget, other profiler   | written, failed *  | stopped, truncated   |                 |
| stop or abort in another thread        | as above           | written, failed      |                 |
| signal in begin or stop                | written, failed ** | written, failed      |                 |
| signal in the writing, export fails    |                    |                      | written, failed |
| finisher has the raw trace             |                    |                      | written         |
| fork, in the child                     | nothing is written | nothing is written   | files continue  |
| the process is killed                  | lock file remains  | lock file remains    | `.part` remains |

* Only if the capture holds the profiler. Otherwise the capture stays waiting.
** If the capture has no file name yet, nothing is written.

Files of a capture in each state:

* `waiting`: none, or the lock file of the capture's name (`.meta.json.part`).
* `recording`: the lock file and torch_npu's folder (`.part`).
* `stopped`: the lock file and the raw trace (`.part`).
* `written`: the meta file and, unless the capture failed, the trace. The meta file is written last. Then the lock file
  and the raw trace are removed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

import msgspec

from autoprof.base import log, process, seam
from autoprof.base.originals import threading
from autoprof.capture import profilers, writer
from autoprof.capture.artifacts import Artifacts, OverBudget, Subject
from autoprof.capture.profilers import Tool, foreign
from autoprof.config.settings import Settings
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

# Minimum stack of a thread in which a profiler may start. If all contents are recorded, torch's profiler crashes on a
# stack of 64 KiB and works on one of 96 KiB (torch 2.13). The stage that runs in the thread also needs stack.
_MIN_STACK_KIB = 256
# At the end of the interpreter: maximum wait for a captured stage that runs in another thread.
_LAST_WAIT_S = 5.0

_NOT_ENDED = "the recording could not be ended"
_T = TypeVar("_T")
State = Literal["waiting", "recording", "stopped", "written"]


class _RecorderState(process.State):
    """The capture that records in this process, and the user's profiler that suspends captures.

    Attributes:
        active: Capture that holds the profiler; None if no capture does.
        suspended_by: Description of the user's profiler that suspends captures; empty if no profiler does.
    """

    ends = process.CAPTURE

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.active: Capture | None = None
        self.suspended_by = ""

    def after_fork_in_child(self) -> None:
        # The parent process ends its own recording. The forked child records nothing.
        super().after_fork_in_child()
        self.active = None

    def at_exit(self) -> None:
        """End the recording. If the interpreter ends during a recording, torch may crash (torch 2.13).

        Only the thread that began a recording can end it. If that is another thread, this method waits up to
        `_LAST_WAIT_S` for the end of the stage in that thread.
        """
        with seam.guard("a capture could not be ended", log.error_once):
            if (capture := self.active) is not None:
                if capture.thread != threading.get_ident():
                    capture.ended.wait(_LAST_WAIT_S)
                capture.abort("the process ended during the stage")
                capture.wait()


_state = _RecorderState()


class Capture:
    """Capture of one stage in this process.

    A recording of torch belongs to the thread that began it. If another thread stops the recording, the export causes a
    segmentation fault. If another profiler has stopped before, the stop causes a segmentation fault (torch 2.13).

    Attributes:
        subject: The step, role, stage and rank.
        tool: Profiler that records.
        state: State of the capture.
        thread: Id of the thread that began the capture.
        ended: Latch that is set once the capture is stopped or written.
        cut: If the capture must end as truncated even after a normal stop: the reason. Otherwise an empty text.
        artifacts: Files of the profiler.
        tried: True once the capture has begun, or an attempt to begin has failed.
        over_budget: True if the capture was ended because it exceeded a limit.
        problem: If there is no trace: the reason. Otherwise an empty text.
    """

    # True if the trace gets a range with the stage's name that covers the whole recording.
    ranged = True

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: Tool) -> None:
        self.subject = subject
        self.tool = tool
        self.state: State = "waiting"
        self.thread = threading.get_ident()
        self.ended = process.Latch()
        self.cut = ""
        self.tried = False
        self.over_budget = False
        self.problem = ""
        self.artifacts = Artifacts(run, subject, settings, tool)
        self._run = run
        self._settings = settings
        # First the files of the profiler, then the files of the tools that record beside it (`profilers.beside`).
        self._all_artifacts = [self.artifacts]
        # Function that ends the range of the stage, or of the current step in a capture of whole steps.
        self._end_range: Callable[[], None] = profilers.nothing
        # Id of the thread that ends the capture; 0 until a thread does.
        self._ender = 0

    def claim(self) -> bool:
        """Claim the profiler of this process and return True.

        Return False if another capture or the program uses the profiler, or if the stack of this thread is too small.
        """
        # Without a tool that records, don't import ctypes, which delays the first stage by 9 ms, or more with threads.
        if self.tool.ending and not _has_room(self.subject):
            return False
        with _state.lock:
            if _state.active is not None:
                return _state.active is self
            if reason := self.tool.busy():
                subject = self.subject
                log.warning_once(f"step {subject.step}, {subject.role} {subject.stage} is not captured: {reason}")
                return False
            _state.active = self
        _state.register_at_exit()
        return True

    def begin(self) -> bool:
        """Start recording and return True.

        Return False if the profiler is in use, if the user's profiler suspends captures, or if the disk is too full.

        Raises:
            Exception: The tool could not start. A meta file gives the reason.
        """
        self.tried = True
        if owner := _state.suspended_by:
            self.fail(f"{owner} is on in this step, so autoprof records nothing")
            return False
        self.thread = threading.get_ident()
        try:
            return self._attempt("the profiler did not start", self._begin)
        except OverBudget:  # the meta file has the reason
            return False

    def _begin(self) -> bool:
        if not self.claim():
            return False
        self.artifacts.costs("profiler start", self._start)
        self.state = "recording"
        return True

    def _start(self) -> None:
        subject = self.subject
        self.artifacts.open()
        self.artifacts.start()
        if self.ranged:
            self._end_range = self.tool.mark(f"{subject.role}.{subject.stage}")
        for tool in profilers.beside(self._settings, self.tool):
            # The requested contents apply to the profiler only.
            settings = msgspec.structs.replace(self._settings, contents=())
            artifacts = Artifacts(self._run, subject, settings, tool)
            self._all_artifacts.append(artifacts)
            artifacts.open()
            if (error := seam.attempt(artifacts.start)[1]) is not None:
                self._all_artifacts.remove(artifacts)
                artifacts.abort(_why("the profiler did not start", error))

    def keep_within_budget(self) -> None:
        """Abort the capture if it exceeds a limit. In another thread than the capture's, do nothing.

        The callers call this between two parts of the captured work.
        """
        records_here = self.state == "recording" and self.thread == threading.get_ident()
        if records_here and (reason := self.artifacts.exceeded()):
            self.over_budget = True
            self.abort(reason)

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range in the trace, if this thread is recorded.

        Returns:
            The function that ends the range. If the recording is off by then, the function does nothing.
        """
        if self.thread != threading.get_ident() or self.ended.is_set():
            return profilers.nothing
        end_range = self.tool.mark(name)

        def end_if_recorded() -> None:
            if self.thread == threading.get_ident() and not self.ended.is_set():
                end_range()

        return end_if_recorded

    def stop(self, reason: str = "") -> None:
        """End the recording, if it is on, and write the trace.

        If another thread than the capture's calls this, the recording is lost.

        Args:
            reason: Remark for the meta file, or an empty text.
        """
        if self.cut:
            self.abort(self.cut)
        else:
            self._stop_and_write("complete", reason, "the stage ended in another thread than it began in")

    def abort(self, reason: str) -> None:
        """End the capture early. May be called after an interrupted `begin` or `stop`, and more than once.

        Args:
            reason: Reason for the meta file.
        """
        if self.state == "waiting" and _state.active is self:
            self.fail(reason)
        else:
            self._stop_and_write("truncated", reason, f"{reason}, in another thread than the capture's")

    def _stop_and_write(self, state: str, reason: str, elsewhere: str) -> None:
        """Stop the tool and let a thread write the files.

        Args:
            state: State for the meta file: `complete` or `truncated`.
            reason: Reason for the meta file, or an empty text.
            elsewhere: Reason for the meta file if this is not the thread that began the capture, so that there is no
                trace.
        """
        if self.state != "recording":
            return
        if not self.release():
            if (
                self._ender == threading.get_ident() and not self.ended.is_set()
            ):  # this thread's `_stop_and_write` was interrupted
                self._end_without_trace(seam.AT_WORK)
            return
        if not self.tool.ending:  # the tool records nothing, so nothing is lost
            state, reason = "complete", ""
        elif self.thread != threading.get_ident():
            self._attempt(_NOT_ENDED, partial(self._end_without_trace, elsewhere, in_starting_thread=False))
            return
        self._attempt(_NOT_ENDED, partial(self._finish, state, reason))
        if state == "truncated":
            subject = self.subject
            log.warning(f"step {subject.step}, {subject.role} {subject.stage}: the capture ends early, {reason}")

    def _finish(self, state: str, reason: str) -> None:
        self.artifacts.costs("profiler stop", self._stop)
        for artifacts in self._all_artifacts:
            artifacts.write(state, reason)
        self.state = "stopped"
        self.ended.set()

    def _stop(self) -> None:
        end_range, self._end_range = self._end_range, profilers.nothing
        end_range()
        for artifacts in self._all_artifacts:
            artifacts.stop()

    def fail(self, reason: str) -> None:
        """End the capture without a trace, and write a meta file with the reason. May be called more than once."""
        self.artifacts.open()
        self._end_without_trace(reason)

    def _attempt(self, what: str, work: Callable[[], _T]) -> _T:
        """Call `work`, a part of the capture's begin or end, and return its result.

        If `work` raises an exception, end the capture without a trace and raise the exception again.

        Args:
            what: Text for the meta file that says which part failed.
            work: The part.
        """
        try:
            return work()
        except BaseException as error:
            if seam.error_for_user(error) is None:
                self._end_without_trace(_why(what, error))
            else:  # a second interrupt may come while `_end_without_trace` runs
                seam.undo(error, partial(self._end_without_trace, seam.AT_WORK))
            raise

    def _end_without_trace(self, reason: str, in_starting_thread: bool = True) -> None:
        """End the capture without a trace. If the capture has no file name yet, it also gets no meta file.

        Args:
            reason: Reason for the meta file.
            in_starting_thread: True in the thread in which the tool was started.
        """
        self.release()
        self.problem = reason
        handed_over = [artifacts.abort(reason, in_starting_thread) for artifacts in self._all_artifacts]
        self.state = "stopped" if handed_over[0] else "written"
        self.ended.set()

    def release(self) -> bool:
        """Release the profiler of this process and return True. Return False if the capture does not hold it."""
        with _state.lock:
            if _state.active is not self:
                return False
            self._ender = threading.get_ident()
            _state.active = None
            return True

    def wait(self) -> None:
        """Wait, at most `AUTOPROF_STOP_TIMEOUT_S`, until this process has written the raw trace."""
        for artifacts in self._all_artifacts:
            artifacts.wait()
        if self.state == "stopped":
            self.state = "written"


# End of the reason in the meta file, if the capture was aborted before any pass was recorded.
TOO_EARLY = ", before the first forward pass that was to be recorded"


class PassCapture(Capture):
    """Capture that counts the passes of a stage and records only some consecutive passes. It begins at most once.

    Attributes:
        passed: Number of counted passes so far.
    """

    def __init__(
        self,
        run: Runtime,
        subject: Subject,
        settings: Settings,
        tool: Tool,
        part: tuple[int, int | None],
        counted: str = "the engine ran {} forward passes",
    ) -> None:
        """Make a capture of some passes.

        Args:
            run: The run to which the capture belongs.
            subject: The step, role, stage and rank.
            settings: The settings of the capture.
            tool: The tool that records.
            part: The index of the first pass to record, and the index of the pass before which recording stops (None
                for no end). `parse_iterations` returns such a pair.
            counted: Template of a sentence for the meta file. `{}` is replaced by the number of counted passes.
        """
        super().__init__(run, subject, settings, tool)
        self.passed = 0
        self._part = range(part[0], part[1] or sys.maxsize)
        self._counted = counted

    @property
    def recording(self) -> bool:
        """True while the capture is recording."""
        return self.state == "recording"

    def before_pass(self, may_begin: bool = True) -> bool:
        """Count a pass that begins now. Return True if the pass is recorded.

        Args:
            may_begin: False if the recording must not begin now.
        """
        self.reach(may_begin)
        self.passed += 1
        return self.recording

    def after_pass(self) -> None:
        """Count a pass that has ended."""
        self.passed += 1
        self.reach()

    def reach(self, may_begin: bool = True) -> None:
        """Begin the recording before the first pass to record, and stop the recording after the last one.

        Call this between two passes. Only the thread that began the recording stops it, because torch can't export a
        recording that another thread has stopped.

        Args:
            may_begin: False if the recording must not begin now.
        """
        if self.state == "recording" and self.thread == threading.get_ident():
            if self.passed == self._part.stop:
                self.stop()
            else:
                self.keep_within_budget()
        elif may_begin and self.state == "waiting" and not self.tried and self.passed in self._part:
            self.begin()

    def abort(self, reason: str) -> None:
        super().abort(reason if self.tried else f"{reason}{TOO_EARLY}")

    def close(self, reason: str = "") -> str:
        """Wait until this process has written the raw trace. If nothing was recorded, write the reason to a meta file.

        Args:
            reason: The reason why nothing was recorded. If it is empty, the reason is the number of passes.

        Returns:
            If there is no trace or its meta file could not be written: a description of the error. Otherwise an empty
            text.
        """
        if self.state == "waiting":
            self.fail(reason or self.why_nothing())
        self.wait()
        return self.problem or self.artifacts.problem

    def why_nothing(self) -> str:
        """Return a sentence that gives the number of passes, and after how many passes recording was to begin."""
        sentence = self._counted.format(self.passed)
        return f"{sentence}; recording was to begin after {self._part.start}" if self._part.start else sentence


def begin(run: Runtime, subject: Subject, settings: Settings | None = None) -> Capture | None:
    """Start a capture and return it. Return None if it does not begin (`Capture.begin`).

    For example, this process may already record an outer stage. The trace of the outer stage then includes this stage.

    Args:
        run: The run.
        subject: The step, role, stage and rank.
        settings: Settings of the role in this window. If None, the run's settings of the role are used.
    """
    settings = settings or run.settings.for_role(subject.role)
    capture = Capture(run, subject, settings, profilers.choose(settings))
    return capture if capture.begin() else None


def _has_room(subject: Subject) -> bool:
    """Return True if the stack of this thread is large enough for a profiler. Otherwise warn once and return False."""
    stack = process.stack_bytes()
    if stack is None or stack >= _MIN_STACK_KIB << 10:
        return True
    log.warning_once(
        f"{subject.role} {subject.stage} is not captured: the stack of its thread has {stack >> 10} KiB and a profiler "
        f"needs {_MIN_STACK_KIB}; see threading.stack_size"
    )
    return False


def current() -> Capture | None:
    """Return the capture that holds the profiler of this process; None if no capture does."""
    return _state.active


def subject() -> Subject | None:
    """Return the subject of the capture that holds the profiler of this process; None if no capture does."""
    capture = _state.active
    return capture.subject if capture is not None else None


def abort(reason: str, but_for: object = None) -> None:
    """Abort the capture that this thread began, if it holds the profiler, unless the capture is `but_for`."""
    capture = _state.active
    if capture is not None and capture is not but_for and capture.thread == threading.get_ident():
        capture.abort(reason)


def make_way(reason: str, any_thread: bool = True) -> None:
    """Abort the recording of this process and wait until it is written, because the program needs the profiler.

    Args:
        reason: Reason for the meta file.
        any_thread: True to abort also a recording that another thread began. The function first waits, at most
            `AUTOPROF_STOP_TIMEOUT_S`, until the other thread stops the recording.
    """
    capture, run = _state.active, runtime.current()
    is_of_this_thread = capture is not None and capture.thread == threading.get_ident()
    if not (is_of_this_thread or any_thread):
        return
    timeout_s = (run.settings if run is not None else Settings()).stop_timeout_s
    try:
        if capture is not None:
            if not is_of_this_thread:
                capture.ended.wait(timeout_s)
            capture.abort(reason)
    finally:
        writer.wait(timeout_s)


def suspend(owner: str) -> None:
    """Abort the recording, because the user's profiler is on. Until `resume`, this process captures no stage.

    Args:
        owner: Description of the user's profiler.
    """
    _state.suspended_by = owner
    make_way(f"{owner} was started")


def resume() -> None:
    """Allow captures in this process again, after `suspend`."""
    _state.suspended_by = ""


def watch_others() -> None:
    """From the import of torch or torch_npu on, watch for profilers that the program starts, and make way for them."""
    foreign.watch(make_way)


def _why(what: str, error: BaseException) -> str:
    return str(error) if isinstance(error, OverBudget) else f"{what}: {type(error).__name__}: {error}"
