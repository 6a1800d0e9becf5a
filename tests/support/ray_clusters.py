"""Ray clusters for scripts, and runs in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import helpers, processes
from tests.support.helpers import ROOT, clean_environment

SCRIPTS = ROOT / "tests" / "real" / "ray_scripts"


ON = {"AUTOPROF": "1", "AUTOPROF_RECIPES": str(SCRIPTS)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a cluster without autoprof in its environment, and return its address."""
    folder = tmp_path_factory.mktemp("cluster")
    tag = uuid.uuid4().hex
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--num-cpus=8"]
    options = ["--include-dashboard=false", "--object-store-memory=100000000", f"--temp-dir=/tmp/ray-{tag[:8]}"]
    variables = clean_environment(**{processes.TAG: tag})
    log = folder / "start.log"
    with log.open("w") as file:
        started = subprocess.Popen(
            [*start, *options], cwd=folder, env=variables, stdout=file, stderr=file, start_new_session=True
        )
    try:
        started.wait(120)
        address = re.search(r"--address='([^']+)'", log.read_text())
        assert address is not None, log.read_text()
        yield address[1]
    finally:
        processes.end_all(tag, started.pid, grace_s=0)
        shutil.rmtree(f"/tmp/ray-{tag[:8]}", ignore_errors=True)


class Asked:
    """Run in progress in a cluster, with the `autoprof --ray` commands sent to it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        (folder / "elsewhere").mkdir()

    @property
    def run(self) -> Path:
        return (self.folder / "autoprof_runs" / "latest").resolve()

    @property
    def connected(self) -> str:
        """Line in which a command prints the address of the cluster."""
        return f"autoprof: connected to the Ray cluster at {self.address}, which --ray names\n"

    def shell(self, *options: str, command: str = "trigger") -> subprocess.Popen[str]:
        """Start `autoprof trigger --ray` in a folder where autoprof finds no run."""
        words = [sys.executable, "-m", "autoprof", command, "--ray", self.address, *options]
        return helpers.started(words, cwd=self.folder / "elsewhere", AUTOPROF="1")

    def trigger(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run `autoprof trigger --ray` and wait until it ends."""
        with self.shell(*options) as shell:
            output, errors = shell.communicate(timeout=120)
        return subprocess.CompletedProcess(shell.args, shell.returncode, output, errors)

    def waited_for(self) -> subprocess.Popen[str]:
        """Start a `trigger --wait` for a step that never comes; return once the run has accepted it."""
        shell = self.shell("--wait", "--from", "1000000")
        assert shell.stdout is not None
        while not (line := shell.stdout.readline()).startswith("taken"):
            assert line, shell.communicate()
        return shell

    def steps(self) -> list[str]:
        return sorted(path.name for path in self.run.glob("global_step_*"))


@contextmanager
def going_on(folder: Path, address: str) -> Iterator[Asked]:
    """Start the run, and yield it once it accepts requests. End it afterwards."""
    tag = uuid.uuid4().hex
    log = folder / "output.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "asked.py"), address, str(folder)],
            cwd=folder,
            env=clean_environment(**ON, AUTOPROF_STEPS="", **{processes.TAG: tag}),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while not list((folder / "autoprof_runs").glob("*/control")):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)
        head = re.search(r"^head (\S+)$", log.read_text(), re.MULTILINE)
        assert head is not None
        yield Asked(folder, head[1])
    finally:
        (folder / "enough").touch()
        try:
            process.wait(60)
        finally:
            processes.end_all(tag, process.pid, grace_s=0)
            process.wait()
