"""Snapshots: threads, tasks and the objects that they await, the owners of open spans, and the limits of size."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoprof.base import identity
from autoprof.run import snapshot, stacks, watcher
from autoprof.run.journal import Span
from autoprof.run.runtime import Runtime
from autoprof.rundir.records import MAX_STACKS_BYTES, Frame, OpenSpan, ProcessStacks, Task, Thread
from tests.support.helpers import Python

HERE = __file__
LONG_S = 120


@pytest.fixture
def run(joined: Callable[..., Runtime]) -> Iterator[Runtime]:
    made = joined()
    yield made
    assert made.hooks.errors == {}


def taken(run: Runtime) -> ProcessStacks:
    """Take the snapshot in another thread, because a snapshot omits its own thread."""
    found: list[ProcessStacks] = []
    watcher = threading.Thread(target=lambda: found.append(snapshot.take_snapshot(run.timeline)), name="as-the-watcher")
    watcher.start()
    watcher.join(LONG_S)
    return found[0]


def functions(stack: Thread | Task) -> list[str]:
    """Return the functions of this file in a stack, without the names of enclosing functions."""
    return [frame.function.rpartition(".")[2] for frame in stack.frames if frame.file == HERE]


@pytest.mark.needs("urllib3")
def test_a_thread_that_repeats_a_request_names_the_server(run: Runtime) -> None:
    import urllib3

    retries = urllib3.Retry(5, backoff_factor=LONG_S)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    pool = urllib3.HTTPConnectionPool("localhost", port, retries=retries)
    threading.Thread(target=lambda: pool.request("POST", "/", body=b""), name="asks", daemon=True).start()
    deadline = time.monotonic() + LONG_S
    awaits = ""
    while "2 failed" not in awaits and time.monotonic() < deadline:
        awaits = next(thread.awaits for thread in taken(run).threads if thread.name == "asks")
        time.sleep(0.01)
    assert awaits == f"an answer from localhost:{port}, after 2 failed attempts (NewConnectionError)"


def task(told: ProcessStacks, name: str) -> Task:
    (found,) = [each for each in told.tasks if each.name == name]
    return found


def of(told: ProcessStacks, stack: Thread | Task) -> list[tuple[str, str]]:
    """Return the spans that a thread or a task works on."""
    return [(told.spans[place].kind, told.spans[place].name) for place in stack.spans]


@contextmanager
def waiting(count: int, deep: int = 0) -> Iterator[None]:
    """Start threads that wait inside a number of nested calls."""
    go_on, there = threading.Event(), threading.Barrier(count + 1)

    def wait_here(left: int) -> None:
        if left:
            return wait_here(left - 1)
        there.wait(LONG_S)
        go_on.wait(LONG_S)
        return None

    before = threading.stack_size(1 << 26 if deep else 0)
    threads = [threading.Thread(target=wait_here, args=(deep,), name=f"waits-{n}") for n in range(count)]
    for thread in threads:
        thread.start()
    threading.stack_size(before)
    there.wait(LONG_S)
    try:
        yield
    finally:
        go_on.set()
        for thread in threads:
            thread.join(LONG_S)


def while_going(run: Runtime, main: Callable[[Callable[[], Any]], Any]) -> ProcessStacks:
    """Return the snapshot of a loop in this thread. `main` takes it by calling its argument."""
    told: list[ProcessStacks] = []
    asyncio.run(main(lambda: told.append(taken(run))))
    return told[0]


def test_threads_have_names_numbers_and_stacks_with_the_main_one_first(run: Runtime) -> None:
    with waiting(1):
        told = taken(run)
    main, waits = told.threads[0], next(each for each in told.threads if each.name == "waits-0")
    assert (main.main, main.ident, main.native) == (True, threading.get_ident(), threading.get_native_id())
    assert functions(main)[-1] == "taken"
    assert (waits.main, functions(waits)) == (False, ["wait_here"])
    assert waits.native not in (0, main.native)
    assert waits.frames[-1].function.endswith("wait")
    assert all(frame.line > 0 for frame in waits.frames)
    # The thread that takes the snapshot is missing.
    assert "as-the-watcher" not in [each.name for each in told.threads]
    assert (told.host, told.pid, told.by, told.left_out) == (identity.HOST, os.getpid(), "itself", [])


def test_the_program_does_not_notice(run: Runtime) -> None:
    class Held:
        pass

    held = Held()
    freed = weakref.ref(held)

    def holds(theirs: Held) -> Any:
        yield

    def known(threads: list[threading.Thread]) -> list[threading.Thread]:
        """Return the threads without those of earlier tests, which `threading` forgets when an ident is used again."""
        return [thread for thread in threads if not isinstance(thread, threading._DummyThread)]

    generator = holds(held)
    next(generator)
    before = threading.enumerate()
    with waiting(3):
        among = threading.enumerate()
        taken(run)
        assert known(threading.enumerate()) == known(among)
        assert set(threading.enumerate()) <= set(among)
    assert known(threading.enumerate()) == known(before)
    # Nothing is kept alive.
    del held, generator
    assert freed() is None


def test_nested_awaits_are_a_chain_and_the_innermost_says_what_it_waits_on(run: Runtime) -> None:
    async def inner(future: asyncio.Future[None]) -> None:
        await future

    async def outer(future: asyncio.Future[None]) -> None:
        await inner(future)

    async def waits_for(other: asyncio.Task[None]) -> None:
        await other

    async def main(look: Callable[[], Any]) -> None:
        future = asyncio.get_running_loop().create_future()
        first = asyncio.create_task(outer(future), name="first")
        second = asyncio.create_task(waits_for(first), name="second")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        new = asyncio.create_task(outer(future), name="new")
        look()
        future.set_result(None)
        await asyncio.gather(second, new)

    told = while_going(run, main)
    assert (functions(task(told, "first")), task(told, "first").waits_on) == (["outer", "inner"], "Future")
    assert (functions(task(told, "second")), task(told, "second").waits_on) == (["waits_for"], "first")
    assert task(told, "new").waits_on == "its turn"
    (runs,) = [each for each in told.tasks if functions(each)[:1] == ["main"]]
    assert runs.waits_on == ""
    # The stack shows that this thread runs the task.
    (thread,) = [each for each in told.threads if each.ident == runs.thread]
    assert "main" in [frame.function.rpartition(".")[2] for frame in thread.frames]
    assert task(told, "new").thread == 0


def test_gatherings_groups_and_generators_are_followed(run: Runtime) -> None:
    class Mine:
        def __await__(self) -> Any:
            return (yield from leaf().__await__())

    ends: list[asyncio.Future[None]] = []

    async def leaf() -> None:
        ends.append(asyncio.get_running_loop().create_future())
        await ends[-1]

    async def items() -> Any:
        await leaf()
        yield 1

    async def by_items() -> None:
        async for _ in items():
            pass

    async def by_next() -> None:
        await anext(items(), None)

    async def by_class() -> None:
        await Mine()

    async def by_gathering() -> None:
        parts = [asyncio.create_task(leaf(), name=f"part-{n}") for n in range(5)]
        await asyncio.gather(*parts)

    async def by_group() -> None:
        if sys.version_info >= (3, 11):
            async with asyncio.TaskGroup() as group:
                group.create_task(leaf(), name="in-group")

    kinds = (by_items, by_next, by_class, by_gathering, by_group)

    async def main(look: Callable[[], Any]) -> None:
        made = [asyncio.create_task(kind(), name=kind.__name__) for kind in kinds]
        for _ in range(5):
            await asyncio.sleep(0)
        look()
        for end in ends:
            end.set_result(None)
        await asyncio.gather(*made)

    told = while_going(run, main)
    assert functions(task(told, "by_items")) == ["by_items", "items", "leaf"]
    assert functions(task(told, "by_next")) == ["by_next", "items", "leaf"]
    assert functions(task(told, "by_class")) == ["by_class", "__await__", "leaf"]
    assert task(told, "by_gathering").waits_on == "5 of 5 gathered: part-0, part-1, part-2, ..."
    assert functions(task(told, "part-3")) == ["leaf"]
    if sys.version_info >= (3, 11):
        assert task(told, "by_group").frames[-1].function.endswith("__aexit__")
        assert functions(task(told, "in-group")) == ["leaf"]


def test_a_loop_of_uvloop_in_another_thread_is_read_too(run: Runtime) -> None:
    uvloop = pytest.importorskip("uvloop")
    there, end = threading.Event(), []

    async def main() -> None:
        asyncio.current_task().set_name("of-uvloop")  # type: ignore[union-attr]
        end.append((asyncio.get_running_loop(), asyncio.Event()))
        there.set()
        await end[0][1].wait()

    def thread() -> None:
        loop = uvloop.new_event_loop()
        loop.run_until_complete(main())
        loop.close()

    other = threading.Thread(target=thread)
    other.start()
    assert there.wait(LONG_S)
    while (told := task(taken(run), "of-uvloop")).waits_on != "Future":
        pass
    assert [frame.function for frame in told.frames][-1].endswith(
        "Event.wait" if sys.version_info >= (3, 11) else "wait"
    )
    loop, event = end[0]
    loop.call_soon_threadsafe(event.set)
    other.join(LONG_S)


def test_spans_belong_to_the_threads_and_tasks_that_work_on_them(run: Runtime, hooked: Callable[..., Any]) -> None:
    told: list[ProcessStacks] = []

    async def search(number: int, future: asyncio.Future[None]) -> None:
        await future

    tool = hooked(search, "span", kind="tool", stage="search", role="agent_loop", ids={"sample": "number"})

    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        samples = [asyncio.create_task(tool(n, future), name=f"sample-{n}") for n in range(3)]
        await asyncio.sleep(0)
        told.append(taken(run))
        future.set_result(None)
        await asyncio.gather(*samples)

    rollout = hooked(lambda: asyncio.run(main()), "stage", stage="rollout", role="rollout")
    rewards = threading.Event(), threading.Event()

    def score() -> None:
        rewards[0].set()
        rewards[1].wait(LONG_S)

    reward = hooked(score, "span", kind="reward", stage="score", role="reward")
    step = Span(run.timeline, "step", "step", step=4, role="trainer", rank=0)
    thread = threading.Thread(target=reward, name="rewards")
    thread.start()
    rewards[0].wait(LONG_S)
    rollout()
    rewards[1].set()
    thread.join(LONG_S)
    step.end()

    (found,) = told
    assert len(found.spans) == 6
    for number in range(3):
        each = task(found, f"sample-{number}")
        assert functions(each) == ["search"]
        assert [frame.file for frame in each.frames] == [HERE]
        (place,) = each.spans
        assert (found.spans[place].name, found.spans[place].ids) == ("search", {"sample": number})
    by_name = {each.name: each for each in found.threads}
    # No frame holds the step, so it belongs to the thread in which it began.
    assert of(found, found.threads[0]) == [("step", "step"), ("stage", "rollout")]
    assert of(found, by_name["rewards"]) == [("reward", "score")]
    # The wrappers are omitted, but no function of the user.
    assert not [frame for each in found.threads for frame in each.frames if frame.file.startswith(stacks.OWN)]
    assert functions(by_name["rewards"]) == ["score"]


def test_where_autoprof_itself_waits_is_told(run: Runtime, hooked: Callable[..., Any]) -> None:
    class Slow:
        @property
        def rank(self) -> int:
            told.append(taken(run))
            return 0

    told: list[ProcessStacks] = []
    hooked(lambda holder: None, "stage", stage="update", role="actor", rank="holder.rank")(Slow())
    frames = [frame.function.rpartition(".")[2] for frame in told[0].threads[0].frames]
    assert frames[-1] == "wait" or "rank" in frames
    assert "drive" not in frames


def test_secrets_and_what_was_said_are_not_told(run: Runtime, hooked: Callable[..., Any]) -> None:
    async def call(prompt: str, token: str, future: asyncio.Future[None]) -> None:
        await future

    wrapped = hooked(call, "span", kind="tool", stage="search", role="agent_loop")

    async def main(look: Callable[[], Any]) -> None:
        future = asyncio.get_running_loop().create_future()
        named = asyncio.create_task(
            wrapped("the prompt", "the token", future), name="api_key=hunter2 \ud800 hf_abcdefgh12345678"
        )
        await asyncio.sleep(0)
        look()
        future.set_result(None)
        await named

    told = while_going(run, main)
    text = snapshot.encoded(told).decode()
    for secret in ("the prompt", "the token", "hunter2", "hf_abcdefgh"):
        assert secret not in text
    assert "api_key=***" in text


def test_an_exception_that_passes_is_freed_as_without_a_snapshot(run: Runtime, hooked: Callable[..., Any]) -> None:
    class Error(Exception):
        pass

    class Looks:
        @property
        def size(self) -> int:
            told.append(taken(run))
            return 7

    def work(looks: Looks) -> None:
        raise Error

    told: list[ProcessStacks] = []
    # The property is read while the hook's frame holds the exception in a local variable.
    wrapped = hooked(work, "span", kind="tool", stage="search", role="agent_loop", counts={"size": "looks.size"})
    freed: list[weakref.ref[Error]] = []
    gc.disable()
    try:
        try:
            wrapped(Looks())
        except Error as error:
            freed.append(weakref.ref(error))
        assert freed[0]() is None
    finally:
        gc.enable()
    assert len(told) == 1


def test_a_request_is_answered_once_and_those_before_the_process_never(run: Runtime) -> None:
    place = run.rundir.path / "stacks"
    (place / "before").mkdir(parents=True)
    watched = watcher.Watcher(run)
    (place / "now").mkdir()
    (place / ".part").mkdir()
    (run.rundir.path / "hangs" / "step_000041").mkdir(parents=True)
    watched.look()
    own = f"{identity.HOST}-{os.getpid()}.json"
    answers = sorted(str(path.relative_to(run.rundir.path)) for path in run.rundir.path.glob("*/*/*.json"))
    assert answers == [f"hangs/step_000041/{own}", f"stacks/now/{own}"]
    (place / "now" / own).unlink()
    watched.look()
    assert not (place / "now" / own).exists()


def test_deep_recursion_is_told_from_both_ends(run: Runtime) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        with waiting(1, deep=500):
            told = taken(run)
        with waiting(1, deep=5_000):
            deeper = taken(run)
    finally:
        sys.setrecursionlimit(before)
    (stack,) = [each for each in told.threads if each.name == "waits-0"]
    assert len(stack.frames) == 141
    assert stack.frames[0].function.endswith("_bootstrap")
    assert stack.frames[-1].function.endswith("wait")
    assert stack.frames[20].function.startswith("... 36")
    (stack,) = [each for each in deeper.threads if each.name == "waits-0"]
    assert stack.frames[20].function == "... at least 2860 more functions ..."


def test_200_threads_and_5000_tasks_fit_into_a_file(run: Runtime, tmp_path: Path) -> None:
    async def inner(end: asyncio.Future[None]) -> None:
        await end

    async def outer(end: asyncio.Future[None]) -> None:
        await inner(end)

    async def main(look: Callable[[], Any]) -> None:
        end = asyncio.get_running_loop().create_future()
        made = [asyncio.create_task(outer(end), name=f"a-task-of-many-{n}") for n in range(5_000)]
        await asyncio.sleep(0)
        look()
        snapshot.write_snapshot(run.rundir, run.timeline, str(run.rundir.path / "stacks" / "now"))
        end.set_result(None)
        await asyncio.gather(*made)

    with waiting(200):
        told = while_going(run, main)
    assert len([each for each in told.threads if each.name.startswith("waits-")]) == 200
    assert len(told.tasks) == 5_001
    (path,) = (run.rundir.path / "stacks" / "now").iterdir()
    assert path.stat().st_size <= MAX_STACKS_BYTES
    written = msgspec.json.decode(path.read_bytes(), type=ProcessStacks)
    assert f"{5_001 - len(written.tasks)} of 5001 tasks" in written.left_out
    # A stack that differs from all others is kept.
    assert {len(task.frames) for task in written.tasks} == {len(task.frames) for task in told.tasks} == {1, 2}
    assert any(task.waits_on == "Future" for task in written.tasks)


@pytest.mark.parametrize("letter", ["x", "\u4e2d", '"'], ids=["ascii", "wide", "escaped"])
def test_whatever_there_is_fits(letter: str) -> None:
    def frames(count: int, n: int) -> list[Frame]:
        return [Frame(f"function_{n}_{place}", letter * 300, place) for place in range(count)]

    told = ProcessStacks(
        host="h",
        pid=1,
        unix_ns=1,
        spans=[OpenSpan(kind="sample", name="x", ids={"sample": n}) for n in range(9_000)],
        threads=[Thread(name=f"t{n}", frames=frames(140, n), spans=[n]) for n in range(256)],
        tasks=[Task(name=f"t{n}", frames=frames(20, n), spans=[n]) for n in range(9_000)],
    )
    content = snapshot.encoded(told)
    assert MAX_STACKS_BYTES // 2 < len(content) < MAX_STACKS_BYTES
    kept = msgspec.json.decode(content, type=ProcessStacks)
    assert kept.threads[0] == msgspec.structs.replace(told.threads[0], frames=told.threads[0].frames[-15:])
    assert [line.partition(" of ")[2] for line in kept.left_out[:3]] == ["9000 spans", "256 threads", "9000 tasks"]
    assert "all but the 15 innermost functions of each stack" in kept.left_out
    assert all(place < len(kept.spans) for each in [*kept.threads, *kept.tasks] for place in each.spans)


def test_a_full_disk_leaves_no_half_file(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.helpers import room_for

    folder = run.rundir.path / "stacks" / "now"
    folder.mkdir(parents=True)
    with room_for(100), pytest.raises(OSError, match="large"):
        snapshot.write_snapshot(run.rundir, run.timeline, str(folder))
    assert list(folder.iterdir()) == []


def test_a_fork_in_between_has_a_snapshot_of_its_own(run: Runtime) -> None:
    with waiting(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                snapshot.write_snapshot(run.rundir, run.timeline, str(run.rundir.path / "stacks" / "child"))
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
    told = json.loads((run.rundir.path / "stacks" / "child" / f"{identity.HOST}-{pid}.json").read_text())
    assert told["pid"] == pid
    # The parent's threads are missing.
    assert [each["name"] for each in told.get("threads", []) if each["name"].startswith("waits-")] == []


def test_a_tracer_of_the_users_keeps_its_variables(run: Runtime, hooked: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def work(value: int) -> int:
        taken(run)
        return value + 1

    wrapped = hooked(work, "stage", stage="update", role="actor")

    def tracer(frame: Any, event: str, argument: Any) -> Any:
        if event == "return" and frame.f_code is work.__code__:
            seen.append(dict(frame.f_locals))
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        assert wrapped(1) == 2
    finally:
        sys.settrace(before)
    assert seen[0]["value"] == 1


def test_where_a_fork_counts_threads_last_the_watcher_waits_for_the_next_span(
    run: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_COUNTS_LAST", True)

    def threads(expected: int) -> int:
        """Return the number of threads; wait until it is as expected, because a thread ends a moment after its work."""
        deadline = time.monotonic() + 60
        while (count := len(os.listdir("/proc/self/task"))) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return count

    before = len(os.listdir("/proc/self/task"))
    watcher.start(run, hook_called=True)
    assert threads(before + 1) == before + 1
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert threads(before) == before
    Span(run.timeline, "stage", "x", step=1, role="actor", rank=0).end()
    assert threads(before + 1) == before + 1
    assert run.timeline.wake is None


def test_a_further_fork_waits_for_no_thread_of_the_watcher(run: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "_COUNTS_LAST", True)
    watcher.start(run, hook_called=True)
    started = watcher._state.watcher
    assert started is not None
    ended, waits = started._ended, []

    class Ended:
        def acquire(self, timeout: float) -> bool:
            waits.append(timeout)
            return ended.acquire(timeout=timeout)

    monkeypatch.setattr(started, "_ended", Ended())
    for _ in range(3):
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    assert len(waits) == 1


@pytest.mark.skipif(
    not (3, 11) <= sys.version_info < (3, 11, 12), reason="this Python has python/cpython#106883 mended"
)
@pytest.mark.parametrize("on", [True, False])
def test_no_garbage_is_collected_while_python_holds_the_lock_of_its_threads(python: Python, on: bool) -> None:
    code = (
        "import gc, sys, threading\n"
        "from autoprof.run import stacks\n"
        f"if not {on}: gc.disable()\n"
        "seen = []\n"
        "def hook(event, arguments):\n"
        "    if event == 'sys._current_frames': seen.append(gc.isenabled())\n"
        "    if len(seen) == 2: raise RuntimeError('refused')\n"
        "sys.addaudithook(hook)\n"
        "assert stacks.current_frames()[threading.get_ident()].f_back is sys._getframe()\n"
        "print(seen, gc.isenabled())\n"
        "try: stacks.places_of_thread(threading.get_ident(), 9)\n"
        "except RuntimeError: print(seen, gc.isenabled())\n"
    )
    assert python(["-c", code]).stdout.splitlines() == [f"[False] {on}", f"[False, False] {on}"]


SAMPLES_OF_A_THREAD = """
import threading
from collections import Counter
from autoprof.run import stacks

