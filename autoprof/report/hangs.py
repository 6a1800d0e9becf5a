"""Sentences about stuck steps. Each kind of evidence has a function; the report shows the most certain kind first.

The sentences also report runs that begin no new step, samples that wait longer than other samples, and ranks that are
in an earlier stage than other ranks.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeAlias

import msgspec

from autoprof.base.redact import writable
from autoprof.base.units import seconds
from autoprof.report import collectives, hang_state, places, silence
from autoprof.report.collectives import collective, flight_records
from autoprof.report.hang_state import Hang, OpenSpans, Process, Sentence, Working, where
from autoprof.report.model import Finding, name_ranks, plural, several
from autoprof.report.rules import KINDS
from autoprof.rundir import deaths, journal, layout, processes
from autoprof.rundir.layout import RunDir
from autoprof.rundir.processes import ProcessState
from autoprof.rundir.records import Line, OpenSpan
from autoprof.rundir.runs import label, loop_of

# A sample is reported as waiting if it is older than `OLD_S`, and older than WAITING_RATIO times the median duration of
# spans of the same kind.
WAITING_RATIO = 5
# Minimum number of ended spans from which this median is computed.
MIN_ENDED_SPANS = 3
# Maximum number of journals that are searched for ended spans.
_MAX_FILES = 8


class Spans(msgspec.Struct, frozen=True):
    """Open spans of one process.

    Attributes:
        host: The host of the process.
        pid: The pid of the process.
        spans: The open spans.
        end_ns: The time until which the spans are known to be open.
        process: The state of the process when it wrote its stacks. None if it wrote no stacks.
    """

    host: str
    pid: int
    spans: Sequence[OpenSpan]
    end_ns: int
    process: Process | None = None


def waiting_samples(run_path: str, processes: Sequence[Spans], stuck_s: float | None) -> Iterator[Sentence]:
    """Report samples, turns, tools, rewards and requests that wait far longer than usual, the oldest first.

    Args:
        run_path: The directory of the run.
        processes: The open spans of each process of the run.
        stuck_s: If the step is known to be stuck, the seconds since it began. Then spans are also reported if too few
            similar spans have ended, so that the usual duration is unknown. If the step may not be stuck, None.
    """
    min_age_s = OLD_S if stuck_s is None else min(OLD_S, stuck_s / 2)
    innermost: dict[tuple[str, int, str], tuple[OpenSpan, Spans]] = {}
    for process_spans in processes:
        for index, span in enumerate(process_spans.spans):
            if span.kind in OF_SAMPLES:
                ids = {name: span.ids.get(name) for name in ("sample", "rollout", "validate")}
                key = process_spans.host, process_spans.pid, str(ids if ids["sample"] is not None else index)
                if key not in innermost or innermost[key][0].start_ns <= span.start_ns:
                    innermost[key] = span, process_spans
    groups: dict[tuple[str, str], list[tuple[float, OpenSpan, Spans]]] = defaultdict(list)
    for span, process_spans in innermost.values():
        if (age := (process_spans.end_ns - span.start_ns) / 1e9) >= min_age_s:
            groups[span.kind, span.name].append((age, span, process_spans))
    for (kind, name), old_spans in sorted(groups.items(), key=lambda each: -max(age for age, _, _ in each[1])):
        old_spans.sort(key=lambda each: -each[0])
        ended_s = _ended_s(run_path, [process_spans for _, _, process_spans in old_spans], kind, name)
        usual_s = median(ended_s) if len(ended_s) >= MIN_ENDED_SPANS else None
        late_spans = [each for each in old_spans if usual_s is None or each[0] >= WAITING_RATIO * usual_s]
        if late_spans and (usual_s is not None or stuck_s is not None):
            with_stacks = [of.process for of in processes if of.process is not None]
            yield _sample(kind, name, late_spans, usual_s, with_stacks)


def _sample(
    kind: str,
    name: str,
    late_spans: Sequence[tuple[float, OpenSpan, Spans]],
    usual_s: float | None,
    processes: Sequence[Process],
) -> Sentence:
    """Return the sentence about spans of one kind and name that last far longer than usual: at least one."""
    age, span, process_spans = late_spans[0]
    activity = f"in {kind} {name}" if kind != "sample" else "with no turn or tool open"
    process = process_spans.process
    working = process.working if process is not None else []
    work = next((each for each in working if span in each.spans), None)
    here = f"; it is in {work.place}" if work is not None else ""
    if process is not None and work is not None and not (work.own and work.is_thread):
        here += _own_threads(process, work)
    if (work is None or not work.own) and (only_process := elsewhere(processes)):
        here = f"; {only_process}"
    waiting_unit = where(msgspec.structs.replace(span, role="")) or (process.name if process is not None else name)
    text = f"{waiting_unit} has waited {seconds(age)} {activity}{here}"
    if len(late_spans) > 1:
        thing = "request" if kind == "request" else "sample"
        text = f"{several(len(late_spans), thing)} have waited up to {seconds(age)} {activity}{here}"
    evidence = [f"{where(each)}: {seconds(age_s)}, {spans.host} {spans.pid}" for age_s, each, spans in late_spans[:4]]
    evidence += [f"usually {seconds(usual_s)}"] if usual_s is not None else []
    return Sentence(text, evidence, f"journal/{process_spans.host}-{process_spans.pid}.jsonl")


def _ended_s(run_path: str, processes: Sequence[Spans], kind: str, name: str) -> list[float]:
    """Return the seconds of recently ended spans with a kind and a name, from the journals of the processes."""
    of_processes = dict.fromkeys((of.host, of.pid) for of in processes)
    files = [file for file in journal.journals(run_path) if (file.host, file.pid) in of_processes][:_MAX_FILES]
    return [
        (span.end_ns - span.start_ns) / 1e9
        for file in files
        for span in journal.recent_spans(file)
        if span.kind == kind and span.name == name
    ]


def late_stages(processes: Sequence[Spans]) -> Iterator[Sentence]:
    """Report ranks that are in an earlier stage than the other ranks of their group.

    The processes of a group have the same label. If a process wrote no stacks, its role is used as its label.
    """
    groups: dict[str, list[tuple[Spans, OpenSpan]]] = defaultdict(list)
    for process_spans in processes:
        stages = [span for span in process_spans.spans if span.kind == "stage" and span.rank is not None]
        if stages:
            label = process_spans.process.label if process_spans.process is not None else ""
            groups[label or stages[-1].role].append((process_spans, stages[-1]))
    for members in groups.values():
        first_start_ns: dict[tuple[int | None, str], int] = {}
        for _, span in members:
            key = span.step, span.name
            first_start_ns[key] = min(first_start_ns.get(key, span.start_ns), span.start_ns)
        if len(first_start_ns) < 2:
            continue
        earliest_stage = min(first_start_ns, key=lambda key: (key[0] or 0, first_start_ns[key]))
        late_members = [each for each in members if (each[1].step, each[1].name) == earliest_stage]
        other_spans = [span for _, span in members if (span.step, span.name) != earliest_stage]
        if len(late_members) > len(other_spans):
            continue
        process_spans, span = late_members[0]
        age = max((each.end_ns - other.start_ns) / 1e9 for each, other in late_members)
        ranks = [other.rank for _, other in late_members if other.rank is not None]
        late_places = {
            each.process.place for each, _ in late_members if each.process is not None and each.process.place
        }
        here = f"; {plural(ranks, 'it is', 'they are')} in {late_places.pop()}" if len(late_places) == 1 else ""
        common_stage = Counter(other.name for other in other_spans).most_common(1)[0][0]
        text = f"{name_ranks(ranks, span.role)} {plural(ranks, 'has', 'have')} been in {span.name} for {seconds(age)}"
        yield Sentence(
            f"{text}, {several(len(other_spans), 'other')} in {common_stage}{here}",
            [],
            f"journal/{process_spans.host}-{process_spans.pid}.jsonl",
        )


# A sample or a request is old from this number of seconds. In a stuck step, it is also old from half the age of the
# step.
OLD_S = 60.0
# Kinds of spans of which a step may have thousands.
OF_SAMPLES = ("sample", "turn", "tool", "reward", "request")


def deadlocks(processes: Sequence[Process], step_has_ended: bool) -> Iterator[Sentence]:
    """Report processes that wait for themselves: deadlocks of two locks, and Ray actors that wait for their own result.

    Args:
        processes: The processes that wrote their stacks.
        step_has_ended: True if the step has ended. Then no deadlock of locks is reported: a deadlock never ends, so it
            can't be the cause.
    """
    for process in processes:
        if process.deadlock and not step_has_ended:
            yield Sentence(process.deadlock.replace("{process}", process.name), process.stack_lines(), process.file)
        elif process.alone and not step_has_ended:
            yield Sentence(process.alone.replace("{process}", process.name), process.stack_lines(), process.file)
        elif process.itself:
            text = f"{process.name} waits for itself: ray.get in {process.itself} waits for a call to the same actor"
            yield Sentence(text, process.stack_lines(), process.file)


def held_up(processes: Sequence[Process], age_s: float) -> Iterator[Sentence]:
    """Report tasks that block an event loop, so that the other tasks of the loop can't run."""
    for process in processes:
        if process.held_up is None:
            continue
        work, waiting = process.held_up
        span = next((span for span in reversed(work.spans) if span.kind in OF_SAMPLES), None)
        is_long = span is not None and (process.unix_ns - span.start_ns) / 1e9 >= min(OLD_S, age_s / 2)
        if span is None or not is_long:
            continue
        owner = where(msgspec.structs.replace(span, role=""))
        blocker = f"{span.kind} {span.name} of {owner}" if owner else f"{span.kind} {span.name}"
        tasks = f"{several(waiting, 'task')} {'waits' if waiting == 1 else 'wait'}"
        text = f"{blocker} blocks the event loop of {process.name}, where {tasks}"
        yield Sentence(f"{text}; it is in {work.place}", process.stack_lines(), process.file)


