"""Stacks of the processes of one node, from their own snapshots and from py-spy.

A process that holds the interpreter's lock never answers. py-spy, which is optional (`autoprof-rl[stacks]`), reads its
memory from outside, and stops it only for native stacks. In a Ray cluster, all nodes are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from autoprof.base.identity import host_name
from autoprof.cli.trigger import view
from autoprof.run import cluster
from autoprof.rundir.records import MAX_STACKS_BYTES, STACKS, WHY, OpenSpan


class Absent(Struct, frozen=True, kw_only=True):
    """A process without a stack in the answer.

    Attributes:
        state: `running`, `gone` or `elsewhere`, as in `rundir/journal.py`.
        reason: The reason.
        spans: Its last open spans.
    """

    host: str
    pid: int
    process: str
    state: str
    reason: str
    spans: list[OpenSpan]


class Answer(Struct, frozen=True, kw_only=True):
    """The answer of a node.

    Attributes:
        host: The host.
        folder: The folder with the files.
        files: The content of each file, by name.
        absent: The processes without a file.
        py_spy: The reason why py-spy could not help; empty if it did.
        problem: The reason why no process could be asked; empty if they could.
    """

    host: str
    folder: str
    files: dict[str, bytes]
    absent: list[Absent]
    py_spy: str
    problem: str


# Values of `Answer.py_spy`: py-spy is not installed, or may not read the memory of other processes.
PY_SPY_MISSING, PY_SPY_PERMISSION = "missing", "permission"
_PY_SPY_TIMEOUT_S = 30.0
_PY_SPY_ATTEMPTS = 3


def py_spy_looker() -> Callable[[str, int, bool], tuple[list[dict[str, Any]], str]]:
    """Return the function that runs py-spy. It uses the standard library only, since Ray ships it to nodes by value."""
    timeout_s, attempts, permission = _PY_SPY_TIMEOUT_S, _PY_SPY_ATTEMPTS, PY_SPY_PERMISSION

    def converted(thread: dict[str, Any]) -> dict[str, Any]:
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

    def autoprof_spy(program: str, pid: int, native: bool) -> tuple[list[dict[str, Any]], str]:
        """Return the threads of a process as py-spy sees them, or the reason why it can't."""
        import json
        import subprocess

        # With --native, py-spy stops the process for some milliseconds.
        options = ["--native", "--nonblocking"] if native else ["--nonblocking"]
        for attempt in range(attempts):
            # Retry without --native: py-spy can't stop a process that is stopped already.
            option = options[min(attempt, len(options) - 1)]
            try:
                done = subprocess.run(
                    [program, "dump", "--json", option, "--pid", str(pid)],
                    capture_output=True,
                    timeout=timeout_s,
                    check=False,
                )
            except (OSError, subprocess.SubprocessError) as error:
                return [], f"{type(error).__name__}"
            try:
                threads = json.loads(done.stdout)
            except ValueError:
                errors = done.stderr.decode(errors="replace").strip()
                if "ermission" in errors or "not permitted" in errors:
                    return [], permission
                # The lines after the first are py-spy's own backtrace.
                text = errors.splitlines()[0][:200] if errors else f"exit status {done.returncode}"
                # Retry: the memory of a process that keeps running may look damaged.
                if attempt == attempts - 1:
                    return [], text
                continue
            return [result for thread in threads if (result := converted(thread))][:256], ""
        return [], ""

    return autoprof_spy


# Bytes of all files together that a node returns.
_MAX_ANSWER_BYTES = 48 << 20
# Processes that py-spy reads at the same time.
_MAX_SPIES = 4
# Children started by multiprocessing that are reported.
_MAX_CHILDREN = 64


