"""This process's profiler, and the states of a capture. One capture at a time holds the profiler.

A capture goes from `waiting` over `recording` and `stopped` to `written`. Three verbs end it:

* `stop`: the normal end. The trace is complete.
* `abort`: the work is interrupted. The trace has the work until then, and the meta file says `truncated`.
* `fail`: there is no trace. The meta file says `failed` and gives the reason.

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

* If the capture holds the profiler; otherwise it stays waiting. ** Nothing is written if it has no name yet.

Files: while waiting, none or the lock file of the name (`.meta.json.part`); while recording, the lock file and
torch_npu's folder (`.part`); when stopped, the lock file and the raw trace (`.part`); when written, the meta file and,
unless it failed, the trace. The meta file is written last. Then the lock file and the raw trace are removed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

import msgspec

from autoprof.base import files, log, process, seam, threads
from autoprof.base.exception_text import described
from autoprof.base.originals import threading
from autoprof.capture import profilers, writer
from autoprof.capture.artifacts import Artifacts, Subject
from autoprof.capture.budget import OverBudget
from autoprof.capture.profilers import Tool, foreign
from autoprof.config.settings import Settings
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

# Minimum stack of a thread for a profiler. torch's profiler crashes with 64 KiB and works with 96 KiB with all contents
# (torch 2.13). The stage that runs in the thread needs some of the stack, too.
_MIN_STACK_KIB = 256
# Maximum wait for a stage in another thread at the end of the interpreter.
_LAST_WAIT_S = 5.0

_NOT_ENDED = "the recording could not be ended"
_T = TypeVar("_T")
State = Literal["waiting", "recording", "stopped", "written"]


class _RecorderState(process.State):
    """Recording of this process.

    Attributes:
        active: Capture that holds the profiler, if any.
        suspended_by: Description of the user's profiler that suspends captures; empty if none does.
    """

    ends = process.CAPTURE

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.active: Capture | None = None
        self.suspended_by = ""

    def in_child(self) -> None:
        # The parent ends its own recording; the child records nothing.
        super().in_child()
        self.active = None

    def at_exit(self) -> None:
        """End the recording, since torch may crash if the interpreter ends during one (2.13).

        A recording of another thread can only end in that thread, so this waits a while for its stage.
        """
        with seam.guard("a capture could not be ended", _warn):
            if (capture := self.active) is not None:
                if capture.thread != threading.get_ident():
                    capture.ended.wait(_LAST_WAIT_S)
                capture.abort("the process ended during the stage")
                capture.wait()


_state = _RecorderState()


class Capture:
    """Capture of a stage in this process.

    A recording of torch belongs to the thread that began it. An export after a stop in another thread is a segmentation
    fault, and so is a stop after another profiler has stopped (torch 2.13).

    Attributes:
        subject: The step, role, stage and rank.
        tool: Profiler that records.
        state: State of the capture.
        thread: Thread that began it.
        ended: Event that is set once it is stopped or written.
        cut: Reason why it ends as truncated even if it is stopped normally, or an empty text.
        left_out: Contents of the settings that the tool was not asked to record.
        tried: True once it has begun, or could not begin.
        over_budget: True if it has ended because it was over a limit.
        problem: Reason why there is no trace, or an empty text.
    """

    # True to mark the whole recording as a range with the stage's name.
    ranged = True

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: Tool) -> None:
        self.subject = subject
        self.tool = tool
        self.state: State = "waiting"
        self.thread = threading.get_ident()
        self.ended = threading.Event()
        self.cut = ""
        self.left_out: list[str] = []
        self.tried = False
        self.over_budget = False
        self.problem = ""
        self._run = run
        self._settings = settings
        # The files of the profiler, then the files of tools beside it (`profilers.beside`).
        self._artifacts: list[Artifacts] = []
        self._taken: list[str] = []
        self._end_range: Callable[[], None] = profilers.nothing
        # Thread that ends it; 0 before that.
        self._ender = 0

    def open(self) -> Artifacts:
        """Return the files of the profiler. The first call makes the step's folder and takes a name in it.

        Raises:
            OSError: The folder or the name can't be made.
        """
        if not self._artifacts:
            made = Artifacts(self._run, self.subject, self._settings, self.tool, taken=self._taken)
            made.left_out = self.left_out
            self._artifacts.append(made)
        return self._artifacts[0]

    def claim(self) -> bool:
        """Claim this process's profiler. Return False if it is in use or can't run in this thread."""
        if not has_room(self.subject):
            return False
        with _state.lock:
            if _state.active is not None:
                return _state.active is self
            if reason := self.tool.busy():
                subject = self.subject
                log.warning_once(f"step {subject.step}, {subject.role} {subject.stage} is not captured: {reason}")
                return False
            _state.active = self
        _state.end_first()
        return True

    def begin(self) -> bool:
        """Start recording. Return False if the profiler is in use or the budget is spent.

        Raises:
            Exception: The tool does not record. A meta file has the reason.
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
        self.open().costs("profiler start", self._start)
        self.state = "recording"
        return True

    def _start(self) -> None:
        subject = self.subject
        self._artifacts[0].start()
        if self.ranged:
            self._end_range = self.tool.mark(f"{subject.role}.{subject.stage}")
        for tool in profilers.beside(self._settings, self.tool):
            # The contents are for the profiler only.
            settings = msgspec.structs.replace(self._settings, contents=())
            beside = Artifacts(self._run, subject, settings, tool, tool.name)
            self._artifacts.append(beside)
            try:
                beside.start()
            except Exception as error:
                seam.pass_on(error)
                self._artifacts.remove(beside)
                beside.abort(_why("the profiler did not start", error))

    def keep_within_budget(self) -> None:
        """Abort the capture if it is over a limit. Called between two parts of the work, in any thread."""
        here = self.state == "recording" and self.thread == threading.get_ident()
        if here and (reason := self._artifacts[0].exceeded()):
            self.over_budget = True
            self.abort(reason)

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range, if this thread is recorded. Return the function that ends it, if the recording is still on."""
        if self.thread != threading.get_ident() or self.ended.is_set():
            return profilers.nothing
        end_range = self.tool.mark(name)

        def end_if_recorded() -> None:
            if self.thread == threading.get_ident() and not self.ended.is_set():
                end_range()

        return end_if_recorded

    def stop(self, reason: str = "") -> None:
        """End the recording and write it, if it is on. In another thread than it began in, the recording is lost.

        Args:
            reason: Remark for the meta file, if any.
        """
        if self.cut:
            self.abort(self.cut)
        else:
            self._end("complete", reason, "the stage ended in another thread than it began in")

    def abort(self, reason: str) -> None:
        """End the capture early, also one whose `begin` or `stop` was interrupted. May be called again.

        Args:
            reason: Reason for the meta file.
        """
        if self.state == "waiting" and _state.active is self:
            self.fail(reason)
        else:
            self._end("truncated", reason, f"{reason}, in another thread than the capture's")

    def _end(self, state: str, reason: str, elsewhere: str) -> None:
        """Stop the tool and let a thread write the files.

        Args:
            state: State for the meta file: `complete` or `truncated`.
            reason: Reason for the meta file, if any.
            elsewhere: Reason why there is no trace, in another thread than it began in.
        """
        if self.state != "recording":
            return
        if not self.release():
            if self._ender == threading.get_ident() and not self.ended.is_set():  # its end was interrupted
                self._lose(seam.AT_WORK)
            return
        if not self.tool.ending:  # the tool records nothing, so nothing is lost
            state, reason = "complete", ""
        elif self.thread != threading.get_ident():
            self._attempt(_NOT_ENDED, partial(self._lose, elsewhere, here=False))
            return
        self._attempt(_NOT_ENDED, partial(self._finish, state, reason))
        if state == "truncated":
            subject = self.subject
            log.warning(f"step {subject.step}, {subject.role} {subject.stage}: the capture ends early, {reason}")

    def _finish(self, state: str, reason: str) -> None:
        self._describe()
        self._artifacts[0].costs("profiler stop", self._stop)
        for artifacts in self._artifacts:
            artifacts.write(state, reason)
        self._set("stopped")

    def _describe(self) -> None:
        """Set the facts that are known only at the end."""

    def _stop(self) -> None:
        end_range, self._end_range = self._end_range, profilers.nothing
        end_range()
        for artifacts in self._artifacts:
            artifacts.stop()

    def fail(self, reason: str) -> None:
        """End the capture without a trace, and write a meta file with the reason. May be called again."""
        self.open()
        self._lose(reason)

    def _attempt(self, what: str, work: Callable[[], _T]) -> _T:
        """Return the result of a part of `begin` or the end. If it raises, the capture ends without a trace."""
        try:
            return work()
        except BaseException as error:
            if seam.of_user(error) is None:
                self._lose(_why(what, error))
            else:  # a second interrupt may interrupt this
                seam.undo(error, partial(self._lose, seam.AT_WORK))
            raise

    def _lose(self, reason: str, here: bool = True) -> None:
        """End without a trace. Without a name, there is no meta file, either. `here`: as in `Artifacts.abort`."""
        self.release()
        self.problem = reason
        if not self._artifacts:
            files.remove(*self._taken)
        for artifacts in self._artifacts:
            artifacts.abort(reason, here)
        self._set("stopped" if self._artifacts and not self._artifacts[0].has_failed else "written")

    def _set(self, state: State) -> None:
        self.state = state
        self.ended.set()

    def release(self) -> bool:
        """Release this process's profiler. Return False if the capture does not hold it."""
        with _state.lock:
            if _state.active is not self:
                return False
            self._ender = threading.get_ident()
            _state.active = None
            return True

    def wait(self) -> None:
        """Wait up to `AUTOPROF_STOP_TIMEOUT_S` until the trace is written."""
        for artifacts in self._artifacts:
            artifacts.wait()
        if self.state == "stopped":
            self.state = "written"

    def withdraw(self) -> None:
        """Remove the meta file of `fail`: another process has reported the reason."""
        self.open().withdraw()

    def give_back(self) -> None:
        """Release the name for other captures: this one has no files and nothing to report."""
        self.open().give_back()