def busy_engines(processes: Sequence[Process], age_s: float) -> Iterator[Sentence]:
    """Report engines whose requests wait although no request runs or because no block is free, or are very old.

    Args:
        processes: The processes that wrote their stacks.
        age_s: The seconds since the step began.
    """
    for process in processes:
        running, waiting, free, longest = (
            value if isinstance(value := process.engine.get(key), (int, float)) else None
            for key in ("running", "waiting", "free_blocks", "longest_s")
        )
        name = f"replica {process.replica}" if process.replica is not None else process.name
        here = f"; it is in {process.place}" if process.place and not process.waits else ""
        state = [", ".join(f"{key} {value}" for key, value in sorted(process.engine.items()))]
        requests = several(int(waiting or 0), "request")
        if waiting and free == 0:
            yield Sentence(f"{name} has {requests} waiting and no free block", state, process.file)
        elif waiting and not running:
            yield Sentence(f"{name} has {requests} waiting and none running{here}", state, process.file)
        elif (running or waiting) and longest is not None and longest >= min(OLD_S, age_s / 2):
            text = f"{name} has {several(int(running or 0), 'request')} running and {int(waiting or 0)} waiting"
            yield Sentence(f"{text}, the oldest for {seconds(longest)}{here}", state, process.file)


def stopped_children(processes: Sequence[Process]) -> Iterator[Sentence]:
    """Report child processes of multiprocessing that were stopped while a step lasted that has ended."""
    for process in processes:
        for text in process.failed:
            if " is stopped" in text:
                yield Sentence(f"{text}; {process.name} started it", process.stack_lines(), process.file)


