"""Readers of a stuck run: the stacks in `hangs/`, and the open spans."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from autoprof.base import files, seam, units
from autoprof.base.redact import writable
from autoprof.report.hangs import places
from autoprof.report.model import OpenSpanRow
from autoprof.rundir import decoder, processes
from autoprof.rundir.processes import ProcessState
from autoprof.rundir.records import (
    HANGS,
    MAX_STACKS_BYTES,
    WHY,
    Count,
    Frame,
    OpenSpan,
    ProcessStacks,
    Task,
    Thread,
    Why,
)
from autoprof.rundir.runs import Run

# Open spans in a report.
MAX_ROWS = 200
# Open samples, turns, tools, rewards and requests among them.
_MAX_SAMPLE_ROWS = 50
_FIRST = {"step": 0, "stage": 1, "timer": 1, "window": 1}


class OpenSpans(msgspec.Struct, frozen=True, kw_only=True):
    """Open spans of a run.

    Attributes:
        states: Its processes that have a journal.
        ends_ns: The moment up to which the spans of each are known to be open, by the clock of its host.
        shifts_ns: Nanoseconds that bring the times of each host onto one clock.
        going_on: True if the run is running.
        now_ns: The time of reading, by the clock of this host.
        started_ns: The start of the run, or of its last attempt if it was resumed.
    """

    states: Sequence[ProcessState]
    ends_ns: Sequence[int]
    shifts_ns: Mapping[str, int]
    going_on: bool
    now_ns: int
    started_ns: int = 0

    def age_s(self, place: int, span: OpenSpan) -> float:
        """Return the age, in seconds, of a span of the process `states[place]`."""
        # Negative if a clock was set back.
        return max(0.0, (self.ends_ns[place] - span.start_ns) / 1e9)

    def shifted(self, state: ProcessState, moment_ns: int) -> int:
        """Return a moment of a process's host on the clock that all hosts share."""
        return moment_ns + self.shifts_ns.get(state.host, 0)

    def still_s(self) -> float:
        """Return the seconds since a span last began or ended in any process, or since the run was resumed.

        Memory measurements don't count as activity; for `last_ns` they do.
        """
        moved = max((self.shifted(state, state.moved_ns) for state in self.states), default=self.now_ns)
        moved = max(moved, self.started_ns)
        return max(0.0, (self.now_ns - moved) / 1e9)

    def rows(self) -> tuple[list[OpenSpanRow], int]:
        """Return the rows of the report, and the number of spans that are left out."""
        spans = [
            (_FIRST.get(span.kind, 2), self.age_s(place, span), state, span)
            for place, state in enumerate(self.states)
            for span in state.spans
        ]
        spans.sort(key=lambda each: (each[0], -each[1]))
        kept = [each for each in spans if each[0] < 2]
        kept += [each for each in spans if each[0] == 2][:_MAX_SAMPLE_ROWS]
        rows = [_row(age, state, span) for _, age, state, span in kept[:MAX_ROWS]]
        return rows, len(spans) - len(rows)


def read_open_spans(run: Run, now_ns: int, shifts_ns: Mapping[str, int]) -> OpenSpans:
    """Read the open spans of a run."""
    going_on, started_ns = run.state.startswith("running"), round(run.info.started * 1e9)
    states = processes.without_past(run.processes, started_ns, shifts_ns)
    ends = processes.ends(states, going_on, now_ns, shifts_ns)
    return OpenSpans(
        states=states, ends_ns=ends, shifts_ns=shifts_ns, going_on=going_on, now_ns=now_ns, started_ns=started_ns
    )


def open_for(row: OpenSpanRow, going_on: bool) -> str:
    """Return the words for the time that a span is or was open. A dead process was last seen at its last line."""
    if processes.open_until_now(row.state, going_on):
        return units.seconds(row.age_s)
    return f"at least {units.seconds(row.age_s)}" if row.age_s else "an unknown time"


def where(span: OpenSpan) -> str:
    """Return the words for the owner of a span: `actor rank 3`, `agent_loop sample 63, rollout 2`."""
    replica = span.ids.get("replica")
    number = f"rank {span.rank}" if span.rank is not None else f"replica {replica}" if replica is not None else ""
    ids = [f"{name} {value}" for name, value in span.ids.items() if name in _NAMED and value not in (None, "")]
    return writable(" ".join(filter(None, [span.role, number, ", ".join(ids)])))


