"""Finishes a capture in a process of its own: compresses a Chrome trace, has torch_npu analyse its folder, or waits for
nsys, gives it its name, and writes its meta file.

Run as a script with one JSON job on stdin, isolated and without site, so that it starts in milliseconds. Stdlib only.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

PART = ".part"
NAMED = f".named{PART}"
COMPRESSED = ".gz"
REPORT = ".nsys-rep"
# torch's own export compresses at level 9, in the training thread: bench/stop.py compares the two.
LEVEL = 4
# How a folder of torch_npu's ends (profiler/_profiler_path_creator.py).
FOLDER = re.compile(r"_\d+_\d+_ascend_pt$")
# What torch_npu's analysis makes in it, the first thing and the one that Perfetto opens.
ANALYSED = "ASCEND_PROFILER_OUTPUT"
TIMELINE = "trace_view.json"
NOT_ANALYSED = "torch_npu has not analysed it"
_PIECE = 1 << 20
_ANALYSE = "import sys; from torch_npu.profiler.profiler import analyse; analyse(sys.argv[1], max_process_number=1)"
_ANALYSE_TIMEOUT_S = 3600.0
_SIGN_OF_LIFE_S = 2.0
# One process at a time for so many cores.
_CORES_A_TURN = 8
_PAUSE_S = 0.1


def _beside(name: str) -> Any:
    """A module of the folder that this one is in, which is on no path when this is a script."""
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_files = _beside("_files")


def wait_for_turn(raw: str) -> None:
    """Wait while as many processes of this user's finish captures on this host as may at once.

    The run goes on meanwhile and needs the host's cores. `raw` is touched, since what is not for long is taken for left
    behind.
    """
    places = max(1, (os.cpu_count() or 1) // _CORES_A_TURN)
    names = [f"autoprof-{os.getuid()}-finish{place}.lock" for place in range(places)]
    touched = 0.0
    while True:
        for name in names:
            path = os.path.join(tempfile.gettempdir(), name)
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError:
                return
            try:
                # Held until this process ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                os.close(lock)
            except OSError:
                return
        if time.monotonic() - touched > _SIGN_OF_LIFE_S:
            touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(raw)
        time.sleep(_PAUSE_S)


def finish(job: dict[str, Any]) -> None:
    """Make a trace with its final name and `job["meta_path"]` from `job["raw"]`, which is removed.

    The meta file comes after it and says `complete` or `truncated` of a trace that has its final name; where the trace
    can't be written it says `failed`. Nothing is done where another process is at it or was.
    """
    _files.open_to_group(job.get("group", False))
    with _claimed(job["raw"]) as mine:
        if mine:
            _finish(job)


@contextlib.contextmanager
def _claimed(raw: str) -> Iterator[bool]:
    """Whether what was recorded is this process's to finish: whoever hands it over may not know that it got there."""
    try:
        descriptor = os.open(raw, os.O_RDONLY)
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
        _files.remove(job["trace"] + PART)
        # The disk may be full, and the meta file needs room.
        _files.empty(job["raw"])
    # Nobody is there to be told where the meta file can't be written: the capture's name stays taken then.
    with contextlib.suppress(OSError):
        _files.write(job["meta_path"], json.dumps(meta, indent=1, default=str).encode() + b"\n")
        _files.remove(*job.get("taken", ()))
    # Last: whoever waits for the capture waits while there is a .part of it.
    _files.remove(job["trace"] + NAMED, job["raw"])


def size(path: str) -> int:
    """The bytes of a file, or of all files in a folder."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(path) for name in names)


def _make(job: dict[str, Any]) -> dict[str, Any]:
    """Make of `job["raw"]` what has the final name; returns what the meta file says of it."""
    if os.path.isdir(job["raw"]):
        return _name_folder(job)
    if job["raw"].endswith(REPORT + PART):
        said: dict[str, Any] = _beside("_reports").take(job)
        _files.show(job["base"] + REPORT)
        return said
    return _compress(job) if job["trace"].endswith(COMPRESSED) else _rename(job)


def _compress(job: dict[str, Any]) -> dict[str, Any]:
    """Compress a Chrome trace; returns what the meta file says of it."""
    raw, trace, chrome = job["raw"], job["trace"], _beside("_chrome")
    said: dict[str, Any] = {}
    with (
        open(raw, "rb") as source,
        open(_files.create(trace + PART), "wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=LEVEL) as target,
    ):
        if os.path.getsize(raw) <= job["max_bytes"]:
            shutil.copyfileobj(source, target, _PIECE)
        else:
            chrome.copy_cut(source, target, job["max_bytes"])
            said = {"state": "truncated", "reason": f"the trace was over {job['max_bytes']} bytes"}
    os.replace(trace + PART, trace)
    if job.get("suspicion"):
        found = chrome.device_events(raw)
        said |= {"device_events": found} if found else {"device_events": found, "device_reason": job["suspicion"]}
    return said | {"bytes": os.path.getsize(trace)}


def _rename(job: dict[str, Any]) -> dict[str, Any]:
    """Give a file that viewers take as it is its name; returns what the meta file says of it."""
    # There is a .part until all is there.
    os.close(_files.create(job["trace"] + NAMED))
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
    return said | {"bytes": size(final)}


def analysed(folder: str) -> bool:
    """Whether torch_npu has made of a folder of its what viewers open: a timeline, or a database."""
    output = os.path.join(folder, ANALYSED)
    return os.path.isdir(output) and any(name == TIMELINE or name.endswith(".db") for name in os.listdir(output))


def analyse(folder: str, python: str, alive: str) -> bool:
    """Have a Python with torch_npu analyse a folder; returns whether it did.

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
    _files.remove(os.path.join(folder, ANALYSED))
    return False


if __name__ == "__main__":
    received = json.load(sys.stdin)
    # Ray kills the children of a worker that exits (core worker, kill_child_processes_on_worker_exit), so this one
    # stops being a child before the worker goes on.
    if os.fork():
        os._exit(0)
    os.nice(10)
    if not received["raw"].endswith(REPORT + PART):  # nsys does the work
        wait_for_turn(received["raw"])
    finish(received)