def vanished(opened: OpenSpans, step: int | None) -> Iterator[Sentence]:
    """Report ranks that vanished after a stage of a stuck step, or of the step before.

    No exception names such a rank while the others wait for it.
    """
    for state in opened.states:
        ended = state.ended
        if state.state != processes.GONE or state.spans or ended is None or ended.rank is None:
            continue
        if step is not None and ended.step in (step, step - 1):
            death = deaths.after_stage(state, ended, deaths.GONE_DEAD)
            yield Sentence(deaths.sentence(death), [f"process {state.pid} on {state.host}"], state.file)


def late_answers(hang: Hang, opened: OpenSpans) -> Iterator[Sentence]:
    """Report processes that answered far later than their watchers look for requests. They did not run until then."""
    asked_ns = hang.why.unix_ns + opened.shifts_ns.get(hang.why.host, 0)
    for process in hang.processes:
        waited_s = (process.unix_ns + opened.shifts_ns.get(process.host, 0) - asked_ns) / 1e9
        if asked_ns and process.answered and waited_s > 2 * layout.look_s():
            yield Sentence(f"{process.name} did not answer for {seconds(waited_s)}", [], process.file)


# Functions of torch.distributed in which ranks wait, and which are no collectives.
_NO_COLLECTIVES = ("init_process_group", "recv", "send", "recv_object_list", "send_object_list")


