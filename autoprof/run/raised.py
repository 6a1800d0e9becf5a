"""Converter of exceptions to records: the type, the text and the stack of an exception.

The module also decides which exceptions get a `raised` line, finds the uncaught exception that ends this process, and
writes the exit status of the process that started a run.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from autoprof import _boot
from autoprof.base import files, log, seam
from autoprof.base.originals import os, time
from autoprof.base.redact import hidden, writable
from autoprof.rundir.records import Frame, Line, NamedProcess, Raised, RaisedLine

# Maximum number of functions that are kept of a stack: the innermost functions.
_MAX_FRAMES = 30
# Maximum number of characters that are kept of the text of an exception, that are kept of the text of its cause, and
# that are read of each of these texts.
_MAX_MESSAGE_CHARS = 1000
_MAX_CAUSE_CHARS = 200
_MAX_TEXT_CHARS = 1 << 15
# Maximum number of dead processes that are kept of an exception, and of nested Ray exceptions that are read.
_MAX_NAMED = 8
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_FRAME = re.compile(r'^ *File "([^"\n]{1,400})", line (\d{1,9}), in ([^\n]{1,200})$', re.MULTILINE)
# The following patterns match texts of Ray 2.9 to 2.60 (`ray/exceptions.py`, and the messages of the raylet and the GCS
# about dead workers).
_PID = re.compile(r"\bpid[:=] ?(\d{1,9})")
_ACTOR = re.compile(r"^\s*class_name: (\w{1,100})", re.MULTILINE)
# Dict from the name of Ray's exception about a dead process to the value of `NamedProcess.cause`. The module of an
# exception is also checked, because other libraries have classes with these names: torch has an `OutOfMemoryError`.
_RAY_MODULE = "ray.exceptions"
_RAY_DEATHS = {"RayActorError": "", "WorkerCrashedError": "", "OutOfMemoryError": "memory", "NodeDiedError": "node"}
_BROUGHT = "RayTaskError"
# First line of a traceback of Ray or Python. It also matches "Original Traceback" of torch and "Exception Group
# Traceback".
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
# Messages of torch's DataLoader about dead workers (torch 2.0 to 2.13, dataloader.py and DataLoader.cpp).
_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (\d{1,9})[\d, ]{0,99}\) "
    r"(?:exited unexpectedly|is killed by signal: ([\w ]{1,50}))"
)
_CUT = re.compile(r"\.\.\. \((\d+) more characters\)$")
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# Beginning of the first line after a stack. This line names the exception and is not indented.
_RAISED = re.compile(r"^[^\s|]", re.MULTILINE)
# Characters with which torchrun and the tracebacks of exception groups draw lines.
_DRAWN = " =-|+"


def read_exception(error: BaseException) -> Raised:
    """Return the record of an exception. If the exception can't be read, the record has only its type.

    Only an exception from a signal handler can leave this function.
    """
    record, _ = seam.attempt(_record_of, error)  # a library may set any object as an attribute
    return record or Raised(type=seam.type_name(error))


def _text(error: BaseException) -> tuple[str, int]:
    """Return the text of an exception, cut at `_MAX_TEXT_CHARS`, and the number of characters that were cut off."""
    text = seam.text(error)
    return writable(text[:_MAX_TEXT_CHARS]), max(0, len(text) - _MAX_TEXT_CHARS)


def _origin(error: BaseException, text: str) -> str:
    """Describe the exception that caused `error`, or that the program was handling when it raised `error`.

    If `error` is a group, describe the first exception in the group. If `error` comes from another process
    (multiprocessing, torch's DataLoader), describe the exception whose traceback is in `text`. Return an empty text if
    there is no such exception.

    Args:
        error: The exception.
        text: The text of `error`.
    """
    group = seam.group_of(error)
    if group and issubclass(type(group[0]), BaseException):
        more_text = f", and {len(group) - 1} more" if len(group) > 1 else ""
        text = _text(group[0])[0]
        return f"{_origin(group[0], text) or _words(group[0], text)}{more_text}"
    origin = seam.cause_of(error)
    if origin is None and not seam.hides_context(error):
        origin = seam.context_of(error)
    if origin is None:
        return description_of_traceback(text)
    text = _text(origin)[0]
    return description_of_traceback(text) or _words(origin, text)


def _words(error: BaseException, text: str) -> str:
    first_line = hidden(text.strip().partition("\n")[0], _MAX_CAUSE_CHARS)
    place = _place_of(_frames(seam.traceback_of(error)))
    return f"{seam.type_name(error)}{f': {first_line}' if first_line else ''}{place}"


def description_of_traceback(text: str) -> str:
    """Describe the exception whose traceback is in a text. Return an empty text if the text has no traceback."""
    stack, end = _last_traceback(text)
    frames = _frames_in(stack)
    lines = [line for line in end.splitlines() if line.strip(' "')]
    return f"{hidden(lines[0], _MAX_CAUSE_CHARS)}{_place_of(frames)}" if frames and lines else ""


def _last_traceback(text: str) -> tuple[str, str]:
    """Return the stack of the last traceback in a text, and the text after that stack.

    If the text has no traceback, both are empty. A single line such as `File "...", line 3` is not a traceback, because
    messages of torch.compile contain such lines.
    """
    header = None
    for header in _HEADER.finditer(text[:_MAX_TEXT_CHARS]):  # noqa: B007
        pass
    if header is None:
        return "", ""
    # The first line of Ray's traceback contains the repr of an actor, which may have several lines.
    frame = _FRAME.search(text, header.end())
    raised_line = _RAISED.search(text, frame.end() if frame else header.end())
    # Each line of a group's traceback begins with a margin. The last line with text names the exception.
    end = raised_line.start() if raised_line else text.rstrip(_DRAWN + "\n").rfind("\n") + 1
    return text[header.end() : end], text[end:].lstrip(" |")


def _frames_in(stack: str) -> list[Frame]:
    """Return the functions in the text of a traceback. Omit autoprof's functions."""
    frames = [Frame(function.strip(), file, int(line)) for file, line, function in _FRAME.findall(stack)]
    return [frame for frame in frames if not frame.file.startswith(_OWN)]


def _place_of(frames: list[Frame]) -> str:
    return f" in {os.path.basename(frames[-1].file)}:{frames[-1].line} {frames[-1].function}" if frames else ""


def _record_of(error: BaseException) -> Raised:
    kind, (text, cut_chars) = seam.type_name(error), _text(error)
    cause = seam.attribute(error, "cause")
    frames, message, pid = _frames(seam.traceback_of(error)), _message(text, cut_chars), 0
    if kind.startswith(_BROUGHT) and issubclass(type(cause), BaseException):
        # A task or an actor of Ray raised the exception: record the type, the text and the stack from its process.
        remote = seam.attribute(error, "traceback_str")
        remote_frames, pid = _remote_frames(remote if isinstance(remote, str) else text)
        frames, pid = remote_frames or frames, pid or seam.attribute(error, "pid")
        inner = _record_of(cause)
        kind, message = inner.type, inner.message
        text = f"{text}\n{_text(cause)[0]}"
    return Raised(
        type=kind[:100],
        message=_message_without_type(message, kind),
        frames=frames[-_MAX_FRAMES:],
        cause="" if kind.startswith(_BROUGHT) or pid else _origin(error, text),
        pid=pid if isinstance(pid, int) else 0,
        named=_named_processes(error, text),
    )


def _frames(traceback: TracebackType | None) -> list[Frame]:
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_OWN):
            name = writable(getattr(code, "co_qualname", code.co_name))
            frames.append(Frame(name, writable(code.co_filename), traceback.tb_lineno or 0))
        traceback = traceback.tb_next
        # Keep only the last frames, because a recursion may have thousands of them.
        del frames[: -2 * _MAX_FRAMES]
    return frames


