"""The files of one capture, and who makes them. The training thread does no more than it must."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from autoprof import __version__, _files, _finish, cupti, handing, interrupts, log, rundir, tools, writing
from autoprof.budget import Budget, OverBudget
from autoprof.naming import Name, Subject
from autoprof.redaction import hidden
from autoprof.runtime import Runtime
from autoprof.settings import GROUP, MERGE, Settings
from autoprof.timeline import Span
from autoprof.tools import Tool
from autoprof.tools.memory import MemoryTool
from autoprof.window import Ranks


class Placement:
    """The files of one capture with one tool, and how they come to be.

    What records beside the profiler (`tools.beside`) starts and stops with it, and has files of its own, which hold the
    tool's name.
    """

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: str, name: str = "") -> None:
        """Make the step's folder and take a name in it. `name` goes into the names of the files.

        Raises:
            OSError: They can't be made.
        """
        self.started = clock()
        self.contents: list[str] = []
        # Words of the settings' contents that were not even asked of the tool.
        self.left_out: list[str] = []
        self._lacking: list[str] = []
        self._run = run
        self._settings = settings
        self._subject = subject
        self._tool = tool
        folder = run.rundir.make(run.rundir.step(subject.step))
        # A snapshot is called the same whether it was taken beside a profiler or alone.
        name = name or (tool if tool == MemoryTool.name else "")
        self.folder = folder
        self._more: dict[str, Any] = {}
        self._name = Name(folder, subject, name)
        self._raw_base = self._name.base
        self._beside: list[tuple[Placement, Tool]] = []
        kind = (tool, subject.role, subject.stage, subject.part.rstrip("0123456789"), settings.contents)
        self._budget = Budget(settings, kind, subject.step, folder)
        self._end_range: Callable[[], None] = _nothing
        self._wait: Callable[[float], None] = _nothing
        # What went wrong that no meta file says.
        self.problem = ""

    def describe(self, role: str, more: dict[str, Any]) -> None:
        """Say before `keep` what is known only at the end: whose capture it is, and `more` for the meta file."""
        self._subject = msgspec.structs.replace(self._subject, role=role)
        self._more = more
        self._name.change(self._subject)
        for place, _ in self._beside:
            place.describe(role, more)

    def raw(self, tool: Tool) -> Path:
        """Where `tool` writes."""
        return self._raw_base.with_name(f"{self._raw_base.name}{tool.ending}{rundir.PART}")

    def start(self, tool: Tool, ranged: bool = True) -> None:
        """Have `tool` record, and what is wanted beside it. `ranged`: the whole is a range of the stage's name.

        Raises:
            OverBudget: There is no room for what it would record.
            Exception: `tool` does not record.
        """
        with self._told("profiler start"):
            self._start(tool, ranged)

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Have the timeline tell what a capture costs the run beside what it records."""
        subject = self._subject
        ids = {} if subject.replica is None else {"replica": subject.replica}
        span = Span(
            self._run, "profiling", name, step=subject.step, role=subject.role, rank=subject.rank, ids=ids or None
        )
        try:
            yield
        finally:
            span.end()

    def _start(self, tool: Tool, ranged: bool) -> None:
        self._budget.begin()
        # torch's result must be gone before anything else records (tools/torch.py).
        if not writing.wait(self._settings.stop_timeout_s):
            raise RuntimeError("the trace before it is still being written")
        self.started = clock()
        self.contents = tool.start(self._settings, self.raw(tool))
        try:
            self._accompany(tool, ranged)
        except BaseException:
            # It records, and nobody would stop it.
            self.stop(tool)
            raise

    def _accompany(self, tool: Tool, ranged: bool) -> None:
        self._lacking = [f"{tool.name}.{option}" for option in getattr(tool, "lacking", ())]
        if self._lacking:
            log.warning_once(f"options left out, which {tool.name} does not know here: {', '.join(self._lacking)}")
        tool.stamp(self._stamp())
        if ranged:
            self._end_range = tool.mark(f"{self._subject.role}.{self._subject.stage}")
        for other in tools.beside(self._settings, tool):
            place = Placement(self._run, self._subject, _without_contents(self._settings), other.name, other.name)
            try:
                place.start(other, ranged)
            except Exception as error:
                interrupts.pass_on(error)
                place.fail(why_not(error))
            else:
                self._beside.append((place, other))

    def exceeded(self, tool: Tool) -> str:
        """Why what `tool` records has to end now, or an empty text. Costs next to nothing."""
        return self._budget.exceeded(self.raw(tool))

    def stop(self, tool: Tool) -> None:
        """End what `start` began."""
        with self._told("profiler stop"):
            self._stop(tool)

    def _stop(self, tool: Tool) -> None:
        self._budget.end()
        end_range, self._end_range = self._end_range, _nothing
        try:
            end_range()
            if self._more:
                tool.stamp(self._stamp())
        finally:
            try:
                tool.stop()
            finally:
                for place, other in self._beside:
                    place.stop(other)

    def keep(self, tool: Tool, state: str, reason: str = "") -> None:
        """Have a thread write what `tool` recorded, and another process finish it and write the meta file."""
        for place, other in self._beside:
            place.keep(other, state, reason)
        self._lacking += tool.lost
        raw = self.raw(tool)
        meta = self._meta(state, reason)
        # What speaks against the GPU being in it, if the process that finishes it finds nothing of it there.
        suspicion = cupti.suspicion(os.environ) if tool.name == "torch" and cupti.watched(self.contents) else ""
        if raw.is_symlink() or not raw.is_dir():
            # Whoever waits for the files of the run has something to wait for. And Kineto would follow a link.
            _files.remove(f"{raw}.tmp")
            os.close(_files.create(raw))
        self._wait = writing.later(lambda: self._write(tool, raw, meta, suspicion), self._settings.stop_timeout_s)

    def wait(self) -> None:
        """Wait, within `AUTOPROF_STOP_TIMEOUT_S`, until no more than other processes' work is left of what was kept."""
        for place, _ in self._beside:
            place.wait()
        with self._told("writing"):
            self._wait(self._settings.stop_timeout_s)

    def _write(self, tool: Tool, raw: Path, meta: dict[str, Any], suspicion: str) -> None:
        try:
            self._hand_over(tool, raw, meta, suspicion)
        except Exception as error:  # in this thread there is nobody else to catch it
            interrupts.pass_on(error)
            self.problem = f"{type(error).__name__}: {error}"
            log.warning(f"{self.folder.name}/{self._name.base.name}: {self.problem}")

    def _hand_over(self, tool: Tool, raw: Path, meta: dict[str, Any], suspicion: str) -> None:
        try:
            tool.export(str(raw))
        except Exception as error:
            interrupts.pass_on(error)
            self._give_up(f"the trace could not be exported: {error}")
            return
        with interrupts.suppress(OSError):
            self._budget.written(_finish.size(str(raw)))
        handing.over(
            {
                "raw": str(raw),
                "base": str(self._name.base),
                "trace": str(self._name.base) + (rundir.TRACE if rundir.TRACE.startswith(tool.ending) else tool.ending),
                "meta_path": str(self._name.base) + rundir.META,
                "meta": meta,
                "taken": self._name.taken,
                "group": self._settings.access == GROUP,
                "suspicion": suspicion,
                "max_bytes": int(self._settings.max_trace_mb * 1e6),
                "python": sys.executable if self._settings.npu.analyse else "",
            }
        )

    def fail(self, reason: str) -> None:
        """Leave a meta file that says why there is no trace."""
        for place, _ in self._beside:
            place.fail(reason)
        self._give_up(reason)

    def withdraw(self) -> None:
        """Take the meta file that `fail` left away: others have told."""
        _files.remove(str(self._name.base) + rundir.META)

    def _give_up(self, reason: str) -> None:
        log.warning(f"{self.folder.name}/{self._name.base.name}: {reason}")
        raws = [f"{self._raw_base}{ending}{rundir.PART}" for ending in rundir.RAW_ENDINGS]
        _files.remove(*(f"{raw}.tmp" for raw in raws))
        for raw in raws:  # The disk may be full, and the meta file needs room.
            _files.empty(raw)
        try:
            rundir.write_json(Path(str(self._name.base) + rundir.META), self._meta("failed", reason))
            self._name.give_back()
        finally:
            # Last: whoever waits for the capture waits while there is a .part of it.
            _files.remove(*raws)

    def give_back(self) -> None:
        """Leave the name to others: there is nothing of this capture, and nothing to say of it."""
        self._name.give_back()

    def _stamp(self) -> dict[str, Any]:
        """What is written into the trace itself."""
        subject = self._subject
        where = {"global_step": subject.step, "role": subject.role, "stage": subject.stage, "rank": subject.rank}
        if subject.replica is not None:
            where |= {"replica": subject.replica, "part": subject.part}
        if "steps" in self._more:
            where |= {"global_steps": self._more["steps"]}
        return {
            **where,
            "host": rundir.HOST,
            "pid": os.getpid(),
            "run": self._run.info.id,
            "versions": self._versions(),
        }

    def _versions(self) -> dict[str, str]:
        return {"autoprof": __version__} | self._run.hooks.versions() | tools.versions()

    def _meta(self, state: str, reason: str) -> dict[str, Any]:
        asked = dict.fromkeys((*self._settings.contents, *self.left_out))
        left_out = [word for word in asked if word not in (*self.contents, MERGE)]
        if left_out and self.contents and not self.left_out:
            log.warning_once(f"contents left out, which {self._tool} does not know here: {', '.join(left_out)}")
        return {
            **msgspec.to_builtins(self._subject),
            "tool": self._tool,
            "contents": self.contents,
            "left_out": [*left_out, *self._lacking],
            "window": self._settings.reason or f"AUTOPROF_STEPS={self._run.settings.steps}",
            "host": rundir.HOST,
            "pid": os.getpid(),
            "clock": {"start": self.started, "stop": clock()},
            "versions": self._versions(),
            "bytes": 0,
            "state": state,
            "reason": hidden(reason),
            **self._slowest(),
            **self._more,
        }

    def _slowest(self) -> dict[str, str]:
        """Which ranks are captured as the slowest, and why, where the window asks for these."""
        why = self._settings.found.get(self._subject.role, "")
        if not why and Ranks.parse(self._settings.ranks).slowest:
            why = f"{self._settings.ranks}: rank 0, for no times of several are known"
        return {"slowest": why} if why else {}


def why_not(error: Exception) -> str:
    """What a meta file says of a recording that did not begin."""
    if isinstance(error, OverBudget):
        return str(error)
    return f"the profiler did not start: {type(error).__name__}: {error}"


def _without_contents(settings: Settings) -> Settings:
    """The settings of what goes beside a profiler: the contents were asked of that."""
    return msgspec.structs.replace(settings, contents=())


def _nothing(*_: object) -> None:
    """There is no range to end, and nothing to wait for."""


def clock() -> dict[str, int]:
    """One moment on both clocks: since the epoch, which traces use, and monotonic, which no one sets back."""
    return {"unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
