"""Run directories as runs of many ranks write them.

python -m bench.large_runs FOLDER --ranks N [--steps N] [--gpus N] [--exits]

The processes are as in a GRPO run of verl: one process starts the run, one counts the steps, and each rank is a worker
with five stages in each step. Two steps are captured on all ranks. The run is killed in the middle, and resumed under
the same id, a few steps earlier. The files of the last host were never collected. Workers write no exit line, because
Ray kills them. With `--exits`, they write an exit line, like the ranks of torchrun and srun. The runs have no samples,
which bench/timeline.py measures.

Each process is simulated: autoprof's own objects write the files of the process under its host name, pid and clock.
Therefore the files have the right format.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from autoprof import __version__
from autoprof.base import files, identity, originals, process
from autoprof.capture import finisher
from autoprof.capture.artifacts import Subject
from autoprof.config.settings import Settings
from autoprof.hooks import recipe, registry
from autoprof.run import clocks, end, journal
from autoprof.run.journal import Span
from autoprof.run.runtime import RunInfo, Runtime
from autoprof.rundir import file_names, layout
from autoprof.rundir.records import (
    CaptureMeta,
    Clock,
    CollectedFile,
    Missing,
    Moment,
    NodeState,
    Offset,
    RunFile,
    RunNode,
)
from bench.large_shapes import LOADING_NS, SECOND, STAGES, STEP_NS, Attempt, Shape, Stage
from bench.processes import ROOT
from tests.support import report_runs, traces

RUN_ID = "20261115-100000-abcdef"
# The two clocks at the start of the first attempt.
START_NS, BOOT_NS = report_runs.START_NS, 10**12
COMMAND = "python -m verl.trainer.main_ppo"
VERSIONS = {"verl": "0.9.1", "ray": "2.60.0", "vllm": "0.27.1", "torch": "2.13.0"}
_NAMES = [stage.name for stage in STAGES]


class PlayedClock:
    """Both clocks of a simulated host. `now` is their time, in nanoseconds since the start of the first attempt."""

    def __init__(self, now: int) -> None:
        self.now = now

    def unix_ns(self) -> int:
        return START_NS + self.now

    def unix_s(self) -> float:
        return (START_NS + self.now) / 1e9

    def monotonic_ns(self) -> int:
        return BOOT_NS + self.now

    def moment(self) -> Moment:
        return Moment(self.unix_ns(), self.monotonic_ns())


@contextlib.contextmanager
def played(host: str, pid: int, clock: PlayedClock, title: str = COMMAND) -> Iterator[None]:
    """Until the `with` block ends, make autoprof's code see a simulated process: host name, pid, time and title."""
    values: list[tuple[Any, str, Any]] = [
        (identity, "HOST", host),
        (journal, "process_title", lambda: title),
        (originals.os, "getpid", lambda: pid),
        (originals.time, "time", clock.unix_s),
        (originals.time, "time_ns", clock.unix_ns),
        (originals.time, "monotonic_ns", clock.monotonic_ns),
    ]
    original_values = [(module, name, getattr(module, name)) for module, name, _ in values]
    for module, name, value in values:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in original_values:
            setattr(module, name, value)
        # At its exit, this process must write nothing for the simulated process.
        process.reset()


def info(folder: Path, shape: Shape, attempt: Attempt) -> RunInfo:
    """Return the facts about an attempt that the process that starts it passes to the other processes."""
    return RunInfo(
        id=folder.name,
        directory=str(folder),
        command=f"{COMMAND} trainer.nnodes={len(shape.hosts)} trainer.n_gpus_per_node={shape.gpus}",
        cwd="/home/user",
        host=shape.hosts[0],
        pid=attempt.pid(0),
        started=(START_NS + attempt.start_ns) / 1e9,
        python="3.11.7",
        settings=Settings(dir=str(folder.parent), steps=",".join(map(str, shape.captured)), ranks="all", collect="1"),
    )


def make(folder: Path, shape: Shape, exits: bool = False) -> None:
    """Write the directory of a run. If `exits` is true, the workers of the second attempt write an exit line."""
    for attempt in shape.attempts:
        _start(folder, shape, attempt)
        # The missing host is the last host, so its ranks are the last ranks.
        ranks = range(shape.collected)
        with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
            pool.map(functools.partial(_worker, folder, shape, attempt, exits), ranks)
        _trainer(folder, shape, attempt)
    layout.write_json(folder / file_names.COLLECTED, _collected(folder, shape))
    finish(folder, shape)


