"""The work of `autoprof stacks` and `autoprof trigger` on one node of a run.

`ask` collects the stacks of the node's processes, which the processes write themselves or py-spy reads. A process in
which a thread holds the interpreter's lock never answers. py-spy, which is optional (`autoprof-rl[stacks]`), reads the
memory of such a process from outside. py-spy stops the process only for native stacks. `look` reads the requests and
the folders of steps, and `write` writes a request.

In a Ray cluster, this module runs on all nodes of the run. A node may have no autoprof, or another release of autoprof.
Therefore `cluster.shipped` sends the source text of this module, and the module needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from typing import Any

# The same values as in `rundir/records.py`, and as in `rundir/file_names.py`.
STACKS, WHY, MAX_STACKS_BYTES = "stacks", "why.json", 1 << 19
RUN, STEP, META, PART, MERGING = "run.json", "global_step_", ".meta.json", ".part", ".merge-"
LOOP = ".loop"
# Maximum size of a JSON file that `look` reads, in bytes.
_MAX_JSON_BYTES = 1 << 24
# Maximum size of all files in the answer of a node together, in bytes.
_MAX_ANSWER_BYTES = 48 << 20
# Maximum number of processes that py-spy reads at the same time.
_MAX_SPIES = 4
# Maximum number of multiprocessing's child processes that are reported.
_MAX_CHILDREN = 64
# Number of bytes to read at the beginning of a journal. They contain the journal lines of hooks.
_HEAD_BYTES = 64 << 10
# Values of `py_spy` in the answer: py-spy is not installed, or has no permission to read other processes.
PY_SPY_MISSING, PY_SPY_PERMISSION = "missing", "permission"
_PY_SPY_TIMEOUT_S = 30.0
_PY_SPY_ATTEMPTS = 3

# A process of the run, with the keys `host`, `pid`, `process`, `state`, `reason` and `spans`. `Lacking` in
# `documents.py` describes them.
Process = dict[str, Any]

_HOST = re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename)[:60] or "localhost"


def ask(directory: str, name: str, why: bytes, wait_s: float, native: bool, others: bool) -> dict[str, Any]:
    """Ask the processes of this node for their stacks. Return a dict with the fields of `Answer` in `stacks.py`.

    Args:
        directory: The run directory.
        name: The name of the folder for the answers.
        why: The content of the file `why.json` in this folder.
        wait_s: Seconds to wait for the processes.
        native: True to include C functions.
        others: True to wait also for the processes of other hosts. They answer if their hosts share the disk.
    """
    folder = os.path.join(directory, STACKS, name)
    answer = {"host": _HOST, "folder": folder, "files": {}, "absent": [], "py_spy": "", "problem": ""}
    try:
        make_question(folder, why)
        expected = _processes(directory)
    except OSError as error:
        return answer | {"problem": str(error)}
    awaited_processes = [
        process
        for process in expected.values()
        if (process["state"] == "running" and not process["reason"]) or (others and process["state"] == "elsewhere")
    ]
    running = {key: process for key, process in expected.items() if process["state"] == "running"}
    from concurrent.futures import ThreadPoolExecutor  # imported here, because `look` and `write` do not need it

    py_spy_path = shutil.which("py-spy", path=f"{os.environ.get('PATH', '')}:{os.path.dirname(sys.executable)}")
    with ThreadPoolExecutor(_MAX_SPIES) as pool:
        spy_results = {
            key: pool.submit(_run_py_spy, py_spy_path, process["pid"], native)
            for key, process in running.items()
            if py_spy_path
        }
        wait_for_answers(folder, awaited_processes, wait_s)
    problems = []
    for key, future in spy_results.items():
        threads, problem, unix_ns = future.result()
        if not native and os.path.exists(_file_of(folder, running[key])):
            continue
        if threads:
            try:
                _add_threads(folder, running[key], threads, unix_ns)
            except OSError as error:
                answer["problem"] = str(error)
        elif problem:
            problems.append(problem)
    answer["py_spy"] = problems[0] if problems else "" if py_spy_path else PY_SPY_MISSING
    return answer | _answers(folder, expected, wait_s)


def make_question(folder: str, why: bytes) -> None:
    """Make the folder that asks the processes for their stacks.

    The folder appears with `why.json` in it. Another node that shares the disk may have made the folder already.
    """
    parent, name = os.path.split(folder)
    _make_folder(parent)
    hidden = os.path.join(parent, f".{name}.{os.urandom(4).hex()}")
    os.mkdir(hidden, 0o700)
    try:
        _hand_over_folder(hidden)
        _write_complete(os.path.join(hidden, WHY), why)
        if not os.path.isdir(folder):
            os.rename(hidden, folder)
    except OSError:
        if not os.path.isdir(folder):
            raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _process(host: str, pid: int, process: str, state: str, reason: str) -> Process:
    return {"host": host, "pid": pid, "process": process, "state": state, "reason": reason, "spans": []}


def _processes(directory: str) -> dict[str, Process]:
    """Return the processes of the run that may be running, or that died with open spans, by `<host>-<pid>`."""
    by_key: dict[str, Process] = {}
    # In the order of time: if two processes had the same pid, the later process replaces the earlier process.
    for file in sorted(os.scandir(os.path.join(directory, "journal")), key=lambda entry: entry.stat().st_mtime):
        first_lines = _read_start(file.path, _HEAD_BYTES) if file.name.endswith(".jsonl") else b""
        process_line = _parsed(first_lines.partition(b"\n")[0])
        host, pid = str(process_line.get("host", "")), process_line.get("pid")
        if not host or not isinstance(pid, int):
            continue
        # The system uses pids again, but the next process with the pid has another start time.
        is_running = host == _HOST and _is_running(pid, process_line.get("ticks", 0))
        state = "elsewhere" if host != _HOST else "running" if is_running else "gone"
        reason = "" if b'"called":true' in first_lines else "none of autoprof's hooks was called in it"
        by_key[f"{host}-{pid}"] = _process(host, pid, str(process_line.get("process", "")), state, reason)
    _add_spans(directory, by_key)
    return _children(by_key) | {
        key: process
        for key, process in by_key.items()
        if process["state"] in ("running", "elsewhere") or (process["state"] == "gone" and process["spans"])
    }


def _add_spans(directory: str, by_key: dict[str, Process]) -> None:
    """Add the state and the open spans of each process, if this node has an autoprof that can read the journals."""
    try:
        import msgspec

        from autoprof.rundir import processes

        for state in processes.read(directory):
            unlisted = _process(state.host, state.pid, "", state.state, "")
            process = by_key.setdefault(f"{state.host}-{state.pid}", unlisted)
            process |= {"state": state.state, "spans": msgspec.to_builtins(state.spans)}
            process["process"] = state.process or process["process"]
    except Exception:  # no autoprof on this node, or a version without this module
        pass


def _children(by_key: dict[str, Process]) -> dict[str, Process]:
    """Return the children that are workers of pools and data loaders, by `<host>-<pid>`.

    These processes run without autoprof, but work for the run.
    """
    parents = {process["pid"]: _command(process["pid"]) for process in by_key.values() if process["state"] == "running"}
    workers: dict[str, Process] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        fields = _stat(pid)
        parent = int(fields[1]) if fields else 0
        if parent not in parents or f"{_HOST}-{pid}" in by_key or len(workers) == _MAX_CHILDREN:
            continue
        command = _command(pid)
        # A forked worker has its parent's command line; a spawned one names multiprocessing.spawn.
        if command == parents[parent] or b"multiprocessing.spawn" in command:
            title = command.replace(b"\0", b" ").decode(errors="replace")[:200]
            reason = f"it is a child of process {parent} and runs without autoprof"
            workers[f"{_HOST}-{pid}"] = _process(_HOST, pid, title, "running", reason)
    return workers


def _command(pid: int) -> bytes:
    return _read_start(f"/proc/{pid}/cmdline", 4096)


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat, beginning with the state. Return an empty list for an ended process."""
    fields = _read_start(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()
    return fields if len(fields) > 19 and fields[0] not in (b"Z", b"X") else []


def _start_ticks(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _is_running(pid: int, ticks: int) -> bool:
    """Return True if the process that started at the time `ticks` is running. 0 stands for any time."""
    current = _start_ticks(pid)
    return current is not None and ticks in (0, current)


def _run_py_spy(program: str, pid: int, native: bool) -> tuple[list[dict[str, Any]], str, int]:
    """Return the threads of a process that py-spy read, the reason if py-spy could not read them, and the time.

    The time is in nanoseconds since the epoch.
    """
    threads, problem = _dump_stacks(program, pid, native)
    return threads, problem, time.time_ns()


def _dump_stacks(program: str, pid: int, native: bool) -> tuple[list[dict[str, Any]], str]:
    # With --native, py-spy stops the process for some milliseconds.
    options = ["--native", "--nonblocking"] if native else ["--nonblocking"]
    problem = ""
    for attempt in range(_PY_SPY_ATTEMPTS):
        # Retry without --native: py-spy can't stop a process that is stopped already.
        option = options[min(attempt, len(options) - 1)]
        command = [program, "dump", "--json", option, "--pid", str(pid)]
        try:
            result = subprocess.run(command, capture_output=True, timeout=_PY_SPY_TIMEOUT_S, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return [], f"{type(error).__name__}"
        try:
            threads = json.loads(result.stdout)
        except ValueError:
            errors = result.stderr.decode(errors="replace").strip()
            if "ermission" in errors or "not permitted" in errors:
                return [], PY_SPY_PERMISSION
            # The lines after the first are py-spy's own backtrace.
            problem = errors.splitlines()[0][:200] if errors else f"exit status {result.returncode}"
            # Retry: the memory of a process that keeps running may look damaged.
            continue
        return [converted for thread in threads if (converted := _converted(thread))][:256], ""
    return [], problem


def _converted(thread: dict[str, Any]) -> dict[str, Any]:
    """Convert a thread that py-spy read to the fields of `Thread` in `records.py`.

    Return an empty dict for autoprof's own thread.
    """
    frames = []
    for index, frame in enumerate(thread["frames"]):
        path, function = str(frame["filename"])[:300], str(frame["name"])[:300]
        if function == "_watch" and path.endswith("/autoprof/run/watcher.py"):
            return {}
        if index and path.endswith(("/autoprof/hooks/dispatch.py", "/autoprof/hooks/wrapper.py")):
            continue
        frames.append({"function": function, "file": path, "line": frame["line"]})
    if len(frames) > 140:
        cut = {"function": f"... {len(frames) - 140} more functions ...", "file": "", "line": 0}
        frames = [*frames[:120], cut, *frames[-20:]]
    return {
        "name": str(thread.get("thread_name") or "")[:300],
        "ident": thread["thread_id"],
        "native": thread.get("os_thread_id") or 0,
        "main": thread.get("thread_name") == "MainThread",
        "frames": frames[::-1],
    }


def read_threads(pid: int) -> list[dict[str, Any]]:
    """Return the threads of a process as py-spy sees them. Empty if there is no py-spy, or if it may not read them."""
    program = shutil.which("py-spy", path=f"{os.environ.get('PATH', '')}:{os.path.dirname(sys.executable)}")
    return _dump_stacks(program, pid, native=False)[0] if program else []


def read_silent(folder: str, silent: list[Process]) -> None:
    """Read the stacks of processes that did not answer with py-spy, and write them into a folder of `hangs/`.

    Do nothing if there is no py-spy, or if it may not read the processes.
    """
    for process in silent[:_MAX_SPIES]:
        threads = read_threads(process["pid"])
        with contextlib.suppress(OSError):
            if threads and not os.path.exists(_file_of(folder, process)):
                _add_threads(folder, process, threads, time.time_ns())


def wait_for_answers(folder: str, processes: list[Process], wait_s: float) -> None:
    """Wait until all `processes` have answered or ended, but at most `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        processes = [
            process
            for process in processes
            if not os.path.exists(_file_of(folder, process))
            and (process["host"] != _HOST or _start_ticks(process["pid"]) is not None)
        ]
        if not processes:
            return
        time.sleep(0.1)


def _add_threads(folder: str, process: Process, threads: list[dict[str, Any]], unix_ns: int) -> None:
    """Write the threads that py-spy read at `unix_ns` into the file of the process.

    If the process answered, its own answer stays in the file, except that the threads are replaced.
    """
    own_answer = _parsed(_read_start(_file_of(folder, process), MAX_STACKS_BYTES))
    spans_by_thread = {thread.get("ident"): thread.get("spans", []) for thread in own_answer.get("threads", [])}
    content = {key: process[key] for key in ("host", "pid", "process", "spans")} | {"unix_ns": unix_ns}
    content |= own_answer | {"by": "itself, py-spy" if own_answer else process.get("by", "py-spy")}
    for limit in (256, 64, 16, 4):
        content["threads"] = [
            thread | ({"spans": spans_by_thread[thread["ident"]]} if spans_by_thread.get(thread["ident"]) else {})
            for thread in sorted(threads, key=lambda thread: not thread["main"])[:limit]
        ]
        text = json.dumps(content).encode()
        if len(text) < MAX_STACKS_BYTES:
            break
        content["left_out"] = [*own_answer.get("left_out", []), f"{len(threads) - limit} threads"]
    _write_complete(_file_of(folder, process), text)


def _answers(folder: str, expected: dict[str, Process], wait_s: float) -> dict[str, Any]:
    """Return a dict with `files`, the content of each process's file by name, and `absent`.

    `absent` lists the processes without a file, each with the reason.
    """
    contents: dict[str, bytes] = {}
    absent = []
    bytes_left = _MAX_ANSWER_BYTES
    for key, process in expected.items():
        content = _read_start(_file_of(folder, process), MAX_STACKS_BYTES) if bytes_left > 0 else b""
        bytes_left -= len(content)
        if content:
            contents[f"{key}.json"] = content
            continue
        if process["state"] == "running":
            if _start_ticks(process["pid"]) is None:
                process |= {"state": "gone", "reason": ""}
            elif not process["reason"]:
                process["reason"] = f"it did not answer within {wait_s:g} s"
        if bytes_left <= 0:
            process["reason"] = "the answers are larger than this command shows; its file is in the run"
        absent.append(process)
    return {"files": contents, "absent": absent}


def look(directory: str, steps: list[int], pid: int = 0, ticks: int = 0) -> dict[str, Any]:
    """Return a description of the run directory on this node, with the folders of `steps`. `View` has the same fields.

    `pid` and `ticks` are the id and the start time of the process that counts the steps, if it is on this node.
    """
    control = os.path.join(directory, "control")
    names = _names_in(control)
    folders = {step: _step_folder(directory, step) for step in steps}
    return {
        "host": os.uname().nodename,
        "info": _document(directory, RUN),
        "alive": _is_running(pid, ticks),
        "off": "off" in names,
        "requests": {name: _document(control, name) for name in names if name.endswith((".json", ".json.taken"))},
        "steps": {step: _contents(folder) for step, folder in folders.items() if os.path.isdir(folder)},
    }


def _step_folder(directory: str, step: int) -> str:
    """Return the path of a step's folder. If several loops have the step, return the folder of the last loop."""
    name = f"{STEP}{step:06d}"
    loops = [each.rpartition(LOOP)[2] for each in _names_in(directory) if each.startswith(name + LOOP)]
    last_loop = max((int(loop) for loop in loops if loop.isdecimal()), default=1)
    return os.path.join(directory, name if last_loop == 1 else f"{name}{LOOP}{last_loop}")


def _contents(folder: str) -> dict[str, Any]:
    """Return a description of the folder of a step. `Contents` has the same fields."""
    captures, unfinished = {}, {}
    for name in _names_in(folder):
        if name.endswith(META):
            meta = _document(folder, name)
            size = meta.get("bytes")
            size = size if isinstance(size, int) and 0 <= size < 1 << 62 else 0
            captures[name.removesuffix(META)] = (
                str(meta.get("state", "unfinished")),
                str(meta.get("reason") or ""),
                size,
            )
        elif name.endswith(PART) and not name.startswith(MERGING):
            unfinished[name] = _size_and_change(os.path.join(folder, name))
    return {"folder": folder, "captures": captures, "unfinished": unfinished}


def _size_and_change(path: str) -> tuple[int, float, bool]:
    """Return the size and the time of the last change of a file or folder, and True if it is a folder."""
    try:
        status = os.stat(path)
    except OSError:  # the part was renamed to its final name
        return 0, 0.0, False
    return status.st_size, status.st_mtime, stat.S_ISDIR(status.st_mode)


def write(directory: str, name: str, content: bytes) -> tuple[int, str, str] | None:
    """Write a file into the folder `control` of a run. If `content` is empty, remove the file.

    Return the number, the text and the folder of an error, or None.
    """
    control = os.path.join(directory, "control")
    try:
        if content:
            _make_folder(control)
            _write_complete(os.path.join(control, name), content)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(control, name))
    except OSError as error:
        return error.errno or 0, error.strerror or str(error), control
    return None


def _file_of(folder: str, process: Process) -> str:
    return os.path.join(folder, f"{process['host']}-{process['pid']}.json")


def _read_start(path: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a file, or no bytes if it can't be read or is no regular file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(limit) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return b""


def _document(folder: str, name: str) -> dict[str, Any]:
    return _parsed(_read_start(os.path.join(folder, name), _MAX_JSON_BYTES))


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _make_folder(path: str) -> None:
    """Make a folder in the run directory, which must exist: a deleted run directory is not made again."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        _hand_over_folder(path)


def _write_complete(path: str, content: bytes) -> None:
    """Write a file. The file gets its name once it is complete."""
    part = f"{path}.{os.urandom(4).hex()}.part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            _hand_over(descriptor, os.path.dirname(path), 0o640)
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # the file has been renamed
            os.unlink(part)


def _hand_over_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _hand_over(descriptor, os.path.dirname(path), 0o750)
    finally:
        os.close(descriptor)


def _hand_over(descriptor: int, parent: str, mode: int) -> None:
    """Give an open file or folder the owner of its parent folder, and `mode` if the group can read the parent.

    If this process is root, a name would not be safe: the parent's owner could replace the file by a link.
    """
    owner = os.stat(parent)
    if os.geteuid() == 0 and owner.st_uid != 0:
        with contextlib.suppress(PermissionError):  # a container may run as root without the right to change owners
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    if owner.st_mode & 0o040:
        os.fchmod(descriptor, mode)
