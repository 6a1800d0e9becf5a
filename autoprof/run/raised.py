"""Record of an exception: its type, its text and the places where it was raised.

The process that started a run also records the exception that ended it, and its exit status.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from autoprof.base import exception_text, exceptions, files, interrupts, log
from autoprof.base.originals import os
from autoprof.base.redact import hidden, writable
from autoprof.rundir.records import Frame, Named, Raised

# Maximum number of innermost functions of a stack, and of characters of a text that are kept and read.
_DEEPEST = 30
_MOST_MESSAGE = 1000
_MOST_ORIGIN = 200
_MOST_READ = 1 << 15
_MOST_NAMED = 8
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_FRAME = re.compile(r'^ *File "([^"\n]{1,400})", line (\d{1,9}), in ([^\n]{1,200})$', re.MULTILINE)
# Of Ray 2.9 to 2.60 (`ray/exceptions.py`, and the raylet's and the GCS's texts of why a worker is gone).
_PID = re.compile(r"\bpid[:=] ?(\d{1,9})")
# Other libraries have classes of these names: torch has an `OutOfMemoryError`.
_RAY_MODULE = "ray.exceptions"
_RAY_DEATHS = {"RayActorError": "", "WorkerCrashedError": "", "OutOfMemoryError": "memory", "NodeDiedError": "node"}
_BROUGHT = "RayTaskError"
# First lines of Ray's tracebacks, and of Python's: also "Original Traceback" of torch and "Exception Group Traceback".
_HEADER = re.compile(
    r"ray::[^\n]{0,400}\(pid=(\d{1,9}), ip=[^\n]*|\bTraceback \(most recent call last\):?[ \t]*$", re.MULTILINE
)
_RAY_MEMORY = re.compile(r"killed due to the node running low on memory", re.IGNORECASE)
_RAY_USED = re.compile(r"was (?:running was )?([\d.]+) ?([KMGT]?i?B)(?: used)? / ([\d.]+) ?([KMGT]?i?B)", re.IGNORECASE)
_NODE = re.compile(r"\b(its node|the node) (has )?(died|dead|failed)|NodeDiedError", re.IGNORECASE)
_CONTAINED = re.compile(
    r"^The actor died unexpectedly|^The worker died unexpectedly|killed due to the node running low on memory",
    re.MULTILINE,
)
_CUT = re.compile(r"\.\.\. \((\d+) more characters\)$")
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# The first line after the indented lines of a stack: the exception.
_RAISED = re.compile(r"^[^\s|]", re.MULTILINE)
# torchrun draws lines, and so do tracebacks of groups.
_DRAWN = " =-|+"


def of(error: BaseException) -> Raised:
    """Return the record of an exception. Raises only what a signal handler raises."""
    try:
        return _of(error, _text(error))
    except Exception as problem:  # a library may keep anything in its attributes
        interrupts.pass_on(problem)
        return Raised(type=exceptions.type_name(error))


def _text(error: BaseException) -> tuple[str, int]:
    """Return an exception's text, cut at a limit, and the number of characters after it."""
    text = exception_text.text(error)
    return writable(text[:_MOST_READ]), max(0, len(text) - _MOST_READ)


def _origin(error: BaseException, text: str) -> str:
    """Describe the exception that caused `error`, or was being handled when it was raised.

    Of a group, this is the first exception. Of an exception of another process (multiprocessing, torch's DataLoader),
    `text` has its traceback.
    """
    group = exceptions.group_of(error)
    if group and issubclass(type(group[0]), BaseException):
        more = f", and {len(group) - 1} more" if len(group) > 1 else ""
        text = _text(group[0])[0]
        return f"{_origin(group[0], text) or _words(group[0], text)}{more}"
    origin = exceptions.cause_of(error)
    if origin is None and not exceptions.hides_context(error):
        origin = exceptions.context_of(error)
    if origin is None:
        return _from_traceback(text)
    text = _text(origin)[0]
    return _from_traceback(text) or _words(origin, text)


def _words(error: BaseException, text: str) -> str:
    first = hidden(text.strip().partition("\n")[0], _MOST_ORIGIN)
    place = _at(_frames(exceptions.traceback_of(error)))
    return f"{exceptions.type_name(error)}{f': {first}' if first else ''}{place}"


