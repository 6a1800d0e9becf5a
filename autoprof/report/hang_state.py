"""State of a stuck run: the stacks in `hangs/`, and the open spans."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from autoprof.base import files, seam, units
from autoprof.base.redact import writable
from autoprof.report import places
from autoprof.report.model import OpenSpanRow
from autoprof.rundir import layout, processes
from autoprof.rundir.processes import ProcessState
from autoprof.rundir.records import (
    BY_PY_SPY,
    BY_PY_SPY_OF_WORKER,
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
    WorkerProcess,
)
from autoprof.rundir.runs import ENDED, Run, loop_of

# Maximum number of open spans in a report.
MAX_ROWS = 200
# Maximum number of samples, turns, tools, rewards and requests among these spans.
_MAX_SAMPLE_ROWS = 50
_KIND_ORDER = {"step": 0, "stage": 1, "timer": 1, "window": 1}


class OpenSpans(msgspec.Struct, frozen=True, kw_only=True):
    """Open spans of a run.

    Attributes:
        states: The states of the run's processes that have a journal.
        ends_ns: For each process in `states`, the time until which its spans are known to be open, on the clock of its
            host.
        shifts_ns: Dict from each host to the nanoseconds to add to its times, so that all times are on one clock.
        going_on: True if the run is running.
        now_ns: The time at which the spans were read, on the clock of this host.
        started_ns: The start of the run. If the run was resumed, the start of its last attempt.
        ended_ns: The end of the run. 0 if it is unknown.
        failed: True if the run failed, or if the process that started it vanished.
    """

    states: Sequence[ProcessState]
    ends_ns: Sequence[int]
    shifts_ns: Mapping[str, int]
    going_on: bool
    now_ns: int
    started_ns: int
    ended_ns: int = 0
    failed: bool = False

    def aged(self) -> list[tuple[float, ProcessState, OpenSpan]]:
        """Return all open spans, each with the seconds for which it has been open and the state of its process."""
        # The difference is negative if a clock was set back.
        return [
            (max(0.0, (end_ns - span.start_ns) / 1e9), state, span)
            for state, end_ns in zip(self.states, self.ends_ns, strict=True)
            for span in state.spans
        ]

    def shifted(self, state: ProcessState, moment_ns: int) -> int:
        """Return a time of a process's host on the clock that all hosts share."""
        return moment_ns + self.shifts_ns.get(state.host, 0)

    def still_s(self) -> float:
        """Return the seconds since a span last began or ended in any process.

        If the run was resumed later, return the seconds since it was resumed. Memory measurements don't count here,
        although they count for `last_ns`.
        """
        last_change_ns = max((self.shifted(state, state.moved_ns) for state in self.states), default=self.now_ns)
        last_change_ns = max(last_change_ns, self.started_ns)
        return max(0.0, (self.now_ns - last_change_ns) / 1e9)

    def rows(self) -> tuple[list[OpenSpanRow], int]:
        """Return the rows of open spans in the report, and the number of open spans without a row."""
        spans = sorted(self.aged(), key=lambda each: (_KIND_ORDER.get(each[2].kind, 2), -each[0]))
        kept_spans = [each for each in spans if each[2].kind in _KIND_ORDER]
        kept_spans += [each for each in spans if each[2].kind not in _KIND_ORDER][:_MAX_SAMPLE_ROWS]
        rows = [_row(*each) for each in kept_spans[:MAX_ROWS]]
        return rows, len(spans) - len(rows)


def read_open_spans(run: Run, shifts_ns: Mapping[str, int]) -> OpenSpans:
    """Return the open spans of a run.

    Args:
        run: The run whose processes are read.
        shifts_ns: Dict from each host to the nanoseconds to add to its times.
    """
    now_ns = time.time_ns()
    going_on, started_ns = run.is_running, round(run.info.started * 1e9)
    states = processes.without_past(run.processes, started_ns, shifts_ns)
    ends = processes.ends(states, going_on, now_ns, shifts_ns)
    return OpenSpans(
        states=states,
        ends_ns=ends,
        shifts_ns=shifts_ns,
        going_on=going_on,
        now_ns=now_ns,
        started_ns=started_ns,
        ended_ns=0 if going_on else round((run.info.ended or 0.0) * 1e9),
        failed=not going_on and not run.state.startswith(ENDED),
    )


