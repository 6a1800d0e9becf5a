"""List of the processes of a run that died, the likely cause first, and the sentences that report these deaths.

A death that follows from another death comes after that death. Workers that Ray or a launcher killed because the run
had ended come last. A process that vanished without an open span is listed only if an exception names it, because Ray
normally ends its workers in this way.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from autoprof.base import files, identity, seam, units
from autoprof.base.originals import io, os, time
from autoprof.base.redact import hidden
from autoprof.rundir import file_names, layout, memory_state, processes
from autoprof.rundir.layout import CRASHES, MAX_SILENCE_NS
from autoprof.rundir.processes import EXITED, GONE, ProcessState
from autoprof.rundir.records import ENGINE, Death, Frame, Line, NamedProcess, OpenSpan, Raised, RaisedLine, RunFile
from autoprof.rundir.runs import ENDED, FAILED, UNFINISHED, Run, exit_status, label, loop_of

EXCEPTION, EXIT, CRASH, KILLED, GONE_DEAD = "exception", "exit", "crash", "killed", "gone"
KERNEL, RAY, NODE = "kernel", "Ray", "node"
_MAX_DEATHS = 16
# Messages of exceptions that are consequences of the death of another process: lost connections, and errors with which
# Ray and vLLM report a death.
_CONSEQUENCE = re.compile(
    r"connection (was |has been )?(closed|reset|refused|lost)|\bpeer\b|broken pipe|\bEOF\b|nccl|gloo|timed? ?out"
    r"|died unexpectedly|raylet died|owner has exited|\broot cause\b",
    re.IGNORECASE,
)
# The result of `_cause_rank` for a vanished process.
_GONE_RANK = 2
# Role of the steps of an engine, which are its batches.
_ENGINE_ROLE = "rollout"
_CTRL_C, _SIGTERM = "SIGINT", "SIGTERM"
# Maximum time between a dump at a kill and the last journal line of the process.
_DUMP_NS = 1_000_000_000
_EXIT = "SystemExit"
# Maximum time between the end of a rank and the lost connection of another rank.
_ENDED_EARLY_NS = 3_600_000_000_000
# Maximum time in which a process ends after it has closed its connections.
_EXIT_NS = 5_000_000_000


def find_in_run(run: Run) -> list[Death]:
    """Return the deaths to report for a run, the likely cause first. Deaths of earlier attempts come last.

    For a run that ended without a failure, return only crashes and kills.
    """
    path, info, state = Path(run.path), run.info, run.state.partition(" ")[0]
    # An empty state means that `run.json` is missing.
    if info.error == _CTRL_C or not info.state:
        return []
    deaths = find(path, info, run.processes, run_has_ended=state in (ENDED, FAILED))
    latest = [death for death in deaths if not death.earlier]
    earlier = [death for death in deaths if death.earlier]
    if state == FAILED:
        return [*_add_exit_status(latest, info, exit_status(path)), *earlier]
    if state == ENDED:
        # The program may have left spans open, and ended processes, on purpose.
        trained = [each.stepped.end_ns for each in run.processes if each.stepped and each.stepped.role != _ENGINE_ROLE]
        return [
            death
            for death in deaths
            if (death.how in (CRASH, KILLED) and death.signal != _SIGTERM)
            or (death.how in (EXCEPTION, EXIT) and death.name)
            # After the last step of a trainer, Ray may kill a process of an engine before the server that started it.
            if not (trained and _was_reported(death) and death.last_ns > max(trained))
        ]
    if state == UNFINISHED:
        return [*_add_starter(latest, info, run.processes), *earlier]
    return [death for death in deaths if death.how != EXCEPTION]


def find(
    path: Path,
    info: RunFile,
    states: Sequence[ProcessState],
    run_has_ended: bool,
    ending_exception: Raised | None = None,
) -> list[Death]:
    """Return the processes that died, the likely cause first.

    Args:
        path: The run directory.
        info: The content of `run.json`.
        states: The last states of the run's processes.
        run_has_ended: True if the run has ended. `info.died` then lists the processes that were dead at its end.
        ending_exception: The exception that is ending this process, if this process started the run.
    """
    exception = ending_exception or info.exception
    deaths = {(death.host, death.pid): death for death in info.died} if run_has_ended else {}
    for state in states:
        if (state.host, state.pid) in deaths:
            continue
        if not run_has_ended and state.state == GONE and _stages(state.spans):
            deaths[state.host, state.pid] = _death_without_exit_line(state, info)
        elif state.exception is not None or state.raised is not None:
            deaths[state.host, state.pid] = _as_exit(_death_by_exception(state, info))
    dumps = _deaths_with_dump(path)
    for crash in [dump for dump in dumps if dump.how == CRASH]:
        # A process that began after the crash is another process with the same pid.
        candidates = [state for state in states if state.begun_ns <= crash.last_ns]
        death = deaths.get((crash.host, crash.pid)) or _gone_process(candidates, info, crash.host, crash.pid)
        deaths[crash.host, crash.pid] = replace(
            death, how=CRASH, signal=crash.signal, frames=crash.frames, last_ns=crash.last_ns, file=crash.file
        )
    if exception is not None and (info.host, info.pid) not in deaths:
        now_ns = time.time_ns() if ending_exception is not None else round((info.ended or 0) * 1e9)
        starter = _gone_process(states, info, info.host, info.pid)
        deaths[info.host, info.pid] = replace(starter, how=EXCEPTION, exception=exception, last_ns=now_ns)
    exceptions = [death.exception for death in deaths.values() if death.exception is not None]
    _add_named(deaths, states, info, [*exceptions, *([exception] if exception is not None else [])])
    _add_engines(deaths, states, info)
    _add_places(deaths, states, info, [dump for dump in dumps if dump.how == KILLED])
    # A death in an earlier attempt cannot be the cause of a later one.
    attempts: dict[int, list[Death]] = {}
    for death in deaths.values():
        ago = _attempts_ago(death, info)
        attempts.setdefault(ago, []).append(replace(_with_loop(death, states), earlier=ago > 0))
    ordered = [
        death for ago in sorted(attempts) for death in _first_of_equal_exceptions(_likely_cause_first(attempts[ago]))
    ]
    causes = [*_ended_early(ordered[:1], states), *_lost_to_samples(ordered[:1], deaths, states, info)]
    keys = {(death.host, death.pid) for death in causes}
    return [*causes, *(death for death in ordered if (death.host, death.pid) not in keys)][:_MAX_DEATHS]


def _lost_to_samples(
    first: Sequence[Death], deaths: Mapping[tuple[str, int], Death], states: Sequence[ProcessState], info: RunFile
) -> list[Death]:
    """Return the processes whose death samples reported in the step before an exception, or in its step.

    A trainer may continue without these samples, and then fail because they are missing.

    Args:
        first: The likely cause so far. Empty if no process died.
        deaths: Dict from host and pid to the deaths that are known.
        states: The last states of the run's processes.
        info: The content of `run.json`.
    """
    failed = [death for death in first if death.how == EXCEPTION and death.step is not None]
    lines = [
        line
        for death in failed
        for state in states
        for line in state.lost
        if line.unix_ns < death.last_ns and line.step is not None and line.step + 1 >= (death.step or 0)
    ]
    found = dict(deaths)
    _add_named(found, states, info, [line.exception for line in lines])
    return [death for key, death in found.items() if deaths.get(key) is not death and death.how != EXCEPTION]


def after_stage(state: ProcessState, ended: Line, how: str) -> Death:
    """Return the death of a process after its last stage, `ended`. `how` is a way to die, as in `Death`."""
    return Death(
        how=how,
        host=state.host,
        pid=state.pid,
        role=ended.role,
        rank=ended.rank,
        step=ended.step,
        after=ended.name,
        last_ns=state.last_ns,
        file=state.file,
    )


def _ended_early(first: Sequence[Death], states: Sequence[ProcessState]) -> list[Death]:
    """Return the ranks that ended without an error before another rank lost its connection. They are the likely cause.

    Args:
        first: The likely cause so far. Empty if no process died.
        states: The last states of the run's processes.
    """
    lost = [death for death in first if death.how == EXCEPTION and is_consequence(death) and death.rank is not None]
    titles = {(state.host, state.pid): state.process for state in states}
    return [
        after_stage(state, ended, EXIT)
        for death in lost
        if death.exception is not None and not death.exception.named
        for state in states
        if state.state == EXITED and not state.error and state.raised is None and (ended := state.ended) is not None
        if ended.rank not in (None, death.rank) and state.process == titles.get((death.host, death.pid))
        if state.host == death.host and ended.end_ns < death.last_ns < state.last_ns + _ENDED_EARLY_NS
        if state.last_ns < death.last_ns + _EXIT_NS
    ]


def _attempts_ago(death: Death, info: RunFile) -> int:
    """Return how often the run was resumed after a death; 0 for a death in the current attempt."""
    if not death.last_ns or not info.earlier:
        return 0
    starts = [info.started, *(attempt.started or 0.0 for attempt in info.earlier[1:])]
    return sum(start * 1e9 > death.last_ns for start in starts)


def _likely_cause_first(deaths: Sequence[Death]) -> list[Death]:
    """Return the deaths of one attempt, the likely cause first."""
    # A launcher ends the other ranks by SIGTERM after a failure. The time of a kill is known if it has a stack.
    failed_ns = min((death.last_ns for death in deaths if death.how == EXCEPTION and death.last_ns), default=0)
    terminated = [
        death for death in deaths if death.signal == _SIGTERM and death.frames and 0 < failed_ns < death.last_ns
    ]
    deaths = [death for death in deaths if death not in terminated]
    any_process_vanished = any(
        death.how in (GONE_DEAD, CRASH, KILLED) or (death.how == EXIT and not death.started) for death in deaths
    )
    # The times of two exceptions can be compared only on one host, because the clocks of hosts differ.
    failed_hosts = {death.host for death in deaths if death.how == EXCEPTION and not is_consequence(death)}
    causes = sorted(
        deaths,
        key=lambda death: (
            _cause_rank(death, any_process_vanished or bool(failed_hosts - {death.host})),
            death.last_ns,
        ),
    )
    return [*causes, *terminated]


def _first_of_equal_exceptions(deaths: Sequence[Death]) -> list[Death]:
    """Return the deaths. If several have equal exceptions, return only the first of them.

    Ray and launchers raise one exception in several processes.
    """
    kept_deaths, seen_exceptions = [], set()
    for death in deaths:
        exception = death.exception if death.how == EXCEPTION else None
        key = (exception.type, exception.message) if exception is not None else None
        if key is None or key not in seen_exceptions:
            kept_deaths.append(death)
        seen_exceptions.add(key)
    return kept_deaths


def is_consequence(death: Death) -> bool:
    """Return True if the exception of a death is probably a consequence of the death of another process."""
    exception = death.exception
    return exception is not None and bool(exception.named or _CONSEQUENCE.search(exception.message))


def _cause_rank(death: Death, another_process_failed: bool) -> int:
    """Return a number to sort deaths by: the smaller it is, the likelier the death ended the run. The likeliest have 0.

    Args:
        death: The death.
        another_process_failed: True if a process of the run died in a way that causes exceptions in other processes.
    """
    if death.how == CRASH or death.killer or (death.how == KILLED and death.signal != _SIGTERM):
        return 0
    if death.how == EXCEPTION and death.exception is not None:
        return _GONE_RANK + 1 if death.exception.named or (another_process_failed and is_consequence(death)) else 1
    return _GONE_RANK if death.how != EXIT or not death.started else 4


def _stages(spans: Iterable[OpenSpan]) -> list[OpenSpan]:
    return [span for span in spans if span.kind in ("step", "stage")]


def _death_without_exit_line(state: ProcessState, info: RunFile) -> Death:
    """Return the death of a process that wrote no exit line, with the cause if its log or its memory shows it."""
    spans, ended = _stages(state.spans), state.ended
    place: dict[str, Any] = {}
    if spans:
        inner_span = next((span for span in reversed(spans) if span.kind == "stage"), spans[-1])
        place = {
            "role": inner_span.role,
            "rank": inner_span.rank,
            "step": next((span.step for span in reversed(spans) if span.step is not None), None),
            "stage": inner_span.name if inner_span.kind == "stage" else "",
            "since_ns": inner_span.start_ns,
        }
    elif ended is not None and not state.spans:
        # If an exception ended the last stage, the death is reported as `in` that stage, otherwise as `after` it.
        place = {"role": ended.role, "rank": ended.rank, "step": ended.step}
        place["stage" if ended.error else "after"] = ended.name
    resident_bytes = state.memory[1].resident_bytes
    death = _death(state, info, GONE_DEAD, last_ns=state.last_ns, resident_bytes=resident_bytes, **place)
    if state.host == identity.HOST and state.stderr and (crash := crash_in_log(state.stderr)) is not None:
        return replace(death, how=CRASH, signal=crash[0], frames=crash[1], file=state.stderr)
    return _killed_by_kernel(death, state)


def _killed_by_kernel(death: Death, state: ProcessState) -> Death:
    """Return the death as a kill by the kernel, if the kernel probably killed the process. Otherwise do not change it.

    The kernel probably killed the process if it has killed a process of the same control group since the process began.
    """
    first_memory, last_memory = state.memory
    kills = last_memory.kills
    if state.host == identity.HOST and state.boot == identity.machine():
        kills = max(kills, memory_state.kills(first_memory.cgroup))
    if kills <= first_memory.kills:
        return death
    used = max(last_memory.used_bytes, last_memory.used_peak_bytes, memory_state.peak_of(first_memory.cgroup))
    return replace(
        death,
        how=KILLED,
        signal="SIGKILL",
        killer=KERNEL,
        used_bytes=min(used, last_memory.limit_bytes or used),
        limit_bytes=last_memory.limit_bytes,
    )


def _death_by_exception(state: ProcessState, info: RunFile) -> Death:
    """Return the death of a process by an exception: it ended the process, or the trainer in that process."""
    line, exception, last_ns = state.raised, state.exception, state.last_ns
    if line is not None and (exception is None or line.exception.type == exception.type):
        # The time at which the exception left the innermost stage.
        exception, last_ns = exception or line.exception, line.unix_ns
    death = _death(state, info, EXCEPTION, stage=state.within, last_ns=last_ns, exception=exception)
    if line is None:
        return death
    stage = state.within or (line.name if line.span == "stage" else "")
    return replace(death, role=line.role, rank=line.rank, step=line.step, stage=stage)


def _death(state: ProcessState, info: RunFile, how: str, **fields: Any) -> Death:
    started = (info.host, info.pid) == (state.host, state.pid)
    return Death(how=how, host=state.host, pid=state.pid, started=started, file=state.file, loop=_loop(state), **fields)


def _loop(state: ProcessState) -> int:
    """Return the number of the loop of a process's latest step; 0 if the process has no steps."""
    step = _latest_step(state)
    return loop_of(step) if step is not None else 0