def _common_call(processes: Sequence[Process]) -> str:
    """Return the name and the place of the call in which all processes wait, if it is in `_NO_COLLECTIVES`."""
    calls = {
        process.peer
        or next((places.name(frame) for frame in process.stack if places.name(frame) in _NO_COLLECTIVES), "")
        for process in processes
    }
    if len(calls) != 1 or not (call := calls.pop()):
        return ""
    at = {process.place for process in processes}
    return f"{call} at {at.pop()}" if len(at) == 1 else call


def stack_sentences(processes: Sequence[Process]) -> Iterator[Sentence]:
    """Report processes that are elsewhere than most processes with the same label.

    Most of these processes are in a collective, or in the same function.
    """
    by_label: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        if process.stack:
            by_label[process.label].append(process)
    for same_label in by_label.values():
        waiting = [process for process in same_label if process.waits == places.COLLECTIVE]
        call = _common_call(waiting)
        other_processes = [process for process in same_label if process.waits not in (places.COLLECTIVE, places.IDLE)]
        most_are = f"in {call}" if call else places.COLLECTIVE
        if not waiting:
            place, count = (
                Counter(process.place for process in other_processes).most_common(1)[0] if other_processes else ("", 0)
            )
            if count < 2:
                continue
            waiting, most_are = [each for each in other_processes if each.place == place], f"in {place}"
            other_processes = [process for process in other_processes if process.place != place]
        if not other_processes or len(other_processes) > len(waiting):
            continue
        first_other = other_processes[0]
        names = (
            first_other.name
            if len(other_processes) == 1
            else f"{first_other.name} and {several(len(other_processes) - 1, 'other')}"
        )
        text = f"{names} {plural(other_processes, 'is', 'are')} in {first_other.place}"
        text += f", {waiting[0].name if len(waiting) == 1 else several(len(waiting), 'other')} {most_are}"
        yield Sentence(text, first_other.stack_lines(), first_other.file)


def busy(processes: Sequence[Process]) -> Iterator[Sentence]:
    """Report the functions of processes that do not wait for other processes.

    Only processes that have open spans or run code of the user are reported.
    """
    workers = [
        (process, work)
        for process in processes
        for work in process.working[:1]
        if (process.spans or work.own) and (process.waits not in (places.COLLECTIVE, places.RAY) or not work.main)
    ]
    workers.sort(
        key=lambda each: (not each[1].own, each[0].stage is None, not each[1].main, each[0].waits == places.IDLE)
    )
    for process, work in workers[:3]:
        stage = f" in {process.stage.name}" if process.stage is not None else ""
        doing = f"waits for {work.who}" if work.awaited else "is"
        text = f"{process.name} {doing} in {work.place}{stage}{process.of_workers()}{_beside(process, work)}"
        yield Sentence(text, process.stack_lines(), process.file)


def _beside(process: Process, work: Working) -> str:
    """Return a text about the threads of a process for which `work` may wait. Empty if it waits for no thread."""
    return _own_threads(process, work) if process.waits_for_thread or work.awaited else ""


def _own_threads(process: Process, work: Working) -> str:
    """Return a text about the threads and tasks that run code of the user elsewhere than in the place of `work`.

    The text is empty if they are in no function or in several functions.
    """
    others = [
        each
        for each in process.working
        if each.own and not each.main and not each.awaited and each.place != work.place
        if each.is_thread or (work.is_thread and not work.awaited)
    ]
    if len({each.place for each in others}) != 1:
        return ""
    who = f"its thread {others[0].who} is" if len(others) == 1 else f"its {len(others)} other threads are"
    return f"; {who} in {others[0].place}"