def open_for(row: OpenSpanRow, going_on: bool) -> str:
    """Return a text with the time for which a span has been or was open.

    If the process is dead, the time counts until the last line of its journal. Then the text begins with `at least`, or
    it is `an unknown time`.
    """
    if processes.open_until_now(row.state, going_on):
        return units.seconds(row.age_s)
    return f"at least {units.seconds(row.age_s)}" if row.age_s else "an unknown time"


def where(span: OpenSpan) -> str:
    """Return a text that names the owner of a span, such as `actor rank 3` or `agent_loop sample 63, rollout 2`."""
    replica = span.ids.get("replica")
    number = f"rank {span.rank}" if span.rank is not None else f"replica {replica}" if replica is not None else ""
    ids = [f"{name} {value}" for name, value in span.ids.items() if name in _IDS_IN_TEXTS and value not in (None, "")]
    return writable(" ".join(filter(None, [span.role, number, ", ".join(ids)])))


_IDS_IN_TEXTS = ("sample", "rollout", "request", "validate")


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


# Maximum number of folders in `hangs/` that are read. The latest folders are read.
MAX_HANGS = 16
# Maximum number of processes that are read in a folder.
MAX_PROCESSES = 4096
# Maximum number of spans, of frames, and of working threads and tasks that are kept of a process.
_MAX_SPANS, _MAX_FRAMES, _MAX_THREADS = 64, 12, 16
_STEP = re.compile(r"step_(\d{1,12})(?:\.loop\d{1,6})?$")
_FLIGHT_RECORD_RANK = re.compile(r"rank_(\d{1,7})$")
_NUMBER = re.compile(r"\d+")
# Maximum number of texts for a stack.
_MAX_LINES = 5
# Names of functions that run an event loop.
_LOOPS = ("run_until_complete", "run_forever")


class Working(msgspec.Struct, frozen=True):
    """A thread or a task that runs a function of the user or of a trainer.

    Attributes:
        who: The name of the thread or task.
        place: A text that names the function.
        spans: The open spans that the thread or task works on.
        main: True for the thread that works on the open step or stage.
        own: True if the function belongs to the user, False if it belongs to a trainer.
        awaited: True for a task for which the thread of an event loop waits.
        is_thread: True for a thread, False for a task.
    """

    who: str
    place: str
    spans: list[OpenSpan] = []
    main: bool = False
    own: bool = False
    awaited: bool = False
    is_thread: bool = False


