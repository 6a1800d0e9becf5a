"""Turns of the processes that finish captures: few of one user's work on a host at a time. Part of `job.py`, which
loads it: stdlib only.

The locks are files in a folder of the user, where no other user can make or hold one. A process removes its lock and
the folder when its turn ends. So another process may find that either is gone, and makes it again.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from autoprof.base import files
from autoprof.base.originals import fcntl, json, os
from autoprof.capture.finisher import chrome_trace, nsys_report
from autoprof.rundir.file_names import FOLDER, NAMED, NOT_ANALYSED, NPU_ANALYSED, NPU_TIMELINE, NSYS_REPORT, PART

# Cores of the host for each process that finishes a capture.
_CORES_A_TURN = 8
_PAUSE_S = 0.1
_WAITING_SIGN_S = 2.0
# A stopped process keeps its lock.
_PATIENCE_S = 600.0
# Tries to open a folder that other processes remove.
_TRIES = 100


def wait_for_turn(raw: str) -> Callable[[], None]:
    """Wait while as many processes of this user finish captures on this host as may at once, ten minutes at most.

    The run continues meanwhile and needs the host's cores. There is no wait if no folder for the locks can be made.

    Args:
        raw: Is touched, since a file that does not change for long counts as left behind.

    Returns:
        The function that ends the turn.
    """
    places = max(1, (os.cpu_count() or 1) // _CORES_A_TURN)
    deadline = time.monotonic() + _PATIENCE_S
    touched = 0.0
    while (now := time.monotonic()) < deadline:
        try:
            for place in range(places):
                if (end := _taken(f"autoprof-finish{place}.lock")) is not None:
                    return end
        except OSError:  # no folder, or a file system without locks
            break
        if now - touched > _WAITING_SIGN_S:
            touched = now
            with contextlib.suppress(OSError):
                os.utime(raw)
        time.sleep(_PAUSE_S)
    return _nothing


def _taken(name: str) -> Callable[[], None] | None:
    """Take a lock. Return the function that gives it back, or None if another process has it.

    Raises:
        OSError: There are no locks here.
    """
    folder, made = _folder()
    try:
        lock = _locked(name, folder)
    except FileNotFoundError:  # another process has just removed the folder
        lock = None
    except OSError:
        os.close(folder)
        raise
    if lock is None:
        os.close(folder)
        return None

    def give_back() -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        os.close(lock)
        os.close(folder)
        with contextlib.suppress(OSError):  # others have locks in it
            if made:
                os.rmdir(made)

    return give_back


def _locked(name: str, folder: int) -> int | None:
    """Return the descriptor of a lock that this process has taken, or None if another process has or had it."""
    lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that had it may have removed it, and a third one may have made a new file.
        if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(lock)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _folder() -> tuple[int, str]:
    """Open the folder of the locks: the user's own one for such files, else one in the temporary folder.

    Returns:
        Its descriptor, and its path if it is to be removed when it is empty.

    Raises:
        OSError: No folder is private to this user.
    """
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(own):
        with contextlib.suppress(OSError):
            return _private(own), ""
    path = os.path.join(tempfile.gettempdir(), f"autoprof-{os.getuid()}")
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed it
            return _private(path), path
    raise FileNotFoundError(path)


def _private(path: str) -> int:
    """Open a folder of this user.

    Raises:
        OSError: It belongs to another user, others can write in it, or a link is in its place.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(folder)
    if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return folder
    os.close(folder)
    raise PermissionError(path)


def _nothing() -> None:
    """Do nothing: there is no lock to give back."""


COMPRESSED = ".gz"
# torch's own export compresses at level 9, in the training thread: bench/stop.py compares the two.
LEVEL = 4
_PIECE = 1 << 20
_ANALYSE = "import sys; from torch_npu.profiler.profiler import analyse; analyse(sys.argv[1], max_process_number=1)"
_ANALYSE_TIMEOUT_S = 3600.0
_SIGN_OF_LIFE_S = 2.0


def finish(job: dict[str, Any], in_turn: bool = False) -> None:
    """Make a trace with its final name and `job["meta_path"]` from `job["raw"]`, which is removed.

    The meta file is written last. It says `complete` or `truncated` of a trace that has its final name, and `failed` if
    the trace can't be written. If another process has claimed the recording, this one does nothing.

    Args:
        job: The capture.
        in_turn: True if other processes may finish theirs first.
    """
    files.open_to_group(job.get("group", False))
    with _claimed(job["raw"]) as mine:
        if not mine:
            return
        end = wait_for_turn(job["raw"]) if in_turn else None
        try:
            _finish(job)
        finally:
            if end is not None:
                end()


