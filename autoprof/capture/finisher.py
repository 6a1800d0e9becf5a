"""The finisher: a process that compresses a trace, renames it and writes its meta file.

1. It waits for a turn. On one host, only a few finishers of a user work at the same time. A finisher has its turn while
   it holds a lock on a file in the temporary folder. Other users can't open these files. When its turn ends, the
   finisher removes its file.
2. It makes the final file:

   * It compresses a Chrome trace of Kineto, repairs the names of events, and cuts a trace that is too large after a
     complete event.
   * It lets torch_npu analyse the folder that torch_npu has written, and moves the folder.
   * It waits for the report of nsys and moves it. A separate process of nsys writes one report for each window. With
     `--capture-range-end=repeat:async`, nsys writes the report some time after the window was closed. An nsys without
     this option writes the report when the recorded process has ended. The report is called `<-o>.<number>.nsys-rep`,
     or has no number (verl 0.9.1, utils/profiler/nvtx_profile.py, relocate_results).
   * It renames a memory snapshot.
3. It writes the meta file and removes the recording.

The finisher uses only the standard library, and zlib-ng if zlib-ng is installed, because it takes half the time to
compress a trace.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # `python -m` puts the folder of the packages first in `sys.path`. This moves the folder to the end, because modules
    # in the folder must not replace modules of the standard library.
    sys.path.append(sys.path.pop(0))

import contextlib
import gzip
import importlib
import math
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from autoprof.base import files, seam
from autoprof.base.originals import fcntl, json, os
from autoprof.rundir.file_names import FOLDER, NAMED, NOT_ANALYSED, NPU_ANALYSED, NPU_TIMELINE, NSYS_REPORT, PART

# Number of cores of the host for each finisher that may work at the same time.
_CORES_PER_FINISHER = 8
_PAUSE_S = 0.1
_TOUCH_S = 2.0
# Maximum wait for a turn. The wait needs a limit, because a suspended finisher keeps its lock.
_PATIENCE_S = 600.0


def wait_for_turn(raw: str) -> tuple[int, str] | None:
    """Wait until fewer than the maximum number of this user's finishers work on this host, but at most ten minutes.

    The finishers take turns because the run continues in the meantime and needs the cores of the host. If the lock
    files can't be made, this function does not wait.

    Args:
        raw: Path of the recording. During the wait, the file is touched, because other processes consider a file that
            does not change as abandoned.

    Returns:
        The arguments of `end_turn`: the descriptor and the path of the locked file. None if this process got no lock.
    """
    max_finishers = max(1, (os.cpu_count() or 1) // _CORES_PER_FINISHER)
    deadline = time.monotonic() + _PATIENCE_S
    last_touch = 0.0
    while (now := time.monotonic()) < deadline:
        try:
            for turn in range(max_finishers):
                path = os.path.join(tempfile.gettempdir(), f"autoprof-{os.getuid()}-finish{turn}.lock")
                if (lock := _lock_file(path)) is not None:
                    return lock, path
        except OSError:  # no temporary folder, a file of another user, or a file system without locks
            break
        if now - last_touch > _TOUCH_S:
            last_touch = now
            with contextlib.suppress(OSError):
                os.utime(raw)
        time.sleep(_PAUSE_S)
    return None


def end_turn(lock: int, path: str) -> None:
    """End the turn of this process: remove the lock file and release the lock.

    Args:
        lock: Descriptor of the lock file.
        path: Path of the lock file.
    """
    with contextlib.suppress(OSError):
        os.unlink(path)
    os.close(lock)


def _lock_file(path: str) -> int | None:
    """Lock the file at `path`, which is created if it does not exist, and return its descriptor.

    Return None if another process holds the lock or has just removed the file.

    Raises:
        OSError: The folder does not exist, other users can open the file, or the file system has no locks.
    """
    lock = files.descriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(lock)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(path)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock before may have removed the file, and a third process may have made a new file.
        if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(lock)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


COMPRESSED = ".gz"
# Compression level. At this level, zlib-ng makes smaller files than Python's gzip. torch's own export uses level 9 and
# compresses in the training thread; bench/stop.py compares torch's export with autoprof's.
LEVEL = 4
_PIECE = 1 << 20
_ANALYSE = "import sys; from torch_npu.profiler.profiler import analyse; analyse(sys.argv[1], max_process_number=1)"
_ANALYSE_TIMEOUT_S = 3600.0
_SIGN_OF_LIFE_S = 2.0


def finish(job: dict[str, Any], in_turn: bool = False) -> None:
    """Make the final trace and the meta file from the recording, then remove the recording.

    The meta file is written after the trace. If the trace has its final name, the state in the meta file is `complete`
    or `truncated`. If the trace can't be written, the state is `failed`.

    If another process has claimed the recording, do nothing.

    Args:
        job: Description of the capture, as `Artifacts` makes it.
        in_turn: True to wait for a turn first.
    """
    files.open_to_group(job.get("group", False))
    with _locked_recording(job["raw"]) as claimed:
        if not claimed:
            return
        turn = wait_for_turn(job["raw"]) if in_turn else None
        try:
            _finish(job)
        finally:
            if turn is not None:
                end_turn(*turn)


@contextlib.contextmanager
def _locked_recording(raw: str) -> Iterator[bool]:
    """Lock the recording during the `with` block and yield True.

    Yield False if another process has locked the recording, or if the recording does not exist any more.

    From the lock, `run/end.py` sees that a process works on the recording, even if the recorded process is dead.
    """
    try:
        descriptor = files.descriptor(raw, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield os.path.exists(raw)
    finally:
        os.close(descriptor)


def _finish(job: dict[str, Any]) -> None:
    meta = job["meta"]
    try:
        meta |= _make_final(job)
    except OSError as error:
        meta |= {"state": "failed", "reason": f"the trace could not be written: {error}"}
        files.remove(job["trace"] + PART)
        # The disk may be full, and the meta file needs space.
        files.empty(job["raw"])
    # The finisher can't report errors. If the meta file can't be written, the lock file of the capture's name remains.
    with contextlib.suppress(OSError):
        files.write(job["meta_path"], json.dumps(meta, indent=1, default=str).encode() + b"\n")
        files.remove(*job.get("taken", ()))
    # The .part file is removed last, because other processes wait for the capture while this file exists.
    files.remove(job["trace"] + NAMED, job["raw"])


def _make_final(job: dict[str, Any]) -> dict[str, Any]:
    """Make the final file or folder from `job["raw"]`. Return the fields that it adds to the meta file."""
    if os.path.isdir(job["raw"]):
        return _name_folder(job)
    if job["raw"].endswith(NSYS_REPORT + PART):
        fields: dict[str, Any] = take_report(job)
        files.show(job["base"] + NSYS_REPORT)
        return fields
    return _compress(job) if job["trace"].endswith(COMPRESSED) else _rename(job)


def _compress(job: dict[str, Any]) -> dict[str, Any]:
    """Compress a Chrome trace. Return the fields that this adds to the meta file."""
    raw, trace = job["raw"], job["trace"]
    fields: dict[str, Any] = {}
    with (
        open(raw, "rb", opener=files.descriptor) as source,
        open(files.create(trace + PART), "wb") as file,
        _gzip(job)(fileobj=file, mode="wb", compresslevel=LEVEL) as target,
    ):
        size = os.path.getsize(raw)
        if size <= job["max_bytes"]:
            copy(source, target, size)
        else:
            copy_cut(source, target, job["max_bytes"])
            fields = {"state": "truncated", "reason": f"the trace was over {job['max_bytes']} bytes"}
    os.replace(trace + PART, trace)
    if job.get("suspicion"):
        has_device_events = device_events(raw)
        fields |= {"device_events": has_device_events}
        if not has_device_events:
            fields |= {"device_reason": job["suspicion"]}
    return fields | {"bytes": os.path.getsize(trace)}


def _gzip(job: dict[str, Any]) -> Any:
    """Return the class `GzipFile` of zlib-ng if zlib-ng is installed in the folder of autoprof's dependencies.

    Otherwise return Python's `GzipFile`. This process has no site-packages, so `job["packages"]` names the folder. The
    folder becomes the last one in `sys.path`.
    """
    if packages := job.get("packages"):
        sys.path.append(packages)
        # If the installation is broken, the trace must still be written.
        faster, _ = seam.attempt(importlib.import_module, "zlib_ng.gzip_ng")
        return getattr(faster, "GzipFile", gzip.GzipFile)
    return gzip.GzipFile


def _rename(job: dict[str, Any]) -> dict[str, Any]:
    """Rename a recording that viewers can open without changes. Return the fields that this adds to the meta file."""
    # Other processes wait for the capture while this file exists. `_finish` removes the file last.
    os.close(files.create(job["trace"] + NAMED))
    os.replace(job["raw"], job["trace"])
    return {"bytes": os.path.getsize(job["trace"])}


def _name_folder(job: dict[str, Any]) -> dict[str, Any]:
    """Analyse the folder that torch_npu has written in `job["raw"]`, and move the folder to its final path.

    Returns:
        The fields that this adds to the meta file.

    Raises:
        OSError: torch_npu has written no folder, or the folder can't be moved.
    """
    matches = list(filter(None, map(FOLDER.search, sorted(os.listdir(job["raw"])))))
    if not matches:
        raise OSError("torch_npu wrote no folder")
    folder = os.path.join(job["raw"], matches[-1].string)
    is_analysed = job["python"] and analyse(folder, job["python"], job["raw"])
    fields = {} if is_analysed else {"reason": job["meta"]["reason"] or NOT_ANALYSED}
    final = job["base"] + matches[-1].group()
    os.rename(folder, final)
    return fields | {"bytes": files.size(final)}


def is_analysed(folder: str) -> bool:
    """Return True if torch_npu has analysed a folder: the folder contains a timeline or a database for viewers."""
    output = os.path.join(folder, NPU_ANALYSED)
    return os.path.isdir(output) and any(name == NPU_TIMELINE or name.endswith(".db") for name in os.listdir(output))


def analyse(folder: str, python: str, alive: str) -> bool:
    """Let torch_npu analyse a folder in a new process, and wait for the process. Return True if the analysis succeeded.

    Args:
        folder: The folder that torch_npu has written.
        python: Path of the interpreter, which can import torch_npu.
        alive: Path to touch during the analysis, because other processes consider a path that does not change as
            abandoned.
    """
    child = subprocess.Popen(
        [python, "-c", _ANALYSE, folder],
        env=os.environ | {"AUTOPROF": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    waited_s = 0.0
    while waited_s < _ANALYSE_TIMEOUT_S:
        try:
            child.wait(_SIGN_OF_LIFE_S)
            return is_analysed(folder)
        except subprocess.TimeoutExpired:
            waited_s += _SIGN_OF_LIFE_S
            os.utime(alive)
    # The whole process group is killed, because the analysis starts child processes.
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    files.remove(os.path.join(folder, NPU_ANALYSED))
    return False


# The `name` field of an event if the name may need a repair. Such a name contains a quote, a backslash or a character
# outside of ASCII, or it is the name for line 0 of a Python file, which stands for a module.
_NAME = re.compile(rb'"name": "(?:(?![ !#-\[\]-~]*",?\n)|(?=.*\.py\(0\): ))(?<=  "name": ")(.*)"(?=,?\n)')
_MODULE_NAME = re.compile(rb"(?<=\.py\(0\): ).*")
_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat": "gpu_memcpy"', b'"cat": "gpu_memset"')


def device_events(path: str) -> bool:
    """Return True if a Chrome trace of Kineto contains an event with a category of GPU events (torch 2.13)."""
    previous_end = b""
    with open(path, "rb", opener=files.descriptor) as source:
        while piece := source.read(_PIECE):
            if any(text in previous_end + piece for text in _DEVICE_EVENTS):
                return True
            # The text may be split between two pieces.
            previous_end = (previous_end + piece)[-max(map(len, _DEVICE_EVENTS)) :]
    return False


def copy(source: BinaryIO, target: Any, end: int) -> None:
    """Copy a Chrome trace from the current position up to the offset `end`, and repair the names of events.

    Kineto writes names without escapes (torch 2.13). A quote in a name, as in `record_function('say "hi"')`, makes the
    trace invalid JSON.

    Also, names of modules may be wrong. Python frees the code object of a module after the import of the module, but
    torch keeps only a pointer to the name in the code object. So Kineto may write other bytes in place of the name.
    """
    while lines := source.read(min(end - source.tell(), _PIECE)):
        lines += source.readline(end - source.tell())
        target.write(_NAME.sub(_repaired, lines))


def _repaired(match: re.Match[bytes]) -> bytes:
    name = _MODULE_NAME.sub(b"<module>", match[1])
    try:
        json.loads(b'"%b"' % name)
    except ValueError:
        name = json.dumps(name.decode(errors="replace"))[1:-1].encode()
    return b'"name": "%b"' % name


def copy_cut(source: BinaryIO, target: Any, limit: int) -> None:
    """Copy a Chrome trace up to the last complete event within `limit` bytes, then the fields that follow the events.

    Kineto writes an event as `  {...\\n  },`. After the last event, it writes the base of the clock (torch 2.13).

    Raises:
        OSError: The trace does not have this form.
    """
    length = source.seek(0, os.SEEK_END)
    footer_start, _ = _find_last(source, b"\n  ]", length)
    _, event_end = _find_last(source, b"\n  }", limit)
    source.seek(0)
    copy(source, target, event_end)
    source.seek(footer_start)
    copy(source, target, length)


def _find_last(source: BinaryIO, text: bytes, end_offset: int) -> tuple[int, int]:
    """Return the start and the end of the last occurrence of `text` before the offset `end_offset`.

    The search reads the file backwards from `end_offset`.

    Raises:
        OSError: The file does not contain the text before the offset.
    """
    end = end_offset
    while end > 0:
        start = max(0, end - _PIECE)
        source.seek(start)
        index = source.read(end - start).rfind(text)
        if index >= 0:
            return start + index, start + index + len(text)
        # The text may be split between two pieces.
        end = start + len(text) - 1 if start else 0
    raise OSError("the trace does not have torch's format")


# Ending of the unfinished file from which nsys makes a report.
_UNFINISHED = ".qdstrm"
OWN_COMMAND = "the report is where your own nsys command writes it"
_UNCHANGED_S = 2.0
_REPORT_PAUSE_S = 0.2
_LONG_PAUSE_S = 2.0


def take_report(job: dict[str, Any]) -> dict[str, Any]:
    """Wait for the report of a window and move it to its final name. Return the fields that this adds to the meta file.

    Raises:
        OSError: nsys wrote no report, or the report can't be moved.
    """
    with open(job["raw"], encoding="utf-8") as file:
        description = json.load(file)
    if not description["report"]:
        return {"reason": job["meta"]["reason"] or OWN_COMMAND}
    path = _wait_for_report(description, job["raw"], user_waits=not job["python"])
    final_path = job["base"] + NSYS_REPORT
    # Other processes wait for the capture while this file exists. `_finish` removes the file last.
    os.close(files.create(final_path + NAMED))
    _move_report(path, job["raw"])
    os.replace(job["raw"], final_path)
    return {"bytes": os.path.getsize(final_path)}


def _wait_for_report(description: dict[str, Any], raw: str, user_waits: bool) -> str:
    """Wait until nsys has finished the report, and return its path.

    The wait ends at the latest `patience_s` after the end of the recorded process.

    Args:
        description: The description of the report, from `NsysTool.export`.
        raw: Path of the file with the description. The file is touched while the report may come soon, because other
            processes wait only for files that change.
        user_waits: True if the training process waits for the report. Then the wait takes at most `patience_s`.

    Raises:
        OSError: nsys wrote no report in time.
    """
    patience_s = description["patience_s"]
    soon_until = time.monotonic() + patience_s
    deadline = soon_until if user_waits else math.inf
    last_shape, last_change = (0, 0.0), 0.0
    process_ended = False
    while (now := time.monotonic()) < deadline:
        if now < soon_until:
            os.utime(raw)
        path = _complete_report(description)
        shape = (os.path.getsize(path), os.path.getmtime(path)) if path else (0, 0.0)
        if shape != last_shape:
            last_shape, last_change = shape, now
        elif path and now - last_change >= _UNCHANGED_S:
            return path
        if not process_ended and not os.path.exists(f"/proc/{description['pid']}"):
            process_ended, soon_until = True, now + patience_s
            deadline = min(deadline, soon_until)
        time.sleep(_REPORT_PAUSE_S if path or now < soon_until else _LONG_PAUSE_S)
    after = "the end of its process" if process_ended else "the window"
    raise OSError(
        f"nsys wrote no report {description['report']}.{description['number']}{NSYS_REPORT} "
        f"within {patience_s:g} s after {after}"
    )


def _complete_report(description: dict[str, Any]) -> str:
    """Return the path of the report if it exists and nsys has finished it. Otherwise return an empty text."""
    bases = [f"{description['report']}.{description['number']}"]
    if description["number"] == 1:
        bases.append(description["report"])
    for base in bases:
        try:
            if os.path.getsize(base + NSYS_REPORT) and not os.path.exists(base + _UNFINISHED):
                return base + NSYS_REPORT
        except FileNotFoundError:
            continue
    return ""


def _move_report(path: str, target: str) -> None:
    """Move the content of a report to `target`, and leave an empty file at `path`.

    nsys may choose the number of the next report by the existing files. The empty file keeps the number in use.
    """
    try:
        os.rename(path, target)
    except OSError:  # another file system, or the folder of another user
        shutil.copyfile(path, target)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600))


def main() -> None:
    """Finish the capture that stdin describes. The work is done in a process that is not a child of the trainer."""
    # The thread that starts this process blocks all signals, and this process inherits the signal mask.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    received = json.load(sys.stdin)
    # When a worker exits, Ray kills the children of the worker (core worker, kill_child_processes_on_worker_exit). So
    # this process forks and exits while the worker waits for it, and the grandchild does the work.
    if os.fork():
        os._exit(0)
    os.nice(10)
    finish(received, in_turn=not received["raw"].endswith(NSYS_REPORT + PART))  # nsys: only a wait


if __name__ == "__main__":
    main()