class Sentence(msgspec.Struct, frozen=True):
    """A sentence about a stuck run, the texts that prove it, and the file to look at."""

    text: str
    evidence: list[str] = []
    file: str = ""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """State of one process in a step that takes too long.

    The attributes `stack`, `thread`, `waits` and `place` describe the thread that works on the open step or stage (see
    `_worker`), or else the main thread.

    Attributes:
        host: The host of the process.
        pid: The pid of the process.
        label: The title of the process without numbers. Processes with the same label do the same work.
        title: The title of the process for sentences, without the paths of folders.
        failed: Sentences about its threads and tasks that ended with an exception, and its workers that died.
        workers: Its living worker processes of multiprocessing, each with the function that it runs, if known.
        peer: The rank for which the thread waits in a send or recv. Empty if it waits in neither.
        awaits: The server or the process of `subprocess` for which the thread waits. Empty if it is unknown.
        alone: A sentence about threads of the process that wait for themselves or for each other: a lock that is taken
            twice, or a pool whose threads all wait for futures. Empty if no such threads were found.
        is_rank: True if the process is a rank that a launcher or torch has numbered.
        rank: The rank of the process. None if it is unknown, or if several processes of the role have this rank.
        unix_ns: The time at which the process wrote its stacks.
        spans: The open spans of the process, oldest first.
        stack: The innermost functions of the thread, innermost last.
        lines: Texts for the innermost functions, with folded libraries.
        thread: The name of the thread.
        waits: The reason why the thread waits: a constant of `places`. Empty if the thread does not wait.
        place: A text that names the function that the thread runs. Empty if unknown.
        working: The threads and tasks of the process that run functions of the user or of a trainer.
        deadlock: A sentence about threads that wait for each other's locks. Empty if no such threads were found.
        itself: The function in which the process waits for its own result. Empty if it does not.
        held_up: The thread or task that blocks an event loop, and the number of tasks that wait. None if no loop is
            blocked.
        engine: The numbers of the engine in this process: running requests, waiting requests, free blocks.
        flight_record: The path of the process's flight record. Empty if there is no flight record.
        joined_as: The rank of the process in torch.distributed, from the name of the flight record. Without a flight
            record, `rank`.
        file: The path of the file with the stacks, relative to the directory of the run.
        silent_s: The seconds for which the process did not answer the request for its stacks. None if it answered.
        answered: True if the process wrote its stacks itself, False if autoprof read them with py-spy.
        stopped: True if a signal or a debugger has stopped the process.
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
    title: str = ""
    lines: list[str] = []
    failed: list[str] = []
    workers: list[tuple[WorkerProcess, str]] = []
    peer: str = ""
    awaits: str = ""
    alone: str = ""
    is_rank: bool = False
    silent_s: float | None = None
    answered: bool = True
    stopped: bool = False

    def stack_lines(self) -> list[str]:
        """Return a list with one text that names the innermost functions of the stack. Without a stack, it is empty."""
        return [f"{self.name}, {self.thread}: {' > '.join(self.lines)}"] if self.lines else []

    @property
    def waits_for_thread(self) -> bool:
        """Return True if the thread waits in a lock, a queue, a future or another thread of Python."""
        return bool(self.stack) and self.stack[-1].file.endswith(("/threading.py", "/queue.py"))

    def of_workers(self) -> str:
        """Return a text about the server, the failed threads and the worker processes for which the thread may wait.

        If no worker is known to be awaited, it names a worker that runs code of the user, or the only worker if the
        thread waits in multiprocessing.
        """
        texts = [f"it waits for {self.awaits}"] if self.awaits else []
        texts += [f"its {text}" for text in self.failed[:1]]
        awaited = [each for each in self.workers if each[0].awaited] or [each for each in self.workers if each[1]]
        if len(self.workers) == 1 and not self.failed and any("/multiprocessing/" in each.file for each in self.stack):
            awaited = self.workers
        waits_outside = bool(self.stack) and bool(places.package(self.stack[-1]))
        if awaited and waits_outside and self.waits != places.COLLECTIVE:
            worker, place = awaited[0]
            where = f"is in {place}" if place else "is alive, but autoprof does not know what it does"
            texts.append(f"its {worker.name} (pid {worker.pid}) {where}")
        return "".join(f"; {text}" for text in texts)

    @property
    def role(self) -> str:
        """Return the role of the last open span that has a rank. If no open span has one, return the role of any."""
        return next((span.role for span in reversed(self.spans) if span.role and span.rank is not None), "") or next(
            (span.role for span in self.spans if span.role), ""
        )

    @property
    def stage(self) -> OpenSpan | None:
        """Return the open stage that began last. Return None if no stage is open."""
        return next((span for span in reversed(self.spans) if span.kind == "stage"), None)

    @property
    def replica(self) -> str | None:
        """Return the number of the replica from the open spans. Return None if no span has such a number."""
        replicas = (span.ids.get("replica") for span in self.spans)
        return next((str(each) for each in replicas if each is not None), None)

    @property
    def world(self) -> str:
        """Return a name for the group of processes that call collectives together.

        The processes of such a group have the same label and the same replica.
        """
        return self.label if self.replica is None else f"{self.label} of replica {self.replica}"

    @property
    def name(self) -> str:
        """Return the name of the process in sentences: `actor rank 3`, or else its title, the pid and the host.

        The titles of engines' processes contain their ranks, such as `sglang::scheduler_TP1`.
        """
        if self.rank is not None and self.role and any(span.rank == self.rank for span in self.spans):
            return f"{self.role} rank {self.rank}"
        if self.is_rank and (self.title.startswith("ray::") or "::" not in self.title):
            return f"rank {self.joined_as} (pid {self.pid} on {self.host})"
        return f"{self.title or self.label or 'process'} (pid {self.pid} on {self.host})"


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A step that took too long.

    Attributes:
        folder: The path of the folder with the stacks, relative to the directory of the run.
        step: The number of the step. None if unknown.
        loop: The number of the step's loop in its process.
        why: The reason why the processes wrote their stacks.
        processes: The states of the processes that wrote their stacks.
        left_out: Notes on files that can't be read.
    """

    folder: str
    step: int | None
    loop: int
    why: Why
    processes: list[Process]
    left_out: list[str]