def _latest_step(state: ProcessState) -> Line | OpenSpan | None:
    return next((span for span in reversed(state.spans) if span.kind == "step"), state.stepped)


def _with_loop(death: Death, states: Iterable[ProcessState]) -> Death:
    """Return a death with the number of the loop of its step. A process without steps takes it from the trainer's."""
    if death.loop:
        return death
    steps = [step for state in states if (step := _latest_step(state)) is not None and step.step == death.step]
    latest = max(
        (step for step in steps if step.start_ns <= death.last_ns), key=lambda step: step.start_ns, default=None
    )
    return replace(death, loop=loop_of(latest) if latest is not None else 1)


def _as_exit(death: Death) -> Death:
    """Return a death by `SystemExit` as an exit, and every other death unchanged.

    `sys.exit` raises `SystemExit`. The text of this exception is the exit status.
    """
    exception = death.exception
    if death.started or exception is None or exception.type != _EXIT:
        return death
    text = exception.message
    status = int(text) if text.isdecimal() and len(text) < 4 else 0 if text in ("", "None") else 1
    return replace(death, how=EXIT, status=status)


def _gone_process(states: Iterable[ProcessState], info: RunFile, host: str, pid: int) -> Death:
    for state in states:
        if (state.host, state.pid) == (host, pid):
            return _death_without_exit_line(state, info)
    return Death(how=GONE_DEAD, host=host, pid=pid, started=(info.host, info.pid) == (host, pid))


