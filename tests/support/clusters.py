"""A Ray cluster on this machine whose nodes have disks and host names of their own, as far as a run can tell."""

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
    """Return whether this process may give others a host name and mounts of their own."""
    command = ["unshare", "-m", "-u", "sh", "-c", "hostname x && mount -t tmpfs none /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


class Spread:
    """A cluster whose nodes each see an empty disk at `parent`, but for the first, which has this machine's."""

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
        """Add a node that is a host of this name; `bare` ones have no autoprof."""
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
        """End a node as a machine does that loses its power."""
        started, tag = self._started[name]
        while found := processes._running(tag, started.pid):
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        started.wait()

    def end(self) -> None:
        """End all of it."""
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
        # One after the other: two that start at a time may take the same socket's name (Ray 2.60).
        while _STARTED not in log.read_text():
            assert started.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return log.read_text()

    def _options(self) -> list[str]:
        return ["--num-cpus=1", "--object-store-memory=100000000"]

    def _head(self) -> list[str]:
        return ["--include-dashboard=false", f"--temp-dir={self._temporary}"]
