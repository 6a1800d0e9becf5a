"""Readers of a stuck run: the snapshots in `hangs/`, and the spans that have begun and not ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from autoprof.base import files, interrupts, units
from autoprof.base.redact import writable
from autoprof.report.hangs import places
from autoprof.report.model import OpenSpanRow
from autoprof.rundir import decoder, open_spans
from autoprof.rundir.open_spans import ProcessState
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

# So many are told, and so many of them are of samples, turns and tools.
MOST, _MOST_OF_SAMPLES = 200, 50
_FIRST = {"step": 0, "stage": 1, "timer": 1, "window": 1}


class OpenSpans(msgspec.Struct, frozen=True, kw_only=True):
    """Open spans of a run.

    Attributes:
        states: Its processes that have a timeline.
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
        """Return the age of a span of the process at a place."""
        # A clock may have been set.
        return max(0.0, (self.ends_ns[place] - span.start_ns) / 1e9)

    def shifted(self, state: ProcessState, moment_ns: int) -> int:
        """Return a moment by the clock of a process's host on the clock that all hosts share."""
        return moment_ns + self.shifts_ns.get(state.host, 0)

    def still_s(self) -> float:
        """Return the seconds since a span began or ended in any process, or since the run was resumed.

        Unlike `last_ns`, memory is no movement.
        """
        moved = max((self.shifted(state, state.moved_ns) for state in self.states), default=self.now_ns)
        moved = max(moved, self.started_ns)
        return max(0.0, (self.now_ns - moved) / 1e9)

    def rows(self) -> tuple[list[OpenSpanRow], int]:
        """Return the rows of the report, and how many spans have none."""
        found = [
            (_FIRST.get(span.kind, 2), self.age_s(place, span), state, span)
            for place, state in enumerate(self.states)
            for span in state.spans
        ]
        found.sort(key=lambda each: (each[0], -each[1]))
        kept = [each for each in found if each[0] < 2]
        kept += [each for each in found if each[0] == 2][:_MOST_OF_SAMPLES]
        rows = [_row(age, state, span) for _, age, state, span in kept[:MOST]]
        return rows, len(found) - len(rows)


def read_open_spans(run: Run, now_ns: int, shifts_ns: Mapping[str, int]) -> OpenSpans:
    """Read the open spans of a run."""
    going_on, started_ns = run.state.startswith("running"), round(run.info.started * 1e9)
    states = open_spans.without_past(open_spans.read(run.path), started_ns, shifts_ns)
    ends = open_spans.ends(states, going_on, now_ns, shifts_ns)
    return OpenSpans(
        states=states, ends_ns=ends, shifts_ns=shifts_ns, going_on=going_on, now_ns=now_ns, started_ns=started_ns
    )


def open_for(row: OpenSpanRow, going_on: bool) -> str:
    """Return in words how long a span is or was open. A process that died was last seen when it last wrote a line."""
    if open_spans.open_until_now(row.state, going_on):
        return units.seconds(row.age_s)
    return f"at least {units.seconds(row.age_s)}" if row.age_s else "an unknown time"


def where(span: OpenSpan) -> str:
    """Return whose span it is: `actor rank 3`, `agent_loop sample 63, rollout 2`."""
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


# So many folders and processes are read, and so much is kept of a process.
MOST_HANGS, MOST_PROCESSES = 16, 4096
_MOST_SPANS, _FRAMES, _MOST_THREADS = 64, 12, 16
_STEP = re.compile(r"step_(\d{1,12})$")
_JOINED = re.compile(r"rank_(\d{1,7})$")
_NUMBER = re.compile(r"\d+")
# What runs an event loop.
_LOOPS = ("run_until_complete", "run_forever")


