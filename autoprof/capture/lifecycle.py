"""Per-process profiler claim: one recording at a time holds the profiler, from its begin to its end."""

from __future__ import annotations

from functools import partial

from autoprof.base import exceptions, interrupts, log, process, threads
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

# Torch's profiler crashes in a thread whose stack has 64 KiB, and works in 96 KiB with all contents (torch 2.13). The
# work of the stage, which the profiler calls from, needs some of it, too.
_LEAST_STACK_KIB = 256
# How long the end of the interpreter waits for a stage in another thread.
_LAST_S = 5.0


class _State(process.State):
    """The recording that is going on in this process.

    Attributes:
        aside: The owner of the profiler that the user has switched on, in words; empty where there is none.
    """

    ends = process.CAPTURE

    def begin(self) -> None:
        self.lock = threading.Lock()
        self.active: Recording | None = None
        self.aside = ""

    def in_child(self) -> None:
        # The parent ends its own recording; the child records nothing.
        self.lock = threading.Lock()
        self.active = None

    def at_exit(self) -> None:
        """End what is still recording: torch may crash where the interpreter ends around it (2.13).

        Another thread's recording can be ended in that thread only, so its stage is given a while.
        """
        recording = self.active
        if recording is None:
            return
        try:
            if recording.thread == threading.get_ident():
                finish(recording, "truncated", "the process ended during the stage")
            elif not recording.ended.wait(_LAST_S) and release(recording):
                recording.abandon("the process ended while another thread was in the stage")
            recording.wait()
        except Exception as error:
            interrupts.pass_on(error)
            log.warning(f"a capture could not be ended: {described(error)}")


_state = _State()


def begin(
    run: Runtime, subject: Subject, settings: Settings | None = None, kind: type[Capture] = Capture
) -> Capture | None:
    """Start a capture, unless this process is recording already: the outer stage's capture holds the inner one.

    Args:
        settings: Those of the role in this window, where it has some of its own.
    """
    settings = settings or run.settings.for_role(subject.role)
    capture = kind(run, subject, settings, profilers.choose(settings))
    return capture if record(capture) else None


def record(capture: Capture) -> bool:
    """Take this process's profiler and record; False where it is not to be had, or there is no room for a trace."""
    if whose := _state.aside:
        capture.fail(f"{whose} is on in this step, so autoprof records nothing")
        return False
    try:
        if _state.active is not capture and not claim(capture, capture.tool):
            return False
        capture.start()
    except OverBudget:  # which its meta file says
        release(capture)
        return False
    except BaseException as error:
        interrupts.undo(error, partial(_give_up, capture))
        release(capture)
        raise
    return True


def _give_up(recording: Recording) -> None:
    """End a recording whose begin or end was interrupted."""
    recording.give_up(interrupts.AT_WORK)
    release(recording)
    recording.ended.set()


def keep_within_budget(capture: Capture | None) -> None:
    """End a capture that costs more than it may, at the end of a part of the work."""
    if capture is not None and not capture.ended.is_set() and (reason := capture.exceeded()):
        capture.over_budget = True
        cut_short(reason, but_for=None)


def end(capture: Capture, error: BaseException | None = None) -> None:
    """Stop a capture and place its files, unless it was ended before."""
    if error is None:
        finish(capture, "complete", "")
    else:
        finish(capture, "truncated", f"the stage raised {exceptions.type_name(error)}")


def claim(recording: Recording, tool: Tool) -> bool:
    """Claim this process's profiler for `recording`. Return False if it is in use, or cannot run in this thread."""
    if not has_room(recording.subject):
        return False
    with _state.lock:
        if _state.active is not None:
            return False
        if why := tool.busy():
            subject = recording.subject
            log.warning_once(f"step {subject.step}, {subject.role} {subject.stage} is not captured: {why}")
            return False
        _state.active = recording
    _state.end_first()
    return True


def has_room(subject: Subject) -> bool:
    """Return whether the stack of this thread is large enough for a profiler; if not, warn once."""
    stack = threads.stack_bytes()
    if stack is None or stack >= _LEAST_STACK_KIB << 10:
        return True
    log.warning_once(
        f"{subject.role} {subject.stage} is not captured: the stack of its thread has {stack >> 10} KiB and a profiler "
        f"needs {_LEAST_STACK_KIB}; see threading.stack_size"
    )
    return False


def taken() -> bool:
    """Return whether this process is recording."""
    return _state.active is not None


def current() -> Recording | None:
    """Return the recording that is going on in this process."""
    return _state.active


def cut_short(reason: str, but_for: object) -> None:
    """End the recording that is going on in this thread, unless it is `but_for`."""
    recording = _state.active
    if recording is not None and recording is not but_for and recording.thread == threading.get_ident():
        _end_early(reason)


def subject() -> Subject | None:
    """Return the subject of this process's recording, if there is one."""
    recording = _state.active
    return recording.subject if recording is not None else None


def release(recording: Recording) -> bool:
    """Give this process's profiler back; return False where `recording` does not hold it."""
    with _state.lock:
        if _state.active is not recording:
            return False
        recording.ender = threading.get_ident()
        _state.active = None
        return True


def interrupt(reason: str, everywhere: bool = True) -> None:
    """End this process's recording and wait until it is written: the program needs the profiler.

    Args:
        everywhere: True if the recording of another thread ends too. This waits for that thread to end it, up to
            `AUTOPROF_STOP_TIMEOUT_S`, and then gives the recording up.
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
    """End a recording in this state and place its files, unless it was ended before."""
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
            interrupts.undo(error, partial(_give_up, recording))
        recording.ended.set()
        raise
    recording.ended.set()


def stand_aside(whose: str) -> None:
    """Capture no stage of this process until `come_back`: the user has `whose` on, which would get in the way."""
    _state.aside = whose
    interrupt(f"{whose} was started")


def come_back() -> None:
    """Capture again."""
    _state.aside = ""


def watch_others() -> None:
    """Watch for other profilers, from the moment that torch or torch_npu is imported."""
    foreign.watch(interrupt)
