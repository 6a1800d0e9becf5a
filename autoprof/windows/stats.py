"""Statistics of ranks and rollout replicas, for conditions and for `AUTOPROF_RANKS=slowest:N`.

A rank reports the seconds of its stages and its memory usage. A replica reports the tokens that it has generated. A
thread sends the statistics of a rank once per step, to Ray's key-value store or to the run's `told/` folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec

from autoprof.base import files, identity, process, seam
from autoprof.base.originals import threading, time
from autoprof.config.selection import MEMORY, REPORTED, Ranks
from autoprof.config.settings import Settings
from autoprof.run import cluster, runtime
from autoprof.run.runtime import Runtime
from autoprof.rundir import file_names, memory_state
from autoprof.rundir.records import Line

# Name of the folder, and prefix of the keys in the store.
STATS_FOLDER = "told"
# Maximum wait for each thread before Ray shuts down.
_JOIN_S = 2.0
# Maximum size of an entry, which usually has a few hundred bytes.
_MAX_BYTES = 1 << 20
_Stats = TypeVar("_Stats", bound=msgspec.Struct)


class _StatsState(process.State):
    """Channels of this process, threads that read statistics, and the event that stops channels and threads."""

    def reset(self) -> None:
        self.stop = process.Latch()
        self.threads: list[threading.Thread] = []
        self.channels: WeakSet[StatsChannel] = WeakSet()

    def after_fork_in_child(self) -> None:
        self.threads = []
        for channel in list(self.channels):
            channel.begin()


state = _StatsState()


class StatsChannel:
    """Sender of statistics entries. It sends in a thread, which ends when no entry waits."""

    def __init__(self, run: Runtime) -> None:
        self._run = run
        self.begin()
        state.channels.add(self)

    def begin(self) -> None:
        """Set up an empty channel, in a new process or a forked child."""
        self._waiting: dict[str, tuple[float, Callable[[], msgspec.Struct]]] = {}
        self._lock = threading.Lock()
        self._running = False

    def send(self, name: str, make: Callable[[], msgspec.Struct], earliest_s: float = 0.0) -> None:
        """Send an entry in a thread. If an entry with the same name still waits, the new entry replaces it.

        Args:
            name: Name of the entry.
            make: Function that returns the entry. It is called when the entry is sent.
            earliest_s: Earliest time to send it (`time.monotonic`).
        """
        with self._lock:
            self._waiting[name] = earliest_s, make
            if self._running:
                return
            self._running = True
        if not start_thread(threading.Thread(target=self._send_entries, name="autoprof-posting", daemon=True)):
            self._running = False

    def _send_entries(self) -> None:
        while True:
            with self._lock:
                name = min(self._waiting, key=lambda name: self._waiting[name][0], default="")
                send_time, make = self._waiting.pop(name, (0.0, None))
                if make is None or state.stop.is_set():
                    self._running = False
                    return
            if state.stop.wait(max(0.0, send_time - time.monotonic())):
                continue
            with seam.guard("posting", report):
                _put(self._run, name, msgspec.json.encode(make()))


def start_thread(thread: threading.Thread) -> bool:
    """Start a thread that reads or sends statistics. Return False if the system has no more threads."""
    with seam.suppress(RuntimeError):
        process.start_thread(thread.start)
        return True
    return False


def report(where: str, error: BaseException) -> None:
    """Report an error of a thread, unless Ray is shutting down."""
    if not state.stop.is_set():
        runtime.report(where, error)


def read_entries(run: Runtime, prefix: str, kind: type[_Stats]) -> list[_Stats]:
    """Return all entries whose names begin with `prefix`. Reading Ray's store may raise any exception.

    Entries that can't be decoded are skipped: other versions of autoprof or other programs may have written them.
    """
    entries: list[bytes | None] = []
    if cluster.is_up():
        entries = list(cluster.entries(f"{STATS_FOLDER}/{run.info.id}/{prefix}").values())
    elif identity.ranks() > 1:
        folder = run.rundir.path / STATS_FOLDER
        # Not `Path.glob`: in Python 3.13 it catches every `OSError`, also one that a signal handler raises.
        names = [name for name in files.names_in(folder) if name.startswith(prefix) and name.endswith(".json")]
        entries = [files.try_read(folder / name, _MAX_BYTES) for name in names]
    decoded = []
    for entry in filter(None, entries):
        with seam.suppress(msgspec.DecodeError):
            decoded.append(msgspec.json.decode(entry, type=kind))
    return decoded


def stop() -> None:
    """Stop reading and sending statistics, before Ray shuts down."""
    state.stop.set()
    for thread in state.threads:
        if thread is not threading.current_thread():
            thread.join(_JOIN_S)


def resume() -> None:
    """Allow reading and sending statistics again, after Ray has started."""
    state.stop.clear()


def _put(run: Runtime, name: str, content: bytes) -> None:
    if not cluster.put(f"{STATS_FOLDER}/{run.info.id}/{name}", content) and identity.ranks() > 1:
        folder = run.rundir.make(run.rundir.path / STATS_FOLDER)
        files.write(folder / f"{name}.json", content)


HOST = "host"
# Minimum seconds between two reports of a replica: while the replica is idle, and while it has open requests.
_IDLE_S, _BUSY_S = 1.0, 10.0
# Maximum number of spans kept for one step.
_MAX_SPANS = 50_000
# Prefixes of the names of entries.
RANK, REPLICA = "rank.", "replica."
_RAN_OUT = "OutOfMemoryError"


class RankStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Statistics of one rank in one step.

    Attributes:
        role: First role of the rank. The role is part of the entry's name.
        rank: Global rank. The rank is part of the entry's name.
        host: Host of the rank.
        step: The global step; None before the first stage.
        stages: Seconds of each stage, as a dict from role to a dict from stage to seconds.
        ends: End of the last call of each stage, in the same form, in seconds since the epoch.
        memory: Share of memory in use, from 0 to 1: the peak of the rank's device, or the current use of the host.
        memory_of: The owner of that memory, `device` or `host`.
        oom: Description of the last time that the rank ran out of memory; empty if this has not happened.
    """

    role: str
    rank: int
    host: str
    step: int | None = None
    stages: dict[str, dict[str, float]] = {}
    ends: dict[str, dict[str, float]] = {}
    memory: float = 0.0
    memory_of: str = ""
    oom: str = ""


class ReplicaStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Statistics of a rollout replica since its start.

    Attributes:
        replica: Number of the replica.
        requests: Number of finished requests.
        seconds: Sum of the durations of these requests.
        tokens: Number of tokens that these requests generated.
    """

    replica: int
    requests: int = 0
    seconds: float = 0.0
    tokens: int = 0


def needs_other_processes(settings: Settings) -> bool:
    """Return True if a condition or `slowest` ranks need the statistics of other processes."""
    return any(condition.what in REPORTED for condition in settings.when) or asks_for_slowest(settings)


def asks_for_slowest(settings: Settings) -> bool:
    """Return True if the run's settings, the settings of a role or a condition's settings select the slowest ranks."""
    tables = [{"ranks": settings.ranks}, *settings.role.values(), *(condition.overrides for condition in settings.when)]
    return any(Ranks.parse(str(table["ranks"])).slowest for table in tables if "ranks" in table)


def per_unit(replicas: Sequence[ReplicaStats]) -> tuple[str, dict[int, float]]:
    """Return a unit of work, and the seconds per unit of each replica as a dict from replica to seconds.

    The unit is `token`. If a replica reports no tokens, the unit is `request`.
    """
    unit = "token" if all(entry.tokens for entry in replicas) else "request"
    amounts = {entry.replica: entry.tokens if unit == "token" else entry.requests for entry in replicas}
    return unit, {entry.replica: entry.seconds / max(1, amounts[entry.replica]) for entry in replicas}


def memory_use() -> tuple[float, str]:
    """Return the share of memory in use, from 0 to 1, and the owner of the memory, `device` or `host`.

    If the process uses a device, the share is the peak of the memory that torch's allocator has reserved since the
    process began, or since the program reset the peak. Otherwise the share is the host memory in use now. If the
    process's container has a memory limit, that share is relative to the limit.
    """
    torch = sys.modules.get("torch")
    for name in ("cuda", "npu"):
        backend: Any = getattr(torch, name, None)
        # A query would initialise a device that the process does not use.
        if backend is not None and backend.is_initialized():
            device = backend.current_device()
            if total := backend.get_device_properties(device).total_memory:
                return float(backend.max_memory_reserved(device) / total), "device"
    now = memory_state.state()
    return now.used_bytes / max(1, now.limit_bytes), HOST


class StatsReporter:
    """Listener to the spans of this process. It sums them up and sends the sums as statistics.

    Attributes:
        step: Span of the last step that ended in this process since the last call of `take`; None if no step ended.
        parts: Names, starts and ends (in ns) of the stages and timers that ended since the last call of `take`. Empty
            if another process drives the steps.
        kinds: Kinds of all stages and timers so far, as a dict from name to kind.
    """

    def __init__(self, run: Runtime) -> None:
        self.step: Line | None = None
        self.parts: list[tuple[str, int, int]] = []
        self.kinds: dict[str, str] = {}
        self._run = run
        self._channel = StatsChannel(run)
        # False if all conditions use only steps and stages of the trainer's process: these need no statistics.
        self._asked = needs_other_processes(run.settings)
        self._memory = any(condition.what == MEMORY for condition in run.settings.when)
        self._rank = RankStats(role="trainer", rank=identity.own_rank(), host=identity.HOST)
        self._replicas: dict[int, ReplicaStats] = {}
        # Monotonic time of the newest report of a replica, which was sent then or waits until then.
        self._report_at = float("-inf")
        # Names of this rank's stages in the current step, in the order of their ends.
        self._ran: list[str] = []
        # Name of the last stage of the previous step, and the number of times that it ran in that step.
        self._end = ("", 0)
        self._sent = True

    def hear(self, line: Line) -> None:
        """Add a span that has ended in this process to the statistics. Errors are only reported."""
        with seam.guard("telling", runtime.report):
            self._note_line(line)

    def take(self) -> tuple[Line | None, list[tuple[str, int, int]]]:
        """Return the attributes `step` and `parts`, and empty both for the next step."""
        step_and_parts = self.step, self.parts
        self.step, self.parts = None, []
        return step_and_parts

    def of_rank(self) -> RankStats:
        """Return the statistics of this process's rank in its last step."""
        entry = msgspec.structs.replace(self._rank)
        if self._memory:
            entry.memory, entry.memory_of = memory_use()
        return entry

    def send(self) -> None:
        """Send the statistics of this rank in a thread, if a setting needs them."""
        self._sent = True
        if not self._asked:
            return
        entry = self.of_rank()
        self._channel.send(f"{RANK}{file_names.tidy(entry.role)}.{entry.rank}", lambda: entry)

    def _note_line(self, line: Line) -> None:
        """Add a written line of this process's timeline to the statistics."""
        drives = cluster.own_announcement()[1] is not None
        if line.kind == "step":
            self.step = line
        elif line.kind == "request" and self._asked:
            self._request(line)
        elif line.kind in ("stage", "timer"):
            # verl's timer `step` covers the whole step.
            if drives and line.name != "step" and len(self.parts) < _MAX_SPANS:
                self.parts.append((line.name, line.start_ns, line.end_ns))
                if line.stage_kind:
                    self.kinds[line.name] = line.stage_kind
            if line.kind == "stage" and line.step is not None and line.rank is not None:
                self._stage(line, line.rank, drives)

    def _stage(self, line: Line, rank: int, is_driver: bool) -> None:
        """Add a stage that has ended to the statistics of this rank.

        A worker process does not know when a step ends. It assumes that each step ends with the same stage as the
        previous step, and sends its statistics after that stage.
        """
        if self._rank.step != line.step:
            if not self._sent and not is_driver:
                self.send()
            if self._ran:
                self._end = self._ran[-1], self._ran.count(self._ran[-1])
            role = line.role if self._rank.step is None else self._rank.role
            self._rank = RankStats(role=role, rank=rank, host=identity.HOST, step=line.step, oom=self._rank.oom)
            self._ran, self._sent = [], False
        stages = self._rank.stages.setdefault(line.role, {})
        stages[line.name] = stages.get(line.name, 0.0) + (line.end_ns - line.start_ns) / 1e9
        self._rank.ends.setdefault(line.role, {})[line.name] = line.end_ns / 1e9
        ran_out = line.error is not None and _RAN_OUT in line.error
        if ran_out:
            self._rank.oom = f"{line.role} rank {rank} ran out of memory in {line.name} of step {line.step}"
        if is_driver:
            return
        name = f"{line.role}.{line.name}"
        self._ran.append(name)
        if ran_out or (not self._sent and (name, self._ran.count(name)) == self._end):
            self.send()

    def _request(self, line: Line) -> None:
        replica = line.ids.get("replica")
        if type(replica) is not int:
            return
        entry = self._replicas.setdefault(replica, ReplicaStats(replica=replica))
        entry.requests += 1
        entry.seconds += (line.end_ns - line.start_ns) / 1e9
        entry.tokens += int(line.counts.get("response_tokens") or 0)
        now = time.monotonic()
        if now >= self._report_at and (not self._run.timeline.running or now >= self._report_at + _BUSY_S):
            self._report_at = max(now, self._report_at + _IDLE_S)
            self._channel.send(f"{REPLICA}{replica}", lambda: entry, earliest_s=self._report_at)


def attach(run: Runtime) -> StatsReporter:
    """Return the reporter that listens to the timeline of this process. If there is no reporter yet, attach one."""
    listener = run.timeline.listener
    if not isinstance(listener, StatsReporter):
        run.timeline.listener = listener = StatsReporter(run)
    return listener