class Working(msgspec.Struct, frozen=True):
    """A thread or a task that is in a function of the user's or of a trainer's: where, and on which open spans."""

    who: str
    place: str
    spans: list[OpenSpan] = []
    main: bool = False
    own: bool = False  # Whether the function is the user's own.
    awaited: bool = False  # Whether it is a task, or tasks, for which the thread of an event loop waits.


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a process in a step that takes too long.

    Attributes:
        label: Its title without what numbers it: processes with the same do the same.
        spans: Its open spans, oldest first.
        stack: The innermost functions of the thread that works on what is open, the innermost last; of the main one
            where none does.
        thread: The name of that thread.
        waits: For what that thread waits, of `places`.
        place: Where that thread is; empty where nothing tells.
        working: Its threads and tasks that do something.
        deadlock: Which threads wait for one another's locks, in words.
        itself: Where it waits for itself.
        held_up: What the thread of an event loop is in, while the loop's other tasks wait; and how many those are.
        flight_record: The path of its flight record.
        joined_as: Its rank for torch, as the name of that file has it, else its own rank.
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

    @property
    def role(self) -> str:
        """Return its role in the open stage, or in any open span."""
        return next((span.role for span in reversed(self.spans) if span.role and span.rank is not None), "") or next(
            (span.role for span in self.spans if span.role), ""
        )

    @property
    def stage(self) -> OpenSpan | None:
        """Return the open stage that began last."""
        return next((span for span in reversed(self.spans) if span.kind == "stage"), None)

    @property
    def replica(self) -> str | None:
        """Return the number of the replica that it is of, where its spans tell."""
        found = (span.ids.get("replica") for span in self.spans)
        return next((str(each) for each in found if each is not None), None)

    @property
    def world(self) -> str:
        """Return the name of the processes that call collectives together: those with the same title, or replica."""
        return self.label if self.replica is None else f"{self.label} of replica {self.replica}"

    @property
    def name(self) -> str:
        """Return how it is told: `rank 3 of actor`, else its title and pid."""
        if self.rank is not None and self.role and any(span.rank == self.rank for span in self.spans):
            return f"rank {self.rank} of {self.role}"
        return f"{self.label or 'process'} (pid {self.pid} on {self.host})"


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A step that took too long.

    Attributes:
        folder: Its folder, relative to the run's.
        step: The step, None where it is not known.
        left_out: What could not be read.
    """

    folder: str
    step: int | None
    why: Why
    processes: list[Process]
    left_out: list[str]


def read_hangs(run: str | Path) -> Iterator[Hang]:
    """Yield the steps of a run that took too long, the last ones. Raises nothing."""
    parent = Path(run, HANGS)
    try:
        names = sorted(path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        interrupts.pass_on(error)
        return
    for name in names[-MOST_HANGS:]:
        yield _hang(parent / name)


def _hang(folder: Path) -> Hang:
    left_out: list[str] = []
    why = decoder.read(folder / WHY, Why, left_out)
    number = _STEP.search(folder.name)
    step = why.step if why.step is not None else int(number[1]) if number else None
    try:
        paths = sorted(path for path in folder.glob("*.json") if path.name != WHY)
    except OSError as error:
        interrupts.pass_on(error)
        paths = []
    if len(paths) > MOST_PROCESSES:
        left_out.append(f"{len(paths) - MOST_PROCESSES} of {len(paths)} processes are not read")
    processes = [found for path in paths[:MOST_PROCESSES] if (found := _process(path, left_out)) is not None]
    # Ray's actors that no launcher gave a rank have 0, all of them.
    named = Counter((process.role, process.rank) for process in processes if process.spans)
    processes = [
        msgspec.structs.replace(each, rank=None) if named[each.role, each.rank] > 1 else each for each in processes
    ]
    place = writable(f"{HANGS}/{folder.name}")
    return Hang(folder=place, step=step, why=why, processes=processes, left_out=left_out)


def _process(path: Path, left_out: list[str]) -> Process | None:
    try:
        stood = msgspec.json.decode(files.read(path, MAX_STACKS_BYTES), type=ProcessStacks)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        interrupts.pass_on(error)
        stood = decoder.read(path, ProcessStacks, left_out)
    if not (stood.host or stood.threads or stood.spans):
        return None
    teller = _teller(stood)
    frames = teller.frames if teller is not None else []
    told = places.told(frames)
    itself = next((place for thread in stood.threads if (place := places.waits_for_itself(thread))), None)
    record = Path(stood.flight_record).name if stood.flight_record else ""
    return Process(
        host=writable(stood.host),
        pid=stood.pid,
        label=_label(stood.process),
        rank=stood.rank,
        unix_ns=stood.unix_ns,
        spans=_kept(stood.spans),
        stack=[_writable(frame) for frame in frames[-_FRAMES:]],
        thread="main thread" if teller is None or teller.main else writable(f"thread {teller.name}"),
        waits=places.waits(frames) if frames else places.IDLE,
        place=writable(places.text(told)) if told is not None else "",
        working=_working(stood, teller),
        deadlock=writable(places.deadlock(stood.threads)),
        itself=writable(places.text(itself)) if itself is not None else "",
        held_up=_held_up(stood),
        engine=stood.engine,
        flight_record=str(path.parent / record) if record else "",
        joined_as=int(number[1]) if (number := _JOINED.search(record)) is not None else stood.rank,
        file=writable(f"{HANGS}/{path.parent.name}/{path.name}"),
    )


def _kept(spans: Sequence[OpenSpan]) -> list[OpenSpan]:
    first = sorted(spans, key=lambda span: (span.kind not in ("step", "stage", "window"), span.start_ns))
    return sorted(first[:_MOST_SPANS], key=lambda span: span.start_ns)


def _writable(frame: Frame) -> Frame:
    return Frame(writable(frame.function), writable(frame.file), frame.line)


def _label(process: str) -> str:
    """Return a process's title without numbers, and of one of Ray's without the method that it is in."""
    title = writable(process.strip())
    actor = re.search(r"ray::(\w+)", title)
    if actor is not None:
        return f"ray::{actor[1]}"
    return _NUMBER.sub("", title)[:80].strip()


def _teller(stood: ProcessStacks) -> Thread | None:
    """Return the thread that works on the open step or stage, or on samples where the main one does nothing: Ray's
    asynchronous actors do so beside the main one."""
    works = {number for number, span in enumerate(stood.spans) if span.kind in ("step", "stage")}
    found = [thread for thread in stood.threads if works.intersection(thread.spans)]
    main = next((thread for thread in stood.threads if thread.main), None)
    if main is not None and not found and places.waits(main.frames) == places.IDLE:
        found = [thread for thread in stood.threads if thread.spans]
    return main if not found or main in found else found[-1]


def _working(stood: ProcessStacks, teller: Thread | None) -> list[Working]:
    found = [work for thread in stood.threads if (work := _at_work(stood, thread, thread is teller)) is not None]
    for task in stood.tasks:
        place = places.told(task.frames)
        on = [stood.spans[number] for number in task.spans if 0 <= number < len(stood.spans)]
        if place is not None and (on or not places.package(place)):
            own = not places.package(place)
            found.append(Working(writable(task.name), writable(places.text(place)), on, False, own))
    # Those that work on spans first.
    found.sort(key=lambda each: (not each.spans, not each.own, not each.main))
    return [*_awaited(stood, teller), *found][:_MOST_THREADS]


def _awaited(stood: ProcessStacks, teller: Thread | None) -> list[Working]:
    """Return the tasks for which the thread of an event loop waits with open spans, of which none is a task's own."""
    frames = teller.frames if teller is not None else []
    if teller is None or not teller.spans or not any(places.name(frame) in _LOOPS for frame in frames):
        return []
    if places.waits(frames) != places.IDLE or any(task.spans for task in stood.tasks):
        return []
    found: dict[str, list[str]] = {}
    for task in stood.tasks:
        place = places.own(task.frames)
        if place is not None and not places.package(place) and not _waits_for_tasks(task):
            found.setdefault(places.text(place), []).append(task.name)
    if not found:
        return []
    place_text, names = max(found.items(), key=lambda each: len(each[1]))
    who = f"task {names[0]}" if len(names) == 1 else f"{len(names)} tasks"
    spans = [stood.spans[number] for number in teller.spans if 0 <= number < len(stood.spans)]
    return [Working(writable(who), writable(place_text), spans, teller.main, True, True)]