def begin(run: Runtime, subject: Subject, settings: Settings | None = None) -> Capture | None:
    """Start a capture. Return None if this process already records: the outer stage's capture includes the inner one.

    Args:
        run: The run.
        subject: The step, role, stage and rank.
        settings: Settings of the role in this window; by default those of the run.
    """
    settings = settings or run.settings.for_role(subject.role)
    capture = Capture(run, subject, settings, profilers.choose(settings))
    return capture if capture.begin() else None


def has_room(subject: Subject) -> bool:
    """Return True if the stack of this thread is large enough for a profiler. If not, warn once."""
    stack = threads.stack_bytes()
    if stack is None or stack >= _MIN_STACK_KIB << 10:
        return True
    log.warning_once(
        f"{subject.role} {subject.stage} is not captured: the stack of its thread has {stack >> 10} KiB and a profiler "
        f"needs {_MIN_STACK_KIB}; see threading.stack_size"
    )
    return False


def current() -> Capture | None:
    """Return the capture that holds this process's profiler, if any."""
    return _state.active


def subject() -> Subject | None:
    """Return the subject of this process's recording, if any."""
    capture = _state.active
    return capture.subject if capture is not None else None


def abort(reason: str, but_for: object = None) -> None:
    """Abort the recording of this thread, unless it is `but_for`."""
    capture = _state.active
    if capture is not None and capture is not but_for and capture.thread == threading.get_ident():
        capture.abort(reason)


