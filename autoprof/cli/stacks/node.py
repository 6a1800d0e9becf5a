"""Stacks of the processes of one node: from their own snapshots, and from py-spy.

A process that holds the interpreter's lock never answers. py-spy, which is optional (`autoprof-rl[stacks]`), reads its
memory from outside, and stops it only for native stacks. The same question goes to all nodes of a Ray cluster.
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
        state: `running`, `gone` or `elsewhere`, as in `open_spans`.
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


# What is said where it is not there, and where this process may not read the memory of another.
PY_SPY_MISSING, PY_SPY_PERMISSION = "missing", "permission"
# How long it has for a process.
_LONGEST_S = 30.0
_TIMES = 3


def py_spy_looker() -> Callable[[str, int, bool], tuple[list[dict[str, Any]], str]]:
    """Make the function that looks, of the standard library alone: it is shipped to nodes by value."""
    longest_s, times, permission = _LONGEST_S, _TIMES, PY_SPY_PERMISSION

    def seen(given: dict[str, Any]) -> dict[str, Any]:
        frames = []
        for place, each in enumerate(given["frames"]):
            path, function = str(each["filename"])[:300], str(each["name"])[:300]
            if function == "_watch" and path.endswith("/autoprof/run/watch/watcher.py"):
                return {}
            if place and path.endswith(("/autoprof/hooks/dispatch.py", "/autoprof/hooks/wrapper.py")):
                continue
            frames.append({"function": function, "file": path, "line": each["line"]})
        if len(frames) > 140:
            cut = {"function": f"... {len(frames) - 140} more functions ...", "file": "", "line": 0}
            frames = [*frames[:120], cut, *frames[-20:]]
        return {
            "name": str(given.get("thread_name") or "")[:300],
            "ident": given["thread_id"],
            "native": given.get("os_thread_id") or 0,
            "main": given.get("thread_name") == "MainThread",
            "frames": frames[::-1],
        }

    def autoprof_spy(program: str, pid: int, native: bool) -> tuple[list[dict[str, Any]], str]:
        """Return the threads of a process as py-spy sees them, or why it does not."""
        import json
        import subprocess

        # With --native it has to stop the process for some milliseconds.
        ways = ["--native", "--nonblocking"] if native else ["--nonblocking"]
        for attempt in range(times):
            # One that somebody has stopped can't be stopped again.
            way = ways[min(attempt, len(ways) - 1)]
            try:
                done = subprocess.run(
                    [program, "dump", "--json", way, "--pid", str(pid)],
                    capture_output=True,
                    timeout=longest_s,
                    check=False,
                )
            except (OSError, subprocess.SubprocessError) as error:
                return [], f"{type(error).__name__}"
            try:
                found = json.loads(done.stdout)
            except ValueError:
                errors = done.stderr.decode(errors="replace").strip()
                if "ermission" in errors or "not permitted" in errors:
                    return [], permission
                # Behind the first line stands where py-spy was.
                text = errors.splitlines()[0][:200] if errors else f"exit status {done.returncode}"
                # A process that goes on meanwhile may look damaged.
                if attempt == times - 1:
                    return [], text
                continue
            return [thread for each in found if (thread := seen(each))][:256], ""
        return [], ""

    return autoprof_spy


# What a node returns at most.
_MOST_TOGETHER = 48 << 20
# So many processes are looked at by py-spy at a time, and so many children of multiprocessing's.
_SPIES, _MOST_CHILDREN = 4, 64


def asker() -> Callable[..., dict[str, Any]]:
    """Make the function that asks.

    It is made here, and of the standard library alone, so that it is shipped by value to nodes that have no autoprof,
    or another one.
    """
    kind, why_file, most_bytes, most_together = STACKS, WHY, MAX_STACKS_BYTES, _MOST_TOGETHER
    spies, spied, missing, most_children = _SPIES, py_spy_looker(), PY_SPY_MISSING, _MOST_CHILDREN

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
        said: dict[str, Any] = {"host": host, "folder": folder, "files": {}, "absent": [], "py_spy": "", "problem": ""}

        def load(path: str, most: int) -> bytes:
            try:
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                    return file.read(most)
            except OSError:
                return b""

        def parsed(content: bytes) -> dict[str, Any]:
            try:
                found = json.loads(content)
            except (ValueError, RecursionError):
                return {}
            return found if isinstance(found, dict) else {}

        def began(pid: int) -> int | None:
            fields = load(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()
            return int(fields[19]) if len(fields) > 19 and fields[0] not in (b"Z", b"X") else None

        def processes() -> dict[str, dict[str, Any]]:
            """Return the processes of the run by host and pid, as far as they may run."""
            found: dict[str, dict[str, Any]] = {}
            uptime = float(load("/proc/uptime", 100).split()[0] or 0)
            # Of two processes with one number the later one counts.
            for each in sorted(os.scandir(os.path.join(directory, "hooks")), key=lambda file: file.stat().st_mtime):
                content = parsed(load(each.path, 16 << 20)) if each.name.endswith(".json") else {}
                whose, pid = str(content.get("host", "")), content.get("pid")
                if not whose or not isinstance(pid, int):
                    continue
                ticks = began(pid) if whose == host else None
                # A number comes again: what has begun after the file was written is another process.
                since = time.time() - uptime + (ticks or 0) / os.sysconf("SC_CLK_TCK")
                runs = ticks is not None and since < each.stat().st_mtime + 5
                hooks = content.get("hooks")
                called = any(isinstance(hook, dict) and hook.get("called") for hook in (hooks or {}).values())
                found[f"{whose}-{pid}"] = {
                    "host": whose,
                    "pid": pid,
                    "process": str(content.get("process", "")),
                    "state": "elsewhere" if whose != host else "running" if runs else "gone",
                    "reason": "" if called else "none of autoprof's hooks was called in it",
                    "spans": [],
                }
            try:
                import msgspec

                from autoprof.rundir import open_spans

                for state in open_spans.read(directory):
                    # One that began no span leaves no timeline.
                    known = {"host": state.host, "pid": state.pid, "process": "", "reason": ""}
                    told = found.setdefault(f"{state.host}-{state.pid}", known)
                    told |= {"state": state.state, "spans": msgspec.to_builtins(state.spans)}
            except Exception:  # no autoprof here, or one that has no such module
                pass
            return children(found) | {
                key: told
                for key, told in found.items()
                if told["state"] in ("running", "elsewhere") or (told["state"] == "gone" and told["spans"])
            }

        def children(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
            """Return the workers of pools and data loaders that are no processes of the run: they have its work."""

            def command(pid: int) -> bytes:
                return load(f"/proc/{pid}/cmdline", 4096)

            parents = {told["pid"]: command(told["pid"]) for told in known.values() if told["state"] == "running"}
            made: dict[str, dict[str, Any]] = {}
            for pid in sorted(int(each) for each in os.listdir("/proc") if each.isdecimal()):
                fields = load(f"/proc/{pid}/stat", 4096).rpartition(b")")[2].split()
                parent = int(fields[1]) if len(fields) > 1 and fields[0] not in (b"Z", b"X") else 0
                if parent not in parents or f"{host}-{pid}" in known or len(made) == most_children:
                    continue
                line = command(pid)
                # Forked, with the command line of its parent, or spawned.
                if line != parents[parent] and b"multiprocessing.spawn" not in line:
                    continue
                reason = f"it is a child of process {parent} in which nothing of autoprof's is"
                told = {"host": host, "pid": pid, "state": "running", "reason": reason, "spans": []}
                made[f"{host}-{pid}"] = told | {"process": line.replace(b"\0", b" ").decode(errors="replace")[:200]}
            return made

        def stands(told: dict[str, Any]) -> str:
            return os.path.join(folder, f"{told['host']}-{told['pid']}.json")

        def put(path: str, content: bytes) -> None:
            part = f"{path}.{os.urandom(4).hex()}.part"
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                given(part)
                os.replace(part, path)
            except BaseException:
                os.unlink(part)
                raise

        def given(path: str) -> None:
            """Give what was made to the run's own user, and to its group where that may read the run."""
            owner = os.stat(directory)
            if os.geteuid() == 0 and owner.st_uid != 0:
                os.chown(path, owner.st_uid, owner.st_gid)
            if owner.st_mode & 0o040:
                os.chmod(path, 0o750 if os.path.isdir(path) else 0o640)

        def ask() -> None:
            """Make the folder, which appears with the reason in it. Who shares the disk may have made it already."""
            parent = os.path.dirname(folder)
            if not os.path.isdir(parent):
                os.makedirs(parent, 0o700, exist_ok=True)
                given(parent)
            hidden = os.path.join(parent, f".{name}.{os.urandom(4).hex()}")
            os.mkdir(hidden, 0o700)
            try:
                given(hidden)
                put(os.path.join(hidden, why_file), why)
                if not os.path.isdir(folder):
                    os.rename(hidden, folder)
            except OSError:
                if not os.path.isdir(folder):
                    raise
            finally:
                shutil.rmtree(hidden, ignore_errors=True)

        def added(told: dict[str, Any], threads: list[dict[str, Any]]) -> None:
            """Write what py-spy saw of a process that did not answer, or into what it answered."""
            own = parsed(load(stands(told), most_bytes))
            spans = {thread.get("ident"): thread.get("spans", []) for thread in own.get("threads", [])}
            content: dict[str, Any] = {
                "host": host,
                "pid": told["pid"],
                "unix_ns": time.time_ns(),
                "process": told["process"],
                "spans": told["spans"],
            }
            content |= own | {"by": "itself, py-spy" if own else "py-spy"}
            for most in (256, 64, 16, 4):
                content["threads"] = [
                    thread | ({"spans": spans[thread["ident"]]} if spans.get(thread["ident"]) else {})
                    for thread in sorted(threads, key=lambda thread: not thread["main"])[:most]
                ]
                text = json.dumps(content).encode()
                if len(text) < most_bytes:
                    break
                content["left_out"] = [*own.get("left_out", []), f"{len(threads) - most} threads"]
            put(stands(told), text)

        try:
            ask()
            expected = processes()
        except OSError as error:
            said["problem"] = str(error)
            return said
        here = {key: told for key, told in expected.items() if told["state"] == "running"}
        waited_for = [told for told in here.values() if not told["reason"]]
        if others:
            waited_for += [told for told in expected.values() if told["state"] == "elsewhere"]
        program = shutil.which("py-spy", path=f"{os.environ.get('PATH', '')}:{os.path.dirname(sys.executable)}")
        deadline = time.monotonic() + wait_s
        with ThreadPoolExecutor(spies) as pool:
            looks = (
                {key: pool.submit(spied, program, told["pid"], native) for key, told in here.items()} if program else {}
            )
            while time.monotonic() < deadline:
                waited_for = [
                    told
                    for told in waited_for
                    if not os.path.exists(stands(told)) and (told["host"] != host or began(told["pid"]) is not None)
                ]
                if not waited_for:
                    break
                time.sleep(0.1)
        problems = []
        for key, look in looks.items():
            told = here[key]
            threads, problem = look.result()
            answered = os.path.exists(stands(told))
            if threads and (native or not answered):
                try:
                    added(told, threads)
                except OSError as error:
                    said["problem"] = str(error)
            elif problem and (native or not answered):
                problems.append(problem)
        said["py_spy"] = ("" if program else missing) if not problems else problems[0]
        room = most_together
        for key, told in expected.items():
            content = load(stands(told), most_bytes) if room > 0 else b""
            room -= len(content)
            if content:
                said["files"][f"{key}.json"] = content
                continue
            if told["state"] == "running":
                if began(told["pid"]) is None:
                    told |= {"state": "gone", "reason": ""}
                elif not told["reason"]:
                    told["reason"] = f"it did not answer within {wait_s:g} s"
            if room <= 0:
                told["reason"] = "there is more than this command shows; its file is in the run"
            said["absent"].append(told)
        return said

    return autoprof_stacks