def _add_named(
    deaths: dict[tuple[str, int], Death], states: Sequence[ProcessState], info: RunFile, exceptions: Iterable[Raised]
) -> None:
    """Add the dead processes that exceptions name to `dead`, a dict from host and pid to the death."""
    for named in [named for exception in exceptions for named in exception.named]:
        if not named.pid:
            continue
        hosts = [state.host for state in states if state.pid == named.pid and state.state != processes.RUNNING]
        host = next(iter(hosts), info.host if not states else "")
        death = deaths.get((host, named.pid)) or _gone_process(states, info, host, named.pid)
        if death.how in (GONE_DEAD, KILLED):
            deaths[host, named.pid] = _add_details(death, named)
        elif death.rank is None and (host, named.pid) in deaths:
            deaths[host, named.pid] = replace(death, rank=named.rank)


def _add_engines(deaths: dict[tuple[str, int], Death], states: Sequence[ProcessState], info: RunFile) -> None:
    """Add the dead engines to `deaths`. The process behind an engine, or the engine itself, reported the death.

    After the death of its engine, a server of vLLM ends with status 0. A server of SGLang kills itself.
    """
    ends = [(state, line) for state in states for line in state.lost if line.span == ENGINE]
    # The engine's own exception replaces its exit status, which another process reported.
    for state, line in sorted(ends, key=lambda end: not end[1].exception.named):
        found = {} if line.exception.named else {(state.host, state.pid): _death_by_engine(state, info, line)}
        _add_named(found, states, info, [line.exception])
        for key, death in found.items():
            step = line.step if line.step is not None or key not in deaths else deaths[key].step
            deaths[key] = replace(death, step=step, last_ns=line.unix_ns, exception=line.exception)


