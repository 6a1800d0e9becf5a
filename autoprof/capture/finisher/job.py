"""Work of the process that finishes a capture: wait for a turn, compress the trace, write the meta file.

Only a few finishers of a user work on a host at a time, each with a lock on a file in the temporary folder. Other users
can't open these files. A process removes its file when its turn ends. Standard library only, and zlib-ng if it is
installed: it compresses in half the time.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from autoprof.base import files
from autoprof.base.originals import fcntl, json, os
from autoprof.capture.finisher import chrome_trace, nsys_report
from autoprof.rundir.file_names import FOLDER, NAMED, NOT_ANALYSED, NPU_ANALYSED, NPU_TIMELINE, NSYS_REPORT, PART

# One finisher may work for every 8 cores of the host.
_CORES_PER_FINISHER = 8
_PAUSE_S = 0.1
_TOUCH_S = 2.0
# Maximum wait for a turn. A stopped process keeps its lock.
_PATIENCE_S = 600.0


def wait_for_turn(raw: str) -> tuple[int, str] | None:
    """Wait, at most ten minutes, while the maximum number of this user's finishers works on this host.

    The run continues meanwhile and needs the host's cores. There is no wait if the locks can't be made.

    Args:
        raw: The recording. It is touched, since other processes take a file that does not change for abandoned.

    Returns:
        The arguments of `end_turn`; None without a lock.
    """
    turns = max(1, (os.cpu_count() or 1) // _CORES_PER_FINISHER)
    deadline = time.monotonic() + _PATIENCE_S
    touched = 0.0
    while (now := time.monotonic()) < deadline:
        try:
            for turn in range(turns):
                path = os.path.join(tempfile.gettempdir(), f"autoprof-{os.getuid()}-finish{turn}.lock")
                if (lock := _locked(path)) is not None:
                    return lock, path
        except OSError:  # no temporary folder, a file of another user, or a file system without locks
            break
        if now - touched > _TOUCH_S:
            touched = now
            with contextlib.suppress(OSError):
                os.utime(raw)
        time.sleep(_PAUSE_S)
    return None


def end_turn(lock: int, path: str) -> None:
    """Remove the file of a lock, and release the lock."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    os.close(lock)


def _locked(path: str) -> int | None:
    """Return the descriptor of a file that is now locked, or None if another process has it or has just removed it.

    Raises:
        OSError: No folder, a file that other users can open, or a file system without locks.
    """
    lock = files.descriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(lock)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(path)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had it may have removed it, and a third one may have made a new file.
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
# Level of gzip; zlib-ng makes smaller files with it. torch's own export uses level 9, in the training thread;
# bench/stop.py compares the two.
LEVEL = 4
_PIECE = 1 << 20
_ANALYSE = "import sys; from torch_npu.profiler.profiler import analyse; analyse(sys.argv[1], max_process_number=1)"
_ANALYSE_TIMEOUT_S = 3600.0
_SIGN_OF_LIFE_S = 2.0


def finish(job: dict[str, Any], in_turn: bool = False) -> None:
    """Make the final trace and the meta file from the recording, and remove the recording.

    The meta file is written last. Its state is `complete` or `truncated` if the trace has its final name, and `failed`
    if the trace can't be written. If another process has claimed the recording, this one does nothing.

    Args:
        job: The capture, as `Artifacts` describes it.
        in_turn: True to wait for a turn first.
    """
    files.open_to_group(job.get("group", False))
    with _claimed(job["raw"]) as claimed:
        if not claimed:
            return
        turn = wait_for_turn(job["raw"]) if in_turn else None
        try:
            _finish(job)
        finally:
            if turn is not None:
                end_turn(*turn)


