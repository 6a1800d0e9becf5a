"""Ray cluster on this machine whose nodes seem to be separate hosts, each with its own disk and host name."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import autoprof
from tests.support import processes

RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
_STARTED = "Ray runtime started"
_TIMEOUT_S = 90


def permitted() -> bool:
    """Return True if this process may start others with their own host name and mounts."""
    command = ["unshare", "-m", "-u", "sh", "-c", "hostname x && mount -t tmpfs none /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


class Spread:
    """Ray cluster in which each node except the first has its own empty disk at `parent`."""

    def __init__(self, folder: Path, parent: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._parent = parent
        self._environment = environment
        self._temporary = Path(f"/tmp/ray-{uuid.uuid4().hex[:8]}")
        self._started: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        parent.mkdir()
        log = self._start("head", [*RAY, "--head", "--port=0", "--block", *self._options(), *self._head()])
        found = re.search(r"ray start --address='([^']+)'", log)
        assert found is not None, log
        self.address = found[1]

    def add(self, name: str, *, bare: bool = False) -> None:
        """Add a node with this host name. A `bare` node has no autoprof."""
        lines = [f"hostname {name}", f"mount -t tmpfs none {self._parent}"]
        if bare:
            nothing = self._folder / "nothing"
            nothing.mkdir(exist_ok=True)
            (self._folder / "empty").touch()
            lines.append(f"mount --bind {nothing} {Path(autoprof.__file__).parent}")
            packages = Path(sys.executable).parent.parent / "lib"
            for path in [*packages.glob("python*/site-packages/*autoprof*.p*"), *packages.glob("*/*/autoprof.start")]:
                lines.append(f"mount --bind {self._folder / 'empty'} {path}")
        command = [*RAY, f"--address={self.address}", "--block", *self._options()]
        script = " && ".join([*lines, 'exec "$@"'])
        self._start(name, ["unshare", "-m", "-u", "sh", "-c", script, "sh", *command])

    def kill(self, name: str) -> None:
        """Kill all processes of a node, as a power failure does."""
        started, tag = self._started[name]
        while found := processes._running(tag, started.pid):
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        started.wait()

    def end(self) -> None:
        """Kill all nodes and delete Ray's temporary folder."""
        for name in reversed(self._started):
            self.kill(name)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _start(self, name: str, command: list[str]) -> str:
        tag, log = uuid.uuid4().hex, self._folder / f"{name}.log"
        with log.open("w") as file:
            started = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment | {processes.TAG: tag},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._started[name] = started, tag
        deadline = time.monotonic() + _TIMEOUT_S
        # Nodes start one after the other: two that start at the same time may choose the same socket name (Ray 2.60).
        while _STARTED not in log.read_text():
            assert started.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return log.read_text()

    def _options(self) -> list[str]:
        return ["--num-cpus=1", "--object-store-memory=100000000"]

    def _head(self) -> list[str]:
        return ["--include-dashboard=false", f"--temp-dir={self._temporary}"]