def waiting(processes: Sequence[Process]) -> Iterator[Sentence]:
    """Report the functions in which processes wait. Use this function for steps in which every process waits."""
    placed = [process for process in processes if process.spans and process.place]
    # A process in ray.get waits for one of the other processes, so it is no cause and comes last.
    for process in sorted(placed, key=lambda each: (each.waits == places.RAY, each.stage is None))[:3]:
        waits = places.RAY_WAIT if process.waits == places.RAY and _is_in_ray_wait(process) else process.waits
        waits = f"in {process.peer}" if process.peer else waits
        call = f" ({waits})" if process.peer or waits in (places.COLLECTIVE, places.RAY, places.RAY_WAIT) else ""
        stage = f" of {process.stage.name}" if process.stage is not None else ""
        text = f"{process.name} waits in {process.place}{stage}{call}{process.of_workers()}"
        yield Sentence(text, process.stack_lines(), process.file)


def _is_in_ray_wait(process: Process) -> bool:
    names = [places.name(frame) for frame in process.stack if places.package(frame) == "ray"]
    return "wait" in names and "get" not in names


def elsewhere(processes: Sequence[Process]) -> str:
    """Return a text about a process without open spans that runs code of the user. Other processes may wait for it.

    Return an empty text if such processes are in no function or in several functions.
    """
    by_place = {
        work.place: process
        for process in processes
        for work in process.working
        if work.own and not process.spans and (process.waits == places.IDLE or work.main)
    }
    if len(by_place) != 1:
        return ""
    return "; ".join(f"{process.name} is in {place}" for place, process in by_place.items())


HANG = "hang"
KINDS.append(HANG)
# Limits for steps without stacks in `hangs/`. A step is stuck if it takes at least TIMES times the median step ...
TIMES = 5
# ... and at least MIN_ENDED_STEPS steps have ended ...
MIN_ENDED_STEPS = 3
# ... and it takes at least LEAST_S seconds.
LEAST_S = 60.0
# If no span begins or ends for this number of seconds, the open step is stuck, or the run is stuck between two steps.
STILL_S = 600.0
# The loop and the number of a step.
LoopStep: TypeAlias = tuple[int, int]
# The role of the steps of an engine without a trainer.
_ENGINE = "rollout"
_MAYBE_RUNNING = (processes.RUNNING, processes.ELSEWHERE)
_MAX_NOTES = 5


def hangs_of_run(
    run_path: str, opened: OpenSpans, ended_s: Mapping[LoopStep, float], holds: Callable[[int], bool] = bool
) -> tuple[list[Finding], list[str]]:
    """Return the findings about steps that are or were stuck, and notes on files that can't be read. Never raise.

    Args:
        run_path: The directory of the run.
        opened: The open spans of the run.
        ended_s: Dict from the loop and the number of each step that has ended to its seconds.
        holds: Function that returns True for a time of the reported loop.
    """
    findings, notes, known = [], [], set()
    for hang in hang_state.read_hangs(run_path):
        if not holds(hang.why.since_ns or hang.why.unix_ns or opened.now_ns):
            continue
        finding, left_out = _finding_of_hang(run_path, hang, opened, ended_s)
        findings += [finding] if finding is not None else []
        known |= {(hang.loop, hang.step)} if finding is not None else set()
        notes += [f"{hang.folder}: {line}" for line in left_out[:_MAX_NOTES]]
    open_step = open_step_of(opened, _MAYBE_RUNNING)
    if not holds(opened.now_ns):
        return findings, notes
    if open_step is not None and (loop_of(open_step[1]), open_step[1].step) not in known:
        findings += findings_of_open_step(run_path, opened, ended_s, *open_step)
    elif open_step_of(opened) is None and not any(finding.step is None for finding in findings):
        findings += _finding_between_steps(run_path, opened, ended_s)
    return findings, notes