def _at_work(stood: ProcessStacks, thread: Thread, main: bool) -> Working | None:
    place = places.own(thread.frames)
    # What works on a span is not idle, though it may wait for a queue.
    if place is None or (places.waits(thread.frames) == places.IDLE and not thread.spans):
        return None
    on = [stood.spans[number] for number in thread.spans if 0 <= number < len(stood.spans)]
    return Working(writable(thread.name), writable(places.text(place)), on, main, not places.package(place))


def _held_up(stood: ProcessStacks) -> tuple[Working, int] | None:
    """Return the thread of a loop that is in a task now, and how many tasks of the process wait."""
    waiting = sum(bool(task.waits_on) for task in stood.tasks)
    running = {task.thread for task in stood.tasks if task.thread}
    found = [
        work
        for thread in stood.threads
        if waiting and thread.ident in running and (work := _at_work(stood, thread, False)) is not None
    ]
    return (found[0], waiting) if found else None


def _waits_for_tasks(task: Task) -> bool:
    inner = task.frames[-1]
    together = inner.file.endswith(("asyncio/taskgroups.py", "asyncio/tasks.py"))
    return "gathered" in task.waits_on or (together and places.name(inner) not in ("sleep", "wait_for"))


def roles(processes: Sequence[Process]) -> dict[str, str]:
    """Return the role of the processes with the same label: that which most of them have."""
    by_label: dict[str, Counter[str]] = {}
    for process in processes:
        if process.role:
            by_label.setdefault(process.label, Counter())[process.role] += 1
    return {label: found.most_common(1)[0][0] for label, found in by_label.items()}
