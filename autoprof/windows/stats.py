"""Statistics of ranks and rollout replicas, for conditions and for `AUTOPROF_RANKS=slowest:N`.

A rank reports the seconds of its stages and its memory usage, a replica the tokens it has generated. A thread sends a
rank's statistics once a step, to Ray's key-value store or to the run's `told/` folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import msgspec

from autoprof.base import files, identity, interrupts, process, threads
from autoprof.base.originals import os, threading, time
from autoprof.config.conditions import MEMORY, REPORTED
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.run import cluster, runtime, step_announcement
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names
from autoprof.rundir.records import Line
from autoprof.windows import memory_usage

# The folder, and the beginning of keys in the store.
STATS_FOLDER = "told"
# An entry is some hundred bytes.
_MOST_BYTES = 1 << 20


class _State(process.State):
    """The end of sending, when Ray is about to end, and the senders, whose threads a forked child does not have."""

    def begin(self) -> None:
        self.stop = threading.Event()
        self.all: WeakSet[StatsChannel] = WeakSet()

    def in_child(self) -> None:
        for channel in list(self.all):
            channel.begin()


_state = _State()


class StatsChannel:
    """Sender of entries, in a thread that ends when there is nothing left to send."""

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self.begin()
        _state.all.add(self)

    def begin(self) -> None:
        """Begin with nothing to send, in a new process or a forked child."""
        self._waiting: dict[str, tuple[float, Callable[[], msgspec.Struct]]] = {}
        self._lock = threading.Lock()
        self._going = False

    def send(self, name: str, make: Callable[[], msgspec.Struct], at: float = 0.0) -> None:
        """Send what `make` gives then, not before `at` (`time.monotonic`), in place of what waits under the name."""
        with self._lock:
            self._waiting[name] = at, make
            if self._going:
                return
            self._going = True
        try:
            threads.start(threading.Thread(target=self._work, name="autoprof-posting", daemon=True).start)
        except RuntimeError as error:  # there may be no more threads
            interrupts.pass_on(error)
            self._going = False

    def _work(self) -> None:
        while True:
            with self._lock:
                name = min(self._waiting, key=lambda each: self._waiting[each][0], default="")
                at, make = self._waiting.pop(name, (0.0, None))
                if make is None or _state.stop.is_set():
                    self._going = False
                    return
            if _state.stop.wait(max(0.0, at - time.monotonic())):
                continue
            try:
                _put(self._run, name, msgspec.json.encode(make()))
            except Exception as error:
                interrupts.pass_on(error)
                if not _state.stop.is_set():
                    runtime.report("posting", error)


def read_entries(run: Runtime, prefix: str) -> list[bytes]:
    """Return the entries whose names begin with `prefix`.

    Raises:
        Exception: The store, or the folder, can't be read.
    """
    if cluster.is_up():
        return list(cluster.entries(f"{STATS_FOLDER}/{run.info.id}/{prefix}").values())
    if identity.ranks() == 1:
        return []
    found, folder = [], os.path.join(run.rundir.path, STATS_FOLDER)
    # Not `Path.glob`: that of Python 3.13 catches every `OSError`, also one that a signal handler raises.
    with interrupts.suppress(FileNotFoundError):
        for name in sorted(os.listdir(folder)):
            if name.startswith(prefix) and name.endswith(".json"):
                with interrupts.suppress(FileNotFoundError):
                    found.append(files.read(os.path.join(folder, name), _MOST_BYTES))
    return found


def stop_channel() -> None:
    """Send nothing more: Ray is about to end."""
    _state.stop.set()


def resume_channel() -> None:
    """Send again: Ray is up again."""
    _state.stop.clear()


def _put(run: Runtime, name: str, content: bytes) -> None:
    if not cluster.put(f"{STATS_FOLDER}/{run.info.id}/{name}", content) and identity.ranks() > 1:
        folder = run.rundir.make(run.rundir.path / STATS_FOLDER)
        files.write(folder / f"{name}.json", content)


HOST = memory_usage.HOST
# A replica tells when it has nothing left to do, once in so many seconds at most, and while it has, every so many.
_IDLE_S, _BUSY_S = 1.0, 10.0
# So many spans of one step are kept.
_MOST = 50_000
# How the names of entries begin.
RANK, REPLICA = "rank.", "replica."
_RAN_OUT = "OutOfMemoryError"


class RankStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The statistics of a rank.

    Attributes:
        role: The first role that it had; with its rank it names the entry.
        step: The step of the statistics.
        stages: Seconds by role and stage.
        memory: The share of the memory of `memory_of` (`device` or `host`) that is taken, or was at most.
        oom: The last time that it ran out of memory, in words, if it ever did.
    """

    role: str
    rank: int
    host: str
    step: int | None = None
    stages: dict[str, dict[str, float]] = {}
    memory: float = 0.0
    memory_of: str = ""
    oom: str = ""


class ReplicaStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The statistics of a rollout replica: what it has generated since it began, and for how long, in all requests."""

    replica: int
    requests: int = 0
    seconds: float = 0.0
    tokens: int = 0


def asked(settings: Settings) -> bool:
    """Return whether a condition, or `slowest` ranks, need the statistics of other processes."""
    return any(condition.what in REPORTED for condition in settings.when) or asks_for_slowest(settings)


def asks_for_slowest(settings: Settings) -> bool:
    """Return whether the slowest ranks are asked for, for any role or by a condition."""
    tables = [{"ranks": settings.ranks}, *settings.role.values(), *(each.overrides for each in settings.when)]
    return any(Ranks.parse(str(table["ranks"])).slowest for table in tables if "ranks" in table)


def per_unit(replicas: Sequence[ReplicaStats]) -> tuple[str, dict[int, float]]:
    """Return the unit, `token` or else `request`, and the seconds that each replica took for one."""
    unit = "token" if all(each.tokens for each in replicas) else "request"
    amounts = {each.replica: each.tokens if unit == "token" else each.requests for each in replicas}
    return unit, {each.replica: each.seconds / max(1, amounts[each.replica]) for each in replicas}


class StatsReporter:
    """Reporter of this process's statistics.

    Attributes:
        step: The step that ended last in this process, by its span.
        parts: Names, starts and ends of the stages and timers since, if a trainer drives its steps here.
        kinds: The kinds of all of them so far that have one, by name.
    """

    def __init__(self, run: Runtime) -> None:
        self.step: Line | None = None
        self.parts: list[tuple[str, int, int]] = []
        self.kinds: dict[str, str] = {}
        self._run = run
        self._channel = StatsChannel(run)
        # Steps and stages are judged by what the trainer's process knows by itself.
        self._asked = asked(run.settings)
        self._memory = any(condition.what == MEMORY for condition in run.settings.when)
        self._rank = RankStats(role="trainer", rank=identity.own_rank(), host=identity.HOST)
        self._replicas: dict[int, ReplicaStats] = {}
        # When the replica tells, or has told.
        self._told = float("-inf")
        # The stages of this step in order, and of the step before the last one and how often that had run by then.
        self._ran: list[str] = []
        self._end = ("", 0)
        self._sent = True

    def hear(self, line: Line) -> None:
        """Take a span that has ended in this process. Raises nothing."""
        try:
            self._hear(line)
        except Exception as error:
            interrupts.pass_on(error)
            runtime.report("telling", error)

    def take(self) -> tuple[Line | None, list[tuple[str, int, int]]]:
        """Return the step that has ended, and its stages and timers, and forget them."""
        taken = self.step, self.parts
        self.step, self.parts = None, []
        return taken

    def of_rank(self) -> RankStats:
        """Return the statistics of this process's last step."""
        told = msgspec.structs.replace(self._rank)
        if self._memory:
            told.memory, told.memory_of = memory_usage.taken()
        return told

    def tell(self) -> None:
        """Send them in a thread, if anybody asks for them."""
        self._sent = True
        if not self._asked:
            return
        told = self.of_rank()
        self._channel.send(f"{RANK}{file_names.tidy(told.role)}.{told.rank}", lambda: told)

    def _hear(self, line: Line) -> None:
        drives = step_announcement.own()[1] is not None
        if line.kind == "step":
            self.step = line
        elif line.kind == "request" and self._asked:
            self._request(line)
        elif line.kind in ("stage", "timer"):
            # verl's own timer of this name is around the step.
            if drives and line.name != "step" and len(self.parts) < _MOST:
                self.parts.append((line.name, line.start_ns, line.end_ns))
                if line.stage_kind:
                    self.kinds[line.name] = line.stage_kind
            if line.kind == "stage" and line.step is not None and line.rank is not None:
                self._stage(line, line.rank, drives)

    def _stage(self, line: Line, rank: int, drives: bool) -> None:
        """Count a stage of this rank. A worker does not hear when the step has ended: it goes by the stage that was the
        last of the step before."""
        if self._rank.step != line.step:
            if not self._sent and not drives:
                self.tell()
            if self._ran:
                self._end = self._ran[-1], self._ran.count(self._ran[-1])
            role = line.role if self._rank.step is None else self._rank.role
            self._rank = RankStats(role=role, rank=rank, host=identity.HOST, step=line.step, oom=self._rank.oom)
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
        replica = line.ids.get("replica")
        if type(replica) is not int:
            return
        told = self._replicas.setdefault(replica, ReplicaStats(replica=replica))
        told.requests += 1
        told.seconds += (line.end_ns - line.start_ns) / 1e9
        told.tokens += int(line.counts.get("response_tokens") or 0)
        now = time.monotonic()
        if now >= self._told and (not self._run.timeline.running or now >= self._told + _BUSY_S):
            self._told = max(now, self._told + _IDLE_S)
            self._channel.send(f"{REPLICA}{replica}", lambda: told, at=self._told)


def attach(run: Runtime) -> StatsReporter:
    """Attach a reporter to the timeline of this process, and return it."""
    listener = run.timeline.listener
    if not isinstance(listener, StatsReporter):
        run.timeline.listener = listener = StatsReporter(run)
    return listener
