"""One capture's life: claim the process's profiler, start, stop, have the files placed."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

from autoprof import interrupts, log, runtime, tools, writing
from autoprof.budget import OverBudget
from autoprof.naming import Subject
from autoprof.placement import Placement, why_not
from autoprof.runtime import Runtime
from autoprof.settings import Settings
from autoprof.tools import Tool
from autoprof.tools.torch import watch


class Recording:
    """What holds the profiler of this process, and the thread in which it began.

    torch gives a recording to the thread that began it only: an export after a stop in another thread, and a stop after
    another profiler has stopped, are segmentation faults (torch 2.13).
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.thread = threading.get_ident()
        self.ended = threading.Event()

    def finish(self, state: str, reason: str) -> None:
        """Stop and place the files. Called once, in the thread that began."""
        raise NotImplementedError

    def abandon(self, reason: str) -> None:
        """Stop in another thread, where nothing can be had of the recording, and say so in a meta file."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until what was recorded is written. Nothing is, unless a kind of recordings says so."""


class Capture(Recording):
    """A capture of a stage in this process."""

    # Whether the whole is a range of the stage's name.
    ranged = True
    # Whether it was ended for what it costs.
    over_budget = False

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: Tool) -> None:
        super().__init__(subject)
        self.tool = tool
        # As in `Placement`.
        self.left_out: list[str] = []
        self._run = run
        self._settings = settings
        self._place: Placement

    def start(self) -> None:
        """Begin to record.

        Raises:
            Exception: The tool does not record; a meta file says so.
        """
        self._place = Placement(self._run, self.subject, self._settings, self.tool.name)
        self._place.left_out = self.left_out
        try:
            self._place.start(self.tool, self.ranged)
        except Exception as error:
            self._place.fail(why_not(error))
            raise

    def exceeded(self) -> str:
        """Why the capture has to end now, or an empty text."""
        return self._place.exceeded(self.tool)

    def mark(self, name: str) -> Callable[[], None]:
        """Begin a range of this name, if this thread is recorded; what is returned ends it, while it still is."""
        if self.thread != threading.get_ident() or self.ended.is_set():
            return _nothing
        end_range = self.tool.mark(name)

        def end_if_recorded() -> None:
            if self.thread == threading.get_ident() and not self.ended.is_set():
                end_range()

        return end_if_recorded

    def finish(self, state: str, reason: str) -> None:
        self._place.stop(self.tool)
        self._place.keep(self.tool, state, reason)

    def wait(self) -> None:
        """Wait, within `AUTOPROF_STOP_TIMEOUT_S`, until the trace is written."""
        self._place.wait()

    def abandon(self, reason: str) -> None:
        self._place.stop(self.tool)
        self._place.fail(reason)


# How long the end of the interpreter waits for a stage in another thread.
_LAST_S = 5.0
_lock = threading.Lock()
_active: Recording | None = None


def _in_child() -> None:
    """A forked child records nothing: what its parent does is the parent's to end."""
    global _lock, _active
    _lock = threading.Lock()
    _active = None


os.register_at_fork(after_in_child=_in_child)
# Whose profiler the user has switched on in this process, in words; empty where nobody's.
_aside = ""


def begin(
    run: Runtime, subject: Subject, settings: Settings | None = None, kind: type[Capture] = Capture
) -> Capture | None:
    """Start a capture, unless this process is recording already: the outer stage's capture holds the inner one.

    `settings` are those of the role in this window, where it has some of its own.
    """
    settings = settings or run.settings.for_role(subject.role)
    capture = kind(run, subject, settings, tools.choose(settings))
    if _aside:
        Placement(run, subject, settings, capture.tool.name).fail(f"{_aside} is on in this step; autoprof stands aside")
        return None
    if not claim(capture, capture.tool):
        return None
    try:
        capture.start()
    except OverBudget:  # which its meta file says
        release(capture)
        return None
    except BaseException:
        release(capture)
        raise
    return capture


