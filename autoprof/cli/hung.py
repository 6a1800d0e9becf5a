"""Processes that `autoprof doctor` reads with py-spy in a present hang: silent ones, and Ray actors without hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base import files, identity
from autoprof.cli import nodes, ray_state
from autoprof.report import hang_state, places, silence
from autoprof.report.hang_state import Hang, OpenSpans
from autoprof.rundir import processes
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import BY_PY_SPY_OF_ACTOR, BY_PY_SPY_OF_WORKER
from autoprof.rundir.runs import Run


def read_silent(run: Run, open_spans: OpenSpans) -> None:
    """Read the stacks of processes of this host that did not answer in the present hang, with py-spy."""
    *_, hang = (None, *hang_state.read_hangs(run.path))
    if hang is None or not open_spans.going_on:
        return
    read_before = {process.pid for process in hang.processes}
    silent = [
        {"host": each.host, "pid": each.pid, "process": each.label, "spans": msgspec.to_builtins(each.spans)}
        for each in silence.silent_processes(hang, open_spans)
        if each.host == identity.HOST and each.pid not in read_before
    ]
    nodes.read_silent(str(Path(run.path, hang.folder)), [*silent, *_workers(hang, open_spans)])


def _workers(hang: Hang, open_spans: OpenSpans) -> list[dict[str, Any]]:
    """Return the worker processes on this host, if their parents are in the hang and have not been read before."""
    if hang.step is not None and all(span.step != hang.step for state in open_spans.states for span in state.spans):
        return []
    return [
        {"host": identity.HOST, "pid": worker.pid, "process": worker.name, "spans": [], "by": BY_PY_SPY_OF_WORKER}
        for process in hang.processes
        if process.host == identity.HOST
        for worker, place in process.workers
        if not place and all(state.pid != worker.pid for state in open_spans.states)
    ]


def ask_ray(run: Run, open_spans: OpenSpans) -> tuple[list[str], list[str]]:
    """If a process waits in `ray.get` in the present hang, return what Ray's control store knows about the cause.

    Also read the run's actors without hooks on this host with py-spy.

    Returns:
        Sentences about requests that Ray can't grant, and about tasks of the run that failed on this host.
    """
    *_, hang = (None, *hang_state.read_hangs(run.path))
    if hang is None or not open_spans.going_on or all(process.waits != places.RAY for process in hang.processes):
        return [], []
    address = processes.ray_address(RunDir(Path(run.path)))
    state = ray_state.read(address) if address else ray_state.RayState()
    known = {each.pid for each in hang.processes} | {each.pid for each in run.processes}
    actors: list[dict[str, Any]] = [
        {"host": identity.HOST, "pid": actor.pid, "process": title, "spans": [], "by": BY_PY_SPY_OF_ACTOR}
        for actor in state.actors
        if actor.pid and actor.pid not in known and _belongs_to(run, actor.pid)
        if (title := files.text(f"/proc/{actor.pid}/cmdline").strip("\0")).startswith(f"ray::{actor.kind}")
    ]
    nodes.read_silent(str(Path(run.path, hang.folder)), actors)
    failed = [task for task in state.failed if task.pid in known or _belongs_to(run, task.pid)]
    return ray_state.sentences(state), ray_state.failures(failed)


def _belongs_to(run: Run, pid: int) -> bool:
    """Return True if a process of this host has the run's id in its environment."""
    return f"\0{_boot.RUN_ID}={run.id}\0" in f"\0{files.text(f'/proc/{pid}/environ')}"
