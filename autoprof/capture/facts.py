"""Facts about one capture, for its trace and its meta file."""

from __future__ import annotations

from typing import Any

import msgspec

from autoprof import __version__
from autoprof.base import identity, log
from autoprof.base.originals import os, time
from autoprof.base.redact import hidden
from autoprof.capture import profilers
from autoprof.capture.profilers import Tool
from autoprof.capture.subject import Subject
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.config.values import MERGE
from autoprof.run.runtime import Runtime
from autoprof.rundir.records import CaptureMeta, Clock, Moment


class Facts:
    """Facts about one capture.

    Attributes:
        subject: The step, role, stage and rank.
        started: Start time on both clocks.
        contents: Contents that the tool records.
        left_out: Contents of the settings that the tool was not asked to record.
        lacking: Options that the installed tool does not support.
        more: Fields of the meta file that are known only at the end.
    """

    def __init__(self, run: Runtime, subject: Subject, settings: Settings, tool: Tool) -> None:
        self.subject = subject
        self.started = clock()
        self.contents: list[str] = []
        self.left_out: list[str] = []
        self.lacking: list[str] = []
        self.more: dict[str, Any] = {}
        self._run = run
        self._settings = settings
        self._tool = tool

    def stamp(self) -> dict[str, Any]:
        """Return the facts that are written into the trace itself."""
        subject = self.subject
        fields = {"global_step": subject.step, "role": subject.role, "stage": subject.stage, "rank": subject.rank}
        if subject.replica is not None:
            fields |= {"replica": subject.replica, "part": subject.part}
        if "steps" in self.more:
            fields |= {"global_steps": self.more["steps"]}
        return {
            **fields,
            "host": identity.HOST,
            "pid": os.getpid(),
            "run": self._run.info.id,
            "versions": self._versions(),
        }

    def _versions(self) -> dict[str, str]:
        return {"autoprof": __version__} | self._run.hooks.versions | profilers.versions()

    def meta(self, state: str, reason: str) -> dict[str, Any]:
        """Return the content of the meta file."""
        requested = dict.fromkeys((*self._settings.contents, *self.left_out))
        left_out = [word for word in requested if word not in (*self.contents, MERGE)]
        if left_out and self.contents and not (self.left_out or self._tool.remark):
            log.warning_once(
                f"{self._tool.name} does not support these contents here, so they are left out: {', '.join(left_out)}"
            )
        subject = self.subject
        meta = CaptureMeta(
            step=subject.step,
            role=subject.role,
            stage=subject.stage,
            rank=subject.rank,
            replica=subject.replica,
            part=subject.part,
            stage_kind=subject.stage_kind,
            tool=self._tool.name,
            contents=self.contents,
            left_out=[*left_out, *self.lacking],
            window=self._settings.reason or f"AUTOPROF_STEPS={self._run.settings.steps}",
            host=identity.HOST,
            pid=os.getpid(),
            clock=Clock(Moment(**self.started), Moment(**clock())),
            versions=self._versions(),
            bytes=0,
            state=state,
            reason=hidden("; ".join(filter(None, [reason, self._tool.remark]))),
            slowest=self._slowest(),
            **self.more,
        )
        content: dict[str, Any] = msgspec.to_builtins(meta)
        return content

    def _slowest(self) -> str:
        """Return the reason why these ranks are captured as the slowest, or an empty text if they are not."""
        reason = self._settings.found.get(self.subject.role, "")
        if not reason and Ranks.parse(self._settings.ranks).slowest:
            reason = f"{self._settings.ranks}: rank 0, because the times of several ranks are not known"
        return reason


def clock() -> dict[str, int]:
    """Return the current time in ns on two clocks: since the epoch, which traces use, and the monotonic one."""
    return {"unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