def _remote_frames(text: str) -> tuple[list[Frame], int]:
    """Return the stack and the pid in Ray's traceback. If a task called another task, use the innermost task.

    The pid is 0 if the traceback has none.
    """
    text = text[:_MAX_TEXT_CHARS]
    stack, _ = _last_traceback(text)
    pids = [int(header[1]) for header in _HEADER.finditer(text) if header[1]]
    return _frames_in(stack), pids[-1] if pids else 0


def _message(text: str, cut_chars: int = 0) -> str:
    """Return the text of an exception without secrets. If it has a traceback, keep only the text after the last one.

    Args:
        text: The text of the exception.
        cut_chars: The number of characters that were cut off from the text.
    """
    _, end = _last_traceback(text)
    lines = [line for line in (end or text).splitlines() if line.strip(_DRAWN)]
    message = hidden("\n".join(lines), _MAX_MESSAGE_CHARS)
    if cut_chars:
        cut = _CUT.search(message)
        message = f"{_CUT.sub('', message)}... ({cut_chars + (int(cut[1]) if cut else 0)} more characters)"
    return message


def _message_without_type(message: str, kind: str) -> str:
    """Return a message without the type and module of the exception, which a traceback puts before the message."""
    type_text, _, rest = message.partition(": ")
    return rest if type_text.rpartition(".")[2] == kind and " " not in type_text else message


