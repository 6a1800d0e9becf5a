"""Processes that did not answer the request for their stacks.

A process can't answer while a thread holds the interpreter's lock, or while a signal or a debugger stops the process.
From Python 3.13 on, it can't answer between a fork and its next span either (`run/watcher.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autoprof.base import files, identity
from autoprof.base.redact import writable
from autoprof.base.units import seconds
from autoprof.report import places
from autoprof.report.collectives import Stuck
from autoprof.report.hang_state import Hang, OpenSpans, Process, roles, short_title, title_without_numbers
from autoprof.report.model import name_ranks, plural
from autoprof.rundir import layout, processes
from autoprof.rundir.processes import ProcessState


def silent_processes(hang: Hang, opened: OpenSpans) -> list[Process]:
    """Return the processes that have an open step or stage, and have not answered two rounds of the watcher.

    A stopped process need not have an open step or stage: an engine's process has none. If autoprof doctor requested
    the stacks, they are the processes that had shown no sign of life, and did not answer.
    """
    answered = {(process.host, process.pid) for process in hang.processes if process.silent_s is None}
    waited_s = (_until_ns(opened) - hang.why.unix_ns) / 1e9
    found_by_doctor = hang.why.silent
    may_answer = waited_s < 2 * layout.look_s() and not found_by_doctor
    if not hang.why.unix_ns:
        return []
    read_from_outside = {(process.host, process.pid): process for process in hang.processes}
    ranks = _own_ranks(opened.states)
    silent = []
    for state in opened.states:
        key = state.host, state.pid
        # A process may be stopped after its answer. Its place is then unknown.
        did_not_answer = key not in answered and _was_at_work(state, hang) and not may_answer
        if not did_not_answer and not is_stopped(state):
            continue
        if found_by_doctor and f"{state.host}-{state.pid}" not in found_by_doctor and not is_stopped(state):
            continue
        known = read_from_outside.get(key) if key not in answered else None
        spans = known.spans if known is not None else state.spans
        rank = ranks.get(key)
        label = title_without_numbers(state.process)
        silent.append(
            Process(
                host=writable(state.host),
                pid=state.pid,
                label=label,
                title=short_title(state.process),
                lines=known.lines if known is not None else [],
                rank=rank,
                unix_ns=known.unix_ns if known is not None else _until_ns(opened),
                spans=spans,
                stack=known.stack if known is not None else [],
                thread=known.thread if known is not None else "",
                waits=known.waits if known is not None else "",
                place=known.place if known is not None else "",
                working=[],
                deadlock="",
                itself="",
                held_up=None,
                engine={},
                flight_record="",
                joined_as=rank,
                file=known.file if known is not None else state.file,
                silent_s=max(waited_s, (_until_ns(opened) - state.last_ns) / 1e9) if found_by_doctor else waited_s,
                stopped=is_stopped(state),
            )
        )
    return silent


def _until_ns(opened: OpenSpans) -> int:
    """Return the time until which a process could answer: now, or the last sign of life of a run that has ended."""
    return opened.now_ns if opened.going_on else max((state.last_ns for state in opened.states), default=0)


def _was_at_work(state: ProcessState, hang: Hang) -> bool:
    """Return True if a process was running when the stacks were requested, with an open step or stage of that time."""
    died_before = state.state == processes.GONE and state.last_ns < hang.why.unix_ns and not hang.why.silent
    if state.state == processes.EXITED or died_before:
        return False
    return any(span.kind in ("step", "stage") and span.start_ns < hang.why.unix_ns for span in state.spans)


def _own_ranks(states: Sequence[ProcessState]) -> dict[tuple[str, int], int]:
    """Return a dict from host and pid to the rank of the process's last open span, if no other process has it."""
    ranks = {
        (state.host, state.pid): (state.process, rank)
        for state in states
        if (rank := next((span.rank for span in reversed(state.spans) if span.rank is not None), None)) is not None
    }
    taken = list(ranks.values())
    return {key: own[1] for key, own in ranks.items() if taken.count(own) == 1}


def is_stopped(state: ProcessState) -> bool:
    """Return True if a signal or a debugger has stopped a process of this host."""
    if state.state != processes.RUNNING or state.host != identity.HOST:
        return False
    return files.text(f"/proc/{state.pid}/stat").rpartition(")")[2].split()[:1] in (["T"], ["t"])


def silent_sentences(
    silent: Iterable[Process], stuck: Iterable[Stuck], others: Sequence[Process]
) -> Iterator[tuple[str, list[str], str]]:
    """Yield the text, the evidence and the file for each silent process that does not wait in a collective itself.

    Args:
        silent: The silent processes.
        stuck: The stuck collectives.
        others: The processes that answered.
    """
    waiting: dict[tuple[str, int | None], Stuck] = {(each.world, rank): each for each in stuck for rank in each.silent}
    stopped_first = sorted(silent, key=lambda process: (not process.stopped, process.waits == places.COLLECTIVE))
    for process in stopped_first:
        if process.waits == places.COLLECTIVE and not process.stopped:
            continue
        stage = next((span for span in reversed(process.spans) if span.kind in ("stage", "timer")), None)
        where = f" in {stage.name}" if stage is not None else ""
        if process.stopped:
            text = f"{process.name} is stopped{where}, by a signal such as SIGSTOP or by a debugger"
        else:
            text = f"{process.name} did not answer for {seconds(process.silent_s or 0.0)}"
            text += f" and is in stage {stage.name}" if stage is not None else " and is in a step"
        text += f"; it is in {process.place}" if process.place else ""
        text += _waiters(waiting.get((process.world, process.joined_as)), others)
        evidence = process.stack_lines()
        if not process.stopped:
            evidence.append(_HINT if process.place else f"{_HINT}; py-spy could not read it")
        yield text, evidence, process.file


_HINT = (
    "a process can't answer while C code, such as a regular expression, holds the interpreter's lock, and on Python "
    "3.13 and later from a fork to the next begin or end of a stage"
)


def _waiters(stuck: Stuck | None, others: Sequence[Process]) -> str:
    """Return a text about the ranks that wait in a collective for a silent rank."""
    if stuck is None:
        return ""
    by_rank: Mapping[int | None, Process] = {each.joined_as: each for each in others if each.world == stuck.world}
    ranks = [rank for rank in stuck.waiting if rank in by_rank and by_rank[rank].waits == places.COLLECTIVE]
    if not ranks:
        return ""
    role = roles(others).get(by_rank[ranks[0]].label, "")
    return f"; {name_ranks(ranks, role)} {plural(ranks, 'waits', 'wait')} for it in {stuck.name} #{stuck.number}"
