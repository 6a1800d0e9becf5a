"""Files of one capture. Other threads and processes do most of the work, so that the training thread does not wait."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import files, log, seam, units
from autoprof.base.exception_text import reason
from autoprof.base.originals import os
from autoprof.capture import cupti, profilers, writer
from autoprof.capture.budget import Budget, OverBudget
from autoprof.capture.facts import Facts, clock
from autoprof.capture.profilers import Tool
from autoprof.capture.profilers.memory import MemoryTool
from autoprof.capture.subject import Name, Subject
from autoprof.config.settings import Settings
from autoprof.config.values import GROUP
from autoprof.run.runtime import Runtime
from autoprof.run.timeline import Span
from autoprof.rundir import file_names, layout
from autoprof.rundir.records import EXPORT


class Artifacts:
    """Files of one capture and the tool that makes them.

    Tools beside the profiler (`profilers.beside`) start and stop with it. They have separate files, whose names contain
    the tool's name.
    """

    def __init__(
        self,
        run: Runtime,
        subject: Subject,
        settings: Settings,
        tool: Tool,
        name: str = "",
        taken: list[str] | None = None,
    ) -> None:
        """Make the step's folder and take a name in it.

        Args:
            run: The run.
            subject: The step, role, stage and rank.
            settings: The settings of this capture.
            tool: The tool that records.
            name: Last word of the file names, if any.
            taken: List to which the lock files of names are added before they are made.

        Raises:
            OSError: The folder or the name can't be made.
        """
        self.facts = Facts(run, subject, settings, tool)
        self._run = run
        self._settings = settings
        self._tool = tool
        folder = run.rundir.make(run.rundir.step(subject.step))
        # A snapshot has the same name, taken beside a profiler or alone.
        name = name or (tool.name if tool.name == MemoryTool.name else "")
        self.folder = folder
        self._name = Name(folder, subject, name, [] if taken is None else taken)
        self._raw_base = self._name.base
        self._beside: list[Artifacts] = []
        kind = (tool.name, subject.role, subject.stage, subject.part.rstrip("0123456789"), settings.contents)
        self._budget = Budget(settings, kind, subject.step, folder)
        self._end_range: Callable[[], None] = _nothing
        self._job: writer.Job | None = None
        self._reported_failure = False
        # Problem that is not in the meta file.
        self.problem = ""

    def describe(self, role: str, more: dict[str, Any]) -> None:
        """Set facts that are known only at the end. Call it before `keep`.

        Args:
            role: The role of the capture.
            more: Further fields of the meta file.
        """
        self.facts.subject = msgspec.structs.replace(self.facts.subject, role=role)
        self.facts.more = more
        self._name.change(self.facts.subject)
        for other in self._beside:
            other.describe(role, more)

    @property
    def _raw(self) -> Path:
        """Return the path to which the tool writes."""
        return self._raw_base.with_name(f"{self._raw_base.name}{self._tool.ending}{file_names.PART}")

    def start(self, ranged: bool = True) -> None:
        """Start the tool, and the tools beside it.

        Args:
            ranged: True to mark the whole recording as a range with the stage's name.

        Raises:
            OverBudget: The disk has no room for the recording.
            Exception: The tool does not record.
        """
        self._costs("profiler start", lambda: self._start(ranged))

    def _costs(self, name: str, work: Callable[[], object]) -> None:
        """Run `work`, and write its time to the timeline as a cost of the capture."""
        if not self._tool.ending:  # the cost is negligible
            work()
            return
        subject = self.facts.subject
        ids = {} if subject.replica is None else {"replica": subject.replica}
        span = Span(
            self._run.timeline,
            "profiling",
            name,
            step=subject.step,
            role=subject.role,
            rank=subject.rank,
            ids=ids or None,
        )
        try:
            work()
        finally:
            span.end()

    def _start(self, ranged: bool) -> None:
        self._budget.begin()
        # torch's previous result must be freed before the next recording (profilers/torch.py).
        if not writer.wait(self._settings.stop_timeout_s):
            raise RuntimeError("the process is still writing its previous trace")
        self.facts.started = clock()
        # torch writes lines to stderr, which may be a file.
        self.facts.contents = files.no_size_signal(self._tool.start, self._settings, self._raw)
        try:
            self._accompany(ranged)
        except Exception as error:
            seam.pass_on(error)  # after an interrupt, the caller calls `give_up`
            # The tool already records, and no caller would stop it.
            self.stop()
            raise

    def _accompany(self, ranged: bool) -> None:
        tool, lacking = self._tool, [f"{self._tool.name}.{option}" for option in getattr(self._tool, "lacking", ())]
        self.facts.lacking = lacking
        if lacking:
            log.warning_once(
                f"{tool.name} does not support these options here, so they are left out: {', '.join(lacking)}"
            )
        tool.stamp(self.facts.stamp())
        if ranged:
            self._end_range = tool.mark(f"{self.facts.subject.role}.{self.facts.subject.stage}")
        for other in profilers.beside(self._settings, tool):
            settings = msgspec.structs.replace(self._settings, contents=())  # these are for the profiler only
            artifacts = Artifacts(self._run, self.facts.subject, settings, other, other.name)
            self._beside.append(artifacts)
            try:
                artifacts.start(ranged)
            except Exception as error:
                seam.pass_on(error)
                self._beside.remove(artifacts)
                artifacts.fail(why_not(error))

    def exceeded(self) -> str:
        """Return the reason why the recording must end now, or an empty text. The check is cheap."""
        return self._budget.exceeded(self._raw)

    def stop(self) -> None:
        """Stop the tool, and the tools beside it."""
        self._costs("profiler stop", self._stop)

    def give_up(self, reason: str) -> None:
        """End a recording whose start or stop was interrupted.

        If the trace is already being written, it is kept. Otherwise a meta file gives the reason for its absence.
        """
        for other in self._beside:
            other.give_up(reason)
        if self._job is not None and self._job.kept:
            self._job.start()
            return
        files.no_size_signal(self._tool.abort)
        if not self._reported_failure:
            self._give_up(reason)

    def _stop(self) -> None:
        self._budget.end()
        end_range, self._end_range = self._end_range, _nothing
        try:
            end_range()
            if self.facts.more:
                self._tool.stamp(self.facts.stamp())
        finally:
            try:
                files.no_size_signal(self._tool.stop)
            finally:
                for other in self._beside:
                    other.stop()

    def keep(self, state: str, reason: str = "") -> None:
        """Let a thread write the recording, and another process finish it and write the meta file.

        For a tool that records nothing, this writes the meta file.

        Args:
            state: State for the meta file: `complete` or `truncated`.
            reason: Reason for the meta file, if any.
        """
        if not self._tool.ending:
            self._write_meta(state, reason)
            return
        for other in self._beside:
            other.keep(state, reason)
        self.facts.lacking += self._tool.lost
        raw = self._raw
        meta = self.facts.meta(state, reason)
        # Reason for the meta file if the finisher finds no GPU events in the trace.
        watched = self._tool.name == "torch" and cupti.watched(self.facts.contents)
        suspicion = cupti.suspicion(os.environ) if watched else ""
        if not files.is_folder(raw, follow=False):
            # Processes that wait for the run's files see this one. Also, Kineto would follow a link of this name.
            files.remove(f"{raw}.tmp")
            os.close(files.create(raw))

        def write() -> None:
            files.no_size_signal(self._write, raw, meta, suspicion)

        self._job = writer.Job(write, self._settings.stop_timeout_s)
        writer.later(self._job)

    def wait(self) -> None:
        """Wait up to `AUTOPROF_STOP_TIMEOUT_S` until this process has written its files. The finisher may still run."""
        for other in self._beside:
            other.wait()
        if (job := self._job) is not None:
            self._costs("writing", lambda: job.wait(self._settings.stop_timeout_s))

    def _write(self, raw: Path, meta: dict[str, Any], suspicion: str) -> None:
        try:
            self._hand_over(raw, meta, suspicion)
        except Exception as error:  # this thread has no caller that could catch it
            seam.pass_on(error)
            self.problem = f"{type(error).__name__}: {error}"
            log.warning(f"{self.folder.name}/{self._name.base.name}: {self.problem}")
        except BaseException as error:  # no thread could start, so the main thread wrote and was interrupted
            seam.undo(error, lambda: self._give_up(seam.AT_WORK))
            raise

    def _hand_over(self, raw: Path, meta: dict[str, Any], suspicion: str) -> None:
        try:
            # Kineto opens the file in C++. Threads of C may write to a closed standard output meanwhile.
            with files.low_numbers_taken():
                self._costs(EXPORT, lambda: self._tool.export(str(raw)))
        except Exception as error:
            seam.pass_on(error)
            self._give_up(f"the trace could not be exported: {reason(error)}")
            return
        chrome = file_names.TRACE.startswith(self._tool.ending)
        max_bytes = int(self._settings.max_trace_mb * 1e6)
        with seam.suppress(OSError):
            size = files.size(str(raw))
            self._budget.written(size)
            if chrome and size > max_bytes:  # the finisher cuts it, but has no log
                log.warning(
                    f"{self.folder.name}/{self._name.base.name}: the trace is cut short, it has {units.size(size)} and "
                    f"AUTOPROF_MAX_TRACE_MB is {self._settings.max_trace_mb:g}; raise that, or record less by "
                    "AUTOPROF_CONTENTS, AUTOPROF_ROLLOUT_ITERATIONS or AUTOPROF_MINI_BATCHES"
                )
        writer.spawn(
            {
                "raw": str(raw),
                "base": str(self._name.base),
                "trace": str(self._name.base) + (file_names.TRACE if chrome else self._tool.ending),
                "meta_path": str(self._name.base) + file_names.META,
                "meta": meta,
                "taken": self._name.taken,
                "group": self._settings.access == GROUP,
                "suspicion": suspicion,
                "max_bytes": max_bytes,
                "python": sys.executable if self._settings.npu.analyse else "",
            }
        )

    def fail(self, reason: str) -> None:
        """Write a meta file that gives the reason why there is no trace."""
        for other in self._beside:
            other.fail(reason)
        self._give_up(reason)

    def withdraw(self) -> None:
        """Remove the meta file of `fail`: another process has reported the reason."""
        files.remove(str(self._name.base) + file_names.META)

    def _give_up(self, reason: str) -> None:
        log.warning(f"{self.folder.name}/{self._name.base.name}: {reason}")
        raws = [f"{self._raw_base}{ending}{file_names.PART}" for ending in file_names.RAW_ENDINGS]
        files.remove(*(f"{raw}.tmp" for raw in raws))
        for raw in raws:  # the disk may be full, and the meta file needs room
            files.empty(raw)
        try:
            self._write_meta("failed", reason)
        finally:
            # Last, because processes wait for the capture while its .part file exists.
            files.remove(*raws)
        self._reported_failure = True

    def _write_meta(self, state: str, reason: str) -> None:
        layout.write_json(Path(str(self._name.base) + file_names.META), self.facts.meta(state, reason))
        self._name.give_back()

    def give_back(self) -> None:
        """Release the name for other captures: this one has no files and nothing to report."""
        self._name.give_back()


def why_not(error: Exception) -> str:
    """Return the reason why a recording did not begin, for its meta file."""
    if isinstance(error, OverBudget):
        return str(error)
    return f"the profiler did not start: {type(error).__name__}: {error}"


def _nothing(*_: object) -> None:
    """Do nothing: no range has begun."""