def _named_processes(error: BaseException, text: str) -> list[NamedProcess]:
    """Return the dead processes that an exception of Ray, torchrun or torch's DataLoader names.

    Omit a process of Ray if neither its pid nor the cause of its death is known.
    """
    failures = seam.attribute(error, "failures")
    if isinstance(failures, dict):
        return _processes_failed_in_torchrun(failures)
    if "DataLoader worker (pid" in text:
        return _dead_loader_workers(error, text)
    death = _ray_death(error)
    if not death and not _CONTAINED.search(text):
        return []
    sizes = _RAY_USED.search(text)
    used, limit = (_size_in_bytes(sizes[1], sizes[2]), _size_in_bytes(sizes[3], sizes[4])) if sizes else (0, 0)
    cause = "memory" if _RAY_MEMORY.search(text) else "node" if _NODE.search(text) else _RAY_DEATHS.get(death, "")
    # Search from the message about the death on. A pid before that message belongs to the process that received the
    # exception.
    pids = _PID.findall(text[start.start() :] if (start := _CONTAINED.search(text)) else text)
    pid = int(pids[0]) if pids else 0
    actor = _ACTOR.search(text)
    name = f"Ray actor {actor[1]}" if actor else ""
    return [NamedProcess(pid=pid, name=name, cause=cause, used_bytes=used, limit_bytes=limit)] if pid or cause else []


def _dead_loader_workers(error: BaseException, text: str) -> list[NamedProcess]:
    """Return the dead worker of a data loader. The signal is often only in the exception that caused `error`."""
    import signal

    cause = seam.cause_of(error)
    found = _LOADER.findall(f"{text}\n{_text(cause)[0] if cause is not None else ''}")
    signals = {signal.strsignal(each): each.name for each in signal.Signals}
    workers: dict[str, str] = {}
    for pid, words in found:
        workers[pid] = signals.get(words, "") or workers.get(pid, "")
    return [NamedProcess(pid=int(pid), name="data loader worker", signal=name) for pid, name in workers.items()]


def _ray_death(error: Any) -> str:
    """Return the name of the class in `_RAY_DEATHS` that an exception belongs to; an empty text for other exceptions.

    The exception may be of a derived class. If a task raised the exception, look at the exception inside it.
    """
    for _ in range(_MAX_NAMED):
        kinds = seam.mro_of(type(error))
        names = [seam.name_of(kind) for kind in kinds if seam.members_of(kind).get("__module__") == _RAY_MODULE]
        if death := next((name for name in names if name in _RAY_DEATHS), ""):
            return death
        error = seam.attribute(error, "cause") if _BROUGHT in names else None
    return ""


def _processes_failed_in_torchrun(failures: dict[object, object]) -> list[NamedProcess]:
    """Return the dead ranks that torchrun's ChildFailedError names, in the order in which they failed.

    Args:
        failures: Dict from rank to torchrun's record of the failure.
    """
    ranks = []
    for rank, failure in failures.items():
        status, pid = getattr(failure, "exitcode", None), getattr(failure, "pid", 0)
        failed_at = getattr(failure, "timestamp", 0)
        if not isinstance(status, int) or not isinstance(pid, int):
            continue
        named = named_process(pid, status, rank=rank if isinstance(rank, int) else None)
        ranks.append((failed_at if isinstance(failed_at, int) else 0, named))
    return [named for _, named in sorted(ranks, key=lambda entry: entry[0])[:_MAX_NAMED]]


def named_process(pid: int, status: int, **fields: Any) -> NamedProcess:
    """Return the record of a dead process. `status` is its exit status, or the negative number of a signal."""
    signal = signal_name(-status) if status < 0 else ""
    return NamedProcess(pid=pid, signal=signal, status=max(status, 0) or None, **fields)


def signal_name(number: int) -> str:
    import signal

    with seam.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _size_in_bytes(number: str, unit: str) -> int:
    with seam.suppress(ValueError, KeyError):
        return min(int(float(number) * _UNITS[unit[0].lower()]), 1 << 62)
    return 0


# Exceptions that a working program raises too, so they get no journal line.
_NO_FAULT = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)
# Maximum number of `raised` lines for stages and windows that a process writes.
_MAX_STAGE_LINES = 50
_STAGES = ("step", "stage", "window")
# Kinds of spans for which an exception means that a sample is lost. Exceptions of tools and turns may be caught later.
_LOST = ("sample", "reward")
# Maximum number of `raised` lines for samples and rewards per LIMIT_BYTES of the file: for the same span name and
# exception type, and for all of them.
_MAX_ALIKE_LINES, _MAX_SAMPLE_LINES = 2, 20