def _death_by_engine(state: ProcessState, info: RunFile, line: RaisedLine) -> Death:
    return _death(state, info, EXCEPTION, name=line.name, exception=line.exception)


def _add_places(
    deaths: dict[tuple[str, int], Death], states: Sequence[ProcessState], info: RunFile, kills: Iterable[Death]
) -> None:
    """Add the stacks of processes that SIGTERM killed to `deaths`, a dict from host and pid to the death.

    A process without an open stage may have been ended on purpose. It is added only if it started the run.
    """
    for kill in kills:
        key = (kill.host, kill.pid)
        death = deaths.get(key)
        for state in states if death is None else ():
            is_it = (state.host, state.pid) == key and state.begun_ns <= kill.last_ns
            is_dead = state.state not in (EXITED, processes.RUNNING)
            if is_it and is_dead and (key == (info.host, info.pid) or _stages(state.spans)):
                death = _death_without_exit_line(state, info)
        # If the process wrote journal lines after the dump, another process wrote the dump: a child that C code forked.
        if death is None or death.how not in (GONE_DEAD, KILLED) or death.last_ns > kill.last_ns + _DUMP_NS:
            continue
        # The dump of a copied run has a later time.
        last_ns = min(kill.last_ns, death.last_ns or kill.last_ns)
        death = replace(death, frames=kill.frames, last_ns=last_ns, file=kill.file)
        is_sure = death.killer in ("", KERNEL)  # autoprof derives a kill by the kernel from counts of the control group
        deaths[key] = replace(death, how=KILLED, signal=kill.signal, killer="") if is_sure else death