@contextlib.contextmanager
def _claimed(raw: str) -> Iterator[bool]:
    """Lock the recording and yield True; yield False if another process has it: its process may not know that.

    The lock also says that a process works on it, whatever became of the one that made it (`run/end.py`).
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
    # Nobody is there to be told where the meta file can't be written: the capture's name stays taken then.
    with contextlib.suppress(OSError):
        files.write(job["meta_path"], json.dumps(meta, indent=1, default=str).encode() + b"\n")
        files.remove(*job.get("taken", ()))
    # Last: whoever waits for the capture waits while there is a .part of it.
    files.remove(job["trace"] + NAMED, job["raw"])


def _make(job: dict[str, Any]) -> dict[str, Any]:
    """Make the file of the final name from `job["raw"]`; return its entries of the meta file."""
    if os.path.isdir(job["raw"]):
        return _name_folder(job)
    if job["raw"].endswith(NSYS_REPORT + PART):
        said: dict[str, Any] = nsys_report.take(job)
        files.show(job["base"] + NSYS_REPORT)
        return said
    return _compress(job) if job["trace"].endswith(COMPRESSED) else _rename(job)


def _compress(job: dict[str, Any]) -> dict[str, Any]:
    """Compress a Chrome trace; return its entries of the meta file."""
    raw, trace, chrome = job["raw"], job["trace"], chrome_trace
    said: dict[str, Any] = {}
    with (
        open(raw, "rb", opener=files.descriptor) as source,
        open(files.create(trace + PART), "wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=LEVEL) as compressed,
    ):
        target = chrome.RightNames(compressed)
        if os.path.getsize(raw) <= job["max_bytes"]:
            shutil.copyfileobj(source, target, _PIECE)
        else:
            chrome.copy_cut(source, target, job["max_bytes"])
            said = {"state": "truncated", "reason": f"the trace was over {job['max_bytes']} bytes"}
        target.end()
    os.replace(trace + PART, trace)
    if job.get("suspicion"):
        found = chrome.device_events(raw)
        said |= {"device_events": found} if found else {"device_events": found, "device_reason": job["suspicion"]}
    return said | {"bytes": os.path.getsize(trace)}


def _rename(job: dict[str, Any]) -> dict[str, Any]:
    """Give a file that viewers take as it is its name; return its entries of the meta file."""
    # There is a .part until all is there.
    os.close(files.create(job["trace"] + NAMED))
    os.replace(job["raw"], job["trace"])
    return {"bytes": os.path.getsize(job["trace"])}


def _name_folder(job: dict[str, Any]) -> dict[str, Any]:
    """Have torch_npu analyse its folder, and move it out of `job["raw"]`; returns what the meta file says of it."""
    folders = [name for name in sorted(os.listdir(job["raw"])) if FOLDER.search(name)]
    if not folders:
        raise OSError("there is no folder of torch_npu's")
    folder = os.path.join(job["raw"], folders[-1])
    done = job["python"] and analyse(folder, job["python"], job["raw"])
    said = {} if done else {"reason": job["meta"]["reason"] or NOT_ANALYSED}
    ending = FOLDER.search(folder)
    final = job["base"] + (ending.group() if ending else "")
    os.rename(folder, final)
    return said | {"bytes": files.size(final)}


def analysed(folder: str) -> bool:
    """Return whether torch_npu has made files for viewers of a folder: a timeline, or a database."""
    output = os.path.join(folder, NPU_ANALYSED)
    return os.path.isdir(output) and any(name == NPU_TIMELINE or name.endswith(".db") for name in os.listdir(output))


def analyse(folder: str, python: str, alive: str) -> bool:
    """Have a Python with torch_npu analyse a folder; return whether it did.

    Args:
        folder: The folder of torch_npu's.
        python: The interpreter.
        alive: What is touched meanwhile: what is not for long is taken for left behind.
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
    # It has processes of its own.
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    files.remove(os.path.join(folder, NPU_ANALYSED))
    return False


def main() -> None:
    """Finish the capture that stdin describes, in a process that is no child of the trainer."""
    # The thread that started this process blocks all signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    received = json.load(sys.stdin)
    # Ray kills the children of a worker that exits (core worker, kill_child_processes_on_worker_exit), so this one
    # stops being a child before the worker goes on.
    if os.fork():
        os._exit(0)
    os.nice(10)
    finish(received, in_turn=not received["raw"].endswith(NSYS_REPORT + PART))  # nsys does the work
