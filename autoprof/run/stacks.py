"""Stacks of the threads and asyncio tasks of this process, and the spans on which they work.

Stacks contain no secrets, and omit autoprof's own wrappers. The locals of the program's frames are never read, because
up to Python 3.12 reading the locals leaves a copy of them in the frame. The locals of autoprof's own frames are read,
to find the spans that belong to each stack, and those of torch's functions that wait for a rank or for a worker of a
data loader.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import operator
import sys
import weakref
from collections.abc import Iterator
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, TypeAlias

from autoprof.base import seam, units
from autoprof.base.originals import threading
from autoprof.base.redact import hidden, writable
from autoprof.run.journal import Span
from autoprof.rundir.records import Frame, Task, Thread

_call = operator.methodcaller("__call__")


def _frames_once() -> Iterator[dict[int, FrameType]]:
    """Return an iterator that calls `sys._current_frames` once. The iterator runs no Python code.

    In Python 3.11 before 3.11.12, the call may collect garbage while it holds the lock of the list of threads. If a
    destructor then waits, and another thread starts or ends, both threads wait for each other forever
    (python/cpython#106883). So no garbage is collected in the call. As no Python code runs, no other thread can call
    `gc.disable` meanwhile.
    """
    if (3, 11) <= sys.version_info < (3, 11, 12) and gc.isenabled():
        calls = (map(_call, (each,)) for each in (gc.disable, sys._current_frames, gc.enable))
        return map(operator.itemgetter(1), zip(*calls, strict=False))
    return map(_call, (sys._current_frames,))


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's id."""
    collects = gc.isenabled()
    try:
        return next(_frames_once())
    except BaseException:  # an audit hook refuses the call
        if collects:
            gc.enable()
        raise


def places_of_thread(ident: int, max_depth: int) -> list[Place]:
    """Return the places of a thread's stack, the innermost first, or an empty list if there is no such thread.

    No Python code runs while a frame is held. So the thread cannot continue meanwhile and leave a function whose frame
    is held: the destructors of the locals would run in the caller's thread. An audit hook is an exception, because
    Python calls it for each `f_code`.
    """
    places: list[Any] = []
    collects = gc.isenabled()
    try:
        places.extend(
            map(
                operator.attrgetter("f_code", "f_lineno"),
                itertools.accumulate(
                    itertools.chain(
                        map(operator.methodcaller("get", ident), _frames_once()),
                        itertools.repeat("f_back", max_depth - 1),
                    ),
                    getattr,
                ),
            )
        )
    except AttributeError as error:  # the frame outside of the outermost is None, which has no code
        seam.pass_on(error)
    except BaseException:  # an audit hook refuses the call
        if collects:
            gc.enable()
        raise
    return [(code, line or 0) for code, line in places]


# Maximum number of functions of a stack that are kept: of the outermost and of the innermost functions.
_MAX_OUTER, _MAX_INNER = 20, 120
# Maximum number of functions of a stack that are read.
MAX_DEPTH = 3_000
_MAX_NAME_CHARS = 300

# A code object, and the number of the line that is running in it.
Place: TypeAlias = "tuple[CodeType, int]"


class Names:
    """Cache of the names of code objects for one snapshot. Most code objects occur often in a snapshot."""

    def __init__(self) -> None:
        self._known: dict[CodeType, tuple[str, str]] = {}

    def frames(self, places: list[Place]) -> list[Frame]:
        """Return the frames of a stack, the outermost first. `places` has the innermost first.

        Omit autoprof's wrappers around functions of the user. If the innermost functions belong to autoprof, keep them,
        because autoprof itself is working in that case.
        """
        own_count = 0
        while own_count < len(places) and is_own(places[own_count][0]):
            own_count += 1
        kept_places = places[:own_count] + [place for place in places[own_count:] if not is_around(place[0])]
        cut_count = len(kept_places) - _MAX_OUTER - _MAX_INNER
        if cut_count <= 1:
            return [self._frame(place) for place in reversed(kept_places)]
        at_least = "at least " if len(places) >= MAX_DEPTH else ""
        inner, outer = kept_places[:_MAX_INNER], kept_places[len(kept_places) - _MAX_OUTER :]
        left_out = Frame(f"... {at_least}{cut_count} more functions ...")
        return [*map(self._frame, reversed(outer)), left_out, *map(self._frame, reversed(inner))]

    def _frame(self, place: Place) -> Frame:
        code, line = place
        names = self._known.get(code)
        if names is None:
            function = getattr(code, "co_qualname", code.co_name)
            names = self._known[code] = place_text(function), place_text(code.co_filename)
        return Frame(*names, line)


def place_text(name: str) -> str:
    """Return a name from the user's code, cut if it is long, and without secrets."""
    return writable(hidden(name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."))


# OWN is the folder of the package, as in the file names of the package's code objects.
_HERE = "run/stacks.py"
OWN = sys._getframe().f_code.co_filename.removesuffix(_HERE)
# End of the file name of autoprof's wrapper. A wrapper that was pickled on another machine has the folder of that
# machine before it.
_WRAPPER = "/autoprof/hooks/wrapper.py"
# Folder of the wrappers around functions of the user.
_WRAPPERS = f"{OWN}hooks/"
# Dict from a function that runs a behaviour around a call, to its local variable that has the behaviour.
_DRIVERS = {
    (f"{OWN}hooks/dispatch.py", "drive"): "hook_call",
    (f"{OWN}hooks/dispatch.py", "drive_coroutine"): "hook_call",
}
# Local variables that the functions in _DRIVERS delete before they return. If a copy of the locals kept these
# variables, it would keep an exception alive.
_DELETED_LOCALS = ("error", "traceback", "result")


def is_own(code: CodeType) -> bool:
    """Return True if code belongs to autoprof."""
    return code.co_filename.startswith(OWN) or (
        code.co_name == "autoprof_wrapper" and code.co_filename.endswith(_WRAPPER)
    )


def is_around(code: CodeType) -> bool:
    """Return True if code belongs to a wrapper of autoprof around a hooked function."""
    return is_own(code) and not (code.co_filename.startswith(OWN) and not code.co_filename.startswith(_WRAPPERS))


def spans_in_frame(frame: FrameType) -> list[Span]:
    """Return the spans of a frame, which may be running. The list is empty if its function is not in `_DRIVERS`."""
    name = _DRIVERS.get((frame.f_code.co_filename, frame.f_code.co_name))
    return list(_spans_of(locals_of(frame, name)[0])) if name is not None else []


def locals_of(frame: FrameType, *names: str) -> list[Any]:
    """Return the values of local variables of a frame. A variable that is not set or can't be read is None."""
    if sys.version_info >= (3, 13):
        local = frame.f_locals
        return [local.get(name) for name in names]
    # Python makes a copy of the locals. If the frame has a trace function of the user, that function may use the copy.
    if frame.f_trace is not None:
        return [None] * len(names)
    local = frame.f_locals
    values = [local.get(name) for name in names]
    for variable in _DELETED_LOCALS:
        local.pop(variable, None)
    return values


def spans_in_awaited(awaited: Any, code: CodeType, frame: FrameType | None) -> list[Span]:
    """Return the spans of a coroutine or a generator. The list is empty if its function is not in `_DRIVERS`.

    The locals of a suspended coroutine or generator are read without a copy of them.
    """
    if (code.co_filename, code.co_name) not in _DRIVERS:
        return []
    spans = [span for value in _referents(awaited, frame) for span in _spans_of(value)]
    return spans if spans or frame is None else spans_in_frame(frame)


def _spans_of(value: Any) -> Iterator[Span]:
    """Yield the spans of a running behaviour."""
    if type(value).__module__ != "autoprof.hooks.dispatch":
        return
    around = getattr(value, "_around", None)
    if around is None:
        return
    for local in _referents(around, around.gi_frame):
        kind = type(local)
        if kind is Span:
            yield local
        elif kind.__module__.startswith("autoprof.") and type(span := getattr(local, "_span", None)) is Span:
            yield span


def _referents(generator: Any, frame: FrameType | None) -> list[Any]:
    """Return the objects that a suspended generator or coroutine refers to, including its locals."""
    # Up to Python 3.10, the locals belong to the frame of the generator.
    return gc.get_referents(generator) if sys.version_info >= (3, 11) else gc.get_referents(generator, frame)


# Maximum number of tasks that are read.
_MAX_TASKS = 10_000
# Maximum number of tasks whose names are written for one `asyncio.gather`.
_MAX_NAMED_TASKS = 3
# Value of `Task.waits_on` for a task that is ready to run and waits for its event loop.
_TURN = "its turn"

_KINDS = {CoroutineType: "cr_await", GeneratorType: "gi_yieldfrom", AsyncGeneratorType: "ag_await"}
# Types of C objects between two coroutines. Only the garbage collector can find the awaited coroutine in them.
_BETWEEN = {"coroutine_wrapper", "async_generator_asend", "async_generator_athrow", "anext_awaitable"}


_is_done = operator.methodcaller("done")


def task_stacks(names: Names) -> tuple[list[tuple[Task, list[Span]]], int]:
    """Return the pending tasks of all event loops with the spans that their coroutines work on, and their number.

    Tasks with spans come first. If there are many tasks, some stacks are left out.
    """
    pending = 0
    stacks = []
    for task in all_tasks():
        is_done, error = seam.attempt(_is_done, task)  # the class of the task may be the user's
        if is_done or error is not None:
            continue
        pending += 1
        if pending <= _MAX_TASKS and (stack := seam.attempt(_read_task, task, names)[0]) is not None:
            stacks.append(stack)
    return sorted(stacks, key=lambda stack: not stack[1]), pending


def all_tasks() -> list[Any]:
    """Return the tasks that asyncio knows. Each set is copied first, because no thread can interrupt a copy."""
    tasks: dict[int, Any] = {}
    for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks"):
        task_set = getattr(asyncio.tasks, name, ())
        for entry in list(getattr(task_set, "data", task_set)):
            # Up to Python 3.11, all tasks are in one weak set. From Python 3.12 on, eager tasks are in a plain set.
            task = entry() if isinstance(entry, weakref.ref) else entry
            if task is not None:
                tasks[id(task)] = task
    if sys.version_info >= (3, 14):
        # Tasks that are in none of these sets can be found only through their event loop.
        for loop in _loops():
            tasks |= {id(task): task for task in asyncio.all_tasks(loop)}
    return list(tasks.values())


def _loops() -> list[Any]:
    """Return the running event loops of asyncio, from the locals of their frames.

    The caller needs this from Python 3.14 on, where reading the locals does not leave a copy of them in the frame.
    """
    loops = []
    for frame in current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is asyncio.BaseEventLoop.run_forever.__code__:
                loops.append(caller.f_locals["self"])
            caller = caller.f_back
    return loops


def _read_task(task: Any, names: Names) -> tuple[Task, list[Span]]:
    chain: list[Place] = []
    spans: list[Span] = []
    awaited = task.get_coro()
    depth = 0
    while awaited is not None and depth < MAX_DEPTH:
        depth += 1
        inner, code, frame = _unwrap(awaited)
        if code is not None and frame is not None:
            chain.append((code, frame.f_lineno or 0))
            spans += spans_in_awaited(awaited, code, frame)
        awaited = inner
    chain.reverse()
    name = str(task.get_name())
    waits_on = _waits_on(task)
    thread = 0 if waits_on else _thread_of(task)
    record = Task(name=place_text(name), frames=names.frames(chain), waits_on=waits_on, thread=thread)
    return record, spans


def awaited_places(task: Any) -> list[Place]:
    """Return the places of the coroutines that a task waits in, the innermost first."""
    places: list[Place] = []
    awaited = task.get_coro()
    while awaited is not None and len(places) < MAX_DEPTH:
        awaited, code, frame = _unwrap(awaited)
        if code is not None and frame is not None:
            places.append((code, frame.f_lineno or 0))
    places.reverse()
    return places


def _thread_of(task: Any) -> int:
    """Return Python's id of the thread that runs a task; 0 if no thread runs the task.

    The stack of that thread contains the frame of the task's outermost coroutine.
    """
    outermost = getattr(task.get_coro(), "cr_frame", None)
    for ident, frame in current_frames().items() if outermost is not None else ():
        caller: FrameType | None = frame
        while caller is not None:
            if caller is outermost:
                return ident
            caller = caller.f_back
    return 0


def _unwrap(awaited: Any) -> tuple[Any, CodeType | None, FrameType | None]:
    """Return the object that a coroutine or a generator awaits, then the coroutine's own code and frame.

    A C object between two coroutines has no code and no frame. For an object of any other type, all three are None.
    """
    kind = type(awaited)
    attribute = _KINDS.get(kind)
    if attribute is not None:
        prefix = attribute.partition("_")[0]
        code: CodeType = getattr(awaited, f"{prefix}_code")
        return getattr(awaited, attribute), code, getattr(awaited, f"{prefix}_frame")
    if _is_between(awaited):
        inner = (value for value in gc.get_referents(awaited) if type(value) in _KINDS or _is_between(value))
        return next(inner, None), None, None
    return None, None, None


def _is_between(awaited: Any) -> bool:
    kind = type(awaited)
    return kind.__module__ == "builtins" and kind.__name__ in _BETWEEN


def _waits_on(task: Any) -> str:
    """Return a text that describes the object that a task awaits; an empty text if the task is running."""
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None:
        return "" if asyncio.current_task(task.get_loop()) is task else _TURN
    if isinstance(waiter, asyncio.Task):
        return place_text(str(waiter.get_name()))
    children = getattr(waiter, "_children", None)
    if type(children) is list:
        pending = [child for child in children if not child.done()]
        named_tasks = [str(child.get_name()) for child in pending[:_MAX_NAMED_TASKS] if isinstance(child, asyncio.Task)]
        more_text = ", ..." if len(pending) > len(named_tasks) else ""
        return place_text(
            f"{len(pending)} of {len(children)} gathered: {', '.join(named_tasks)}{more_text}".removesuffix(": ")
        )
    return type(waiter).__name__


# Maximum number of threads that are kept: first the main thread, then threads with spans, then all other threads.
_MAX_THREADS = 256


def thread_stacks(names: Names, own: int) -> tuple[list[tuple[Thread, list[Span]]], int]:
    """Return all threads except the thread `own`, with the spans that their functions work on, and their number.

    The main thread comes first. If there are many threads, some stacks are left out.
    """
    # The lock of `threading` is not taken, because an interrupted thread may hold it. No thread can interrupt the copy.
    known_threads = dict(threading._active)  # type: ignore[attr-defined]
    main = threading.main_thread().ident
    frames = current_frames()
    frames.pop(own, None)
    rows = []
    # Drop each frame once it is read, because it keeps the locals of its function alive.
    while frames:
        ident, frame = frames.popitem()
        stack, spans, awaited = _read_thread(frame)
        del frame
        thread = known_threads.get(ident)
        rows.append((ident != main, not spans, ident, thread, stack, spans, awaited))
    rows.sort(key=lambda row: row[:3])
    stacks = []
    for is_other, _, ident, thread, stack, spans, awaited in rows[:_MAX_THREADS]:
        name = place_text(thread.name) if thread is not None else ""
        native = (thread.native_id or 0) if thread is not None else 0
        record = Thread(
            name=name,
            ident=ident,
            native=native,
            main=not is_other,
            frames=names.frames(stack),
            peer=awaited[0],
            awaits=awaited[1],
        )
        stacks.append((record, spans))
    return stacks, len(rows)


def _read_thread(innermost: FrameType) -> tuple[list[Place], list[Span], tuple[str, str]]:
    """Return the places and spans of a thread, and the fields `peer` and `awaits` of its record."""
    stack: list[Place] = []
    spans: list[Span] = []
    peer = awaits = ""
    frame: FrameType | None = innermost
    while frame is not None and len(stack) < MAX_DEPTH:
        stack.append((frame.f_code, frame.f_lineno or 0))
        spans += spans_in_frame(frame)
        peer, awaits = peer or _peer_in_frame(frame), awaits or _awaited_in_frame(frame)
        frame = frame.f_back
    return stack, spans, (peer, awaits)


# Dict from a function of torch.distributed that waits for one rank, to the locals with the rank and with the rank in
# the process group, and a preposition.
_PEERS = {"recv": ("src", "group_src", "from"), "send": ("dst", "group_dst", "to")}


def _peer_in_frame(frame: FrameType) -> str:
    """Return a text about the rank for which a frame waits, such as `recv from rank 1`. Empty if it waits for none."""
    code = frame.f_code
    if code.co_name not in _PEERS or not code.co_filename.endswith("torch/distributed/distributed_c10d.py"):
        return ""
    *variables, preposition = _PEERS[code.co_name]
    rank, group_rank = locals_of(frame, *variables)
    if type(rank) is int:
        return f"{code.co_name} {preposition} rank {rank}"
    return f"{code.co_name} {preposition} rank {group_rank} of its group" if type(group_rank) is int else ""


def _awaited_in_frame(frame: FrameType) -> str:
    """Return the server or the process for which a frame of the standard library or urllib3 waits, or an empty text."""
    code = frame.f_code
    if code.co_name == "urlopen" and code.co_filename.endswith("urllib3/connectionpool.py"):
        pool, retries = map(members_of, locals_of(frame, "self", "retries"))
        attempts = retries.get("history", ())
        _, _, error, status, _ = attempts[-1] if attempts else [None] * 5
        last = seam.type_name(error) if error is not None else f"HTTP {status}"
        failed = f", after {units.count(len(attempts), 'failed attempt')} ({last})" if attempts else ""
        return place_text(f"an answer from {pool.get('host')}:{pool.get('port')}{failed}")
    if code.co_name == "readinto" and code.co_filename.endswith("/socket.py"):
        return _server_of(members_of(locals_of(frame, "self")[0]).get("_sock"))
    if code.co_name in ("wait", "communicate") and code.co_filename.endswith("/subprocess.py"):
        members = members_of(locals_of(frame, "self")[0])
        command = members.get("args")
        program = command[0] if type(command) in (list, tuple) and command else command
        name = program.split()[0].rpartition("/")[2] if type(program) is str and program.strip() else ""
        return place_text(f"process {members.get('pid')}{f' ({name})' if name else ''}")
    return ""


def _server_of(connection: Any) -> str:
    """Return a text about the server at the other end of a socket. Empty if it is a Unix socket or not connected."""
    module: Any = sys.modules["socket"]
    with seam.suppress(OSError, TypeError, AttributeError):
        address = module.SocketType.getpeername(connection)
        if isinstance(address, tuple):
            return f"an answer from {address[0]}:{address[1]}"
    return ""


def members_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object. No code of its class runs, because the class may be the user's."""
    return {} if value is None else object.__getattribute__(value, "__dict__")