def _add_details(death: Death, named: NamedProcess) -> Death:
    death = replace(death, name=named.name)
    if death.killer:
        return death
    if named.cause:
        killer = RAY if named.cause == "memory" else NODE
        used, limit = named.used_bytes, named.limit_bytes
        return replace(death, how=KILLED, killer=killer, used_bytes=used, limit_bytes=limit)
    rank = death.rank if death.rank is not None else named.rank
    if named.signal:
        return replace(death, how=KILLED, signal=named.signal, rank=rank)
    if named.status:
        return replace(death, how=EXIT, status=named.status, rank=rank)
    return death


def _add_exit_status(deaths: list[Death], info: RunFile, status: int | None) -> list[Death]:
    """Return the deaths, and report the process that started the run as an exit if `sys.exit` explains its end.

    `sys.exit` explains the end if that process left a stage by `SystemExit`, or if there is no other death.
    """
    exits = [
        death for death in deaths if death.started and death.exception is not None and death.exception.type == _EXIT
    ]
    if not status or (deaths and not exits):
        return deaths
    own_death = exits[0] if exits else Death(how=EXIT, host=info.host, pid=info.pid, started=True)
    return [*(death for death in deaths if death not in exits), replace(own_death, how=EXIT, status=status)]


def _add_starter(deaths: list[Death], info: RunFile, states: Sequence[ProcessState]) -> list[Death]:
    """Return the deaths of an unfinished run, and add the process that started the run, if that process vanished.

    The end of that process also ends the other processes. So it comes before all deaths except likelier causes, earlier
    deaths, and dead engines that a process has reported.
    """
    own_death = next((death for death in deaths if death.started), None)
    starter = next((state for state in states if (state.host, state.pid) == (info.host, info.pid)), None)
    if own_death is None and starter is not None and starter.state != GONE:
        return deaths
    if own_death is None:
        own_death = Death(how=GONE_DEAD, host=info.host, pid=info.pid, started=True)
        # A Ray driver has no spans, so the step and stage come from the process with the latest step.
        has_spans = starter is not None and (starter.ended or starter.stepped)
        steps = [death for death in deaths if death.step is not None and not has_spans]
        if (trainer := max(steps, key=lambda death: death.last_ns, default=None)) is not None:
            place = {"step": trainer.step, "loop": trainer.loop, "stage": trainer.stage}
            own_death = replace(own_death, last_ns=trainer.last_ns, **place)
    other_deaths = [death for death in deaths if not death.started]
    likelier_deaths = [
        death
        for death in other_deaths
        if _cause_rank(death, another_process_failed=True) < _GONE_RANK
        or _was_reported(death)
        or _vanished_before(death, own_death)
    ]
    if own_death.how != GONE_DEAD:
        return deaths
    return [*likelier_deaths, own_death, *(death for death in other_deaths if death not in likelier_deaths)]


