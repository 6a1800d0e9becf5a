"""Facts about one capture: what is written into its trace, and what its meta file says."""

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
        started: Its begin, on both clocks.
        contents: The words of the contents that the tool records.
        left_out: Words of the settings' contents that were not even asked of the tool.
        lacking: Options that the tool does not have here.
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
        where = {"global_step": subject.step, "role": subject.role, "stage": subject.stage, "rank": subject.rank}
        if subject.replica is not None:
            where |= {"replica": subject.replica, "part": subject.part}
        if "steps" in self.more:
            where |= {"global_steps": self.more["steps"]}
        return {
            **where,
            "host": identity.HOST,
            "pid": os.getpid(),
            "run": self._run.info.id,
            "versions": self._versions(),
        }

    def _versions(self) -> dict[str, str]:
        return {"autoprof": __version__} | self._run.hooks.versions | profilers.versions()

    def meta(self, state: str, reason: str) -> dict[str, Any]:
        """Return the content of the meta file."""
        asked = dict.fromkeys((*self._settings.contents, *self.left_out))
        left_out = [word for word in asked if word not in (*self.contents, MERGE)]
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
        said: dict[str, Any] = msgspec.to_builtins(meta)
        return said

    def _slowest(self) -> str:
        """Return why ranks are captured as the slowest, where the window asks for these."""
        why = self._settings.found.get(self.subject.role, "")
        if not why and Ranks.parse(self._settings.ranks).slowest:
            why = f"{self._settings.ranks}: rank 0, because the times of several ranks are not known"
        return why


def clock() -> dict[str, int]:
    """Return one moment on both clocks: since the epoch, which traces use, and monotonic, which no one sets back."""
    return {"unix_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
