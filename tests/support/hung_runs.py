"""Hand-made run directories with a stuck step: open spans in timelines, and files in `hangs/`."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import identity
from autoprof.report import build
from autoprof.report.model import Finding
from autoprof.rundir import runs
from autoprof.rundir.records import Frame, OpenSpan, ProcessStacks, Task, Thread, Why

MIN = 60_000_000_000
TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
ALL_REDUCE = (
    Frame("<module>", "/home/u/train.py", 90),
    Frame("Actor.update", "/env/lib/python3.11/site-packages/verl/actor.py", 300),
    Frame("all_reduce", TORCH, 3245),
)
REWARD = (
    Frame("<module>", "/home/u/train.py", 90),
    Frame("fetch_score", "/home/u/reward.py", 44),
    Frame("get", "/env/lib/python3.11/site-packages/requests/api.py", 73),
    Frame("readinto", "/usr/lib/python3.11/socket.py", 718),
)
IDLE = (Frame("main_loop", "/env/lib/python3.11/site-packages/ray/_private/worker.py", 900),)


class HungRun:
    """Run of three steps of ten seconds each, and a stuck fourth step that began `minutes` ago.

    Attributes:
        folder: The run directory.
        now: Current time, in nanoseconds since the epoch.
        step: Number of the stuck step.
    """

    def __init__(
        self, folder: Path, minutes: float = 12, running: bool = True, steps: int = 3, driver: str = "trainer"
    ) -> None:
        self.folder, self.now, self.step = folder, time.time_ns(), steps + 1
        self.began = self.now - round(minutes * MIN)
        (folder / "journal").mkdir(parents=True)
        own, self._pid = os.getpid(), 1000
        info = {"id": folder.name, "host": identity.HOST, "pid": own, "started": self.began / 1e9 - 60}
        (folder / "run.json").write_text(json.dumps(info | {"state": "running" if running else "ended"}))
        # The driver's timeline has this process's pid, so the driver counts as running.
        ended = [
            self.line("step", "step", driver, 0, self.began - (steps - number) * 11_000_000_000, 10.0, step=number + 1)
            for number in range(steps)
        ]
        self.process(
            own, [*ended, self.begun("step", "step", driver, 0, minutes)], ticks=identity.start_ticks(own) or 0
        )

    def line(self, kind: str, name: str, role: str, rank: int | None, start: int, took: float, **more: Any) -> Any:
        """Return the line of a span that has ended; `took` is in seconds."""
        span = {"kind": kind, "name": name, "step": self.step, "role": role, "rank": rank, "start_ns": start}
        return span | {"end_ns": start + round(took * 1e9)} | more

    def begun(self, kind: str, name: str, role: str, rank: int | None, minutes: float, **more: Any) -> Any:
        """Return the line of an open span that began `minutes` ago."""
        start = self.now - round(minutes * MIN)
        line = {"kind": "begun", "span": kind, "name": name, "step": self.step, "role": role, "rank": rank}
        return line | {"start_ns": start} | more

    def process(self, pid: int, lines: Sequence[Any], host: str = identity.HOST, ticks: int = 0) -> None:
        """Write the timeline of a process. On another host, autoprof can't find out if the process runs."""
        clock = {"unix_ns": self.began, "monotonic_ns": 1}
        first = {"kind": "process", "host": host, "pid": pid, "clock": clock, "version": "0.1.0", "ticks": ticks}
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [first, *lines])
        (self.folder / "journal" / f"{host}-{pid}.jsonl").write_text(text)

    @property
    def hang(self) -> Path:
        """The folder of the stuck step in `hangs/`, created on first use."""
        folder = self.folder / "hangs" / f"step_{self.step:06d}"
        if not folder.exists():
            folder.mkdir(parents=True)
            why = Why(host="n1", pid=1, unix_ns=self.now, step=self.step, since_ns=self.began, condition="hang>10m")
            (folder / "why.json").write_bytes(msgspec.json.encode(why))
        return folder

    def stack(
        self,
        frames: Sequence[Frame],
        *,
        rank: int | None = None,
        role: str = "",
        stage: str = "",
        minutes: float = 12,
        process: str = "ray::WorkerDict.actor_update_actor",
        spans: Sequence[OpenSpan] = (),
        threads: Sequence[Thread] = (),
        tasks: Sequence[Task] = (),
        record: bytes = b"",
        engine: dict[str, Any] | None = None,
    ) -> ProcessStacks:
        """Write the stacks of one stuck process."""
        self._pid += 1
        start = self.now - round(minutes * MIN)
        open_ones = [*spans]
        if stage:
            open_ones.append(OpenSpan(kind="stage", name=stage, step=self.step, role=role, rank=rank, start_ns=start))
        name = f"n2-{self._pid}"
        if record:
            (self.hang / f"{name}.fr").write_bytes(record)
        made = ProcessStacks(
            host="n2",
            pid=self._pid,
            unix_ns=self.now,
            process=process,
            rank=rank,
            by="itself",
            spans=open_ones,
            threads=[*([Thread(name="MainThread", ident=1, main=True, frames=[*frames])] if frames else []), *threads],
            tasks=[*tasks],
            engine=engine or {},
            flight_record=f"{name}.fr" if record else "",
        )
        (self.hang / f"{name}.json").write_bytes(msgspec.json.encode(made))
        return made

    def span(self, kind: str, name: str, minutes: float, role: str = "agent_loop", **ids: Any) -> OpenSpan:
        """Return an open span that began `minutes` ago."""
        return OpenSpan(
            kind=kind, name=name, step=self.step, role=role, start_ns=self.now - round(minutes * MIN), ids=ids
        )


def finding_of(run: HungRun) -> Finding:
    """Return the run's only finding."""
    (finding,) = build.figures(runs.read(run.folder)).findings
    assert finding.kind == "hang"
    return finding


def said(run: HungRun) -> str:
    """Return the text of the run's only finding without the step and its age."""
    begin, _, rest = finding_of(run).text.partition(": ")
    assert begin.startswith(f"step {run.step} has been stuck for 12 min"), begin
    return rest


def flight_record(entries: list[tuple[int, str, list[int], bool]], ranks: int = 2) -> bytes:
    """Return a flight record like NCCL's, from entries of number, name, sizes, and True if ended."""
    made = [
        {
            "record_id": place,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": name,
            "time_created_ns": time.time_ns(),
            "input_sizes": [size],
            "input_dtypes": ["Float"],
            "output_sizes": [size],
            "output_dtypes": ["Float"],
            "state": "completed" if ended else "scheduled",
            "retired": ended,
            "is_p2p": name.startswith(("nccl:send ", "nccl:recv ")),
            "timeout_ms": 600_000,
            "frames": [{"name": "update", "filename": "/home/u/actor.py", "line": 7}],
        }
        for place, (number, name, size, ended) in enumerate(entries)
    ]
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    return pickle.dumps({"version": "2.10", "pg_config": groups, "entries": made})


def join(number: int, ended: bool = False, size: int = 4, name: str = "nccl:all_reduce") -> Any:
    """Return one collective for `flight_record`."""
    return number, name, [size], ended
