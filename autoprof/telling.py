"""What a process tells of itself where a condition or `slowest` ranks ask for it: a rank the seconds of its stages and
how full memory is, a rollout replica what it has generated.

It hears of that from the process's own spans (`Timeline.hear`), and tells in a thread (`posting.py`), a rank once a
step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from autoprof import board, interrupts, memory_share, rundir, runtime
from autoprof.conditions import MEMORY, TOLD
from autoprof.posting import Post
from autoprof.runtime import Runtime
from autoprof.settings import Settings
from autoprof.timeline import Line
from autoprof.window import Ranks

HOST = memory_share.HOST
# A replica tells when it has nothing left to do, once in so many seconds at most, and while it has, every so many.
_IDLE_S, _BUSY_S = 1.0, 10.0
# So many spans of one step are kept.
_MOST = 50_000
# How the names of entries begin.
RANK, REPLICA = "rank.", "replica."
_RAN_OUT = "OutOfMemoryError"


class OfRank(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a rank tells.

    Attributes:
        role: The role that it took first, by which it is known with its rank.
        step: The step that it tells of.
        stages: Seconds by role and stage.
        memory: How much of the memory of `memory_of` (`device` or `host`) is taken, or was at most: a share.
        oom: When it ran out of memory last, in words, if it ever did.
    """

    role: str
    rank: int
    host: str
    step: int | None = None
    stages: dict[str, dict[str, float]] = {}
    memory: float = 0.0
    memory_of: str = ""
    oom: str = ""


class OfReplica(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a rollout replica tells: what it has generated since it began, and for how long, all requests together."""

    replica: int
    requests: int = 0
    seconds: float = 0.0
    tokens: int = 0


def asked(settings: Settings) -> bool:
    """Whether a condition, or ranks that are the slowest, need what other processes tell."""
    return any(condition.what in TOLD for condition in settings.when) or asks_for_slowest(settings)


def asks_for_slowest(settings: Settings) -> bool:
    """Whether the slowest ranks are asked for, for any role or by a condition."""
    tables = [{"ranks": settings.ranks}, *settings.role.values(), *(each.overrides for each in settings.when)]
    return any(Ranks.parse(str(table["ranks"])).slowest for table in tables if "ranks" in table)


def per_unit(replicas: Sequence[OfReplica]) -> tuple[str, dict[int, float]]:
    """Of what, `token` or else `request`, each of the replicas has generated one in how many seconds."""
    unit = "token" if all(each.tokens for each in replicas) else "request"
    amounts = {each.replica: each.tokens if unit == "token" else each.requests for each in replicas}
    return unit, {each.replica: each.seconds / max(1, amounts[each.replica]) for each in replicas}


class Teller:
    """What this process has to tell.

    Attributes:
        step: The step that ended last in this process, by its span.
        parts: Names, starts and ends of the stages and timers since, if a trainer drives its steps here.
    """

    def __init__(self, run: Runtime) -> None:
        self.step: Line | None = None
        self.parts: list[tuple[str, int, int]] = []
        self._run = run
        self._post = Post(run)
        # Steps and stages are judged by what the trainer's process knows by itself.
        self._asked = asked(run.settings)
        self._memory = any(condition.what == MEMORY for condition in run.settings.when)
        self._rank = OfRank(role="trainer", rank=int(os.environ.get("RANK") or 0), host=rundir.HOST)
        self._replicas: dict[int, OfReplica] = {}
        # When the replica tells, or has told.
        self._told = float("-inf")
        # The stages of this step in order, and of the step before the last one and how often that had run by then.
        self._ran: list[str] = []
        self._end = ("", 0)
        self._sent = True

    def hear(self, line: Line) -> None:
        """A span has ended in this process. Raises nothing."""
        try:
            self._hear(line)
        except Exception as error:
            interrupts.pass_on(error)
            runtime.report("telling", error)

    def take(self) -> tuple[Line | None, list[tuple[str, int, int]]]:
        """The step that has ended, and its stages and timers."""
        taken = self.step, self.parts
        self.step, self.parts = None, []
        return taken

    def of_rank(self) -> OfRank:
        """What this process has to tell of its last step."""
        told = msgspec.structs.replace(self._rank)
        if self._memory:
            told.memory, told.memory_of = memory_share.taken()
        return told

    def tell(self) -> None:
        """Tell it, in a thread, if anybody asks for it."""
        self._sent = True
        if not self._asked:
            return
        told = self.of_rank()
        self._post.send(f"{RANK}{rundir.tidy(told.role)}.{told.rank}", lambda: told)

    def _hear(self, line: Line) -> None:
        drives = board.own()[1] is not None
        if line.kind == "step":
            self.step = line
        elif line.kind == "request" and self._asked:
            self._request(line)
        elif line.kind in ("stage", "timer"):
            # verl's own timer of this name is around the step.
            if drives and line.name != "step" and len(self.parts) < _MOST:
                self.parts.append((line.name, line.start_ns, line.end_ns))
            if line.kind == "stage" and line.step is not None and line.rank is not None:
                self._stage(line, line.rank, drives)

    def _stage(self, line: Line, rank: int, drives: bool) -> None:
        """A stage of this rank has ended. A worker does not hear when the step has: it goes by the stage that was the
        last of the step before."""
        if self._rank.step != line.step:
            if not self._sent and not drives:
                self.tell()
            if self._ran:
                self._end = self._ran[-1], self._ran.count(self._ran[-1])
            role = line.role if self._rank.step is None else self._rank.role
            self._rank = OfRank(role=role, rank=rank, host=rundir.HOST, step=line.step, oom=self._rank.oom)
            self._ran, self._sent = [], False
        stages = self._rank.stages.setdefault(line.role, {})
        stages[line.name] = stages.get(line.name, 0.0) + (line.end_ns - line.start_ns) / 1e9
        ran_out = line.error is not None and _RAN_OUT in line.error
        if ran_out:
            self._rank.oom = f"{line.role} rank {rank} ran out of memory in {line.name} of step {line.step}"
        if drives:
            return
        name = f"{line.role}.{line.name}"
        self._ran.append(name)
        if ran_out or (not self._sent and (name, self._ran.count(name)) == self._end):
            self.tell()

    def _request(self, line: Line) -> None:
        replica = (line.ids or {}).get("replica")
        if type(replica) is not int:
            return
        told = self._replicas.setdefault(replica, OfReplica(replica=replica))
        told.requests += 1
        told.seconds += (line.end_ns - line.start_ns) / 1e9
        told.tokens += (line.counts or {}).get("response_tokens", 0)
        now = time.monotonic()
        if now >= self._told and (not self._run.timeline.going or now >= self._told + _BUSY_S):
            self._told = max(now, self._told + _IDLE_S)
            self._post.send(f"{REPLICA}{replica}", lambda: told, at=self._told)


def attach(run: Runtime) -> None:
    """Have this process listen to its own spans."""
    run.teller = Teller(run)
    run.timeline.hear = run.teller.hear
