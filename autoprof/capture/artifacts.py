"""Subject, file names, files and limits of one capture.

Other threads and processes do most of the work on the files, so that the training thread does not wait.

Two limits end a capture: the free disk space and the size of a trace. torch keeps its recording in memory and does not
report the size. So autoprof estimates the size of a trace from the previous trace of the same kind in the same process.
For the first trace of a kind, there is no estimate: if the trace is too large, it is cut when it is written. Later
recordings are ended before they become too large.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autoprof import __version__
from autoprof.base import files, identity, log, process, seam, units
from autoprof.base.originals import os, time
from autoprof.base.redact import hidden
from autoprof.base.seam import reason as reason_of
from autoprof.capture import profilers, writer
from autoprof.capture.profilers import Tool, foreign
from autoprof.capture.profilers.memory import MemoryTool
from autoprof.config.settings import Settings
from autoprof.config.values import GROUP, MERGE
from autoprof.run.journal import Span
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, layout
from autoprof.rundir.records import EXPORT, HAND_OVER, CaptureMeta, Clock, Moment


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The work that a capture records: the step, the loop of the step, role, stage and rank.

    `rank` is the global rank. Only subjects of rollout engines have `replica` and `part`.
    """

    step: int
    role: str
    stage: str
    rank: int
    replica: int | None = None
    part: str = ""
    stage_kind: str = ""
    loop: int = 1

    def file_name(self, repeat: int, suffix: str = "") -> str:
        """Return the file name of the capture without an ending.

        Args:
            repeat: Number of the capture among this process's captures of this subject, from 1.
            suffix: Last word of the name, or an empty text.
        """
        number = f".{repeat}" if repeat > 1 else ""
        if self.replica is None:
            work = f"{file_names.tidy(self.stage)}{number}.rank{self.rank}"
        else:
            work = f"replica{self.replica}.{file_names.tidy(self.part)}{number}"
        words = [file_names.tidy(self.role), work, identity.HOST, f"pid{os.getpid()}", suffix]
        return ".".join(filter(None, words))


class _ArtifactsState(process.State):
    """The captures of this process so far.

    Attributes:
        repeats: Number of captures, by subject and suffix of the file name. The next capture of a subject gets the next
            number in its file name.
        before: The last written recording of each kind (the argument of `Budget`).
    """

    def reset(self) -> None:
        self.repeats: Counter[tuple[Subject, str]] = Counter()
        self.before: dict[Hashable, _Before] = {}

    def after_fork_in_child(self) -> None:
        self.repeats.clear()


_state = _ArtifactsState()