def _vanished_before(death: Death, later: Death) -> bool:
    """Return True if both processes vanished, and the first one was silent for too long to have lived until `later`.

    The times of these deaths are unknown: only the last signs of life are known.
    """
    silence_ns = MAX_SILENCE_NS + round(2e9 * layout.look_s())
    return death.how == later.how == GONE_DEAD and 0 < death.last_ns + silence_ns < later.last_ns


def _was_reported(death: Death) -> bool:
    """Return True if another process reported the death of an engine while that process was running."""
    return death.how in (KILLED, EXIT) and death.exception is not None and bool(death.exception.named)


# Dict from a text of faulthandler to the signal that it names (`faulthandler_handlers` in CPython's
# Modules/faulthandler.c).
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
}
# Beginning of the dump of one thread, which faulthandler writes before SIGTERM kills the process.
_KILL = "Stack (most recent call first):"
_FATAL = re.compile(r"^Fatal Python error: ([^\n]{1,100})$", re.MULTILINE)
# The library tvm-ffi, a dependency of vLLM's xgrammar, replaces Python's signal handler when it is loaded. Its handler
# prints C functions only (tvm-ffi 0.1.15, src/ffi/backtrace.cc).
_TVM = "\n!!!!!!! Segfault encountered !!!!!!!\n"
_FRAME = re.compile(r'^  File "([^"\n]{1,400})", line (\d{1,9}) in ([^\n]{1,200})$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread 0x|Thread 0x|Stack \()[^\n]*$", re.MULTILINE)
# Files of autoprof whose code runs inside the user's program. autoprof may be installed in any folder.
_OWN = re.compile(r"[/\\]autoprof[/\\]((_boot|base|behaviours|capture|hooks|run|windows)[/\\].*|__init__|agent)\.py$")
_MAX_CRASH_BYTES = 1 << 20
_LOG_TAIL_BYTES = 1 << 17


def _deaths_with_dump(run: Path) -> list[Death]:
    """Return the crashes and the kills by SIGTERM of a run, from its dumps. Skip files that are empty or unreadable."""
    found = []
    for path in sorted(run.glob(f"{CRASHES}/*.txt")):
        host, pid = file_names.process_of(path.name)
        text = (files.try_read(path, _MAX_CRASH_BYTES) or b"").decode(errors="replace")
        status = files.status(path)
        if text.strip() and pid and status is not None:
            signal, frames = parsed(text)
            how, signal = (KILLED, _SIGTERM) if text.startswith(_KILL) else (CRASH, signal)
            file, last_ns = f"{CRASHES}/{path.name}", status.st_mtime_ns
            found.append(Death(how=how, host=host, pid=pid, signal=signal, frames=frames, last_ns=last_ns, file=file))
    return found


def crash_in_log(path: str) -> tuple[str, list[Frame]] | None:
    """Return the signal and the stack of the last crash in a log file, or None if it has no crash.

    Ray enables `faulthandler` in its workers, so the stack of a crashed worker is in the log of its stderr.
    """
    text = ""
    with seam.suppress(OSError), io.open(files.opened(path), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace")
    starts = [match.start() for match in _FATAL.finditer(text)]
    if starts:
        return parsed(text[starts[-1] :])
    return ("SIGSEGV", []) if _TVM in text else None


def parsed(text: str) -> tuple[str, list[Frame]]:
    """Return the signal and the stack of a crash, from the text that faulthandler wrote.

    The stack belongs to the crashed thread, or to the main thread if the crashed thread ran no Python code.
    """
    fatal = _FATAL.search(text)
    name = fatal[1].strip() if fatal else ""
    stacks = [_frames(part) for part in _THREAD.split(text)[1:]]
    # The stack of the crashed thread comes first or is missing. The main thread is the oldest thread and comes last.
    current = next(
        (stack for stack, mark in zip(stacks, _THREAD.findall(text), strict=True) if not mark.startswith("Thread")),
        None,
    )
    return _SIGNALS.get(name, hidden(name)), current or (stacks[-1] if stacks else [])


def _frames(text: str) -> list[Frame]:
    """Return the stack in a text of faulthandler, the innermost function last.

    Omit functions of autoprof, unless the stack has only functions of autoprof.
    """
    frames = [Frame(function, file, int(line)) for file, line, function in _FRAME.findall(text)]
    program_frames = [frame for frame in frames if not _OWN.search(frame.file)]
    return (program_frames or frames)[::-1]


# Paths of files that belong to libraries and not to the user's own code.
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<|^$")
_MAX_MESSAGE_CHARS, _MAX_OTHERS, _MAX_FRAMES = 200, 5, 8


def sentence(death: Death, hosts: int = 1) -> str:
    """Describe the death of a process in one sentence.

    Args:
        death: The death of a process.
        hosts: The number of hosts of the run. If it is more than 1, the sentence names the host of the process.
    """
    return f"{'in an earlier attempt, ' if death.earlier else ''}{_subject(death, hosts)} {_predicate(death)}"


def evidence(deaths: Sequence[Death], hosts: int = 1) -> list[str]:
    """Return output lines: the details of the first death, then a sentence for each of the other deaths.

    Args:
        deaths: The deaths. At least one.
        hosts: The number of hosts of the run. If it is more than 1, the sentences name the hosts of the processes.
    """
    first_death, *other_deaths = deaths
    lines = []
    if first_death.file:
        lines.append(f"process {first_death.pid} on {first_death.host}: {first_death.file}")
    if first_death.last_ns:
        seen_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first_death.last_ns / 1e9))
        duration = units.seconds((first_death.last_ns - first_death.since_ns) / 1e9)
        lines.append(
            f"last sign of life: {seen_at}{f', {duration} into the stage' if _was_in_stage(first_death) else ''}"
        )
    if first_death.resident_bytes:
        lines.append(f"resident memory at the last check: {units.size(first_death.resident_bytes)}")
    frames = (
        first_death.exception.frames
        if first_death.exception is not None and first_death.how != CRASH
        else first_death.frames
    )
    lines += stack_lines(frames, full_path=True)
    if first_death.exception is not None and first_death.exception.named and first_death.how != EXCEPTION:
        lines.append(f"then: {exception_words(first_death.exception)}")
    if first_death.exception is not None and first_death.exception.cause:
        lines.append(f"caused by {first_death.exception.cause}")
    lines += [f"{_order(first_death, other)}{sentence(other, hosts)}" for other in other_deaths[:_MAX_OTHERS]]
    more_count = len(other_deaths) - _MAX_OTHERS
    return [*lines, *([f"and {more_count} more"] if more_count > 0 else [])]