def _from_traceback(text: str) -> str:
    """Return in words the exception whose traceback a text holds, or an empty text."""
    stack, end = _last_traceback(text)
    frames = _frames_in(stack)
    lines = [line for line in end.splitlines() if line.strip(' "')]
    return f"{hidden(lines[0], _MOST_ORIGIN)}{_at(frames)}" if frames and lines else ""


def _last_traceback(text: str) -> tuple[str, str]:
    """Return the stack of the last traceback in a text, and the text after it. Both are empty without a traceback.

    A line such as `File "...", line 3` alone is not a traceback: the texts of torch.compile have such lines.
    """
    header = None
    for header in _HEADER.finditer(text[:_MOST_READ]):  # noqa: B007
        pass
    if header is None:
        return "", ""
    # Ray's header has the repr of an actor, which may have several lines.
    frame = _FRAME.search(text, header.end())
    raised = _RAISED.search(text, frame.end() if frame else header.end())
    # Each line of a group's traceback has a margin. Its last line with words is the exception.
    end = raised.start() if raised else text.rstrip(_DRAWN + "\n").rfind("\n") + 1
    return text[header.end() : end], text[end:].lstrip(" |")


def _frames_in(stack: str) -> list[Frame]:
    """Return the functions of a traceback's text, without autoprof's."""
    found = [Frame(function.strip(), file, int(line)) for file, line, function in _FRAME.findall(stack)]
    return [frame for frame in found if not frame.file.startswith(_OWN)]


def _at(frames: list[Frame]) -> str:
    return f" in {os.path.basename(frames[-1].file)}:{frames[-1].line} {frames[-1].function}" if frames else ""


def _of(error: BaseException, read: tuple[str, int]) -> Raised:
    kind, (text, more) = exceptions.type_name(error), read
    cause = exceptions.attribute(error, "cause")
    frames, message, pid = _frames(exceptions.traceback_of(error)), _message(text, more), 0
    if kind.startswith(_BROUGHT) and issubclass(type(cause), BaseException):
        # It was raised in a task or an actor, and is recorded as it was raised there.
        remote = exceptions.attribute(error, "traceback_str")
        there, pid = _remote(remote if isinstance(remote, str) else text)
        frames, pid = there or frames, pid or exceptions.attribute(error, "pid")
        of_cause = _text(cause)
        inner = _of(cause, of_cause)
        kind, message = inner.type, inner.message
        text = f"{text}\n{of_cause[0]}"
    return Raised(
        type=kind[:100],
        message=_without_type(message, kind),
        frames=frames[-_DEEPEST:],
        cause="" if kind.startswith(_BROUGHT) or pid else _origin(error, text),
        pid=pid if isinstance(pid, int) else 0,
        named=_named(error, text),
    )


def _frames(traceback: TracebackType | None) -> list[Frame]:
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_OWN):
            name = writable(getattr(code, "co_qualname", code.co_name))
            found.append(Frame(name, writable(code.co_filename), traceback.tb_lineno or 0))
        traceback = traceback.tb_next
        # A recursion has thousands.
        del found[: -2 * _DEEPEST]
    return found


def _remote(text: str) -> tuple[list[Frame], int]:
    """Return the stack and the process of Ray's traceback. If tasks called tasks, these are of the last one."""
    text = text[:_MOST_READ]
    stack, _ = _last_traceback(text)
    pids = [int(header[1]) for header in _HEADER.finditer(text) if header[1]]
    return _frames_in(stack), pids[-1] if pids else 0


def _message(text: str, more: int = 0) -> str:
    """Return an exception's text without secrets. After a traceback in it, only the last exception is kept."""
    _, end = _last_traceback(text)
    lines = [line for line in (end or text).splitlines() if line.strip(_DRAWN)]
    shown = hidden("\n".join(lines), _MOST_MESSAGE)
    if more:
        known = _CUT.search(shown)
        shown = f"{_CUT.sub('', shown)}... ({more + (int(known[1]) if known else 0)} more characters)"
    return shown


def _without_type(message: str, kind: str) -> str:
    """Return a message without the exception's type, which a traceback puts in front of it, often with its module."""
    named, _, rest = message.partition(": ")
    return rest if named.rpartition(".")[2] == kind and " " not in named else message