def keep_within_budget(capture: Capture | None) -> None:
    """End a capture that costs more than it may. Called where a part of the work ends."""
    if capture is not None and not capture.ended.is_set() and (reason := capture.exceeded()):
        capture.over_budget = True
        cut_short(reason, but_for=None)


def end(capture: Capture, error: BaseException | None = None) -> None:
    """Stop a capture and place its files, if nobody else ended it before."""
    if error is None:
        finish(capture, "complete", "")
    else:
        finish(capture, "truncated", f"the stage raised {type(error).__name__}")


def claim(recording: Recording, tool: Tool) -> bool:
    """Take this process's profiler for `recording`; False where it is taken, by autoprof or by somebody else."""
    global _active
    with _lock:
        if _active is not None:
            return False
        if why := tool.busy():
            subject = recording.subject
            log.warning_once(f"step {subject.step}, {subject.role} {subject.stage} is not captured: {why}")
            return False
        _active = recording
    # Before whatever was registered until now: files are waited for after this.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    return True


def taken() -> bool:
    """Whether this process is recording."""
    return _active is not None


def current() -> Recording | None:
    """The recording that is going on in this process."""
    return _active


def cut_short(reason: str, but_for: object) -> None:
    """End the recording that is going on in this thread, unless it is `but_for`."""
    recording = _active
    if recording is not None and recording is not but_for and recording.thread == threading.get_ident():
        _end_early(reason)


def subject() -> Subject | None:
    """What this process is recording, if anything."""
    recording = _active
    return recording.subject if recording is not None else None


def release(recording: Recording) -> bool:
    """Give this process's profiler back; False where `recording` does not hold it."""
    global _active
    with _lock:
        if _active is not recording:
            return False
        _active = None
        return True


def interrupt(reason: str) -> None:
    """End the recording that is going on, if any, and have it written: somebody else needs the profiler.

    One that another thread began is waited for, within `AUTOPROF_STOP_TIMEOUT_S`, and given up after that.
    """
    try:
        _end_early(reason)
    finally:
        run = runtime.current()
        writing.wait(run.settings.stop_timeout_s if run is not None else Settings().stop_timeout_s)


def _end_early(reason: str) -> None:
    recording = _active
    if recording is None:
        return
    subject = recording.subject
    if recording.thread == threading.get_ident():
        log.warning(f"step {subject.step}, {subject.role} {subject.stage}: the capture ends early, {reason}")
        finish(recording, "truncated", reason)
        return
    run = runtime.current()
    recording.ended.wait(run.settings.stop_timeout_s if run is not None else None)
    if release(recording):
        recording.abandon(f"{reason}, in another thread than the capture's")


def finish(recording: Recording, state: str, reason: str) -> None:
    """End a recording in this state and place its files, if nobody else ended it before."""
    if not release(recording):
        return
    try:
        if recording.thread == threading.get_ident():
            recording.finish(state, reason)
        else:
            recording.abandon("the stage ended in another thread than it began in")
    finally:
        recording.ended.set()


def _at_exit() -> None:
    """End what is still recording: torch may crash where the interpreter ends around it (2.13).

    What another thread records can be ended in that thread only, so its stage is given a while.
    """
    recording = _active
    if recording is None:
        return
    try:
        if recording.thread == threading.get_ident():
            finish(recording, "truncated", "the process ended in it")
        elif not recording.ended.wait(_LAST_S) and release(recording):
            recording.abandon("the process ended while another thread was in the stage")
        recording.wait()
    except Exception as error:
        interrupts.pass_on(error)
        log.warning(f"a capture could not be ended: {type(error).__name__}: {error}")


def stand_aside(whose: str) -> None:
    """Capture no stage of this process until `come_back`: the user has `whose` on, which would get in the way."""
    global _aside
    _aside = whose
    interrupt(f"{whose} was started")


def come_back() -> None:
    """Capture again."""
    global _aside
    _aside = ""


def _nothing() -> None:
    """There is no range to end."""


def watch_others() -> None:
    """Watch for other profilers, from the moment that torch or torch_npu is imported."""
    watch(interrupt)