@contextlib.contextmanager
def _claimed(raw: str) -> Iterator[bool]:
    """Lock the recording and yield True, or yield False if another process has locked it.

    The lock also shows that a process works on the recording, even if the process that made it is dead (`run/end.py`).
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
        meta |= _make(job)
    except OSError as error:
        meta |= {"state": "failed", "reason": f"the trace could not be written: {error}"}
        files.remove(job["trace"] + PART)
        # The disk may be full, and the meta file needs room.
        files.empty(job["raw"])
    # The finisher can't report an error. If the meta file can't be written, the lock file of the name remains.
    with contextlib.suppress(OSError):
        files.write(job["meta_path"], json.dumps(meta, indent=1, default=str).encode() + b"\n")
        files.remove(*job.get("taken", ()))
    # Last, because processes wait for the capture while its .part file exists.
    files.remove(job["trace"] + NAMED, job["raw"])


def _make(job: dict[str, Any]) -> dict[str, Any]:
    """Make the final file from `job["raw"]`. Return its fields of the meta file."""
    if os.path.isdir(job["raw"]):
        return _name_folder(job)
    if job["raw"].endswith(NSYS_REPORT + PART):
        fields: dict[str, Any] = nsys_report.take(job)
        files.show(job["base"] + NSYS_REPORT)
        return fields
    return _compress(job) if job["trace"].endswith(COMPRESSED) else _rename(job)


def _compress(job: dict[str, Any]) -> dict[str, Any]:
    """Compress a Chrome trace. Return its fields of the meta file."""
    raw, trace = job["raw"], job["trace"]
    fields: dict[str, Any] = {}
    with (
        open(raw, "rb", opener=files.descriptor) as source,
        open(files.create(trace + PART), "wb") as file,
        _gzip(job)(fileobj=file, mode="wb", compresslevel=LEVEL) as target,
    ):
        size = os.path.getsize(raw)
        if size <= job["max_bytes"]:
            chrome_trace.copy(source, target, size)
        else:
            chrome_trace.copy_cut(source, target, job["max_bytes"])
            fields = {"state": "truncated", "reason": f"the trace was over {job['max_bytes']} bytes"}
    os.replace(trace + PART, trace)
    if job.get("suspicion"):
        on_device = chrome_trace.device_events(raw)
        fields |= {"device_events": on_device}
        if not on_device:
            fields |= {"device_reason": job["suspicion"]}
    return fields | {"bytes": os.path.getsize(trace)}


def _gzip(job: dict[str, Any]) -> Any:
    """Return the class `GzipFile` of zlib-ng if it is installed beside autoprof's dependencies, else of Python.

    This process has no site-packages, so the folder of the packages comes with the job. It is the last in `sys.path`.
    """
    if packages := job.get("packages"):
        sys.path.append(packages)
        with contextlib.suppress(Exception):  # a broken installation must not cost the trace
            return importlib.import_module("zlib_ng.gzip_ng").GzipFile
    return gzip.GzipFile


def _rename(job: dict[str, Any]) -> dict[str, Any]:
    """Rename a file that viewers can open without changes. Return its fields of the meta file."""
    # A .part file exists until everything is in place.
    os.close(files.create(job["trace"] + NAMED))
    os.replace(job["raw"], job["trace"])
    return {"bytes": os.path.getsize(job["trace"])}


def _name_folder(job: dict[str, Any]) -> dict[str, Any]:
    """Analyse the folder of torch_npu and move it out of `job["raw"]`. Return its fields of the meta file."""
    folders = [name for name in sorted(os.listdir(job["raw"])) if FOLDER.search(name)]
    if not folders:
        raise OSError("torch_npu wrote no folder")
    folder = os.path.join(job["raw"], folders[-1])
    done = job["python"] and analyse(folder, job["python"], job["raw"])
    fields = {} if done else {"reason": job["meta"]["reason"] or NOT_ANALYSED}
    ending = FOLDER.search(folder)
    final = job["base"] + (ending.group() if ending else "")
    os.rename(folder, final)
    return fields | {"bytes": files.size(final)}


def analysed(folder: str) -> bool:
    """Return True if torch_npu has analysed a folder: it has a timeline or a database for viewers."""
    output = os.path.join(folder, NPU_ANALYSED)
    return os.path.isdir(output) and any(name == NPU_TIMELINE or name.endswith(".db") for name in os.listdir(output))


def analyse(folder: str, python: str, alive: str) -> bool:
    """Analyse a folder in a process with torch_npu. Return True if this succeeded.

    Args:
        folder: The folder of torch_npu.
        python: The interpreter.
        alive: A path to touch meanwhile, since other processes take a path that does not change for abandoned.
    """
    child = subprocess.Popen(
        [python, "-c", _ANALYSE, folder],
        env=os.environ | {"AUTOPROF": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    waited = 0.0
    while waited < _ANALYSE_TIMEOUT_S:
        try:
            child.wait(_SIGN_OF_LIFE_S)
            return analysed(folder)
        except subprocess.TimeoutExpired:
            waited += _SIGN_OF_LIFE_S
            os.utime(alive)
    # The whole group, because it has child processes.
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    files.remove(os.path.join(folder, NPU_ANALYSED))
    return False


def main() -> None:
    """Finish the capture that stdin describes, in a process that is not a child of the trainer."""
    # This process inherits the signal mask of a thread that blocks all signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    received = json.load(sys.stdin)
    # Ray kills the children of a worker that exits (core worker, kill_child_processes_on_worker_exit). So this process
    # forks and exits while the worker waits for it, and the grandchild does the work.
    if os.fork():
        os._exit(0)
    os.nice(10)
    finish(received, in_turn=not received["raw"].endswith(NSYS_REPORT + PART))  # for nsys, it only waits
