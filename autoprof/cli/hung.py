"""Processes that `autoprof doctor` reads with py-spy in a present hang: silent ones, and Ray actors without hooks."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from autoprof import _boot
from autoprof.base import files, identity, units
from autoprof.base.redact import writable
from autoprof.cli import nodes, ray_state
from autoprof.config.selection import Condition
from autoprof.report import hang_state, hangs, places, silence
from autoprof.report.hang_state import Hang, OpenSpans
from autoprof.run import watcher
from autoprof.rundir import layout, processes
from autoprof.rundir.layout import MAX_SILENCE_NS, RunDir
from autoprof.rundir.processes import ProcessState
from autoprof.rundir.records import BY_PY_SPY_OF_ACTOR, BY_PY_SPY_OF_WORKER, HANGS, Thread, Why
from autoprof.rundir.runs import Run, label, loop_of

# Seconds in which a process writes its stacks after its watcher has seen the request.
_ANSWER_S = 3.0


def ask_late(run: Run, open_spans: OpenSpans, ended_s: Mapping[hangs.LoopStep, float]) -> None:
    """Request the stacks of all processes for a step that is stuck although no watcher has requested them.

    The limit of the watchers may be far away, and a watcher can't run while C code holds the interpreter's lock. Do
    nothing if the hang can't be recorded in the run's directory.
    """
    found = hangs.open_step_of(open_spans, (processes.RUNNING,))
    if found is None or not open_spans.going_on or layout.switched_off(RunDir(Path(run.path))):
        return
    age_s, step = found
    silent, is_over_limit = _without_sign_of_life(run, open_spans, ended_s)
    is_stuck = is_over_limit or any(hangs.findings_of_open_step(run.path, open_spans, ended_s, age_s, step))
    number, loop = step.step or 0, loop_of(step)
    folder = Path(run.path, HANGS, layout.hang_name(number, loop))
    if not is_stuck or folder.exists():
        return
    why = Why(
        host=identity.HOST,
        pid=os.getpid(),
        unix_ns=open_spans.now_ns,
        step=number,
        since_ns=step.start_ns,
        reason=f"step {label(number, loop)} has taken {units.seconds(age_s)}, and autoprof doctor was called",
        silent=[f"{state.host}-{state.pid}" for state in silent],
    )
    with contextlib.suppress(OSError):
        nodes.make_question(str(folder), msgspec.json.encode(why) + b"\n")
        living = [state for state in run.processes if state.state == processes.RUNNING and state.host == identity.HOST]
        asked: list[dict[str, Any]] = [
            {"host": each.host, "pid": each.pid}
            for each in living
            if each not in silent and not silence.is_stopped(each)
        ]
        nodes.wait_for_answers(str(folder), asked, layout.look_s() + _ANSWER_S)
        if not silent and len(list(folder.iterdir())) < 2:
            shutil.rmtree(folder)


def _without_sign_of_life(
    run: Run, open_spans: OpenSpans, ended_s: Mapping[hangs.LoopStep, float]
) -> tuple[list[ProcessState], bool]:
    """Return the processes of this host whose watcher does not run, and True if their step is over the hang limit.

    The watcher of a process reports a step over the limit, and writes a line at least every `MAX_SILENCE_NS`.
    """
    conditions: list[Condition] = []
    with contextlib.suppress(msgspec.ValidationError):  # run.json is damaged
        conditions = msgspec.convert(run.info.settings.when, list[Condition])
    limits, at_most = watcher.hang_limits(conditions)
    usual_s = median(ended_s.values()) if len(ended_s) >= watcher.MIN_FOR_MEDIAN else None
    patience_s = 2 * layout.look_s()
    may_ask = sum(1 for _ in hang_state.read_hangs(run.path)) < at_most
    silent, over_limit = {}, False
    for age_s, state, span in open_spans.aged():
        if state.state != processes.RUNNING or state.host != identity.HOST or span.kind not in ("step", "stage"):
            continue
        late_s = hangs.judged_s(age_s, state, span) - patience_s
        is_over = span.kind == "step" and any(limit.passed(late_s, usual_s) for limit in limits)
        silent_s = (open_spans.now_ns - state.last_ns) / 1e9
        if (is_over and may_ask) or silent_s > MAX_SILENCE_NS / 1e9 + patience_s:
            silent[state.file] = state
            over_limit |= is_over
    return list(silent.values()), over_limit


def without_end(run: Run) -> list[str]:
    """Return a sentence for each process of this host that has ended its work and is still running."""
    texts = []
    for state in run.without_end:
        ended_s = time.time() - state.last_ns / 1e9
        threads = msgspec.convert(nodes.read_threads(state.pid), list[Thread])
        frame = next((places.best_frame(thread.frames) for thread in threads if thread.main), None)
        where = f"it is in {places.text(frame)}" if frame is not None else "autoprof does not know where it is"
        if silence.is_stopped(msgspec.structs.replace(state, state=processes.RUNNING)):
            where = "a signal such as SIGSTOP or a debugger has stopped it"
        name = f"{hang_state.short_title(state.process) or 'process'} (pid {state.pid} on {state.host})"
        texts.append(writable(f"{name} reported its end {units.seconds(ended_s)} ago and is still running; {where}"))
    return texts


def stopped(run: Run, problems: Sequence[str]) -> list[str]:
    """Return a sentence for each stopped process of this host, unless one of the problems is about a stopped process.

    A stopped server begins no step, so its run has no hang.
    """
    if any(" is stopped" in problem for problem in problems):
        return []
    names = [
        f"{hang_state.short_title(state.process) or 'process'} (pid {state.pid} on {state.host})"
        for state in run.processes
        if silence.is_stopped(state)
    ]
    return [f"{name} is stopped, by a signal such as SIGSTOP or by a debugger" for name in names]


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
        Sentences about requests that Ray can't grant, and about tasks of the run that failed.
    """
    *_, hang = (None, *hang_state.read_hangs(run.path))
    if hang is None or not open_spans.going_on or all(process.waits != places.RAY for process in hang.processes):
        return [], []
    address = processes.ray_address(RunDir(Path(run.path)))
    state = ray_state.read(address) if address else ray_state.RayState()
    known = {each.pid for each in hang.processes} | {each.pid for each in run.processes}
    mark = f"\0{_boot.RUN_ID}={run.id}\0"
    actors: list[dict[str, Any]] = [
        {"host": identity.HOST, "pid": actor.pid, "process": title, "spans": [], "by": BY_PY_SPY_OF_ACTOR}
        for actor in state.actors
        if actor.pid and actor.pid not in known and mark in f"\0{files.text(f'/proc/{actor.pid}/environ')}"
        if (title := files.text(f"/proc/{actor.pid}/cmdline").strip("\0")).startswith(f"ray::{actor.kind}")
    ]
    nodes.read_silent(str(Path(run.path, hang.folder)), actors)
    failed = [task for task in state.failed if task.driver in known]
    return ray_state.sentences(state), ray_state.failures(failed)