def finish(folder: Path, shape: Shape) -> None:
    """End the run as the process that started the last attempt does."""
    attempt = shape.attempts[-1]
    clock = PlayedClock(attempt.begin_ns(attempt.steps[-1] + 1))
    with played(shape.hosts[0], attempt.pid(0), clock):
        run = Runtime(info(folder, shape, attempt))
        # A real process has read this value when it resumed the run.
        run._earlier = layout.read_json(run.rundir.run_json, RunFile).earlier
        run.nodes = [RunNode(id=_node(host), host=host, directory=str(folder)) for host in shape.hosts]
        end.end_run(run)


def _start(folder: Path, shape: Shape, attempt: Attempt) -> None:
    """Write `run.json` and the states of the hooks, as the process that starts an attempt does."""
    with played(shape.hosts[0], attempt.pid(0), PlayedClock(attempt.start_ns)):
        run = Runtime(info(folder, shape, attempt))
        run.hooks.versions.update(VERSIONS)
        for hook in _hooks():
            if reason := registry.left_out(run, hook):
                run.hooks.skipped(hook, reason)
            else:
                run.hooks.applied(hook)


def _worker(folder: Path, shape: Shape, attempt: Attempt, exits: bool, rank: int) -> None:
    """Write the files of one rank in one attempt."""
    clock = PlayedClock(attempt.start_ns + LOADING_NS)
    draw = random.Random(rank)
    with played(_host(shape, rank), attempt.pid(2 + rank), clock, "ray::WorkerDict.actor_rollout_ref_update_actor"):
        run = Runtime(info(folder, shape, attempt))
        _write_hooks(run)
        for step in attempt.steps:
            is_last_step = attempt.killed and step == attempt.steps[-1]
            for stage in STAGES[:4] if is_last_step else STAGES:
                clock.now = attempt.begin_ns(step) + int(stage.begin * SECOND)
                end_ns = attempt.begin_ns(step) + int((stage.end - draw.random() * 0.1) * SECOND)
                if step in shape.captured:
                    _captured_stage(run, clock, stage, step, rank, end_ns)
                    continue
                span = _span(run, "stage", stage.name, step, stage.role, rank)
                if is_last_step and stage is STAGES[3]:
                    return
                clock.now = end_ns
                span.end()
            # A real process looks for hangs every ten seconds, but only a look in these steps changes a file.
            if step % 50 == 0:
                run.timeline.look()
        if exits:
            run.timeline.leave()


def _captured_stage(run: Runtime, clock: PlayedClock, stage: Stage, step: int, rank: int, end_ns: int) -> None:
    """Write a captured stage: its spans, its trace and its meta file."""
    subject = Subject(step=step, role=stage.role, stage=stage.name, rank=rank)
    _cost(run, clock, subject, "profiler start", 2_000_000)
    span, start = _span(run, "stage", stage.name, step, stage.role, rank), clock.moment()
    clock.now = end_ns
    stop = clock.moment()
    span.end()
    _cost(run, clock, subject, "profiler stop", 30_000_000)
    _cost(run, clock, subject, "export", 50_000_000)
    folder = run.rundir.make(run.rundir.step(step))
    base = str(folder / subject.file_name(1))
    raw_path = base + file_names.TRACE.removesuffix(".gz") + file_names.PART
    files.write(Path(raw_path), _trace(stage, start.unix_ns, originals.os.getpid()))
    # In a real run, the finisher is a separate process.
    meta = msgspec.to_builtins(_meta(run, subject, Clock(start, stop)))
    job_fields = {"raw": raw_path, "base": base, "trace": base + file_names.TRACE, "meta_path": base + file_names.META}
    finisher.finish(job_fields | {"meta": meta, "max_bytes": 1 << 30})


def _cost(run: Runtime, clock: PlayedClock, subject: Subject, name: str, took_ns: int) -> None:
    span = _span(run, "profiling", name, subject.step, subject.role, subject.rank)
    clock.now += took_ns
    span.end()


def _trainer(folder: Path, shape: Shape, attempt: Attempt) -> None:
    """Write the files of the process that counts the steps: spans, timers, and the clock offsets of other hosts."""
    clock = PlayedClock(attempt.start_ns + LOADING_NS)
    with played(shape.hosts[0], attempt.pid(1), clock, "ray::TaskRunnerV1.run"):
        run = Runtime(info(folder, shape, attempt))
        _write_hooks(run)
        for step in attempt.steps:
            clock.now = attempt.begin_ns(step)
            span = _span(run, "step", "step", step, "trainer", 0)
            if step in shape.captured:
                clocks.write(run.rundir, [_offset(host, clock) for host in shape.hosts[1:]])
            for stage in STAGES:
                clock.now = attempt.begin_ns(step) + int((stage.begin - 0.05) * SECOND)
                timer = _span(run, "timer", stage.timer, step, "trainer", None)
                if attempt.killed and step == attempt.steps[-1] and stage is STAGES[3]:
                    return
                clock.now = attempt.begin_ns(step) + int((stage.end + 0.05) * SECOND)
                timer.end()
            clock.now = attempt.begin_ns(step) + STEP_NS - SECOND // 2
            span.end()
            if step % 50 == 0:
                run.timeline.look()