def _finding_of_hang(
    run_path: str, hang: Hang, opened: OpenSpans, ended_s: Mapping[LoopStep, float]
) -> tuple[Finding | None, list[str]]:
    processes: Sequence[Process] = hang.processes
    if not processes and not hang.why.since_ns:
        return None, hang.left_out
    written_ns = hang.why.unix_ns or max((process.unix_ns for process in processes), default=0)
    starts = [(span.kind != "step", span.start_ns) for process in processes for span in process.spans]
    since_ns = hang.why.since_ns or min(starts, default=(True, written_ns))[1]
    open_step = open_step_of(opened)
    is_open = open_step is not None and (loop_of(open_step[1]), open_step[1].step) == (hang.loop, hang.step)
    open_s = open_step[0] if open_step is not None and is_open else None
    took_s = ended_s.get((hang.loop, hang.step)) if hang.step is not None and open_s is None else None
    going_on = opened.going_on and took_s is None
    is_between_steps = hang.step is None and bool(processes) and not any(process.spans for process in processes)
    if hang.step is None and _moved_since(hang.why.unix_ns, opened):
        if is_between_steps:
            return None, hang.left_out
        going_on = False
    if took_s is not None and not hang.why.condition and hang.why.unix_ns:
        return None, hang.left_out  # autoprof doctor requested the stacks of a step that was slow
    if took_s is not None:
        # The step has ended. If a process wrote its stacks after the end, the stacks show the next step.
        processes = [process for process in processes if process.unix_ns <= since_ns + took_s * 1e9]
        if hang.processes and not processes:
            return None, hang.left_out
        age = took_s
    else:
        # The run may have ended long after the processes of an open step, whose last sign of life is in `open_s`.
        ended_ns = opened.ended_ns if open_s is None else 0
        until_ns = max(opened.ends_ns, default=written_ns) if going_on else max(written_ns, ended_ns)
        age = max(open_s or 0.0, (until_ns - since_ns) / 1e9)
    silent = silence.silent_processes(hang, opened) if took_s is None else []
    processes = [process for process in processes if process.silent_s is None]
    stuck, left_out = collectives.stuck(
        flight_records(processes), [(process.world, process.joined_as) for process in silent]
    )
    with_silent = [each for each in stuck if not (each.late or each.other)]
    stuck = [each for each in stuck if each not in with_silent]
    spans = [_open_still(each, opened) if going_on else _spans_then(each) for each in processes]
    stuck_s = (written_ns - since_ns) / 1e9
    reported_worlds = {each.world for each in stuck} | {each.world for each in silent}
    sentences = [
        *(vanished(opened, hang.step) if going_on else ()),
        *((*stopped_children(processes), *late_answers(hang, opened)) if took_s is not None else ()),
        *deadlocks(processes, step_has_ended=took_s is not None),
        *held_up(processes, stuck_s),
        *(collective(each, processes) for each in stuck),
        *(Sentence(*each) for each in silence.silent_sentences(silent, with_silent, processes)),
        *busy_engines(processes, age),
        *waiting_samples(run_path, spans, min(age, stuck_s)),
        *(late_stages(spans) if not stuck and not silent else ()),
        *stack_sentences([each for each in processes if each.world not in reported_worlds]),
    ]
    sentences = sentences or list(busy(processes)) or list(waiting(processes)) or list(_innermost(spans))
    evidence = [f"{process.name}: {text}" for process in processes for text in process.failed[:2]][:4]
    old_s = (opened.now_ns - written_ns) / 1e9
    ago = f", from {seconds(old_s)} ago" if going_on and old_s >= LEAST_S else ""
    evidence += [f"the stacks of all processes are in {hang.folder}{ago}"]
    is_at_least = not going_on and took_s is None and (open_s is not None or not opened.ended_ns)
    finding = _finding(hang.step, hang.loop, age, going_on, sentences, evidence, hang.folder, is_at_least)
    if is_between_steps:
        text = finding.text.replace("the run has been stuck for", "no step has begun for").replace(
            ": ", f"{_since(opened)}: ", 1
        )
        finding = msgspec.structs.replace(finding, text=text)
    return finding, [*hang.left_out, *left_out]


def _moved_since(unix_ns: int, opened: OpenSpans) -> bool:
    """Return True if a span has begun or ended in any process since a time, or if the run has ended without failure."""
    return (opened.now_ns - opened.still_s() * 1e9) > unix_ns or (not opened.going_on and not opened.failed)


def _since(opened: OpenSpans) -> str:
    """Return a text with the step that ended last, or with the start of the run if no step has ended."""
    ended = [state.stepped for state in opened.states if state.stepped is not None]
    last_step = max(ended, key=lambda line: line.end_ns, default=None)
    return " since the run started" if last_step is None else f" since {_step_words(last_step)} ended"