_NAMED = ("sample", "rollout", "request", "validate")


def _row(age: float, state: ProcessState, span: OpenSpan) -> OpenSpanRow:
    return OpenSpanRow(
        process=writable(f"{state.host} {state.pid}"),
        state=state.state,
        kind=writable(span.kind),
        name=writable(span.name),
        where=where(span),
        start_ns=span.start_ns,
        age_s=age,
        step=span.step,
    )


# Folders that are read, the latest ones.
MAX_HANGS = 16
# Processes that are read in a folder.
MAX_PROCESSES = 4096
# Spans, frames and working threads that are kept of a process.
_MAX_SPANS, _MAX_FRAMES, _MAX_THREADS = 64, 12, 16
_STEP = re.compile(r"step_(\d{1,12})$")
_JOINED = re.compile(r"rank_(\d{1,7})$")
_NUMBER = re.compile(r"\d+")
# Functions that run an event loop.
_LOOPS = ("run_until_complete", "run_forever")


class Working(msgspec.Struct, frozen=True):
    """A thread or a task that is in a function of the user or of a trainer.

    Attributes:
        who: The name of the thread or task.
        place: The function that it is in.
        spans: The open spans that it works on.
        main: True for the thread that works on the open step or stage.
        own: True if the function is the user's own, not a trainer's.
        awaited: True for tasks that the thread of an event loop waits for.
    """

    who: str
    place: str
    spans: list[OpenSpan] = []
    main: bool = False
    own: bool = False
    awaited: bool = False