# How much longer than for the processes a node is waited for: Ray may have to start a worker there.
_STARTS_S = 60.0


class Question(NamedTuple):
    """Request to a node: the name of the folder, its `why.json`, how long to wait, and whether for native stacks."""

    name: str
    why: bytes
    wait_s: float
    native: bool


def ask_nodes(ray: Any, run: str, question: Question) -> tuple[str, list[Answer]]:
    """Ask the nodes of a run, and return its id and their answers.

    Raises:
        NotFound: There is no such run in the cluster, or several.
        Gone: None of its nodes is there.
    """
    found = view.find_in_ray(ray, run).run
    alive = {each["NodeID"]: each["NodeManagerHostname"] for each in ray.nodes() if each["Alive"]}
    places = {found.node: found.directory}
    dead = []
    seen = set()
    for each in cluster.nodes_of_run(found.id):
        # Several nodes may be on one machine and have one folder.
        disk = each.disk or each.id
        if disk in seen and each.id != found.node:
            continue
        seen.add(disk)
        if each.id in alive:
            places[each.id] = each.directory
        else:
            dead.append(each)
    function = ray.remote(asker())
    calls = {
        each: cluster.on_node(function, each, "autoprof_stacks").remote(
            directory, question.name, question.why, question.wait_s, question.native, False
        )
        for each, directory in places.items()
        if each in alive
    }
    if not calls:
        raise cluster.Gone(f"none of the nodes of run {found.id} is there any more")
    done, late = ray.wait(list(calls.values()), num_returns=len(calls), timeout=question.wait_s + _STARTS_S)
    for call in late:
        ray.cancel(call)
    answers = []
    for place, call in calls.items():
        host, folder = host_name(alive[place]), f"{places[place]}/{STACKS}/{question.name}"
        try:
            if call not in done:
                raise TimeoutError(f"no answer within {question.wait_s + _STARTS_S:g} s")
            answers.append(msgspec.convert(ray.get(call), Answer))
        except Exception as error:  # the node has gone meanwhile
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            answers.append(_none(host, folder, f"the node did not answer: {first[:200]}"))
    answers += [_none(each.host, each.directory, "the node has died") for each in dead]
    return found.id, answers


def _none(host: str, folder: str, problem: str) -> Answer:
    return Answer(host=host, folder=folder, files={}, absent=[], py_spy="", problem=problem)
