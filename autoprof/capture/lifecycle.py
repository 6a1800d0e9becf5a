"""Lock of this process's profiler, and lifecycle of captures. One recording at a time holds the profiler."""

from __future__ import annotations

from functools import partial

from autoprof.base import exceptions, log, process, seam, threads
from autoprof.base.exception_text import described
from autoprof.base.originals import threading
from autoprof.capture import profilers, writer
from autoprof.capture.budget import OverBudget
from autoprof.capture.profilers import Tool, foreign
from autoprof.capture.recording import Capture, Recording
from autoprof.capture.subject import Subject
from autoprof.config.settings import Settings
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

# Minimum stack of a thread for a profiler. torch's profiler crashes with 64 KiB and works with 96 KiB with all contents
# (torch 2.13). The stage that runs in the thread needs some of the stack, too.
_MIN_STACK_KIB = 256
# Maximum wait for a stage in another thread at the end of the interpreter.
_LAST_WAIT_S = 5.0


class _LifecycleState(process.State):
    """Recording of this process.

    Attributes:
        suspended_by: Description of the user's profiler that suspends captures; empty if none does.
    """

    ends = process.CAPTURE

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.active: Recording | None = None
        self.suspended_by = ""

    def in_child(self) -> None:
        # The parent ends its own recording; the child records nothing.
        super().in_child()
        self.active = None

    def at_exit(self) -> None:
        """End the recording, since torch may crash if the interpreter ends during one (2.13).

        A recording of another thread can only end in that thread, so this waits a while for its stage.
        """
        recording = self.active
        if recording is None:
            return
        try:
            if recording.thread == threading.get_ident():
                finish(recording, "truncated", "the process ended during the stage")
            elif not recording.ended.wait(_LAST_WAIT_S) and release(recording):
                recording.abandon("the process ended while another thread was in the stage")
            recording.wait()
        except Exception as error:
            seam.pass_on(error)
            log.warning(f"a capture could not be ended: {described(error)}")


_state = _LifecycleState()


def begin(
    run: Runtime, subject: Subject, settings: Settings | None = None, kind: type[Capture] = Capture
) -> Capture | None:
    """Start a capture. Return None if this process already records: the outer stage's capture includes the inner one.

    Args:
        run: The run.
        subject: The step, role, stage and rank.
        settings: Settings of the role in this window; by default those of the run.
        kind: The class of the capture.
    """
    settings = settings or run.settings.for_role(subject.role)
    capture = kind(run, subject, settings, profilers.choose(settings))
    return capture if record(capture) else None


def record(capture: Capture) -> bool:
    """Claim the profiler and start recording. Return False if it is busy or the budget is spent."""
    if owner := _state.suspended_by:
        capture.fail(f"{owner} is on in this step, so autoprof records nothing")
        return False
    try:
        if _state.active is not capture and not claim(capture, capture.tool):
            return False
        capture.start()
    except OverBudget:  # the meta file has the reason
        release(capture)
        return False
    except BaseException as error:
        seam.undo(error, partial(_give_up, capture))
        release(capture)
        raise
    return True


def _give_up(recording: Recording) -> None:
    """End a recording whose begin or end was interrupted."""
    recording.give_up(seam.AT_WORK)
    release(recording)
    recording.ended.set()


def keep_within_budget(capture: Capture | None) -> None:
    """End a capture that is over a limit. Called between two parts of the work."""
    if capture is not None and not capture.ended.is_set() and (reason := capture.exceeded()):
        capture.over_budget = True
        cut_short(reason, but_for=None)


def end(capture: Capture, error: BaseException | None = None) -> None:
    """Stop a capture and write its files, unless it has already ended.

    Args:
        capture: The capture.
        error: The exception that the stage raised, if any.
    """
    if error is None:
        finish(capture, "complete", "")
    else:
        finish(capture, "truncated", f"the stage raised {exceptions.type_name(error)}")


def claim(recording: Recording, tool: Tool) -> bool:
    """Claim this process's profiler for `recording`. Return False if it is in use or can't run in this thread."""
    if not has_room(recording.subject):
        return False
    with _state.lock:
        if _state.active is not None:
            return False
        if reason := tool.busy():
            subject = recording.subject
            log.warning_once(f"step {subject.step}, {subject.role} {subject.stage} is not captured: {reason}")
            return False
        _state.active = recording
    _state.end_first()
    return True


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


def taken() -> bool:
    """Return True if this process is recording."""
    return _state.active is not None


def current() -> Recording | None:
    """Return the active recording of this process, if any."""
    return _state.active


def cut_short(reason: str, but_for: object) -> None:
    """End the active recording of this thread, unless it is `but_for`."""
    recording = _state.active
    if recording is not None and recording is not but_for and recording.thread == threading.get_ident():
        _end_early(reason)


def subject() -> Subject | None:
    """Return the subject of this process's recording, if any."""
    recording = _state.active
    return recording.subject if recording is not None else None


def release(recording: Recording) -> bool:
    """Release this process's profiler. Return False if `recording` does not hold it."""
    with _state.lock:
        if _state.active is not recording:
            return False
        recording.ender = threading.get_ident()
        _state.active = None
        return True


def interrupt(reason: str, everywhere: bool = True) -> None:
    """End this process's recording and wait until it is written, because the program needs the profiler.

    Args:
        reason: The reason for the meta file.
        everywhere: True to end the recording of another thread, too. This waits up to `AUTOPROF_STOP_TIMEOUT_S` until
            that thread ends it, and then gives the recording up.
    """
    recording = _state.active
    if not everywhere and (recording is None or recording.thread != threading.get_ident()):
        return
    try:
        _end_early(reason)
    finally:
        run = runtime.current()
        writer.wait(run.settings.stop_timeout_s if run is not None else Settings().stop_timeout_s)


def _end_early(reason: str) -> None:
    recording = _state.active
    if recording is None:
        return
    if recording.thread == threading.get_ident():
        finish(recording, "truncated", reason)
        return
    run = runtime.current()
    recording.ended.wait(run.settings.stop_timeout_s if run is not None else None)
    if release(recording):
        recording.abandon(f"{reason}, in another thread than the capture's")


def finish(recording: Recording, state: str, reason: str) -> None:
    """End a recording and write its files, unless it has already ended.

    Args:
        recording: The recording.
        state: State for the meta file: `complete` or `truncated`.
        reason: Reason for the meta file, if any.
    """
    try:
        if not release(recording):
            if recording.ender == threading.get_ident() and not recording.ended.is_set():
                _give_up(recording)  # its end was interrupted
            return
        if recording.thread == threading.get_ident():
            recording.finish(state, reason)
        else:
            recording.abandon("the stage ended in another thread than it began in")
    except BaseException as error:
        if threading.get_ident() in (recording.ender, recording.thread):
            seam.undo(error, partial(_give_up, recording))
        recording.ended.set()
        raise
    recording.ended.set()


def suspend(owner: str) -> None:
    """End the recording and capture no stage of this process until `resume`, because the user's profiler is on.

    Args:
        owner: Description of the user's profiler.
    """
    _state.suspended_by = owner
    interrupt(f"{owner} was started")


def resume() -> None:
    """Capture again after `suspend`."""
    _state.suspended_by = ""


def watch_others() -> None:
    """Watch for profilers of the program, beginning with the import of torch or torch_npu."""
    foreign.watch(interrupt)