def _span(run: Runtime, kind: str, name: str, step: int, role: str, rank: int | None) -> Span:
    return Span(run.timeline, kind, name, step=step, role=role, rank=rank)


def _write_hooks(run: Runtime) -> None:
    """Write the states of the hooks, and the first call of each hook with a stage."""
    run.hooks.node, run.hooks.ray, run._registered = _node(identity.HOST), "192.0.2.2:6379", True
    run.hooks.versions.update(VERSIONS)
    for hook in _hooks():
        run.hooks.add(hook)
    for hook in _hooks():
        if reason := registry.left_out(run, hook):
            run.hooks.skipped(hook, reason)
        else:
            run.hooks.applied(hook)
            if hook.hook.options.get("stage") in _NAMES:
                run.hooks.called(hook.key)


@functools.cache
def _hooks() -> list[recipe.BoundHook]:
    """Return the hooks of the recipes that workers of verl read."""
    paths = sorted(path for name in ("ray", "verl", "vllm") for path in (ROOT / "recipes").glob(f"{name}*.toml"))
    return [hook for path in paths for hook in recipe.load(str(path))]


def _meta(run: Runtime, subject: Subject, clock: Clock) -> CaptureMeta:
    return CaptureMeta(
        step=subject.step,
        role=subject.role,
        stage=subject.stage,
        rank=subject.rank,
        replica=None,
        part="",
        tool="torch",
        contents=["cpu", "cuda"],
        left_out=[],
        window=f"AUTOPROF_STEPS={run.settings.steps}",
        host=identity.HOST,
        pid=originals.os.getpid(),
        clock=clock,
        versions={"autoprof": __version__} | VERSIONS,
        bytes=0,
        state="complete",
        reason="",
    )


def _trace(stage: Stage, start_ns: int, pid: int) -> bytes:
    """Return a trace in Kineto's layout: 300 events of a process and its GPU."""
    base_ns = report_runs.BASE_NS
    trace = _trace_at_start(stage).replace(str(base_ns).encode(), str(base_ns + start_ns - START_NS).encode(), 1)
    return trace.replace(b'"pid": 1,', b'"pid": %d,' % pid)


@functools.cache
def _trace_at_start(stage: Stage) -> bytes:
    return traces.kineto(report_runs.training((0, stage.end - stage.begin - 0.2)), report_runs.BASE_NS)


def _offset(host: str, clock: PlayedClock) -> Offset:
    return Offset(host=host, offset_ns=0, error_ns=200_000, unix_ns=clock.unix_ns())


def _collected(folder: Path, shape: Shape) -> CollectedFile:
    """Return the content of `collected.json` after a collection in which the last host did not answer."""
    states = dict.fromkeys(shape.hosts, "collected") | {shape.hosts[0]: "here"}
    missing = []
    if shape.missing:
        states[shape.missing] = "no answer"
        missing = [Missing(_node(shape.missing), shape.missing, "", "no answer within 60 s")]
    nodes = [NodeState(id=_node(host), host=host, state=state, directory=str(folder)) for host, state in states.items()]
    return CollectedFile(run=folder.name, directory=str(folder), nodes=nodes, missing=missing, left_out=[])


def _host(shape: Shape, rank: int) -> str:
    return shape.hosts[rank // shape.gpus]


def _node(host: str) -> str:
    """Return the id that Ray gives the node of a host."""
    return f"{host.encode().hex():0<56}"


def described(folder: Path, shape: Shape) -> dict[str, Any]:
    """Return the shape of a made run, the number of its files, and their bytes."""
    file_paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        **{"ranks": shape.ranks, "hosts": len(shape.hosts), "missing": shape.missing, "steps": shape.steps},
        **{
            "captured": shape.captured,
            "files": len(file_paths),
            "bytes": sum(path.stat().st_size for path in file_paths),
        },
    }


def main() -> None:
    """Make a run directory, and print its size as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the run's own folder; its name is the run's id")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gpus", type=int, default=8, help="the ranks on each host")
    parser.add_argument("--exits", action="store_true", help="workers write an exit line")
    parsed = parser.parse_args()
    shape = Shape(parsed.ranks, parsed.steps, parsed.gpus)
    make(parsed.folder.absolute(), shape, parsed.exits)
    print(json.dumps(described(parsed.folder, shape)))


if __name__ == "__main__":
    main()