def stack_lines(frames: Sequence[Frame], full_path: bool = False) -> list[str]:
    """Return a line for each function of a stack, the innermost first. Fold long rows of library functions.

    A folded row has its last function, and the number of the others. So the user's functions are among the few lines.
    """
    lines: list[str] = []
    for is_library, row in itertools.groupby(frames, key=lambda frame: bool(_LIBRARY.search(frame.file))):
        *outer, last = row
        if is_library and len(outer) > 1:
            lines.append(f"{len(outer)} functions of libraries")
            outer = []
        lines += [f"at {frame_words(frame, full_path)}" for frame in (*outer, last)]
    return lines[: -_MAX_FRAMES - 1 : -1]


def _order(first: Death, other: Death) -> str:
    """Return the beginning of the line about another death, which says if it came after the first one."""
    if other.earlier:
        return ""
    is_unknown = first.how == other.how == GONE_DEAD and not _vanished_before(first, other)
    return "before or after that: " if is_unknown else "then: "


def exception_words(raised: Raised) -> str:
    """Return type, text and place of an exception in one line: `ValueError: no score in reward.py:44 fetch_score`."""
    frame = _user_frame(raised.frames)
    place = f" in {frame_words(frame)}" if frame else ""
    first_line = raised.message.partition("\n")[0]
    message = first_line if len(first_line) <= _MAX_MESSAGE_CHARS else f"{first_line[:_MAX_MESSAGE_CHARS]}..."
    return f"{raised.type}{f': {message}' if message else ''}{place}"


