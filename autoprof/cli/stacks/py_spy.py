"""Stacks of a process that py-spy sees from outside. It is optional: `autoprof-rl[stacks]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What is said where it is not there, and where this process may not read the memory of another.
MISSING, PERMISSION = "missing", "permission"
# How long it has for a process.
_LONGEST_S = 30.0
_TIMES = 3


def looker() -> Callable[[str, int, bool], tuple[list[dict[str, Any]], str]]:
    """Make the function that looks, of the standard library alone: it is shipped to nodes by value."""
    longest_s, times, permission = _LONGEST_S, _TIMES, PERMISSION

    def seen(given: dict[str, Any]) -> dict[str, Any]:
        frames = []
        for place, each in enumerate(given["frames"]):
            path, function = str(each["filename"])[:300], str(each["name"])[:300]
            if function == "_watch" and path.endswith("/autoprof/run/watch/watcher.py"):
                return {}
            if place and path.endswith(
                ("/autoprof/hooks/dispatch.py", "/autoprof/hooks/wrapper.py", "/autoprof/hooks/items.py")
            ):
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
