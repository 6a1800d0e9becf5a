"""Places in stacks: the function that a process is in, the reason why it waits, and deadlocks of two locks.

Locks are identified by name. A name counts only if it always means the same lock: a module's global, or an attribute of
`self`. Deadlocks on attributes of `self` are reported as "likely", because each object has its own lock.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple, TypeAlias

from autoprof.base import files, seam
from autoprof.rundir.records import Frame, Thread

# Packages that only run or wait for the work of others.
_PLUMBING = {
    *("torch", "torch_npu", "ray", "asyncio", "uvloop", "requests", "urllib3", "httpx", "httpcore", "aiohttp", "anyio"),
    *("grpc", "zmq", "tensordict", "hydra", "numpy", "autoprof", "wrapt", "psutil", "pandas", "pyarrow", "datasets"),
    *("tqdm", "fsspec", "redis", "boto3", "botocore", "openai"),
}
_OUTER = ("<module>", "main", "__call__", "run", "wrapper", "inner")
_LIBRARY = re.compile(r"(?:site|dist)-packages[/\\]([^/\\.]+)")
_STANDARD = re.compile(r"[/\\]lib(?:64)?[/\\]python\d[^/\\]*[/\\]|^<")
_OWN = re.compile(r"[/\\]autoprof[/\\]capture[/\\]")
# Reasons why a thread waits.
COLLECTIVE, RAY, IDLE = "in a collective", "in ray.get", "idle"
_MAX_SOURCE_BYTES = 4 << 20


def package(frame: Frame) -> str:
    """Return the package of a function: empty for the user's code, `python` for the standard library."""
    return _package(frame.file)


@functools.lru_cache(4096)
def _package(file: str) -> str:
    if found := _LIBRARY.search(file):
        return found[1]
    return "python" if _STANDARD.search(file) else ""


def best_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the function that best describes where a stack is: the innermost of the user's, else of a trainer's."""
    if (profiling := _profiling(frames)) is not None:
        return profiling
    own = [frame for frame in frames if not package(frame)]
    if inner := [frame for frame in own if name(frame) not in _OUTER]:
        return inner[-1]
    others = [frame for frame in frames if package(frame) not in ("", "python") and package(frame) not in _PLUMBING]
    return next(iter([*others[-1:], *own[-1:], *frames[-1:]]), None)


def working_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost function outside of the standard library and of `_PLUMBING`."""
    return _profiling(frames) or next(
        (frame for frame in reversed(frames) if package(frame) != "python" and package(frame) not in _PLUMBING), None
    )


def _profiling(frames: Sequence[Frame]) -> Frame | None:
    """Return autoprof's function that starts or ends a profiler, if any. The functions inside of it are torch's."""
    return next((frame for frame in reversed(frames) if _OWN.search(frame.file)), None)


def name(frame: Frame) -> str:
    """Return a function's name without its class and enclosing functions."""
    return frame.function.rpartition(".")[2]


def text(frame: Frame) -> str:
    """Return the words for a place: `reward.py:44 fetch_score`."""
    place = f"{PurePath(frame.file).name or '?'}:{frame.line} {name(frame)}".strip()
    return f"autoprof, which starts or ends a profiler, {place}" if _OWN.search(frame.file) else place


def waits(frames: Sequence[Frame]) -> str:
    """Return the reason why a stack waits, from its innermost functions: COLLECTIVE, RAY, IDLE or empty."""
    inner = frames[-8:]
    if any("torch/distributed/" in frame.file and package(frame) == "torch" for frame in inner):
        return COLLECTIVE
    ray = [frame for frame in inner if package(frame) == "ray"]
    if any(name(frame) in ("get", "wait", "get_objects") for frame in ray):
        return RAY
    last = frames[-1] if frames else None
    if (
        last is None
        or "forever" in name(last)
        or name(last)
        in (
            "main_loop",
            "select",
            "_worker",
            "wait",
            "poll",
            "run_forever",
            "accept",
            "_run_once",
        )
    ):
        return IDLE
    return RAY if ray and ray[-1] is last and name(last) != "main_loop" else ""


