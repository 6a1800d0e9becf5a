"""One capture's life: claim the process, start, stop, place the files, hand the rest to another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from autoprof import _finish, log, rundir, runtime, tools
from autoprof.runtime import Runtime
from autoprof.settings import MERGE, Settings
from autoprof.tools import Tool
from autoprof.tools.torch import watch

# How long the process that compresses may take to start, which is some 10 ms.
_HAND_OVER_S = 10.0


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture is of. `rank` is the global rank; `replica` and `part` are the rollout engine's."""

    step: int
    role: str
    stage: str
    rank: int
    replica: int | None = None
    part: str = ""

    def file_name(self, repeat: int) -> str:
        """The capture's name without endings: `repeat` counts the times that the stage ran in the step, from 1."""
        again = f".{repeat}" if repeat > 1 else ""
        who = f"rank{self.rank}" if self.replica is None else f"replica{self.replica}"
        words = [rundir.tidy(self.role)]
        if self.replica is None:
            words.append(f"{rundir.tidy(self.stage)}{again}")
            words.append(who)
        else:
            words.append(f"{who}.{rundir.tidy(self.part)}{again}")
        return ".".join([*words, rundir.HOST, f"pid{os.getpid()}"])


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


class Capture(Recording):
    """A capture of a stage in this process."""

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
            self._place.contents = self.tool.start(self._settings.contents, self._place.raw(self.tool))
        except Exception as error:
            self._place.fail(f"the profiler did not start: {type(error).__name__}: {error}")
            raise

    def finish(self, state: str, reason: str) -> None:
        self.tool.stop()
        self._place.keep(self.tool, state, reason)

    def abandon(self, reason: str) -> None:
        self.tool.stop()
        self._place.fail(reason)


class Placement:
    """The files of one capture, and how they come to be."""

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: str) -> None:
        self.started = clock()
        self.contents: list[str] = []
        # Words of the settings' contents that were not even asked of the tool.
        self.left_out: list[str] = []
        self._run = run
        self._settings = settings
        self._subject = subject
        self._tool = tool
        folder = run.rundir.step(subject.step)
        folder.mkdir(parents=True, exist_ok=True)
        _repeats[subject] += 1
        self.folder = folder
        self._base = folder / subject.file_name(_repeats[subject])

    def raw(self, tool: Tool) -> Path:
        """Where `tool` writes."""
        return self._base.with_name(f"{self._base.name}{tool.ending}{rundir.PART}")

    def keep(self, tool: Tool, state: str, reason: str = "") -> None:
        """Let another process finish what `tool` recorded, and write the meta file."""
        raw = self.raw(tool)
        meta = self._meta(state, reason)
        try:
            tool.export(str(raw))
        except Exception as error:
            self.fail(f"the trace could not be exported: {error}")
            return
        _in_another_process(
            {
                "raw": str(raw),
                "base": str(self._base),
                "trace": str(self._base) + rundir.TRACE,
                "meta_path": str(self._base) + rundir.META,
                "meta": meta,
                "max_bytes": int(self._settings.max_trace_mb * 1e6),
                "python": sys.executable,
            }
        )

    def fail(self, reason: str) -> None:
        """Leave a meta file that says why there is no trace."""
        log.warning(f"{self.folder.name}/{self._base.name}: {reason}")
        for raw in (f"{self._base}{ending}{rundir.PART}" for ending in rundir.RAW_ENDINGS):
            _finish.remove(raw, f"{raw}.tmp")
        rundir.write_json(Path(str(self._base) + rundir.META), self._meta("failed", reason))

    def _meta(self, state: str, reason: str) -> dict[str, Any]:
        left_out = [word for word in self._settings.contents if word not in (*self.contents, MERGE)]
        left_out += [word for word in self.left_out if word not in left_out]
        if left_out and self.contents and not self.left_out:
            log.warning_once(f"contents left out, which {self._tool} does not know here: {', '.join(left_out)}")
        return {
            **msgspec.to_builtins(self._subject),
            "tool": self._tool,
            "contents": self.contents,
            "left_out": left_out,
            "host": rundir.HOST,
            "pid": os.getpid(),
            "clock": {"start": self.started, "stop": clock()},
            "versions": self._run.hooks.versions() | tools.versions(),
            "bytes": 0,
            "state": state,
            "reason": reason,
        }


_lock = threading.Lock()
_active: Recording | None = None
_repeats: Counter[Subject] = Counter()


def begin(run: Runtime, subject: Subject, settings: Settings | None = None) -> Capture | None:
    """Start a capture, unless this process is recording already: the outer stage's capture holds the inner one.

    `settings` are those of the role in this window, where it has some of its own.
    """
    settings = settings or run.settings.for_role(subject.role)
    capture = Capture(run, subject, settings, tools.choose(settings.tool))
    if not claim(capture, capture.tool):
        return None
    try:
        capture.start()
    except BaseException:
        release(capture)
        raise
    return capture


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
        return True


def release(recording: Recording) -> bool:
    """Give this process's profiler back; False where `recording` does not hold it."""
    global _active
    with _lock:
        if _active is not recording:
            return False
        _active = None
        return True


def interrupt(reason: str) -> None:
    """End the recording that is going on, if any: somebody else needs the profiler.

    One that another thread began is waited for, within `AUTOPROF_STOP_TIMEOUT_S`, and given up after that.
    """
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


def watch_others() -> None:
    """Watch for other profilers, from the moment that torch or torch_npu is imported."""
    watch(interrupt)


def clock() -> dict[str, int]:
    """One moment on both clocks: since the epoch, which traces use, and monotonic, which no one sets back."""
    return {"unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}


def _in_another_process(job: dict[str, Any]) -> None:
    """Compress and name a trace without the training thread waiting for it, in a process that outlives this one."""
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", _finish.__file__],
            input=json.dumps(job, default=str).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_HAND_OVER_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning_once(f"no process could be started to compress traces ({error}); it is done here")
        # Analysing a folder of torch_npu's takes too long for the training thread.
        _finish.finish(job | {"python": ""})