# After this number of bytes, samples and rewards get the full number of `raised` lines again.
LIMIT_BYTES = 1 << 20


class Exceptions:
    """The part of the timeline that decides which exceptions of the process get a `raised` line.

    Several threads may use this object.

    Attributes:
        count: The number of `raised` lines so far.
    """

    def __init__(self) -> None:
        self.count = 0
        # The id of the last exception, and the start of the span that it left: in stages (False), in samples (True).
        self._left: dict[bool, tuple[int, int]] = {False: (0, 0), True: (0, 0)}
        self._stages = self._samples = 0
        self._alike: Counter[tuple[str, str, str]] = Counter()

    def line(self, line: Line, error: BaseException) -> RaisedLine | None:
        """Return the `raised` line for an exception that leaves a span, or None if the exception gets no line.

        Args:
            line: The journal line for the end of the span.
            error: The exception.
        """
        if issubclass(type(error), _NO_FAULT) or line.kind not in (*_LOST, *_STAGES):
            return None
        is_sample = line.kind in _LOST
        last_error, last_start_ns = self._left[is_sample]
        self._left[is_sample] = id(error), line.start_ns
        # If the exception already left a span that began later, it is now leaving the spans around that span.
        if last_error == id(error) and line.start_ns <= last_start_ns:
            return None
        if not (self._takes_sample(line, error) if is_sample else self._takes_stage(line)):
            return None
        self.count += 1
        return RaisedLine(time.time_ns(), line.kind, line.name, line.step, line.role, line.rank, read_exception(error))

    def again(self) -> None:
        """Allow the full number of lines for samples again. Readers read only the end of a file."""
        self._alike.clear()
        self._samples = 0

    def _takes_stage(self, line: Line) -> bool:
        self._stages += line.kind != "step"
        return line.kind == "step" or self._stages <= _MAX_STAGE_LINES

    def _takes_sample(self, line: Line, error: BaseException) -> bool:
        key = line.kind, line.name, seam.type_name(error)
        if self._alike[key] >= _MAX_ALIKE_LINES or self._samples >= _MAX_SAMPLE_LINES:
            return False
        self._alike[key] += 1
        self._samples += 1
        return True


def last_exception() -> BaseException | None:
    """Return the uncaught exception that ends this process, or None.

    The interpreter keeps an uncaught exception in `sys.last_value`, except `SystemExit`. Debuggers and notebooks keep
    other exceptions in `sys.last_value`, so this function returns None in an interactive interpreter.
    """
    last_value = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") or not issubclass(type(last_value), BaseException) else last_value


def exception_type() -> str:
    """Return the type of the uncaught exception that ends this process, or `SIGINT` for KeyboardInterrupt.

    Return an empty text if there is no uncaught exception.
    """
    ended_by = last_exception()
    if ended_by is None:
        return ""
    return "SIGINT" if issubclass(type(ended_by), KeyboardInterrupt) else seam.type_name(ended_by)


def uncaught() -> Raised | None:
    """Return the record of the uncaught exception that ends this process.

    Return None if there is no uncaught exception, or if it is KeyboardInterrupt.
    """
    ended_by = last_exception()
    return None if ended_by is None or issubclass(type(ended_by), KeyboardInterrupt) else read_exception(ended_by)


def keep_status(path: Path) -> None:
    """Make this process write its exit status, one byte, to a file when it exits. Never raises.

    The file is opened after all exit functions of the program have run, so that none of them can use its descriptor.
    """
    if _boot.starter() == os.getpid():
        _boot.at_last = functools.partial(_register_status_writer, path)
    else:
        _register_status_writer(path)


def _register_status_writer(path: Path) -> None:
    """Register a C exit handler that writes the exit status of this process to a file.

    No Python code can do this, because the status is known only after Python has ended. But `exit` of glibc calls each
    function that was registered with `on_exit`, with the status and one argument. The registered function is `fputc`.
    It writes its first argument, the status, as a byte to the stream in its second argument. No status is written if a
    signal or `os._exit` ends the process, or if the C library has no `on_exit`.
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
        # The stream has no buffer, because a later exit handler may crash before the buffer is written.
        libc.setbuf(stream, None)
        register(write, stream)
    except (ImportError, AttributeError, OSError) as error:  # no ctypes, another libc, or the file can't be made
        seam.pass_on(error)
        log.debug(f"the exit status can't be kept: {type(error).__name__}: {error}")
