"""Analysis of stacks: the function in which a process is, the reason why it waits, and deadlocks of two locks.

Locks are identified by name. A name is used only if it always means the same lock: a global variable of a module, or an
attribute of `self`. Deadlocks on attributes of `self` are reported as "likely", because each object has its own lock.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple, TypeAlias

from autoprof.base import files, seam
from autoprof.rundir.records import Frame, Thread

# Packages whose functions only run the work of other packages, or wait for this work.
_PLUMBING = {
    *("torch", "torch_npu", "ray", "asyncio", "uvloop", "requests", "urllib3", "httpx", "httpcore", "aiohttp", "anyio"),
    *("grpc", "zmq", "tensordict", "hydra", "numpy", "autoprof", "wrapt", "psutil", "pandas", "pyarrow", "datasets"),
    *("tqdm", "fsspec", "redis", "boto3", "botocore", "openai"),
}
_OUTER = ("<module>", "main", "__call__", "run", "wrapper", "inner")
_LIBRARY = re.compile(r"(?:site|dist)-packages[/\\]([^/\\.]+)")
_STANDARD = re.compile(r"[/\\]lib(?:64)?[/\\]python\d[^/\\]*[/\\]|^<")
_OWN = re.compile(r"[/\\]autoprof[/\\]capture[/\\]")
# autoprof's modules that run in a run's processes, also in a checkout.
_AUTOPROF = re.compile(
    r"[/\\]autoprof[/\\](?:(?:_boot|base|behaviours|capture|config|hooks|run|rundir|windows)[/\\]|agent\.py$)"
)
# Reasons why a thread waits.
COLLECTIVE, RAY, IDLE = "in a collective", "in ray.get", "idle"
# Text for a thread that waits in `ray.wait`. `waits` returns RAY for it.
RAY_WAIT = "in ray.wait"
# Maximum size of a source file that is read.
_MAX_SOURCE_BYTES = 1 << 20


def package(frame: Frame) -> str:
    """Return the package of a function. It is empty for the user's code, and `python` for the standard library."""
    return _package(frame.file)


@functools.lru_cache(4096)
def _package(file: str) -> str:
    if _AUTOPROF.search(file):
        return "autoprof"
    if found := _LIBRARY.search(file):
        return found[1]
    return "python" if _STANDARD.search(file) else ""


def best_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the function of a stack that best describes the work of the thread.

    It is the innermost function of the user. If the stack has none, it is the innermost function of a trainer.
    """
    frames = _own_frames(frames)
    if (profiling := _profiling(frames)) is not None:
        return profiling
    user_frames = [frame for frame in frames if not package(frame)]
    if inner_frames := [frame for frame in user_frames if name(frame) not in _OUTER]:
        return inner_frames[-1]
    trainer_frames = [
        frame for frame in frames if package(frame) not in ("", "python") and package(frame) not in _PLUMBING
    ]
    return next(iter([*trainer_frames[-1:], *user_frames[-1:], *frames[-1:]]), None)


def worker_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the user's function that a worker process of multiprocessing runs. Return None if it runs none."""
    return next((frame for frame in reversed(_own_frames(frames)) if not package(frame)), None)