def _source(file: str, sources: dict[str, list[str]]) -> list[str]:
    """Return the lines of a program's source file; none if this machine lacks the file."""
    if file not in sources:
        try:
            content = files.read(file, _MAX_SOURCE_BYTES) if file.endswith(".py") else b""
        except (OSError, ValueError) as error:
            seam.pass_on(error)
            content = b""
        sources[file] = content.decode(errors="replace").splitlines()
    return sources[file]


def waits_for_itself(thread: Thread) -> Frame | None:
    """Return the function in which a Ray actor waits for a call to itself, judged by the source around that line."""
    frames = thread.frames
    # The thread of an actor's methods, or of an asynchronous actor's event loop (Ray 2.60, `_raylet.pyx`).
    of_actor = any("ray/_private/workers" in frame.file for frame in frames[:3])
    if waits(frames) != RAY or not (of_actor or thread.name.startswith("AsyncIO Thread: ")):
        return None
    place = next((frame for frame in reversed(frames) if not package(frame)), None)
    if place is None:
        return None
    lines = _source(place.file, {})
    near = "\n".join(lines[max(0, place.line - 6) : place.line])
    return place if re.search(r"current_actor|self_handle|get_actor\(", near) else None


_KINDS = ("Lock", "RLock")
# Innermost functions of a stack that are searched for locks.
_MAX_LOCK_FRAMES = 8
# Bytes of a source file that are parsed.
_MAX_LOCK_SOURCE = 1 << 20
# File, class (empty for a global) and name.
_Lock: TypeAlias = "tuple[str, str, str]"
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class _Wait(NamedTuple):
    """A thread that waits for a lock, with the locks that it holds."""

    thread: Thread
    frame: Frame
    wanted: _Lock
    held: set[_Lock]


def deadlock(threads: Sequence[Thread]) -> str:
    """Return a sentence about two threads that wait for each other's locks, according to the source; else nothing.

    `{process}` in the sentence stands for the process's name.
    """
    sources: dict[str, _Source] = {}
    waits = [wait for thread in threads if (wait := _wait(thread, sources)) is not None]
    for place, one in enumerate(waits):
        for other in waits[place + 1 :]:
            if one.wanted in other.held and other.wanted in one.held and one.wanted != other.wanted:
                likely = "likely " if one.wanted[1] or other.wanted[1] else ""
                return f"{likely}deadlock of two locks in {{process}}: {_wait_words(one)}, and {_wait_words(other)}"
    return ""


def _wait_words(wait: _Wait) -> str:
    thread = wait.thread.name or f"thread {wait.thread.native or wait.thread.ident}"
    return f"{thread} waits for {wait.wanted[2]} in {text(wait.frame)}"


def _wait(thread: Thread, sources: dict[str, _Source]) -> _Wait | None:
    frames = thread.frames
    # Skip the functions of Python's own lock classes.
    while frames and package(frames[-1]) == "python":
        frames = frames[:-1]
    if not frames or package(frames[-1]):
        return None
    wanted = _lock_source(frames[-1], sources).wanted(frames[-1].line)
    if wanted is None:
        return None
    held = {
        lock
        for frame in frames[-_MAX_LOCK_FRAMES:]
        if not package(frame)
        for lock in _lock_source(frame, sources).held(frame.line)
    }
    return _Wait(thread, frames[-1], wanted, held - {wanted})


def _lock_source(frame: Frame, sources: dict[str, _Source]) -> _Source:
    if frame.file not in sources:
        sources[frame.file] = _Source(frame.file)
    return sources[frame.file]