def read_hangs(run: str | Path) -> Iterator[Hang]:
    """Yield the last steps of a run that took too long, in the order of their requests. Never raise."""
    parent = Path(run, HANGS)
    try:
        names = sorted(path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        seam.pass_on(error)
        return
    yield from sorted((_hang(parent / name) for name in names[-MAX_HANGS:]), key=lambda hang: hang.why.unix_ns)


def _hang(folder: Path) -> Hang:
    """Read the folder in which the processes of one hang have written their stacks."""
    left_out: list[str] = []
    why = layout.read_json(folder / WHY, Why, left_out)
    number = _STEP.search(folder.name)
    step = why.step if why.step is not None else int(number[1]) if number else None
    try:
        paths = sorted(path for path in folder.glob("*.json") if path.name != WHY)
    except OSError as error:
        seam.pass_on(error)
        paths = []
    if len(paths) > MAX_PROCESSES:
        left_out.append(f"{len(paths) - MAX_PROCESSES} of {len(paths)} processes are not read")
    read = [found for path in paths[:MAX_PROCESSES] if (found := _process(path, left_out)) is not None]
    place_of = {(of.host, of.pid): of.place for of, by in read if by == BY_PY_SPY_OF_WORKER}
    processes = [of for of, by in read if by != BY_PY_SPY_OF_WORKER]
    with_stacks = {(of.host, of.pid) for of in processes}
    processes = [_with_places(of, place_of, with_stacks) for of in processes]
    # Remove ranks that several processes of a role have: without a launcher, all Ray actors have rank 0.
    ranks = Counter((process.role, process.rank) for process in processes if process.spans)
    processes = [
        msgspec.structs.replace(each, rank=None) if ranks[each.role, each.rank] > 1 else each for each in processes
    ]
    ranks_by_label: dict[str, list[int | None]] = {}
    for each in processes:
        ranks_by_label.setdefault(each.label, []).append(each.rank)
    numbered = {label for label, own in ranks_by_label.items() if any(own) and len(set(own)) == len(own)}
    processes = [
        msgspec.structs.replace(each, is_rank=each.joined_as is not None)
        if each.flight_record or each.label in numbered
        else each
        for each in processes
    ]
    folder_text = writable(f"{HANGS}/{folder.name}")
    steps = [span for each in processes for span in each.spans if span.kind == "step" and span.step == step]
    loop = max(map(loop_of, steps), default=1)
    return Hang(folder=folder_text, step=step, loop=loop, why=why, processes=processes, left_out=left_out)


def _with_places(
    process: Process, place_of: Mapping[tuple[str, int], str], with_stacks: Container[tuple[str, int]]
) -> Process:
    """Return a process with the functions that its worker processes run. Omit workers that wrote stacks themselves."""
    workers = [
        (worker, place_of.get((process.host, worker.pid), ""))
        for worker, _ in process.workers
        if (process.host, worker.pid) not in with_stacks
    ]
    return msgspec.structs.replace(process, workers=workers)


def _process(path: Path, left_out: list[str]) -> tuple[Process, str] | None:
    """Return the state of a process from the file with its stacks, and the field `by` of this file."""
    try:
        stacks = msgspec.json.decode(files.read(path, MAX_STACKS_BYTES), type=ProcessStacks)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        seam.pass_on(error)
        stacks = layout.read_json(path, ProcessStacks, left_out)
    if not (stacks.host or stacks.threads or stacks.spans):
        return None
    worker = _worker(stacks)
    frames = worker.frames if worker is not None else []
    peer = (worker.peer if worker is not None else "") or places.pending_transfer(frames)
    best_frame = places.best_frame(frames)
    if stacks.by == BY_PY_SPY_OF_WORKER:
        best_frame = places.worker_frame(frames)
    own_wait_frame = next((place for thread in stacks.threads if (place := places.waits_for_itself(thread))), None)
    record = Path(stacks.flight_record).name if stacks.flight_record else ""
    process = Process(
        host=writable(stacks.host),
        pid=stacks.pid,
        label=title_without_numbers(stacks.process),
        title=short_title(stacks.process),
        lines=[writable(text) for text in places.folded(frames, _MAX_LINES)],
        failed=[writable(text) for text in stacks.failed],
        workers=[(msgspec.structs.replace(each, name=writable(each.name)), "") for each in stacks.workers],
        peer=writable(peer),
        awaits=writable(worker.awaits) if worker is not None else "",
        alone=writable(places.lock_taken_twice(stacks.threads) or places.full_pool(stacks.threads)),
        rank=stacks.rank,
        unix_ns=stacks.unix_ns,
        spans=_kept(stacks.spans),
        stack=[_writable(frame) for frame in frames[-_MAX_FRAMES:]],
        thread="main thread" if worker is None or worker.main else writable(f"thread {worker.name}"),
        waits=places.COLLECTIVE if peer else places.waits(frames) if frames else places.IDLE,
        place=writable(places.text(best_frame)) if best_frame is not None else "",
        working=_working(stacks, worker),
        deadlock=writable(places.deadlock(stacks.threads)),
        itself=writable(places.text(own_wait_frame)) if own_wait_frame is not None else "",
        held_up=_held_up(stacks),
        engine=stacks.engine,
        flight_record=str(path.parent / record) if record else "",
        joined_as=int(number[1]) if (number := _FLIGHT_RECORD_RANK.search(record)) is not None else stacks.rank,
        file=writable(f"{HANGS}/{path.parent.name}/{path.name}"),
        silent_s=0.0 if stacks.by == BY_PY_SPY else None,
        answered=not stacks.by.startswith(BY_PY_SPY),
    )
    return process, stacks.by


def _kept(spans: Sequence[OpenSpan]) -> list[OpenSpan]:
    ordered_spans = sorted(spans, key=lambda span: (span.kind not in ("step", "stage", "window"), span.start_ns))
    return sorted(ordered_spans[:_MAX_SPANS], key=lambda span: span.start_ns)


def _writable(frame: Frame) -> Frame:
    return Frame(writable(frame.function), writable(frame.file), frame.line)


def short_title(process: str) -> str:
    """Return the title of a process for a sentence: without folders, and without the method of a Ray actor."""
    title = writable(process.strip())
    actor = re.search(r"ray::(\w+)", title)
    return f"ray::{actor[1]}" if actor is not None else " ".join(word.rpartition("/")[2] for word in title.split())[:80]


def title_without_numbers(process: str) -> str:
    """Return the title of a process without numbers. For a Ray actor, omit the name of the current method too."""
    title = writable(process.strip())
    actor = re.search(r"ray::(\w+)", title)
    if actor is not None:
        return f"ray::{actor[1]}"
    return _NUMBER.sub("", title)[:80].strip()


def _worker(stacks: ProcessStacks) -> Thread | None:
    """Return the thread that works on the open step or stage.

    If no thread works on a step or stage, return the main thread. But if the main thread is idle, prefer a thread that
    works on any open span: Ray's asynchronous actors work in such a thread.
    """
    work_spans = {number for number, span in enumerate(stacks.spans) if span.kind in ("step", "stage")}
    candidates = [thread for thread in stacks.threads if work_spans.intersection(thread.spans)]
    main_thread = next((thread for thread in stacks.threads if thread.main), None)
    if main_thread is not None and not candidates and places.waits(main_thread.frames) == places.IDLE:
        candidates = [thread for thread in stacks.threads if thread.spans]
    return main_thread if not candidates or main_thread in candidates else candidates[-1]


def _working(stacks: ProcessStacks, worker: Thread | None) -> list[Working]:
    """Return the code that threads and tasks of a process execute, code that works on a span first."""
    work_items = [
        work for thread in stacks.threads if (work := _working_code(stacks, thread, thread is worker)) is not None
    ]
    for task in stacks.tasks:
        place = places.best_frame(task.frames)
        task_spans = [stacks.spans[number] for number in task.spans if 0 <= number < len(stacks.spans)]
        if place is not None and (task_spans or not places.package(place)):
            is_own = not places.package(place)
            work_items.append(Working(writable(task.name), writable(places.text(place)), task_spans, False, is_own))
    work_items.sort(key=lambda each: (not each.spans, not each.own, not each.main))
    return [*_awaited_tasks(stacks, worker), *work_items][:_MAX_THREADS]


def _awaited_tasks(stacks: ProcessStacks, worker: Thread | None) -> list[Working]:
    """Return the tasks for which the thread `worker` waits in an event loop.

    The list has one element, for the function in which most of these tasks are. The list is empty if the thread works
    on no open span, or if a task works on an open span.
    """
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


def _working_code(stacks: ProcessStacks, thread: Thread, is_main_thread: bool) -> Working | None:
    """Return the code that a thread executes, or None if the thread is idle."""
    place = places.working_frame(thread.frames)
    # A thread that works on a span is not idle, even if it waits for a queue.
    if place is None or (places.waits(thread.frames) == places.IDLE and not thread.spans):
        return None
    thread_spans = [stacks.spans[number] for number in thread.spans if 0 <= number < len(stacks.spans)]
    is_own = not places.package(place)
    return Working(
        writable(thread.name), writable(places.text(place)), thread_spans, is_main_thread, is_own, is_thread=True
    )


def _held_up(stacks: ProcessStacks) -> tuple[Working, int] | None:
    """Return a thread that runs a task of an event loop now, and the number of tasks that wait in the process.

    Return None if no thread runs a task, or if no task waits.
    """
    waiting_count = sum(bool(task.waits_on) for task in stacks.tasks)
    running_threads = {task.thread for task in stacks.tasks if task.thread}
    work_items = [
        work
        for thread in stacks.threads
        if waiting_count
        and thread.ident in running_threads
        and (work := _working_code(stacks, thread, False)) is not None
    ]
    return (work_items[0], waiting_count) if work_items else None


def _waits_for_tasks(task: Task) -> bool:
    innermost = task.frames[-1]
    waits_for_several = innermost.file.endswith(("asyncio/taskgroups.py", "asyncio/tasks.py"))
    return "gathered" in task.waits_on or (waits_for_several and places.name(innermost) not in ("sleep", "wait_for"))


def roles(processes: Sequence[Process]) -> dict[str, str]:
    """Return a dict from each label to the role that most processes with this label have."""
    by_label: dict[str, Counter[str]] = {}
    for process in processes:
        if process.role:
            by_label.setdefault(process.label, Counter())[process.role] += 1
    return {label: role_counts.most_common(1)[0][0] for label, role_counts in by_label.items()}