def make_way(reason: str, everywhere: bool = True) -> None:
    """Abort this process's recording and wait until it is written, because the program needs the profiler.

    Args:
        reason: The reason for the meta file.
        everywhere: True to abort the recording of another thread, too. This waits up to `AUTOPROF_STOP_TIMEOUT_S` until
            that thread stops it.
    """
    capture, run = _state.active, runtime.current()
    own = capture is not None and capture.thread == threading.get_ident()
    if not (own or everywhere):
        return
    timeout_s = (run.settings if run is not None else Settings()).stop_timeout_s
    try:
        if capture is not None:
            if not own:
                capture.ended.wait(timeout_s)
            capture.abort(reason)
    finally:
        writer.wait(timeout_s)


def suspend(owner: str) -> None:
    """Abort the recording and capture no stage of this process until `resume`, because the user's profiler is on.

    Args:
        owner: Description of the user's profiler.
    """
    _state.suspended_by = owner
    make_way(f"{owner} was started")


def resume() -> None:
    """Capture again after `suspend`."""
    _state.suspended_by = ""


def watch_others() -> None:
    """Watch for profilers of the program, beginning with the import of torch or torch_npu."""
    foreign.watch(make_way)


def _why(what: str, error: BaseException) -> str:
    return str(error) if isinstance(error, OverBudget) else f"{what}: {type(error).__name__}: {error}"


def _warn(what: str, error: BaseException) -> None:
    log.warning(f"{what}: {described(error)}")