def _own_frames(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return a stack without the functions of the parent process, which are on the stack of a forked worker."""
    starts = [index for index, frame in enumerate(frames) if name(frame) == "_bootstrap"]
    return frames[starts[-1] :] if starts else frames


def working_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost function that is not part of the standard library or of a package in `_PLUMBING`.

    If autoprof starts or ends a profiler in this stack, return the function of autoprof. Return None if no function is
    found.
    """
    return _profiling(frames) or next(
        (frame for frame in reversed(frames) if package(frame) != "python" and package(frame) not in _PLUMBING), None
    )


def _profiling(frames: Sequence[Frame]) -> Frame | None:
    """Return the function of autoprof that starts or ends a profiler. Return None if the stack has no such function.

    The functions that it calls belong to torch.
    """
    return next((frame for frame in reversed(frames) if _OWN.search(frame.file)), None)


def name(frame: Frame) -> str:
    """Return the name of a function without the names of its class and of the functions around it."""
    return frame.function.rpartition(".")[2]


def text(frame: Frame) -> str:
    """Return a text that names the file, the line and the function, such as `reward.py:44 fetch_score`."""
    place = f"{PurePath(frame.file).name or '?'}:{frame.line} {name(frame)}".strip()
    return f"autoprof, which starts or ends a profiler, {place}" if _OWN.search(frame.file) else place


# Maximum number of functions of libraries in a row that are shown. In a longer row, only the last one is shown.
_MAX_IN_A_ROW = 2


def folded(frames: Sequence[Frame], limit: int) -> list[str]:
    """Return texts for the innermost functions of a stack, in which long rows of library functions are folded.

    Args:
        frames: The functions of the stack, innermost last.
        limit: The maximum number of texts.
    """
    texts: list[str] = []
    row: list[Frame] = []
    for frame in [*frames, None]:
        if frame is not None and package(frame):
            row.append(frame)
            continue
        if len(row) > _MAX_IN_A_ROW:
            names = dict.fromkeys("Python" if package(each) == "python" else package(each) for each in row[:-1])
            texts.append(f"{len(row) - 1} functions of {', '.join(names)}")
            row = row[-1:]
        texts += [text(each) for each in row]
        texts += [text(frame)] if frame is not None else []
        row = []
    return texts[-limit:]


def waits(frames: Sequence[Frame]) -> str:
    """Return the reason why a thread waits, found from the innermost functions of its stack.

    The reason is COLLECTIVE, RAY or IDLE. It is empty if the thread does not wait.
    """
    inner = frames[-8:]
    if any("torch/distributed/" in frame.file and package(frame) == "torch" for frame in inner):
        return COLLECTIVE
    ray = [frame for frame in inner if package(frame) == "ray"]
    if any(name(frame) in ("get", "wait", "get_objects") for frame in ray):
        return RAY
    last = frames[-1] if frames else None
    if len(frames) > 1 and name(frames[-2]) == "put" and frames[-2].file.endswith("/queue.py"):
        return ""  # a full queue stops the work of a thread
    if (
        last is None
        or "forever" in name(last)
        or name(last) in ("main_loop", "select", "_worker", "wait", "poll", "run_forever", "accept", "_run_once")
    ):
        return IDLE
    return RAY if ray and ray[-1] is last and name(last) != "main_loop" else ""


def pending_transfer(frames: Sequence[Frame]) -> str:
    """Return the transfer for which the innermost function waits, such as `recv from rank 1`, or an empty text.

    The stack has no function of torch for it, because the `wait` of `irecv` and `isend` is written in C++. So the
    transfer is found in the source code.
    """
    return "" if not frames or package(frames[-1]) else _Source(frames[-1].file).transfer(frames[-1].line)


def _read_source(file: str) -> bytes:
    """Return the content of a program's source file. Return no bytes if this machine lacks the file."""
    try:
        return files.read(file, _MAX_SOURCE_BYTES) if file.endswith(".py") else b""
    except (OSError, ValueError) as error:
        seam.pass_on(error)
        return b""


def waits_for_itself(thread: Thread) -> Frame | None:
    """Return the function in which a Ray actor waits for a call to itself. Return None if there is no such function.

    The call is recognized by the source code before the line in which the actor waits.
    """
    frames = thread.frames
    # True for the thread that runs an actor's methods or an asynchronous actor's event loop (Ray 2.60, `_raylet.pyx`).
    is_actor_thread = any("ray/_private/workers" in frame.file for frame in frames[:3])
    if waits(frames) != RAY or not (is_actor_thread or thread.name.startswith("AsyncIO Thread: ")):
        return None
    waiting_frame = next((frame for frame in reversed(frames) if not package(frame)), None)
    if waiting_frame is None:
        return None
    lines = _read_source(waiting_frame.file).decode(errors="replace").splitlines()
    nearby_source = "\n".join(lines[max(0, waiting_frame.line - 6) : waiting_frame.line])
    return waiting_frame if re.search(r"current_actor|self_handle|get_actor\(", nearby_source) else None


_KINDS = ("Lock", "RLock")
# Maximum number of the innermost functions of a stack that are searched for locks.
_MAX_LOCK_FRAMES = 8
# The file, the class (empty for a global variable) and the name of a lock.
_Lock: TypeAlias = "tuple[str, str, str]"
# The lock that `logging` holds while a handler writes a record. Each handler has its own.
_HANDLER_LOCK: _Lock = ("logging/__init__.py", "Handler", "a logging handler's lock")
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class _Wait(NamedTuple):
    """A thread that waits for the lock `wanted`, the function in which it waits, and the locks that it holds."""

    thread: Thread
    frame: Frame
    wanted: _Lock
    held: set[_Lock]


def deadlock(threads: Sequence[Thread]) -> str:
    """Return a sentence about two threads that wait for each other's locks, or an empty text.

    The locks are found in the source code. The caller replaces `{process}` in the sentence by the name of the process.
    """
    sources: dict[str, _Source] = {}
    waits = [wait for thread in threads if (wait := _wait(thread, sources)) is not None]
    for index, one in enumerate(waits):
        for other_wait in waits[index + 1 :]:
            if one.wanted in other_wait.held and other_wait.wanted in one.held and one.wanted != other_wait.wanted:
                likely = "likely " if one.wanted[1] or other_wait.wanted[1] else ""
                return (
                    f"{likely}deadlock of two locks in {{process}}: {_wait_words(one)}, and {_wait_words(other_wait)}"
                )
    return ""


def lock_taken_twice(threads: Sequence[Thread]) -> str:
    """Return a sentence about a thread that waits for a lock which it holds, or an empty text.

    The caller replaces `{process}` in the sentence by the name of the process.
    """
    sources: dict[str, _Source] = {}
    for thread in threads:
        wait = _wait(thread, sources, with_wanted=True)
        if (
            wait is not None
            and wait.wanted in wait.held
            and not _lock_source(wait.frame, sources).reenters(wait.wanted)
        ):
            likely = "likely " if wait.wanted[1] else ""
            who, lock = thread.name or f"thread {thread.native or thread.ident}", wait.wanted[2]
            return f"{likely}deadlock in {{process}}: {who} waits in {text(wait.frame)} for {lock}, which it holds"
    return ""


_POOL_THREAD = re.compile(r"^(.*)_\d+$")
_POOL_FILES = ("concurrent/futures/thread.py",)
_FUTURE_FILES = ("concurrent/futures/_base.py",)


def full_pool(threads: Sequence[Thread]) -> str:
    """Return a sentence about a thread pool whose threads all wait for futures, or an empty text.

    The text is empty if a thread of another pool works, because that thread may give the result.
    """
    pools: dict[str, list[Thread]] = {}
    for thread in threads:
        match = _POOL_THREAD.match(thread.name)
        if match and any(frame.file.endswith(_POOL_FILES) for frame in thread.frames):
            pools.setdefault(match[1], []).append(thread)
    stuck = {name: own for name, own in pools.items() if all(_waits_for_future(thread) for thread in own)}
    idle = [name for name, own in pools.items() if all(name_of_last(thread) == "_worker" for thread in own)]
    if not stuck or len(stuck) + len(idle) < len(pools):
        return ""
    name, own = next(iter(stuck.items()))
    frame = best_frame(own[0].frames)
    where = f" in {text(frame)}" if frame is not None else ""
    return f"all {len(own)} threads of pool {name} in {{process}} wait for futures{where}"


def name_of_last(thread: Thread) -> str:
    """Return the name of the innermost function of a thread."""
    return name(thread.frames[-1]) if thread.frames else ""


def _waits_for_future(thread: Thread) -> bool:
    return any(name(frame) == "result" and frame.file.endswith(_FUTURE_FILES) for frame in thread.frames[-4:])


def _wait_words(wait: _Wait) -> str:
    thread = wait.thread.name or f"thread {wait.thread.native or wait.thread.ident}"
    return f"{thread} waits for {wait.wanted[2]} in {text(wait.frame)}"


def _wait(thread: Thread, sources: dict[str, _Source], with_wanted: bool = False) -> _Wait | None:
    """Return the lock that a thread waits for and the locks that it holds. Return None if it waits for no lock.

    If `with_wanted` is true, the lock that the thread waits for may also be one of the locks that it holds.
    """
    frames = thread.frames
    # Skip the functions of Python's own lock classes.
    while frames and package(frames[-1]) == "python":
        frames = frames[:-1]
    if not frames or package(frames[-1]):
        return None
    wanted_lock = _HANDLER_LOCK if _is_in_logging(thread.frames[-1], "acquire", "handle") else None
    wanted_lock = wanted_lock or _lock_source(frames[-1], sources).wanted(frames[-1].line)
    if wanted_lock is None:
        return None
    held_locks = {
        lock
        for frame in frames[-_MAX_LOCK_FRAMES:]
        if not package(frame)
        for lock in _lock_source(frame, sources).held(frame.line, is_innermost=frame is frames[-1])
    }
    if any(name(inner) == "emit" and _is_in_logging(outer, "handle") for outer, inner in itertools.pairwise(frames)):
        held_locks.add(_HANDLER_LOCK)
    return _Wait(thread, frames[-1], wanted_lock, held_locks if with_wanted else held_locks - {wanted_lock})


def _is_in_logging(frame: Frame, *names: str) -> bool:
    return name(frame) in names and frame.file.endswith("/logging/__init__.py")


def _lock_source(frame: Frame, sources: dict[str, _Source]) -> _Source:
    if frame.file not in sources:
        sources[frame.file] = _Source(frame.file)
    return sources[frame.file]


class _Source:
    """Syntax tree of a program's source file. The tree is empty if this machine lacks the file."""

    def __init__(self, file: str) -> None:
        self._file = file
        try:
            self._tree = ast.parse(_read_source(file))
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            seam.pass_on(error)
            self._tree = ast.Module([], [])
        self._nodes = list(ast.walk(self._tree))
        self._functions = [node for node in self._nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self._of_module, self._of_self = self._locks()

    def wanted(self, line: int) -> _Lock | None:
        """Return the lock that a source line takes.

        Return None if the line takes no lock or several locks, or if the name of the lock may mean several locks.
        """
        lock_expressions = []
        for node in self._nodes:
            if isinstance(node, (ast.With, ast.AsyncWith)) and node.body[0].lineno > line:
                lock_expressions += [item.context_expr for item in node.items if item.context_expr.lineno == line]
            elif isinstance(node, ast.Call) and node.lineno == line and isinstance(node.func, ast.Attribute):
                lock_expressions += [node.func.value] if node.func.attr == "acquire" else []
        return self._named(lock_expressions[0], line) if len(lock_expressions) == 1 else None

    def transfer(self, line: int) -> str:
        """Return the transfer of torch.distributed for which a source line waits, without its rank if that is unknown.

        Return an empty text if the line waits for no transfer that its function starts.
        """
        values: list[ast.expr | None] = [
            node.func.value
            for node in self._nodes
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "wait"
        ]
        if not values:
            return ""
        function = self._around(line)
        nodes = list(ast.walk(function) if function is not None else _outside(self._tree))
        if len(values) == 1 and isinstance(name := values[0], ast.Name):
            values = [value for target, value in _assignments(nodes) if getattr(target, "id", "") == name.id]
        transfers = {_transfer(value) for value in values}
        if len(transfers) == 1 and (transfer := transfers.pop()):
            return transfer
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
        return "a send or recv" if names & {*_TRANSFERS, "batch_isend_irecv"} else ""

    def reenters(self, lock: _Lock) -> bool:
        """Return True unless all assignments to the name of a lock create a plain `Lock`."""
        values = [
            value
            for target, value in _assignments(self._nodes)
            if (getattr(target, "id", None) or getattr(target, "attr", None)) == lock[2]
        ]
        return not values or not all(_constructor(value) == "Lock" for value in values)

    def held(self, line: int, is_innermost: bool = False) -> Iterator[_Lock]:
        """Yield the locks of the `with` blocks that contain a source line and belong to the same function.

        In the innermost function, a block that begins at the line is the one that waits for its lock.
        """
        function = self._around(line)
        for node in ast.walk(function) if function is not None else ():
            if isinstance(node, (ast.With, ast.AsyncWith)) and node.body[0].lineno <= line <= (node.end_lineno or 0):
                if is_innermost and node.lineno == line:
                    continue
                inner_function = self._around(node.lineno)
                for item in node.items if inner_function is function else ():
                    if (lock := self._named(item.context_expr, line)) is not None:
                        yield lock

    def _locks(self) -> tuple[set[str], set[tuple[str, str]]]:
        """Return the locks of the file that are assigned only once.

        Returns:
            The names of the module's global locks, and (class, name) of each lock that is an attribute of `self`.
        """
        rebound_names = {name for node in self._nodes if isinstance(node, ast.Global) for name in node.names}
        module_locks: dict[str, list[bool]] = {}
        for target, value in _assignments(_outside(self._tree)):
            if isinstance(target, ast.Name):
                module_locks.setdefault(target.id, []).append(_creates_lock(value))
        self_locks: dict[tuple[str, str], list[bool]] = {}
        for each in self._nodes:
            if isinstance(each, ast.ClassDef):
                for target, value in _assignments(ast.walk(each)):
                    if isinstance(target, ast.Attribute) and _is_self(target.value):
                        self_locks.setdefault((each.name, target.attr), []).append(_creates_lock(value))
        return (
            {name for name, are_locks in module_locks.items() if are_locks == [True] and name not in rebound_names},
            {name for name, are_locks in self_locks.items() if are_locks == [True]},
        )

    def _around(self, line: int) -> _Function | None:
        functions = [each for each in self._functions if each.lineno <= line <= (each.end_lineno or 0)]
        return max(functions, key=lambda each: each.lineno, default=None)

    def _named(self, node: ast.expr, line: int) -> _Lock | None:
        if isinstance(node, ast.Name) and node.id in self._of_module:
            outer_functions = [each for each in self._functions if each.lineno <= line <= (each.end_lineno or 0)]
            return (
                (self._file, "", node.id)
                if not any(_is_local_name(each, node.id) for each in outer_functions)
                else None
            )
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            classes = [class_name for class_name, name in self._of_self if name == node.attr]
            return (self._file, classes[0], node.attr) if len(classes) == 1 else None
        return None


def _outside(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module that are not part of a function or a class."""
    open_nodes: list[ast.AST] = [tree]
    while open_nodes:
        for node in ast.iter_child_nodes(open_nodes.pop()):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                open_nodes.append(node)
                yield node


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield each target of an assignment and the expression of its value.

    The expression is None if the target gets a part of a value, as in `a, b = function()`.
    """
    for node in nodes:
        targets: list[ast.expr] = getattr(node, "targets", []) if isinstance(node, ast.Assign) else []
        value = getattr(node, "value", None)
        if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Tuple):
                has_same_length = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
                for index, each in enumerate(target.elts):
                    yield each, value.elts[index] if has_same_length and isinstance(value, ast.Tuple) else None
            else:
                yield target, value


def _creates_lock(value: ast.expr | None) -> bool:
    """Return True if an expression creates a lock."""
    return _constructor(value) in _KINDS


def _constructor(value: ast.expr | None) -> str:
    """Return the name of the function that an expression calls, without its module. Empty if it calls none."""
    function = value.func if isinstance(value, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return str(name)


# Dict from a function of torch.distributed to the transfer that it starts, and the name of the parameter with the rank.
_TRANSFERS = {"irecv": ("recv", "from", "src"), "isend": ("send", "to", "dst")}


def _transfer(value: ast.expr | None) -> str:
    """Return the transfer that a call starts, with the rank as in the source code. Empty if it starts none."""
    if not isinstance(value, ast.Call) or _constructor(value) not in _TRANSFERS:
        return ""
    name, preposition, parameter = _TRANSFERS[_constructor(value)]
    ranks = [*value.args[1:2], *(keyword.value for keyword in value.keywords if keyword.arg == parameter)]
    return f"{name} {preposition} rank {ast.unparse(ranks[0])}" if ranks else name


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_local_name(function: _Function, name: str) -> bool:
    """Return True if a name is a parameter or a local variable of a function."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    stored_names = (
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    return name in {each.arg for each in parameters if each is not None} or name in set(stored_names)
