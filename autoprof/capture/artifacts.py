"""Files of one capture, and their making. The training thread does no more than it must."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import files, interrupts, log, units
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

    Tools beside the profiler (`profilers.beside`) start and stop with it. They have files of their own, which hold the
    tool's name.
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
            name: Goes into the names of the files.
            taken: Gets the files by which names are taken, before they are made.

        Raises:
            OSError: They can't be made.
        """
        self.facts = Facts(run, subject, settings, tool)
        self._run = run
        self._settings = settings
        self._tool = tool
        folder = run.rundir.make(run.rundir.step(subject.step))
        # A snapshot is called the same whether it was taken beside a profiler or alone.
        name = name or (tool.name if tool.name == MemoryTool.name else "")
        self.folder = folder
        self._name = Name(folder, subject, name, [] if taken is None else taken)
        self._raw_base = self._name.base
        self._beside: list[Artifacts] = []
        kind = (tool.name, subject.role, subject.stage, subject.part.rstrip("0123456789"), settings.contents)
        self._budget = Budget(settings, kind, subject.step, folder)
        self._end_range: Callable[[], None] = _nothing
        self._job: writer.Job | None = None
        self._told_of = False
        # Problem that no meta file says.
        self.problem = ""

    def describe(self, role: str, more: dict[str, Any]) -> None:
        """Say before `keep` what is known only at the end: whose capture it is, and `more` for the meta file."""
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
        """Have the tool record, and what is wanted beside it. `ranged`: the whole is a range of the stage's name.

        Raises:
            OverBudget: There is no room for what it would record.
            Exception: The tool does not record.
        """
        self._costs("profiler start", lambda: self._start(ranged))

    def _costs(self, name: str, work: Callable[[], object]) -> None:
        """Run `work`, and write its time to the timeline as a cost of the capture."""
        if not self._tool.ending:  # it costs next to nothing
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
        # torch's result must be gone before anything else records (profilers/torch.py).
        if not writer.wait(self._settings.stop_timeout_s):
            raise RuntimeError("the process is still writing its previous trace")
        self.facts.started = clock()
        # torch writes lines to stderr, which may be a file.
        self.facts.contents = files.no_size_signal(self._tool.start, self._settings, self._raw)
        try:
            self._accompany(ranged)
        except Exception as error:
            interrupts.pass_on(error)  # who was interrupted gives up
            # It records, and nobody would stop it.
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
            artifacts = Artifacts(self._run, self.facts.subject, _without_contents(self._settings), other, other.name)
            self._beside.append(artifacts)
            try:
                artifacts.start(ranged)
            except Exception as error:
                interrupts.pass_on(error)
                self._beside.remove(artifacts)
                artifacts.fail(why_not(error))

    def exceeded(self) -> str:
        """Return why the recording has to end now, or an empty text. Costs next to nothing."""
        return self._budget.exceeded(self._raw)

    def stop(self) -> None:
        """End what `start` began."""
        self._costs("profiler stop", self._stop)

    def give_up(self, reason: str) -> None:
        """End what was interrupted as it began or ended, and leave a meta file that says why there is no trace, unless
        the trace is being written."""
        for other in self._beside:
            other.give_up(reason)
        if self._job is not None and self._job.kept:
            self._job.start()
            return
        files.no_size_signal(self._tool.abort)
        if not self._told_of:
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
        """Have a thread write the recording, and another process finish it and write the meta file.

        Without a recording the meta file is written here.
        """
        if not self._tool.ending:
            self._write_meta(state, reason)
            return
        for other in self._beside:
            other.keep(state, reason)
        self.facts.lacking += self._tool.lost
        raw = self._raw
        meta = self.facts.meta(state, reason)
        # The reason that the GPU may be missing, if the process that finishes the trace finds nothing of it there.
        watched = self._tool.name == "torch" and cupti.watched(self.facts.contents)
        suspicion = cupti.suspicion(os.environ) if watched else ""
        if not files.is_folder(raw, follow=False):
            # A process that waits for the files of the run has something to wait for. And Kineto would follow a link.
            files.remove(f"{raw}.tmp")
            os.close(files.create(raw))

        def write() -> None:
            files.no_size_signal(self._write, raw, meta, suspicion)

        self._job = writer.Job(write, self._settings.stop_timeout_s)
        writer.later(self._job)

    def wait(self) -> None:
        """Wait, within `AUTOPROF_STOP_TIMEOUT_S`, until only other processes have work left on the kept files."""
        for other in self._beside:
            other.wait()
        if (job := self._job) is not None:
            self._costs("writing", lambda: job.wait(self._settings.stop_timeout_s))

    def _write(self, raw: Path, meta: dict[str, Any], suspicion: str) -> None:
        try:
            self._hand_over(raw, meta, suspicion)
        except Exception as error:  # in this thread there is nobody else to catch it
            interrupts.pass_on(error)
            self.problem = f"{type(error).__name__}: {error}"
            log.warning(f"{self.folder.name}/{self._name.base.name}: {self.problem}")
        except BaseException as error:  # there was no other thread
            interrupts.undo(error, lambda: self._give_up(interrupts.AT_WORK))
            raise

    def _hand_over(self, raw: Path, meta: dict[str, Any], suspicion: str) -> None:
        try:
            # Kineto opens the file in C++. Threads of C may write to a closed standard output meanwhile.
            with files.low_numbers_taken():
                self._costs(EXPORT, lambda: self._tool.export(str(raw)))
        except Exception as error:
            interrupts.pass_on(error)
            self._give_up(f"the trace could not be exported: {reason(error)}")
            return
        chrome = file_names.TRACE.startswith(self._tool.ending)
        most_bytes = int(self._settings.max_trace_mb * 1e6)
        with interrupts.suppress(OSError):
            size = files.size(str(raw))
            self._budget.written(size)
            if chrome and size > most_bytes:  # which the process that compresses it says to nobody
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
                "max_bytes": most_bytes,
                "python": sys.executable if self._settings.npu.analyse else "",
            }
        )

    def fail(self, reason: str) -> None:
        """Leave a meta file that says why there is no trace."""
        for other in self._beside:
            other.fail(reason)
        self._give_up(reason)

    def withdraw(self) -> None:
        """Take the meta file that `fail` left away: others have told."""
        files.remove(str(self._name.base) + file_names.META)

    def _give_up(self, reason: str) -> None:
        log.warning(f"{self.folder.name}/{self._name.base.name}: {reason}")
        raws = [f"{self._raw_base}{ending}{file_names.PART}" for ending in file_names.RAW_ENDINGS]
        files.remove(*(f"{raw}.tmp" for raw in raws))
        for raw in raws:  # The disk may be full, and the meta file needs room.
            files.empty(raw)
        try:
            self._write_meta("failed", reason)
        finally:
            # Last: whoever waits for the capture waits while there is a .part of it.
            files.remove(*raws)
        self._told_of = True

    def _write_meta(self, state: str, reason: str) -> None:
        layout.write_json(Path(str(self._name.base) + file_names.META), self.facts.meta(state, reason))
        self._name.give_back()

    def give_back(self) -> None:
        """Leave the name to others: there is nothing of this capture, and nothing to say of it."""
        self._name.give_back()


def why_not(error: Exception) -> str:
    """Return the reason in a meta file of a recording that did not begin."""
    if isinstance(error, OverBudget):
        return str(error)
    return f"the profiler did not start: {type(error).__name__}: {error}"


def _without_contents(settings: Settings) -> Settings:
    """Return the settings of a tool beside a profiler: the contents were asked of the profiler."""
    return msgspec.structs.replace(settings, contents=())


def _nothing(*_: object) -> None:
    """Do nothing: there is no range to end, and nothing to wait for."""