def _named(error: BaseException, text: str) -> list[Named]:
    """Return the dead processes that an exception of Ray or torchrun names, with a pid or the cause of the death."""
    failures = exceptions.attribute(error, "failures")
    if isinstance(failures, dict):
        return _of_torchrun(failures)
    death = _ray_death(error)
    if not death and not _CONTAINED.search(text):
        return []
    shares = _RAY_USED.search(text)
    used, limit = (_bytes(shares[1], shares[2]), _bytes(shares[3], shares[4])) if shares else (0, 0)
    cause = "memory" if _RAY_MEMORY.search(text) else "node" if _NODE.search(text) else _RAY_DEATHS.get(death, "")
    # The last one: what is in front of it names the process that was told.
    pids = _PID.findall(text[start.start() :] if (start := _CONTAINED.search(text)) else text)
    pid = int(pids[0]) if pids else 0
    return [Named(pid=pid, cause=cause, used_bytes=used, limit_bytes=limit)] if pid or cause else []


def _ray_death(error: Any) -> str:
    """Return which of Ray's exceptions about a dead process this is, is derived from, or brings from a task."""
    for _ in range(_MOST_NAMED):
        kinds = exceptions.mro_of(type(error))
        names = [
            exceptions.name_of(each) for each in kinds if exceptions.members_of(each).get("__module__") == _RAY_MODULE
        ]
        if death := next((name for name in names if name in _RAY_DEATHS), ""):
            return death
        error = exceptions.attribute(error, "cause") if _BROUGHT in names else None
    return ""


def _of_torchrun(failures: dict[object, object]) -> list[Named]:
    """Return the ranks that torchrun's ChildFailedError names, the first one first."""
    found = []
    for rank, failure in failures.items():
        status, pid = getattr(failure, "exitcode", None), getattr(failure, "pid", 0)
        when = getattr(failure, "timestamp", 0)
        if not isinstance(status, int) or not isinstance(pid, int):
            continue
        name = _signal_name(-status) if status < 0 else ""
        named = Named(pid=pid, rank=rank if isinstance(rank, int) else None, signal=name, status=max(status, 0) or None)
        found.append((when if isinstance(when, int) else 0, named))
    return [named for _, named in sorted(found, key=lambda each: each[0])[:_MOST_NAMED]]


def _signal_name(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError as error:
        interrupts.pass_on(error)
        return f"signal {number}"


def _bytes(number: str, unit: str) -> int:
    try:
        return min(int(float(number) * _UNITS[unit[0].lower()]), 1 << 62)
    except (ValueError, KeyError) as error:
        interrupts.pass_on(error)
        return 0


def last_exception() -> BaseException | None:
    """Return the exception that nobody caught, or None.

    The interpreter keeps it, except for `SystemExit`. A debugger or a notebook keeps others there, too.
    """
    ended_by = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") or not issubclass(type(ended_by), BaseException) else ended_by


def exception_type() -> str:
    """Return the type of the exception that nobody caught, or an empty text."""
    ended_by = last_exception()
    if ended_by is None:
        return ""
    return "SIGINT" if issubclass(type(ended_by), KeyboardInterrupt) else exceptions.type_name(ended_by)


def uncaught() -> Raised | None:
    """Return what is told of the exception that nobody caught; nothing of Ctrl-C."""
    ended_by = last_exception()
    return None if ended_by is None or issubclass(type(ended_by), KeyboardInterrupt) else of(ended_by)


def keep_status(path: Path) -> None:
    """Have the process leave its exit status in a file of one byte, when it exits. Raises nothing.

    No Python runs any more when the status is known, after `sys.exit(1)` as after an exception. But glibc's `exit`
    calls functions with the status and an argument, and `fputc` is one: it writes its first argument, as a byte, to its
    second. A C library without `on_exit`, a signal and `os._exit` leave no status.
    """
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        register, write = libc.on_exit, ctypes.cast(libc.fputc, ctypes.c_void_p)
        libc.fdopen.restype = ctypes.c_void_p
        files.check_size(1)
        descriptor = files.create(str(path), held=True)
        stream = ctypes.c_void_p(libc.fdopen(descriptor, b"wb"))
        if not stream:
            os.close(descriptor)
            return
        # Without a buffer, since what exits later may crash.
        libc.setbuf(stream, None)
        register(write, stream)
    except Exception as error:  # ctypes may be missing, or restricted
        interrupts.pass_on(error)
        log.debug(f"the exit status can't be kept: {type(error).__name__}: {error}")