class Sentence(msgspec.Struct, frozen=True):
    """A sentence, its evidence, and the file to look at."""

    text: str
    evidence: list[str] = []
    file: str = ""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """State of one process in a step that takes too long.

    Attributes:
        label: Its title without numbers. Processes with the same label do the same work.
        unix_ns: The time at which it wrote its stacks.
        spans: Its open spans, oldest first.
        stack: The innermost functions, innermost last, of the thread that works on the open spans; else of the main
            thread.
        thread: The name of that thread.
        waits: The reason why that thread waits, a constant of `places`; empty if it does not.
        place: The function that that thread is in; empty if unknown.
        working: Its threads and tasks that are in functions of the user or of a trainer.
        deadlock: A sentence about threads that wait for each other's locks; empty if none was found.
        itself: The function in which it waits for its own result; empty if it does not.
        held_up: The thread that blocks an event loop, and the number of waiting tasks; None if no loop is blocked.
        engine: The figures of its engine: requests that run and wait, free blocks.
        flight_record: The path of its flight record; empty without one.
        joined_as: Its rank in torch.distributed, from the name of the flight record, else its own rank.
        file: The file of its stacks, relative to the run.
    """

    host: str
    pid: int
    label: str
    rank: int | None
    unix_ns: int
    spans: list[OpenSpan]
    stack: list[Frame]
    thread: str
    waits: str
    place: str
    working: list[Working]
    deadlock: str
    itself: str
    held_up: tuple[Working, int] | None
    engine: dict[str, Count | str]
    flight_record: str
    joined_as: int | None
    file: str

    def stack_lines(self) -> list[str]:
        """Return a line with the innermost functions of its stack, if it has one."""
        inner = [places.text(frame) for frame in self.stack[-4:]]
        return [f"{self.name}, {self.thread}: {' > '.join(inner)}"] if inner else []

    @property
    def role(self) -> str:
        """Return the role of the last open span with a rank, else of any open span."""
        return next((span.role for span in reversed(self.spans) if span.role and span.rank is not None), "") or next(
            (span.role for span in self.spans if span.role), ""
        )

    @property
    def stage(self) -> OpenSpan | None:
        """Return the open stage that began last, or None."""
        return next((span for span in reversed(self.spans) if span.kind == "stage"), None)

    @property
    def replica(self) -> str | None:
        """Return the number of its replica from its spans, or None."""
        replicas = (span.ids.get("replica") for span in self.spans)
        return next((str(each) for each in replicas if each is not None), None)

    @property
    def world(self) -> str:
        """Return a name for the processes that call collectives together: the same title, and the same replica."""
        return self.label if self.replica is None else f"{self.label} of replica {self.replica}"

    @property
    def name(self) -> str:
        """Return its name in sentences: `rank 3 of actor`, else its title, pid and host."""
        if self.rank is not None and self.role and any(span.rank == self.rank for span in self.spans):
            return f"rank {self.rank} of {self.role}"
        return f"{self.label or 'process'} (pid {self.pid} on {self.host})"


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A step that took too long.

    Attributes:
        folder: The folder of its stacks, relative to the run.
        step: The step, or None if unknown.
        why: The condition that wrote the stacks.
        processes: Its processes.
        left_out: Notes on unreadable files.
    """

    folder: str
    step: int | None
    why: Why
    processes: list[Process]
    left_out: list[str]


def read_hangs(run: str | Path) -> Iterator[Hang]:
    """Yield the last steps of a run that took too long. Never raises."""
    parent = Path(run, HANGS)
    try:
        names = sorted(path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        seam.pass_on(error)
        return
    for name in names[-MAX_HANGS:]:
        yield _hang(parent / name)


def _hang(folder: Path) -> Hang:
    left_out: list[str] = []
    why = decoder.read(folder / WHY, Why, left_out)
    number = _STEP.search(folder.name)
    step = why.step if why.step is not None else int(number[1]) if number else None
    try:
        paths = sorted(path for path in folder.glob("*.json") if path.name != WHY)
    except OSError as error:
        seam.pass_on(error)
        paths = []
    if len(paths) > MAX_PROCESSES:
        left_out.append(f"{len(paths) - MAX_PROCESSES} of {len(paths)} processes are not read")
    processes = [found for path in paths[:MAX_PROCESSES] if (found := _process(path, left_out)) is not None]
    # Ray actors without a launcher all have rank 0.
    ranks = Counter((process.role, process.rank) for process in processes if process.spans)
    processes = [
        msgspec.structs.replace(each, rank=None) if ranks[each.role, each.rank] > 1 else each for each in processes
    ]
    place = writable(f"{HANGS}/{folder.name}")
    return Hang(folder=place, step=step, why=why, processes=processes, left_out=left_out)


def _process(path: Path, left_out: list[str]) -> Process | None:
    try:
        stacks = msgspec.json.decode(files.read(path, MAX_STACKS_BYTES), type=ProcessStacks)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        seam.pass_on(error)
        stacks = decoder.read(path, ProcessStacks, left_out)
    if not (stacks.host or stacks.threads or stacks.spans):
        return None
    worker = _worker(stacks)
    frames = worker.frames if worker is not None else []
    best = places.best_frame(frames)
    itself = next((place for thread in stacks.threads if (place := places.waits_for_itself(thread))), None)
    record = Path(stacks.flight_record).name if stacks.flight_record else ""
    return Process(
        host=writable(stacks.host),
        pid=stacks.pid,
        label=_label(stacks.process),
        rank=stacks.rank,
        unix_ns=stacks.unix_ns,
        spans=_kept(stacks.spans),
        stack=[_writable(frame) for frame in frames[-_MAX_FRAMES:]],
        thread="main thread" if worker is None or worker.main else writable(f"thread {worker.name}"),
        waits=places.waits(frames) if frames else places.IDLE,
        place=writable(places.text(best)) if best is not None else "",
        working=_working(stacks, worker),
        deadlock=writable(places.deadlock(stacks.threads)),
        itself=writable(places.text(itself)) if itself is not None else "",
        held_up=_held_up(stacks),
        engine=stacks.engine,
        flight_record=str(path.parent / record) if record else "",
        joined_as=int(number[1]) if (number := _JOINED.search(record)) is not None else stacks.rank,
        file=writable(f"{HANGS}/{path.parent.name}/{path.name}"),
    )


def _kept(spans: Sequence[OpenSpan]) -> list[OpenSpan]:
    first = sorted(spans, key=lambda span: (span.kind not in ("step", "stage", "window"), span.start_ns))
    return sorted(first[:_MAX_SPANS], key=lambda span: span.start_ns)


def _writable(frame: Frame) -> Frame:
    return Frame(writable(frame.function), writable(frame.file), frame.line)


def _label(process: str) -> str:
    """Return a process's title without numbers. For a Ray actor, omit the current method too."""
    title = writable(process.strip())
    actor = re.search(r"ray::(\w+)", title)
    if actor is not None:
        return f"ray::{actor[1]}"
    return _NUMBER.sub("", title)[:80].strip()