def _step_words(step: Line | OpenSpan) -> str:
    return f"step {step.step if step.step is None else label(step.step, loop_of(step))}"


def _spans_then(process: Process) -> Spans:
    """Return the spans that were open when the process wrote its stacks."""
    return Spans(process.host, process.pid, process.spans, process.unix_ns, process)


def _open_still(process: Process, opened: OpenSpans) -> Spans:
    """Return the spans that were open when the process wrote its stacks and are still open, with their present age.

    If no such span is still open, return the spans that were open when the process wrote its stacks.
    """
    for state, end in zip(opened.states, opened.ends_ns, strict=True):
        if (state.host, state.pid) == (process.host, process.pid):
            open_now = {(span.kind, span.name, span.start_ns) for span in state.spans}
            if still_open := [span for span in process.spans if (span.kind, span.name, span.start_ns) in open_now]:
                return Spans(process.host, process.pid, still_open, end, process)
    return _spans_then(process)


def findings_of_open_step(
    run_path: str, opened: OpenSpans, ended_s: Mapping[LoopStep, float], age: float, step: OpenSpan
) -> Iterator[Finding]:
    """Report the open step if it takes far longer than other steps, or if nothing happens in it.

    The step is judged from the timeline alone, because no process has written stacks for the step.
    """
    if not opened.going_on:
        return
    usual_s = median(ended_s.values()) if ended_s else 0.0
    is_still = opened.still_s() >= max(STILL_S, TIMES * usual_s)
    if not is_still and (len(ended_s) < MIN_ENDED_STEPS or age < max(LEAST_S, TIMES * usual_s)):
        return
    spans = [
        Spans(state.host, state.pid, state.spans, end)
        for state, end in zip(opened.states, opened.ends_ns, strict=True)
        if state.state in _MAYBE_RUNNING
    ]
    sentences = [
        *vanished(opened, step.step),
        *waiting_samples(run_path, spans, age if is_still else None),
        *late_stages(spans),
    ]
    evidence = _evidence(run_path, opened, usual_s)
    yield _finding(step.step, loop_of(step), age, True, sentences or list(_innermost(spans)), evidence)


def _finding_between_steps(run_path: str, opened: OpenSpans, ended_s: Mapping[LoopStep, float]) -> Iterator[Finding]:
    """Report a running run in which steps have ended and no new step begins, unless the trainer has exited."""
    drivers = [(opened.shifted(state, state.stepped.end_ns), state) for state in opened.states if state.stepped]
    if not opened.going_on or not drivers or layout.switched_off(RunDir(Path(run_path))):
        return
    end_ns, driver = max(drivers, key=lambda each: each[0])
    if driver.stepped is not None and driver.stepped.role == _ENGINE:  # it may have no requests
        return
    usual_s = median(ended_s.values()) if ended_s else 0.0
    if driver.stepped is None or opened.still_s() < max(STILL_S, TIMES * usual_s):
        return
    # The trainer process of a resumed run is unknown until its first step.
    is_resumed = end_ns < opened.started_ns
    if driver.state == processes.EXITED and not is_resumed:
        return
    age = max(0.0, (opened.now_ns - max(end_ns, opened.started_ns)) / 1e9)
    since_text = "the run was resumed" if is_resumed else f"{_step_words(driver.stepped)} ended; {_driver(driver)}"
    yield Finding(
        kind=HANG,
        text=writable(f"no step has begun for {seconds(age)} since {since_text}"),
        evidence=_evidence(run_path, opened, usual_s),
        seconds=age,
        file=None if is_resumed else driver.file,
    )


def _driver(state: ProcessState) -> str:
    """Return a text about the state of the process that drives the steps: alive, gone, or on another host."""
    name = " ".join(filter(None, ["process", state.stepped.role if state.stepped else "", f"(pid {state.pid})"]))
    return {
        processes.RUNNING: f"{name} is alive",
        processes.GONE: f"{name} is gone",
        processes.ELSEWHERE: f"{name} is on {state.host}; from this host autoprof can't see if it is alive",
    }[state.state]