class Artifacts:
    """One tool that records, the files of its recording, and the facts that go into the trace and the meta file.

    Attributes:
        subject: The step, role, stage and rank.
        folder: Folder of the step. Known once `open` has run.
        name: Name of the files without their endings. Empty until `open` has claimed a name.
        contents: Contents that the tool records.
        left_out: Contents that the settings request, but that autoprof does not request from the tool.
        lacking: Requested options that the installed tool does not support.
        more: Fields of the meta file that are known only at the end of the recording.
        problem: If `fail` could not write the meta file: the error. Otherwise an empty text.
    """

    folder: Path

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: Tool) -> None:
        """Describe the files of a capture. No file is made.

        Args:
            run: The run.
            subject: The step, role, stage and rank.
            settings: The settings of this capture.
            tool: The tool that records.
        """
        self.subject = subject
        self.name = ""
        self.contents: list[str] = []
        self.left_out: list[str] = []
        self.lacking: list[str] = []
        self.more: dict[str, Any] = {}
        self.problem = ""
        self._run = run
        self._settings = settings
        self._tool = tool
        # A memory snapshot has a suffix, because the memory history may record beside another tool.
        self._suffix = tool.name if tool.name == MemoryTool.name else ""
        self._repeat = 0
        # The lock files of claimed names. Each path is added before the file is made.
        self._taken: list[str] = []
        # The path to which the tool writes.
        self._raw = ""
        self._seconds = 0.0
        # True from the start of the tool until the recording is handed to a writing thread or discarded.
        self._is_on = False
        self._has_failed = False
        self._job: writer.Job | None = None

    def open(self) -> None:
        """Make the step's folder and claim a file name in the folder. Do nothing if this was done before.

        Raises:
            OSError: The folder can't be made, or the file name can't be claimed.
        """
        if self.name:
            return
        key = self.subject, self._suffix
        self._started = now()
        self._repeat = _state.repeats[key] + 1
        self.folder = self._run.rundir.make(self._run.rundir.step(self.subject.step, self.subject.loop))
        name = self._claim_name()
        _state.repeats[key] = self._repeat
        self._raw = f"{self.folder}/{name}{self._tool.ending}{file_names.PART}"
        self.name = name

    def _claim_name(self) -> str:
        """Claim a file name that no other capture uses or has used, and return the name.

        A restarted container may have the same pids as before, so an earlier capture may have the same name.

        A lock file claims the name until the meta file exists. If the process is killed, its lock file remains and
        shows that the capture had begun.
        """
        while True:
            name = self.subject.file_name(self._repeat, self._suffix)
            base = f"{self.folder}/{name}"
            lock_file = f"{base}{file_names.TAKEN}"
            self._taken.append(lock_file)
            if files.claim(lock_file):
                # This is checked after the claim. Another capture with this name removes its lock file only when it has
                # a meta file. A capture that changed its name (`describe`) may still have a raw file with this name.
                endings = file_names.META, f"{self._tool.ending}{file_names.PART}"
                if not any(files.exists(base + ending, follow=False) for ending in endings):
                    return name
                files.remove(lock_file)
            self._taken.remove(lock_file)
            self._repeat += 1

    def describe(self, role: str, more: dict[str, Any]) -> None:
        """Set the facts that are known only at the end of the recording. Call this before `stop`.

        Args:
            role: The role of the capture. If the role differs from the subject's role, the files get a new name.
            more: Additional fields of the meta file, as a dict from field name to value.

        Raises:
            OSError: The new file name can't be claimed.
        """
        self.subject = msgspec.structs.replace(self.subject, role=role)
        self.more = more
        if self.subject.file_name(self._repeat, self._suffix) != self.name:
            self.name = self._claim_name()

    def costs(self, name: str, work: Callable[[], object]) -> None:
        """Run `work`, and record its duration as a span on the timeline, because it is a cost of the capture."""
        if not self._tool.ending:  # the tool writes no file, so its cost is negligible
            work()
            return
        subject = self.subject
        ids = None if subject.replica is None else {"replica": subject.replica}
        timeline, step, role = self._run.timeline, subject.step, subject.role
        span = Span(timeline, "profiling", name, step=step, role=role, rank=subject.rank, ids=ids)
        try:
            work()
        finally:
            span.end()

    def start(self) -> None:
        """Start the tool.

        Raises:
            OverBudget: The disk does not have enough free space for the recording.
            Exception: The tool could not start.
        """
        subject, settings, tool = self.subject, self._settings, self._tool
        kind = (tool.name, subject.role, subject.stage, subject.part.rstrip("0123456789"), settings.contents)
        self._budget = Budget(settings, kind, subject.step, self.folder)
        # The result of torch's previous recording must be freed before the next recording (profilers/torch.py).
        if not writer.wait(settings.stop_timeout_s):
            raise RuntimeError("the process is still writing its previous trace")
        self._started = now()
        self._is_on = True
        # torch writes messages to stderr, which may be a file with a size limit.
        self.contents = seam.no_size_signal(tool.start, settings, Path(self._raw))
        self.lacking = [f"{tool.name}.{option}" for option in tool.lacking]
        if self.lacking:
            options = ", ".join(self.lacking)
            log.warning_once(f"{tool.name} does not support these options here, so they are left out: {options}")
        tool.stamp(self._stamp())

    def exceeded(self) -> str:
        """If the recording exceeds a limit, return the reason why it must end now. Otherwise return an empty text.

        The check is cheap.
        """
        return self._budget.exceeded(self._raw)

    def stop(self) -> None:
        """Stop the tool."""
        self._seconds = (time.monotonic_ns() - self._started.monotonic_ns) / 1e9
        if self.more:
            self._tool.stamp(self._stamp())
        seam.no_size_signal(self._tool.stop)

    def abort(self, reason: str, in_starting_thread: bool = True) -> bool:
        """End the recording without a trace. May be called after an interrupted `open`, `start` or `stop`.

        If the recording was already handed to a writing thread, that thread writes the trace nevertheless. If no file
        name was claimed, no meta file is written.

        Args:
            reason: Reason for the meta file.
            in_starting_thread: True in the thread in which the tool was started.

        Returns:
            True if a writing thread writes the trace.
        """
        if self._job is not None and self._job.kept:
            self._job.start()
            return True
        if self._is_on:
            with seam.guard("a capture could not be ended", log.error_once):  # a profiler may raise anything
                seam.no_size_signal(self._tool.abort if in_starting_thread else self._tool.stop)
        if self.name:
            self.fail(reason)
        else:
            self.give_back()
        return False

    def write(self, state: str, reason: str = "") -> None:
        """Let a thread export the raw trace, and let the finisher process complete the trace and write the meta file.

        If the tool records nothing, this method itself writes the meta file.

        Args:
            state: State for the meta file: `complete` or `truncated`.
            reason: Reason for the meta file, or an empty text.
        """
        clock = Clock(self._started, now())
        if not self._tool.ending:
            self._write_meta(state, reason, clock)
            return
        self.lacking += self._tool.lost
        # The raw file is created here, because processes that wait for the run's files wait while it exists. Also, if a
        # link had this name, Kineto would write to the target of the link.
        if not files.claim(self._raw) and not files.is_folder(self._raw, follow=False):
            os.close(files.create(self._raw))

        def write() -> None:
            seam.no_size_signal(self._export, state, reason, clock)

        self._job = writer.Job(write, self._settings.stop_timeout_s)
        writer.later(self._job)
        self._is_on = False

    def wait(self) -> None:
        """Wait, at most `AUTOPROF_STOP_TIMEOUT_S`, until this process has written the raw trace.

        The finisher process may still be running afterwards.
        """
        if (job := self._job) is not None:
            self.costs("writing", lambda: job.wait(self._settings.stop_timeout_s))

    def _export(self, state: str, reason: str, clock: Clock) -> None:
        raw = self._raw
        try:
            # Kineto writes to the `.tmp` file first. If it were a link, Kineto would write to the target of the link.
            files.remove(f"{raw}.tmp")
            # Kineto opens the file in C++. If the program has closed its standard output, the file would get the
            # descriptor of standard output, and threads of C could write into the file.
            with files.low_numbers_taken():
                self.costs(EXPORT, lambda: self._tool.export(raw))
            meta = self._meta(state, reason, clock)
            self.costs(HAND_OVER, lambda: self._hand_over(meta))
        except BaseException as error:  # this function is the root of a thread
            if seam.error_for_user(error) is None:
                self.fail(f"the trace could not be exported: {reason_of(error)}")
                return
            # No thread could start, so the main thread exported the trace, and a signal interrupted the export.
            seam.undo(error, lambda: self.fail(seam.AT_WORK))
            raise

    def _hand_over(self, meta: CaptureMeta) -> None:
        """Let the finisher process compress the trace and write the meta file."""
        raw, base, settings, ending = self._raw, f"{self.folder}/{self.name}", self._settings, self._tool.ending
        is_chrome_trace = file_names.TRACE.startswith(ending)
        max_bytes = int(settings.max_trace_mb * 1e6)
        with seam.suppress(OSError):
            size = files.size(raw)
            self._budget.written(size, self._seconds)
            if is_chrome_trace and size > max_bytes:  # the finisher will cut the trace, but can't write to the log
                log.warning(
                    f"{self._place}: the trace is cut short, it has {units.size(size)} and "
                    f"AUTOPROF_MAX_TRACE_MB is {settings.max_trace_mb:g}; raise that, or record less by "
                    "AUTOPROF_CONTENTS, AUTOPROF_ROLLOUT_ITERATIONS or AUTOPROF_MINI_BATCHES"
                )
        # Reason for the meta file if the finisher finds no GPU events in the trace.
        expects_gpu_events = self._tool.name == "torch" and foreign.expects_gpu_events(self.contents)
        suspicion = foreign.cupti_suspicion(os.environ) if expects_gpu_events else ""
        writer.spawn(
            {
                "raw": raw,
                "base": base,
                "trace": base + (file_names.TRACE if is_chrome_trace else ending),
                "meta_path": base + file_names.META,
                "meta": msgspec.to_builtins(meta),
                "taken": self._taken,
                "group": settings.access == GROUP,
                "suspicion": suspicion,
                "max_bytes": max_bytes,
                "python": sys.executable if settings.npu.analyse else "",
            }
        )

    def fail(self, reason: str) -> None:
        """Remove the recording, and write a meta file that gives the reason. May be called more than once."""
        if self._has_failed:
            return
        log.warning(f"{self._place}: {reason}")
        files.remove(f"{self._raw}.tmp")
        files.empty(self._raw)  # the disk may be full, and the meta file needs space
        try:
            self._write_meta("failed", reason, Clock(self._started, now()))
        except OSError as error:
            seam.pass_on(error)
            self.problem = f"{type(error).__name__}: {error}"
            log.warning(f"{self._place}: {self.problem}")
        # The .part file is removed last, because other processes wait for the capture while a .part file exists.
        files.remove(self._raw)
        self._has_failed = True

    @property
    def _place(self) -> str:
        return f"{self.folder.name}/{self.name}"

    def withdraw(self) -> None:
        """Remove the meta file that `fail` has written, because another process has reported the reason."""
        files.remove(f"{self.folder}/{self.name}{file_names.META}")

    def give_back(self) -> None:
        """Release the file name: remove the lock file of the name."""
        files.remove(*self._taken)

    def _write_meta(self, state: str, reason: str, clock: Clock) -> None:
        layout.write_json(self.folder / f"{self.name}{file_names.META}", self._meta(state, reason, clock))
        self.give_back()

    def _stamp(self) -> dict[str, Any]:
        """Return the facts that are written into the trace itself, as a dict from name to value."""
        subject = self.subject
        fields = {"global_step": subject.step, "role": subject.role, "stage": subject.stage, "rank": subject.rank}
        if subject.loop > 1:
            fields["loop"] = subject.loop
        if subject.replica is not None:
            fields |= {"replica": subject.replica, "part": subject.part}
        if "steps" in self.more:
            fields |= {"global_steps": self.more["steps"]}
        process_facts = {"host": identity.HOST, "pid": os.getpid(), "run": self._run.info.id}
        return fields | process_facts | {"versions": self._versions()}

    def _versions(self) -> dict[str, str]:
        return {"autoprof": __version__} | self._run.hooks.versions | profilers.versions()

    def _meta(self, state: str, reason: str, clock: Clock) -> CaptureMeta:
        """Return the content of the meta file."""
        subject, settings, tool = self.subject, self._settings, self._tool
        requested_contents = dict.fromkeys((*settings.contents, *self.left_out))
        left_out = [word for word in requested_contents if word not in (*self.contents, MERGE)]
        if left_out and self.contents and not (self.left_out or tool.remark):
            log.warning_once(
                f"{tool.name} does not support these contents here, so they are left out: {', '.join(left_out)}"
            )
        reasons = "; ".join(filter(None, [reason, tool.remark]))
        # If these ranks are captured because they are the slowest: a text with the reason. Otherwise an empty text.
        slowest = settings.found.get(subject.role, "")
        if not slowest and "slowest" in settings.ranks:
            slowest = f"{settings.ranks}: rank 0, because the times of several ranks are not known"
        return CaptureMeta(
            **msgspec.structs.asdict(subject),
            tool=tool.name,
            contents=self.contents,
            left_out=[*left_out, *self.lacking],
            window=settings.reason or f"AUTOPROF_STEPS={self._run.settings.steps}",
            host=identity.HOST,
            pid=os.getpid(),
            clock=clock,
            versions=self._versions(),
            bytes=0,
            state=state,
            reason=hidden(reasons) if reasons else "",
            slowest=slowest,
            **self.more,
        )