def _worker(stacks: ProcessStacks) -> Thread | None:
    """Return the thread that works on the open step or stage, else the main thread.

    If the main thread is idle, a thread with any open span comes first: Ray's asynchronous actors work in one.
    """
    works = {number for number, span in enumerate(stacks.spans) if span.kind in ("step", "stage")}
    candidates = [thread for thread in stacks.threads if works.intersection(thread.spans)]
    main = next((thread for thread in stacks.threads if thread.main), None)
    if main is not None and not candidates and places.waits(main.frames) == places.IDLE:
        candidates = [thread for thread in stacks.threads if thread.spans]
    return main if not candidates or main in candidates else candidates[-1]


def _working(stacks: ProcessStacks, worker: Thread | None) -> list[Working]:
    found = [work for thread in stacks.threads if (work := _at_work(stacks, thread, thread is worker)) is not None]
    for task in stacks.tasks:
        place = places.best_frame(task.frames)
        on = [stacks.spans[number] for number in task.spans if 0 <= number < len(stacks.spans)]
        if place is not None and (on or not places.package(place)):
            own = not places.package(place)
            found.append(Working(writable(task.name), writable(places.text(place)), on, False, own))
    found.sort(key=lambda each: (not each.spans, not each.own, not each.main))
    return [*_awaited(stacks, worker), *found][:_MAX_THREADS]


def _awaited(stacks: ProcessStacks, worker: Thread | None) -> list[Working]:
    """Return the tasks that an event loop's thread waits for, if the thread has open spans and no task has."""
    frames = worker.frames if worker is not None else []
    if worker is None or not worker.spans or not any(places.name(frame) in _LOOPS for frame in frames):
        return []
    if places.waits(frames) != places.IDLE or any(task.spans for task in stacks.tasks):
        return []
    by_place: dict[str, list[str]] = {}
    for task in stacks.tasks:
        place = places.working_frame(task.frames)
        if place is not None and not places.package(place) and not _waits_for_tasks(task):
            by_place.setdefault(places.text(place), []).append(task.name)
    if not by_place:
        return []
    place_text, names = max(by_place.items(), key=lambda each: len(each[1]))
    who = f"task {names[0]}" if len(names) == 1 else f"{len(names)} tasks"
    spans = [stacks.spans[number] for number in worker.spans if 0 <= number < len(stacks.spans)]
    return [Working(writable(who), writable(place_text), spans, worker.main, True, True)]


def _at_work(stacks: ProcessStacks, thread: Thread, main: bool) -> Working | None:
    place = places.working_frame(thread.frames)
    # A thread that works on a span is not idle, even if it waits for a queue.
    if place is None or (places.waits(thread.frames) == places.IDLE and not thread.spans):
        return None
    on = [stacks.spans[number] for number in thread.spans if 0 <= number < len(stacks.spans)]
    return Working(writable(thread.name), writable(places.text(place)), on, main, not places.package(place))


def _held_up(stacks: ProcessStacks) -> tuple[Working, int] | None:
    """Return the event loop's thread that runs a task now, and the number of the process's waiting tasks."""
    waiting = sum(bool(task.waits_on) for task in stacks.tasks)
    running = {task.thread for task in stacks.tasks if task.thread}
    found = [
        work
        for thread in stacks.threads
        if waiting and thread.ident in running and (work := _at_work(stacks, thread, False)) is not None
    ]
    return (found[0], waiting) if found else None


def _waits_for_tasks(task: Task) -> bool:
    inner = task.frames[-1]
    together = inner.file.endswith(("asyncio/taskgroups.py", "asyncio/tasks.py"))
    return "gathered" in task.waits_on or (together and places.name(inner) not in ("sleep", "wait_for"))


def roles(processes: Sequence[Process]) -> dict[str, str]:
    """Return the role that most processes with the same label have, by label."""
    by_label: dict[str, Counter[str]] = {}
    for process in processes:
        if process.role:
            by_label.setdefault(process.label, Counter())[process.role] += 1
    return {label: found.most_common(1)[0][0] for label, found in by_label.items()}