def _evidence(run_path: str, opened: OpenSpans, usual_s: float) -> list[str]:
    """Return texts with the median step, the time since a span last began or ended, and the command to run next."""
    return [
        f"the median step took {seconds(usual_s)}" if usual_s else "no step has ended yet",
        f"no span has begun or ended for {seconds(opened.still_s())}",
        f"autoprof stacks {Path(run_path).name} shows where each process is",
    ]


def _innermost(spans: Sequence[Spans]) -> Iterator[Sentence]:
    """Report the stage that began last in the step's process. Use this function for steps without other evidence."""
    for process_spans in spans:
        if any(span.kind == "step" for span in process_spans.spans):
            inner_spans = [span for span in process_spans.spans if span.kind in ("stage", "timer")]
            if inner_spans:
                age = max(0.0, (process_spans.end_ns - inner_spans[-1].start_ns) / 1e9)
                yield Sentence(
                    f"{inner_spans[-1].role or 'the trainer'} has been in {inner_spans[-1].name} for {seconds(age)}"
                )
            else:
                yield Sentence("no stage is open in this step")


def _finding(
    step: int | None,
    loop: int,
    age: float,
    going_on: bool,
    sentences: Sequence[Sentence],
    evidence: list[str],
    folder: str = "",
    is_at_least: bool = False,
) -> Finding:
    """Return the finding about a stuck step. The first sentence is its text, the others become evidence.

    Args:
        step: The number of the step. None if unknown.
        loop: The number of the step's loop.
        age: The seconds for which the step has been or was stuck.
        going_on: True if the step is still stuck.
        sentences: The sentences about the step, the most certain first.
        evidence: The last texts of the evidence.
        folder: The folder with the stacks of the processes. Empty for a step without stacks.
        is_at_least: True if the step was stuck for longer, because the end of the run is unknown.
    """
    first, *others = sentences or [Sentence("no process reports where it is")]
    tense = str if going_on else _past
    subject = "the run" if step is None else f"step {label(step, loop)}"
    duration = f"at least {seconds(age)}" if is_at_least else seconds(age)
    begin = f"{subject} {'has been' if going_on else 'was'} stuck for {duration}"
    return Finding(
        kind=HANG,
        text=f"{begin}: {tense(first.text)}",
        evidence=[*map(tense, [*first.evidence, *(each.text for each in others[:4])]), *evidence],
        seconds=age,
        step=step,
        file=first.file or folder or None,
        is_past=not going_on,
    )


# Verbs in the sentences, and their past.
_PAST = [
    (re.compile(rf"\b(?:{present})"), past)
    for present, past in (
        (r"is (?=in \S+:\d|in stage |in a step|stopped)", "was "),
        (r"are (?=in \S+:\d)", "were "),
        (r"(?:has|have) (?=not (?:joined|called) |been in |waited |\d+ requests? )", "had "),
        (r"waits? (?=in |for )", "waited "),
        (r"waits?(?=; it )", "waited"),
        (r"blocks (?=the event loop)", "blocked "),
        (r"which it holds\b", "which it held"),
    )
]


def _past(text: str) -> str:
    """Return a sentence in the past, for a step that is no longer stuck."""
    for present, past in _PAST:
        text = present.sub(past, text)
    return text


def judged_s(age_s: float, state: ProcessState, span: OpenSpan) -> float:
    """Return the seconds for which an open span may be stuck: its age.

    A batch of an engine lasts until the engine is idle. Its seconds count from the last sign that the engine works.
    """
    is_batch = span.kind == "step" and span.role == _ENGINE
    return age_s - max(0, state.moved_ns - span.start_ns) / 1e9 if is_batch else age_s


def open_step_of(opened: OpenSpans, states: Container[str] | None = None) -> tuple[float, OpenSpan] | None:
    """Return the age in seconds and the span of the open step that began last. Return None if no step is open.

    Args:
        opened: The open spans.
        states: The states of the processes to consider. If None, all processes are considered.
    """
    steps = [
        (judged_s(age_s, state, span), span)
        for age_s, state, span in opened.aged()
        if span.kind == "step" and span.step is not None and (states is None or state.state in states)
    ]
    return max(steps, key=lambda each: each[1].start_ns, default=None)