def now() -> Moment:
    """Return the current time in ns on two clocks: since the epoch, as in traces, and on the monotonic clock."""
    return Moment(time.time_ns(), time.monotonic_ns())


_MB = 1e6
# Minimum time between two checks of a recording.
_CHECK_S = 0.5


class OverBudget(Exception):
    """The disk is too full, so the recording does not begin. The message gives the numbers."""


class _Before(NamedTuple):
    """Size and duration of a recording that has been written.

    Attributes:
        step: The global step.
        size: Bytes before compression.
        seconds: Duration of the recording.
    """

    step: int
    size: int
    seconds: float


class Budget:
    """Limits on the duration and the size of one recording, counted from its start."""

    def __init__(self, settings: Settings, kind: Hashable, step: int, folder: Path) -> None:
        """Begin a recording.

        Args:
            settings: The settings of the capture.
            kind: Key that is the same for recordings that probably have the same size per second.
            step: The global step.
            folder: The folder of the recording's files.

        Raises:
            OverBudget: The disk does not have enough free space.
        """
        self._kind = kind
        self._step = step
        self._folder = folder
        self._limit = int(settings.max_trace_mb * _MB)
        self._floor = int(settings.min_free_mb * _MB)
        self._begun = self._checked = time.monotonic()
        previous = _state.before.get(kind)
        expected_bytes = min(previous.size, self._limit) if previous is not None else 0
        free = _free(folder)
        if free < self._floor + expected_bytes:
            estimate = (
                f" and {_mb(expected_bytes)} for the trace, the size in step {previous.step}"
                if previous is not None
                else ""
            )
            raise OverBudget(
                f"not recorded: the disk has {_mb(free)} free and needs {_mb(self._floor)} to stay free{estimate} "
                "(AUTOPROF_MIN_FREE_MB)"
            )

    def exceeded(self, raw: str) -> str:
        """If the recording exceeds a limit, return the reason why it must end now. Otherwise return an empty text.

        The limits are checked at most twice a second. Calls in between return an empty text.

        Args:
            raw: Path to which the tool writes.
        """
        now = time.monotonic()
        if now - self._checked < _CHECK_S:
            return ""
        self._checked = now
        if _free(self._folder) < self._floor:
            return f"less than {_mb(self._floor)} is free on the disk (AUTOPROF_MIN_FREE_MB)"
        if files.is_folder(raw) and files.size(raw) > self._limit:
            return f"the trace is over {_mb(self._limit)} (AUTOPROF_MAX_TRACE_MB)"
        previous = _state.before.get(self._kind)
        if previous is not None and previous.seconds > 0:
            bytes_per_second = previous.size / previous.seconds
            if (now - self._begun) * bytes_per_second > self._limit:
                return (
                    f"the trace would pass {_mb(self._limit)} (AUTOPROF_MAX_TRACE_MB) "
                    f"at the {_mb(int(bytes_per_second))} a second of step {previous.step}"
                )
        return ""

    def written(self, size: int, seconds: float) -> None:
        """Note the size of the written raw trace, for the estimate of the next recording of the same kind.

        Args:
            size: Bytes before the trace is cut or compressed.
            seconds: Duration of the recording.
        """
        _state.before[self._kind] = _Before(self._step, size, seconds)


def _free(folder: Path) -> int:
    """Return how many bytes this user may still write to the disk that contains an existing folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _mb(size: int) -> str:
    return f"{size / _MB:,.0f} MB"