def asker() -> Callable[..., dict[str, Any]]:
    """Return the function that asks the processes of a node.

    It is a closure that uses the standard library only, so that Ray can ship it by value to nodes that have no autoprof
    or another version of it.
    """
    kind, why_file, max_file_bytes, max_answer_bytes = STACKS, WHY, MAX_STACKS_BYTES, _MAX_ANSWER_BYTES
    max_spies, spied, missing, max_children = _MAX_SPIES, py_spy_looker(), PY_SPY_MISSING, _MAX_CHILDREN

    def autoprof_stacks(
        directory: str, name: str, why: bytes, wait_s: float, native: bool, others: bool
    ) -> dict[str, Any]:
        import json
        import os
        import re
        import shutil
        import sys
        import time
        from concurrent.futures import ThreadPoolExecutor

        host = re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename)[:60] or "localhost"
        folder = os.path.join(directory, kind, name)
        result: dict[str, Any] = {
            "host": host,
            "folder": folder,
            "files": {},
            "absent": [],
            "py_spy": "",
            "problem": "",
        }

        def load(path: str, limit: int) -> bytes:
            try:
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                    return file.read(limit)
            except OSError:
                return b""

        def parsed(content: bytes) -> dict[str, Any]:
            try:
                value = json.loads(content)
            except (ValueError, RecursionError):
                return {}
            return value if isinstance(value, dict) else {}

        def start_ticks(pid: int) -> int | None:
            fields = load(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()
            return int(fields[19]) if len(fields) > 19 and fields[0] not in (b"Z", b"X") else None

        def processes() -> dict[str, dict[str, Any]]:
            """Return the run's processes that may be running or died with open spans, by host and pid."""
            by_key: dict[str, dict[str, Any]] = {}
            uptime = float(load("/proc/uptime", 100).split()[0] or 0)
            # In order of time: if two processes had the same pid, the later one replaces the earlier one.
            for file in sorted(os.scandir(os.path.join(directory, "hooks")), key=lambda entry: entry.stat().st_mtime):
                content = parsed(load(file.path, 16 << 20)) if file.name.endswith(".json") else {}
                process_host, pid = str(content.get("host", "")), content.get("pid")
                if not process_host or not isinstance(pid, int):
                    continue
                ticks = start_ticks(pid) if process_host == host else None
                # Pids are used again: a process that began after the file was written is another one.
                started = time.time() - uptime + (ticks or 0) / os.sysconf("SC_CLK_TCK")
                runs = ticks is not None and started < file.stat().st_mtime + 5
                hooks = content.get("hooks")
                called = any(isinstance(hook, dict) and hook.get("called") for hook in (hooks or {}).values())
                by_key[f"{process_host}-{pid}"] = {
                    "host": process_host,
                    "pid": pid,
                    "process": str(content.get("process", "")),
                    "state": "elsewhere" if process_host != host else "running" if runs else "gone",
                    "reason": "" if called else "none of autoprof's hooks was called in it",
                    "spans": [],
                }
            try:
                import msgspec

                from autoprof.rundir import processes

                for state in processes.read(directory):
                    # A process may have a timeline, but no file in `hooks`.
                    unlisted = {"host": state.host, "pid": state.pid, "process": "", "reason": ""}
                    process = by_key.setdefault(f"{state.host}-{state.pid}", unlisted)
                    process |= {"state": state.state, "spans": msgspec.to_builtins(state.spans)}
            except Exception:  # no autoprof on this node, or a version without this module
                pass
            return children(by_key) | {
                key: process
                for key, process in by_key.items()
                if process["state"] in ("running", "elsewhere") or (process["state"] == "gone" and process["spans"])
            }

        def children(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            """Return workers of pools and data loaders. They run without autoprof, but do work of the run."""

            def command(pid: int) -> bytes:
                return load(f"/proc/{pid}/cmdline", 4096)

            parents = {
                process["pid"]: command(process["pid"]) for process in known.values() if process["state"] == "running"
            }
            workers: dict[str, dict[str, Any]] = {}
            for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
                fields = load(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()
                parent = int(fields[1]) if len(fields) > 1 and fields[0] not in (b"Z", b"X") else 0
                if parent not in parents or f"{host}-{pid}" in known or len(workers) == max_children:
                    continue
                line = command(pid)
                # A forked worker has its parent's command line; a spawned one names multiprocessing.spawn.
                if line != parents[parent] and b"multiprocessing.spawn" not in line:
                    continue
                reason = f"it is a child of process {parent} and runs without autoprof"
                worker = {"host": host, "pid": pid, "state": "running", "reason": reason, "spans": []}
                workers[f"{host}-{pid}"] = worker | {
                    "process": line.replace(b"\0", b" ").decode(errors="replace")[:200]
                }
            return workers

        def file_of(process: dict[str, Any]) -> str:
            return os.path.join(folder, f"{process['host']}-{process['pid']}.json")

        def put(path: str, content: bytes) -> None:
            part = f"{path}.{os.urandom(4).hex()}.part"
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                hand_over(part)
                os.replace(part, path)
            except BaseException:
                os.unlink(part)
                raise

        def hand_over(path: str) -> None:
            """Give a file or folder to the run's user, and make it readable for the group if the run is."""
            owner = os.stat(directory)
            if os.geteuid() == 0 and owner.st_uid != 0:
                os.chown(path, owner.st_uid, owner.st_gid)
            if owner.st_mode & 0o040:
                os.chmod(path, 0o750 if os.path.isdir(path) else 0o640)

        def ask() -> None:
            """Make the folder that asks the processes; it appears complete, with the reason in it.

            Another node on the same disk may have made it already.
            """
            parent = os.path.dirname(folder)
            if not os.path.isdir(parent):
                os.makedirs(parent, 0o700, exist_ok=True)
                hand_over(parent)
            hidden = os.path.join(parent, f".{name}.{os.urandom(4).hex()}")
            os.mkdir(hidden, 0o700)
            try:
                hand_over(hidden)
                put(os.path.join(hidden, why_file), why)
                if not os.path.isdir(folder):
                    os.rename(hidden, folder)
            except OSError:
                if not os.path.isdir(folder):
                    raise
            finally:
                shutil.rmtree(hidden, ignore_errors=True)

        def add_threads(process: dict[str, Any], threads: list[dict[str, Any]]) -> None:
            """Write the threads that py-spy read into the process's file; if it answered, into its own answer."""
            own = parsed(load(file_of(process), max_file_bytes))
            spans = {thread.get("ident"): thread.get("spans", []) for thread in own.get("threads", [])}
            content: dict[str, Any] = {
                "host": host,
                "pid": process["pid"],
                "unix_ns": time.time_ns(),
                "process": process["process"],
                "spans": process["spans"],
            }
            content |= own | {"by": "itself, py-spy" if own else "py-spy"}
            for limit in (256, 64, 16, 4):
                content["threads"] = [
                    thread | ({"spans": spans[thread["ident"]]} if spans.get(thread["ident"]) else {})
                    for thread in sorted(threads, key=lambda thread: not thread["main"])[:limit]
                ]
                text = json.dumps(content).encode()
                if len(text) < max_file_bytes:
                    break
                content["left_out"] = [*own.get("left_out", []), f"{len(threads) - limit} threads"]
            put(file_of(process), text)

        try:
            ask()
            expected = processes()
        except OSError as error:
            result["problem"] = str(error)
            return result
        running = {key: process for key, process in expected.items() if process["state"] == "running"}
        silent = [process for process in running.values() if not process["reason"]]
        if others:
            silent += [process for process in expected.values() if process["state"] == "elsewhere"]
        program = shutil.which("py-spy", path=f"{os.environ.get('PATH', '')}:{os.path.dirname(sys.executable)}")
        deadline = time.monotonic() + wait_s
        with ThreadPoolExecutor(max_spies) as pool:
            futures = (
                {key: pool.submit(spied, program, process["pid"], native) for key, process in running.items()}
                if program
                else {}
            )
            while time.monotonic() < deadline:
                silent = [
                    process
                    for process in silent
                    if not os.path.exists(file_of(process))
                    and (process["host"] != host or start_ticks(process["pid"]) is not None)
                ]
                if not silent:
                    break
                time.sleep(0.1)
        problems = []
        for key, future in futures.items():
            process = running[key]
            threads, problem = future.result()
            answered = os.path.exists(file_of(process))
            if threads and (native or not answered):
                try:
                    add_threads(process, threads)
                except OSError as error:
                    result["problem"] = str(error)
            elif problem and (native or not answered):
                problems.append(problem)
        result["py_spy"] = ("" if program else missing) if not problems else problems[0]
        room = max_answer_bytes
        for key, process in expected.items():
            content = load(file_of(process), max_file_bytes) if room > 0 else b""
            room -= len(content)
            if content:
                result["files"][f"{key}.json"] = content
                continue
            if process["state"] == "running":
                if start_ticks(process["pid"]) is None:
                    process |= {"state": "gone", "reason": ""}
                elif not process["reason"]:
                    process["reason"] = f"it did not answer within {wait_s:g} s"
            if room <= 0:
                process["reason"] = "the answers are larger than this command shows; its file is in the run"
            result["absent"].append(process)
        return result

    return autoprof_stacks


# Seconds to wait for a node beyond the wait for its processes: Ray may have to start a worker there.
_NODE_EXTRA_S = 60.0


class Question(NamedTuple):
    """Request to a node.

    Attributes:
        name: The name of the folder with the answers.
        why: The content of its `why.json`.
        wait_s: Seconds to wait for the processes.
        native: True to include C functions.
    """

    name: str
    why: bytes
    wait_s: float
    native: bool


def ask_nodes(ray: Any, run: str, question: Question) -> tuple[str, list[Answer]]:
    """Ask the nodes of a run, and return its id and their answers.

    Raises:
        NotFound: No run in the cluster matches, or several do.
        Gone: All nodes of the run are gone.
    """
    registered = view.find_in_ray(ray, run).run
    alive = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    directories = {registered.node: registered.directory}
    dead = []
    disks = set()
    for node in cluster.nodes_of_run(registered.id):
        # Ask one node per disk: several nodes on one machine may share the run's folder.
        disk = node.disk or node.id
        if disk in disks and node.id != registered.node:
            continue
        disks.add(disk)
        if node.id in alive:
            directories[node.id] = node.directory
        else:
            dead.append(node)
    function = ray.remote(asker())
    calls = {
        node_id: cluster.on_node(function, node_id, "autoprof_stacks").remote(
            directory, question.name, question.why, question.wait_s, question.native, False
        )
        for node_id, directory in directories.items()
        if node_id in alive
    }
    if not calls:
        raise cluster.Gone(f"all nodes of run {registered.id} are gone")
    done, late = ray.wait(list(calls.values()), num_returns=len(calls), timeout=question.wait_s + _NODE_EXTRA_S)
    for call in late:
        ray.cancel(call)
    answers = []
    for node_id, call in calls.items():
        host, folder = host_name(alive[node_id]), f"{directories[node_id]}/{STACKS}/{question.name}"
        try:
            if call not in done:
                raise TimeoutError(f"no answer within {question.wait_s + _NODE_EXTRA_S:g} s")
            answers.append(msgspec.convert(ray.get(call), Answer))
        except Exception as error:  # the node has died since
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            answers.append(_failed(host, folder, f"the node did not answer: {first[:200]}"))
    answers += [_failed(node.host, node.directory, "the node has died") for node in dead]
    return registered.id, answers


def _failed(host: str, folder: str, problem: str) -> Answer:
    return Answer(host=host, folder=folder, files={}, absent=[], py_spy="", problem=problem)
