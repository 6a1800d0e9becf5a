"""Question to the processes of one node where they stand: a folder in their run directory, and py-spy beside them.

A process that holds the interpreter's lock never answers. py-spy reads its memory from outside, and stops it only for
native stacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoprof.cli.stacks import py_spy
from autoprof.rundir.stacks import MOST_BYTES, STACKS, WHY

# What a node returns at most.
_MOST_TOGETHER = 48 << 20
# So many processes are looked at by py-spy at a time, and so many children of multiprocessing's.
_SPIES, _MOST_CHILDREN = 4, 64


def asker() -> Callable[..., dict[str, Any]]:
    """Make the function that asks.

    It is made here, and of the standard library alone, so that it is shipped by value to nodes that have no autoprof,
    or another one.
    """
    kind, why_file, most_bytes, most_together = STACKS, WHY, MOST_BYTES, _MOST_TOGETHER
    spies, spied, missing, most_children = _SPIES, py_spy.looker(), py_spy.MISSING, _MOST_CHILDREN

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
