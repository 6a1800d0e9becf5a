"""Snapshot of this process: its stacks and open spans, its failed threads and tasks, and the state of its libraries.

The state is the memory, the worker processes of multiprocessing, torch's flight record and the state of an engine.
torch's flight record is its list of the last collectives of this process. A snapshot has a limited size.
"""

from __future__ import annotations

import itertools
import pickle
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType, MethodType
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from autoprof.base import files, identity, log, process, seam
from autoprof.base.originals import os, threading, time
from autoprof.base.redact import hidden, writable
from autoprof.run import raised, stacks
from autoprof.run.journal import Span, Timeline, process_title
from autoprof.rundir import memory_state, processes
from autoprof.rundir.deaths import exception_words
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import MAX_STACKS_BYTES, Frame, OpenSpan, ProcessStacks, Task, Thread, WorkerProcess

_encoder = msgspec.json.Encoder()
# Limits for a snapshot that is too large for a file: the number of functions of each stack, the bytes of all spans.
_MAX_CUT_FRAMES, _MAX_SPANS_BYTES = 15, MAX_STACKS_BYTES // 4
# Number of bytes that are kept free for the texts in `left_out` about omitted spans and stacks.
_LEFT_OUT_BYTES = 1 << 10


def encoded(snapshot: ProcessStacks) -> bytes:
    """Return the JSON of a snapshot, shorter than `MAX_STACKS_BYTES`.

    If the snapshot is too large, parts of it are omitted, and the field `left_out` lists them.
    """
    content = _encoder.encode(snapshot)
    return content if len(content) < MAX_STACKS_BYTES else _encoder.encode(_fitted_snapshot(snapshot))


def _fitted_snapshot(snapshot: ProcessStacks) -> ProcessStacks:
    """Return a snapshot with only the oldest spans and the most important stacks, so that it fits into a file.

    The main thread is the most important. Then comes one stack of each group of equal stacks, then the other stacks. In
    both cases, stacks with spans come before stacks without spans.
    """
    spans = snapshot.spans[: _fitting(snapshot.spans, _MAX_SPANS_BYTES)]
    uncut_stacks: list[Thread | Task] = [*snapshot.threads, *snapshot.tasks]
    stacks = [
        replace(
            stack, frames=stack.frames[-_MAX_CUT_FRAMES:], spans=[index for index in stack.spans if index < len(spans)]
        )
        for stack in uncut_stacks
    ]
    equal_counts: Counter[tuple[Frame, ...]] = Counter()
    order = []
    for index, stack in enumerate(stacks):
        frames = tuple(stack.frames)
        order.append((index > 0, equal_counts[frames] > 0, not stack.spans, equal_counts[frames], index))
        equal_counts[frames] += 1
    indexes = [key[-1] for key in sorted(order)]
    base_snapshot = replace(snapshot, spans=spans, threads=[], tasks=[])
    room = MAX_STACKS_BYTES - len(_encoder.encode(base_snapshot)) - _LEFT_OUT_BYTES
    kept_stacks = [stacks[index] for index in sorted(indexes[: _fitting([stacks[index] for index in indexes], room)])]
    threads = [stack for stack in kept_stacks if isinstance(stack, Thread)]
    tasks = [stack for stack in kept_stacks if isinstance(stack, Task)]
    omissions = [
        f"{len(all_items) - len(items)} of {len(all_items)} {kind}"
        for kind, items, all_items in (
            ("spans", spans, snapshot.spans),
            ("threads", threads, snapshot.threads),
            ("tasks", tasks, snapshot.tasks),
        )
        if len(items) < len(all_items)
    ]
    omissions.append(f"all but the {_MAX_CUT_FRAMES} innermost functions of each stack")
    return replace(base_snapshot, threads=threads, tasks=tasks, left_out=[*snapshot.left_out, *omissions])


def _fitting(items: Sequence[Any], max_bytes: int) -> int:
    """Return how many items, from the first on, fit into `max_bytes` as JSON, with a comma after each item."""
    sizes = itertools.accumulate(len(_encoder.encode(item)) + 1 for item in items)
    return sum(1 for _ in itertools.takewhile(lambda size: size <= max_bytes, sizes))


# Maximum number of failed threads and of failed tasks in a snapshot.
_MAX_FAILED = 4