threads = Counter()

class Local:
    def __del__(self):
        threads[threading.get_ident()] += 1

def work(depth):
    _local = Local()
    if depth:
        work(depth - 1)

done = threading.Event()

def go():
    while not done.is_set():
        work(20)

thread = threading.Thread(target=go)
thread.start()
depths = {len(stacks.places_of_thread(thread.ident, 200)) for _ in range(50_000)}
done.set()
thread.join()
print(threads.total() - threads[thread.ident], max(depths), stacks.places_of_thread(thread.ident, 200))
"""


def test_a_sample_keeps_no_frame_of_a_thread_that_runs(python: Python) -> None:
    """The destructors of the program's locals must run in its own thread.

    The program is a process of its own, because this one may have an audit hook. Python calls it while a frame is held.
    """
    elsewhere, depth, places = python(["-c", SAMPLES_OF_A_THREAD]).stdout.split(maxsplit=2)
    # Samples that held frames while the thread ran had a hundred such calls.
    assert int(elsewhere) <= 5
    assert int(depth) > 20
    assert places.strip() == "[]"


@pytest.mark.parametrize("depth", [1, 2, 40, 400])
def test_the_places_of_a_thread_are_those_of_its_frames(depth: int) -> None:
    def deep(count: int) -> None:
        if count:
            deep(count - 1)
        else:
            frame, expected = sys._getframe(1), []
            while frame is not None and len(expected) < depth:
                expected.append((frame.f_code, frame.f_lineno))
                frame = frame.f_back
            # The first two are this function and `places_of_thread`.
            assert stacks.places_of_thread(threading.get_ident(), depth + 2)[2:] == expected

    deep(60)