def frame_words(frame: Frame, full_path: bool = False) -> str:
    """Return the file, line and function of a frame, such as `reward.py:44 fetch_score`.

    If `full_path` is true, the text has the full path of the file.
    """
    return f"{frame.file if full_path else os.path.basename(frame.file)}:{frame.line} {frame.function}"


def _was_in_stage(death: Death) -> bool:
    """Return True if the process had been in its open stage for more than a second."""
    return 0 < death.since_ns < death.last_ns - 1_000_000_000


def _subject(death: Death, hosts: int) -> str:
    on = f" on {death.host}" if hosts > 1 and death.host else ""
    if death.role and death.rank is not None and death.role != "trainer":
        return f"{death.role} rank {death.rank}{on}"
    if death.role == "trainer":
        return f"the trainer, rank {death.rank},{on}" if death.rank else f"the trainer{on}"
    if death.rank is not None:
        return f"rank {death.rank}{on}"
    if death.started:
        return f"the process that started the run{on}"
    if death.name:
        return f"{death.name} (pid {death.pid}){on}"
    return f"process {death.pid}{on}"


def _predicate(death: Death) -> str:
    where = _where(death)
    place = f" {where}" if where else ""
    if death.how == CRASH:
        frame = _user_frame(death.frames)
        return f"{_how(death)}{place}{f': {frame_words(frame)}' if frame else ''}"
    if death.how == EXCEPTION and death.exception is not None:
        return f"failed with {exception_words(death.exception)}{f',{place}' if place else ''}"
    if death.how == EXIT and death.exception is not None and (frame := _user_frame(death.exception.frames)):
        return f"{_how(death)} in {frame_words(frame)}{f',{place}' if place else ''}"
    if not death.killer and not death.signal and death.how != EXIT:
        # `os.exec` may start a program without autoprof. No trainer calls it inside a step.
        or_exec = " or os.exec" if death.started and not place else ""
        return f"vanished{place} (killed by a signal, or ended by os._exit{or_exec})"
    frame = _user_frame(death.frames)
    return f"{_how(death)}{place}{f'; it was in {frame_words(frame)}' if frame else ''}"


def _how(death: Death) -> str:
    """Describe a crash, an exit with a status, or a kill."""
    if death.how == CRASH:
        return f"crashed ({death.signal})" if death.signal else "crashed"
    if death.how == EXIT:
        return (
            "ended before the other ranks, without an error,"
            if death.status is None
            else f"exited with status {death.status}"
        )
    if death.killer in (KERNEL, RAY):
        killer = "the kernel" if death.killer == KERNEL else "Ray"
        used = f": {units.size(death.used_bytes)} of {units.size(death.limit_bytes)} used" if death.limit_bytes else ""
        return f"was killed by {killer} (out of memory{used})"
    if death.killer == NODE:
        return "was lost with its node"
    return f"was killed by {death.signal}"


def _where(death: Death) -> str:
    step = "" if death.step is None else f"step {label(death.step, death.loop)}"
    if death.after:
        return f"after {death.after} of {step}" if step else f"after {death.after}"
    if not step:
        return f"in {death.stage}" if death.stage else ""
    return f"in {death.stage} of {step}" if death.stage else f"in {step}"


def _user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost function of the user's own code. If the stack has none, return the innermost function.

    Return None if the stack is empty.
    """
    user_frames = [frame for frame in frames if not _LIBRARY.search(frame.file)]
    return user_frames[-1] if user_frames else frames[-1] if frames else None