class _FailedThreads(process.State):
    """Sentences about the threads of this process that ended with an exception.

    `threading` calls `Thread._invoke_excepthook` if an exception ends a thread. Each thread has its own function, and
    `threading._make_invoke_excepthook` makes it. A program may set, compare and restore `threading.excepthook` and
    `threading.__excepthook__`, so these stay as they are.
    """

    def reset(self) -> None:
        self.texts: list[str] = []
        if (former := getattr(self, "former", None)) is not None:
            self._module()._make_invoke_excepthook = former
        self.former: Callable[[], Callable[[Any], Any]] | None = None

    def after_fork_in_child(self) -> None:
        self.texts = []

    @staticmethod
    def _module() -> Any:
        # autoprof imports a copy of `threading`, but the program's threads belong to the original.
        return sys.modules.get("threading")

    def watch(self) -> None:
        """Record the exceptions of all threads, also of those that exist already."""
        module = self._module()
        former = getattr(module, "_make_invoke_excepthook", None)
        if self.former is not None or former is None:
            return
        self.former = former
        module._make_invoke_excepthook = lambda: self._recording(former())
        for thread_ref in list(module._dangling.data):
            if (thread := thread_ref()) is not None:
                members = stacks.members_of(thread)
                members["_invoke_excepthook"] = self._recording(members["_invoke_excepthook"])

    def _recording(self, invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that records the exception of a thread, and then calls `invoke`."""

        def invoke_excepthook(thread: Any) -> Any:
            with seam.guard("the exception of a thread can't be recorded", log.error_once):
                self._record(thread, sys.exc_info()[1])
            return invoke(thread)

        return invoke_excepthook

    def _record(self, thread: Any, error: BaseException | None) -> None:
        # `threading` prints nothing about `SystemExit`. A thread may end itself by it, without a text or a status.
        if error is None or len(self.texts) >= _MAX_FAILED:
            return
        if not issubclass(type(error), SystemExit) or seam.text(error) not in ("", "None", "0"):
            self.texts.append(_failure(f"thread {thread.name}", error))


_failed_threads = _FailedThreads()


def watch_threads() -> None:
    """Record the exceptions that end threads, for snapshots. Never raises."""
    with seam.guard("the exceptions of threads can't be recorded", log.error_once):
        _failed_threads.watch()


def _failure(who: str, error: BaseException) -> str:
    return writable(hidden(f"{who} ended with {exception_words(raised.read_exception(error))}"))


def failed_tasks() -> list[str]:
    """Return a sentence for each task that ended with an exception that no code has read. Mark none as read."""
    texts: list[str] = []
    for task in stacks.all_tasks():
        # `Task.exception` would mark the exception as read, and asyncio would not log it.
        if len(texts) < _MAX_FAILED and task.done() and getattr(task, "_log_traceback", False):
            error = getattr(task, "_exception", None)
            if isinstance(error, BaseException):
                texts.append(_failure(f"task {task.get_name()}", error))
    return texts


# Maximum number of worker processes in a snapshot.
_MAX_WORKERS = 64
# Texts about child processes that ended with status 0, and about stopped ones.
_ENDED = "ended"
_STOPPED = "is stopped, by a signal such as SIGSTOP or by a debugger"


def read_workers() -> tuple[list[WorkerProcess], list[str]]:
    """Return the living processes that this process has started with multiprocessing, and sentences about the others.

    The sentences name processes that died or are stopped. Processes that ended with status 0 are left out.
    """
    module: Any = sys.modules.get("multiprocessing.process")
    children = {} if module is None else dict(filter(None, map(_child, list(module._children))))
    of_loaders = _loader_workers()
    alive, texts = [], _replaced_workers()
    for pid, child_name in children.items():
        title = processes.title_of(pid) if "Process-" in child_name else ""
        name, awaited = of_loaders.get(pid, (f"process {title if '::' in title else child_name}", False))
        if end := _end_of_child(pid):
            texts += [stacks.place_text(f"{name} (pid {pid}) {end}")] if end != _ENDED else []
        else:
            alive.append(WorkerProcess(pid=pid, name=stacks.place_text(name), awaited=awaited))
    return sorted(alive, key=lambda worker: not worker.awaited)[:_MAX_WORKERS], texts[:_MAX_FAILED]


def _child(child: Any) -> tuple[int, str] | None:
    """Return the pid and the name of a process object of multiprocessing. None if this process did not start it."""
    members = stacks.members_of(child)
    pid, name = stacks.members_of(members.get("_popen")).get("pid"), members.get("_name")
    return (pid, name) if type(pid) is int and type(name) is str and members["_parent_pid"] == os.getpid() else None


def _end_of_child(pid: int) -> str:
    """Return a text about the end of a child process, empty if it is running. The child's status stays unread."""
    with seam.suppress(ChildProcessError):  # it was started by the server of multiprocessing
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None and status.si_code == os.CLD_EXITED:
            return f"exited with status {status.si_status}" if status.si_status else _ENDED
        if status is not None:
            return f"was killed by {raised.signal_name(status.si_status)}"
    state = files.text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    return _STOPPED if state in (["T"], ["t"]) else "" if state else _ENDED


def _loader_workers() -> dict[int, tuple[str, bool]]:
    """Return the name of each worker of torch's data loaders by pid, and True if a thread waits for its batch."""
    workers = {}
    for innermost in stacks.current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            if code.co_name == "_try_get_data" and code.co_filename.endswith("torch/utils/data/dataloader.py"):
                loader = stacks.members_of(stacks.locals_of(frame, "self")[0])
                awaited = loader.get("_task_info", {}).get(loader.get("_rcvd_idx"), (None,))[0]
                for number, child in enumerate(loader.get("_workers", ())):
                    if known := _child(child):
                        workers[known[0]] = f"data loader worker {number}", number == awaited
            frame = frame.f_back
    return workers


def _replaced_workers() -> list[str]:
    """Return a sentence for each multiprocessing pool that has replaced a worker which died.

    The pool's first workers start before the thread that replaces dead ones. A pool with a limit of tasks per worker
    also replaces workers that have ended.
    """
    module: Any = sys.modules.get("multiprocessing.pool")
    texts = []
    for thread in list(threading._active.values()) if module is not None else ():  # type: ignore[attr-defined]
        members = stacks.members_of(thread)
        target = members.get("_target")
        if type(target) is MethodType and target.__func__ is module.Pool._handle_workers.__func__:
            workers, max_tasks = members["_args"][5], members["_args"][10]
            began = identity.start_ticks(f"self/task/{members['_native_id']}")
            pids = [known[0] for child in list(workers) if (known := _child(child)) is not None]
            later = [pid for pid in pids if began and (identity.start_ticks(pid) or 0) > began]
            if later and max_tasks is None:
                texts.append("multiprocessing pool has replaced a worker that died; any task that it ran is lost")
    return texts


EngineState: TypeAlias = "dict[str, int | float | str]"
# Function that returns the state of a scheduler. If it can't read an item, it adds a text with the reason to the list.
ReadScheduler: TypeAlias = "Callable[[Any, list[str]], EngineState]"


class _SchedulerState(process.State):
    """The scheduler of the engine in this process, and the function that reads the state of the scheduler."""

    def reset(self) -> None:
        self.scheduler: weakref.ref[Any] | None = None
        self.read: ReadScheduler | None = None

    def after_fork_in_child(self) -> None:
        self.reset()


_scheduler_state = _SchedulerState()


def register_scheduler(scheduler: object, read: ReadScheduler) -> None:
    """Keep the scheduler of this process, for snapshots. A scheduler that is registered later replaces it.

    Args:
        scheduler: The scheduler of an engine.
        read: The function that reads the state of the scheduler.
    """
    with seam.suppress(TypeError):  # the class of the scheduler does not support weak references
        _scheduler_state.scheduler, _scheduler_state.read = weakref.ref(scheduler), read


def _engine_state(left_out: list[str]) -> EngineState:
    """Return the state of the engine in this process as a dict; empty if there is no engine.

    If an item can't be read, add a text with the reason to `left_out`.
    """
    scheduler = _scheduler_state.scheduler() if _scheduler_state.scheduler is not None else None
    if scheduler is None or _scheduler_state.read is None:
        return {}
    return _scheduler_state.read(scheduler, left_out)


def read_part(
    parts: dict[str, Any], left_out: list[str], name: str, read: Callable[[], object], of: str = "engine."
) -> None:
    """Call `read`, and put the result into `parts` as `name`. If `read` raises, add a text to `left_out` instead.

    `read` may raise any exception, because releases of engines differ, the state may change while it is read, and a
    device may be lost.

    Args:
        parts: Dict from the name of a part to the part.
        left_out: List of texts about missing parts.
        name: The name of the part.
        read: Function that returns the part.
        of: The prefix of the name in `left_out`. The default is for an item of the engine's state.
    """
    part, error = seam.attempt(read)
    if error is None:
        parts[name] = part
    else:
        left_out.append(f"{of}{name}: {type(error).__name__}: {error}"[:200])


# Environment variables that set the size of torch's flight record. Only torch 2.8 and later read the first variable.
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Size of the flight record, the same as the default of torch 2.11 and later. Up to torch 2.10 the default is 0, so
# nothing is recorded.
_ENTRIES = "2000"
_ON_BY_DEFAULT = (2, 11)


def enable_flight_record(environ: MutableMapping[str, str]) -> None:
    """Make torch record its collectives in this process.

    Do nothing if the user has set the size of the flight record, or if this release of torch records by default.

    Args:
        environ: The environment. torch reads the size from it when it makes the first process group.
    """
    if any(name in environ for name in SIZES):
        return
    version = getattr(sys.modules.get("torch"), "__version__", None)
    with seam.suppress(ImportError, KeyError, OSError, ValueError):  # torch is missing, or its metadata is damaged
        version = version or metadata.version("torch")
    match = re.match(r"(\d+)\.(\d+)", str(version))
    if match and (int(match[1]), int(match[2])) < _ON_BY_DEFAULT:
        environ[SIZES[1]] = _ENTRIES


def write_flight_record(folder: str) -> str:
    """Write torch's flight record into a folder. Return the name of the file, or an empty text if the record is empty.

    This function imports nothing. It does not block, because other threads hold torch's lock only while they add an
    entry, never during a collective. The stacks of the collectives are omitted, because torch would need seconds for
    them and would hold the GIL in this time.

    Raises:
        OSError: The file can't be written.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ""
    records = _records()
    if not records:
        return ""
    # A build of torch with NCCL has one recorder for NCCL, and one recorder for all other backends.
    record = records[0]
    for other_record in records[1:]:
        record["entries"] = sorted(
            [*record["entries"], *other_record["entries"]], key=lambda entry: entry["time_created_ns"]
        )
        record["pg_config"] = {**other_record.get("pg_config", {}), **record.get("pg_config", {})}
    record["pg_config"] = _groups(distributed) | {
        name: group for name, group in record.get("pg_config", {}).items() if name
    }
    # The rank must follow the prefix in the file name, because torch's analyser reads the rank there.
    name = f"{identity.HOST}-{os.getpid()}-rank_{distributed.get_rank()}"
    files.write(Path(folder, name), _bounded_record(record))
    return name


def _records() -> list[dict[str, Any]]:
    """Return torch's flight records that have entries.

    `_dump_nccl_trace` returns the record of a build with NCCL, and `_dump_fr_trace` the other one, from torch 2.8 on.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    functions = (getattr(module, name, None) for name in ("_dump_nccl_trace", "_dump_fr_trace"))
    records = [
        pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
        for dump in functions
        if dump is not None
    ]
    return [record for record in records if isinstance(record, dict) and record.get("entries")]


def _groups(distributed: Any) -> dict[str, dict[str, str]]:
    """Return a dict from the name of a process group to its description, in the form that torch's analyser reads.

    The record that torch 2.13 returns has no gloo groups, so they are added from here.
    """
    groups = {}
    world = distributed.distributed_c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        # Only groups that this process belongs to are in `pg_names`.
        if group not in world.pg_names:
            continue
        name = str(world.pg_names[group])
        groups[name] = {"name": name, "desc": str(getattr(group, "group_desc", "")), "ranks": str(sorted(ranks))}
    return groups


def _bounded_record(record: dict[str, Any]) -> bytes:
    """Return the record as bytes, in the form in which torch writes it. If it would be too large, omit old entries."""
    content = pickle.dumps(record, protocol=2)
    while len(content) > MAX_STACKS_BYTES:
        entries = record["entries"]
        record = record | {"entries": entries[(len(entries) + 1) // 2 :]}
        content = pickle.dumps(record, protocol=2)
    return content


def with_process_state(taken: ProcessStacks, folder: str) -> ProcessStacks:
    """Return the snapshot with the memory, the engine's state and the name of the flight record. Never raises.

    The flight record is written into `folder`.
    """
    left_out = list(taken.left_out)
    parts: dict[str, Any] = {}
    read_part(parts, left_out, "workers", read_workers, of="")
    workers, dead = parts.pop("workers", ([], []))
    read_part(parts, left_out, "failed", lambda: [*_failed_threads.texts, *failed_tasks(), *dead], of="")
    readers: dict[str, Callable[[], object]] = {
        "memory": _memory,
        "device memory": _device_memory,
        "engine": lambda: _engine_state(left_out),
        "flight_record": lambda: write_flight_record(folder),
    }
    for name, read in readers.items():
        read_part(parts, left_out, name, read, of="")
    memory = parts.pop("memory", {}) | parts.pop("device memory", {})
    return msgspec.structs.replace(taken, memory=memory, workers=workers, **parts, left_out=left_out)


def _memory() -> dict[str, int]:
    """Return a dict from name to size in bytes, for the sizes of `ProcessStacks.memory` that are known."""
    memory = memory_state.state()
    sizes = {
        "resident": memory.resident_bytes,
        "peak_resident": memory.peak_bytes,
        "used": memory.used_bytes,
        "limit": memory.limit_bytes,
    }
    return {name: size for name, size in sizes.items() if size}


def _device_memory() -> dict[str, int]:
    """Return `device_used` and `device_total` of `ProcessStacks.memory`, for the devices of this process.

    The dict is empty if torch has reserved no memory. Only torch's own counters are read, because a call of the
    device's driver may wait for a hanging kernel.
    """
    torch = sys.modules.get("torch")
    for name in ("cuda", "npu"):
        backend: Any = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            reserved_sizes = {number: int(backend.memory_reserved(number)) for number in range(backend.device_count())}
            used_sizes = {number: size for number, size in reserved_sizes.items() if size}
            total = sum(int(backend.get_device_properties(number).total_memory) for number in used_sizes)
            return {"device_used": sum(used_sizes.values()), "device_total": total} if used_sizes else {}
    return {}


def write_snapshot(run: RunDir, timeline: Timeline, folder: str) -> None:
    """Write a snapshot of this process into `folder`, which is a folder in `stacks/` or `hangs/`.

    Raises:
        OSError: The file can't be written.
    """
    snapshot = take_snapshot(timeline)
    run.make(Path(folder))
    content = encoded(with_process_state(snapshot, folder))
    files.write(Path(folder, f"{identity.HOST}-{os.getpid()}.json"), content + b"\n")


def take_snapshot(timeline: Timeline) -> ProcessStacks:
    """Return the stacks and open spans of this process. Omit the calling thread, which is the watcher's thread."""
    names = stacks.Names()
    now_ns = time.time_ns()
    threads, thread_count = stacks.thread_stacks(names, threading.get_ident())
    tasks, task_count = stacks.task_stacks(names)
    # Read the open spans after the stacks, so that the list contains every span that a stack works on.
    spans = timeline.open()
    indexed = _with_span_indexes(spans, threads, tasks)
    left_out = [
        f"{count - len(kept)} of {count} {kind}"
        for count, kept, kind in ((thread_count, threads, "threads"), (task_count, tasks, "tasks"))
        if count > len(kept)
    ]
    return ProcessStacks(
        host=identity.HOST,
        pid=os.getpid(),
        unix_ns=now_ns,
        process=writable(process_title()),
        rank=_rank(),
        by="itself",
        left_out=left_out,
        spans=[OpenSpan.of(span.line) for span in spans],
        threads=[stack for stack in indexed if isinstance(stack, Thread)],
        tasks=[stack for stack in indexed if isinstance(stack, Task)],
    )


def _with_span_indexes(
    spans: list[Span], threads: list[tuple[Thread, list[Span]]], tasks: list[tuple[Task, list[Span]]]
) -> list[Thread | Task]:
    """Return the threads and the tasks, each with the indexes of the spans that it works on.

    A span that no frame contains, for example between two calls, belongs to the thread in which the span began.
    """
    stacks: list[tuple[Thread | Task, list[Span]]] = [*threads, *tasks]
    indexes = {id(span): index for index, span in enumerate(spans)}
    owned = [{indexes[id(span)] for span in stack_spans if id(span) in indexes} for _, stack_spans in stacks]
    owned_by_thread = {thread.ident: owned[index] for index, (thread, _) in enumerate(threads)}
    for index in set(indexes.values()).difference(*owned):
        owned_by_thread.get(getattr(spans[index], "thread", 0), set()).add(index)
    return [replace(stack, spans=sorted(numbers)) for (stack, _), numbers in zip(stacks, owned, strict=True)]


def _rank() -> int | None:
    with seam.suppress(ValueError, RuntimeError):  # a launcher's variable is not a number, or torch has ended the group
        return identity.own_rank()
    return None