class _Source:
    """Syntax tree of a program's source file; empty if this machine lacks the file."""

    def __init__(self, file: str) -> None:
        self._file = file
        try:
            self._tree = ast.parse(files.read(file, _MAX_LOCK_SOURCE) if file.endswith(".py") else b"")
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            seam.pass_on(error)
            self._tree = ast.Module([], [])
        self._nodes = list(ast.walk(self._tree))
        self._functions = [node for node in self._nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self._of_module, self._of_self = self._locks()

    def wanted(self, line: int) -> _Lock | None:
        """Return the lock that a line takes; None if it takes no lock, several, or one without a unique name."""
        found = []
        for node in self._nodes:
            if isinstance(node, (ast.With, ast.AsyncWith)) and node.body[0].lineno > line:
                found += [item.context_expr for item in node.items if item.context_expr.lineno == line]
            elif isinstance(node, ast.Call) and node.lineno == line and isinstance(node.func, ast.Attribute):
                found += [node.func.value] if node.func.attr == "acquire" else []
        return self._named(found[0], line) if len(found) == 1 else None

    def held(self, line: int) -> Iterator[_Lock]:
        """Yield the locks of the `with` blocks around a line, within its function."""
        function = self._around(line)
        for node in ast.walk(function) if function is not None else ():
            if isinstance(node, (ast.With, ast.AsyncWith)) and node.body[0].lineno <= line <= (node.end_lineno or 0):
                inner = self._around(node.lineno)
                for item in node.items if inner is function else ():
                    if (lock := self._named(item.context_expr, line)) is not None:
                        yield lock

    def _locks(self) -> tuple[set[str], set[tuple[str, str]]]:
        """Return the names of the module's locks, and class and name of the locks of `self`, that are assigned once."""
        rebound = {name for node in self._nodes if isinstance(node, ast.Global) for name in node.names}
        module: dict[str, list[bool]] = {}
        for target, value in _assigned(_outside(self._tree)):
            if isinstance(target, ast.Name):
                module.setdefault(target.id, []).append(_makes(value))
        own: dict[tuple[str, str], list[bool]] = {}
        for each in self._nodes:
            if isinstance(each, ast.ClassDef):
                for target, value in _assigned(ast.walk(each)):
                    if isinstance(target, ast.Attribute) and _is_self(target.value):
                        own.setdefault((each.name, target.attr), []).append(_makes(value))
        return (
            {name for name, made in module.items() if made == [True] and name not in rebound},
            {name for name, made in own.items() if made == [True]},
        )

    def _around(self, line: int) -> _Function | None:
        inside = [each for each in self._functions if each.lineno <= line <= (each.end_lineno or 0)]
        return max(inside, key=lambda each: each.lineno, default=None)

    def _named(self, node: ast.expr, line: int) -> _Lock | None:
        if isinstance(node, ast.Name) and node.id in self._of_module:
            outer = [each for each in self._functions if each.lineno <= line <= (each.end_lineno or 0)]
            return (self._file, "", node.id) if not any(_binds(each, node.id) for each in outer) else None
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            classes = [class_name for class_name, name in self._of_self if name == node.attr]
            return (self._file, classes[0], node.attr) if len(classes) == 1 else None
        return None


def _outside(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module outside of its functions and classes."""
    left: list[ast.AST] = [tree]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                left.append(node)
                yield node


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield each target of an assignment with its value, or with None if the value is not a single expression."""
    for node in nodes:
        targets: list[ast.expr] = getattr(node, "targets", []) if isinstance(node, ast.Assign) else []
        value = getattr(node, "value", None)
        if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Tuple):
                alike = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
                for place, each in enumerate(target.elts):
                    yield each, value.elts[place] if alike and isinstance(value, ast.Tuple) else None
            else:
                yield target, value


def _makes(value: ast.expr | None) -> bool:
    """Return True if an expression creates a lock."""
    function = value.func if isinstance(value, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _KINDS


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _binds(function: _Function, name: str) -> bool:
    """Return True if a name is a parameter or a local variable of a function."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    stored = (node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return name in {each.arg for each in parameters if each is not None} or name in set(stored)
