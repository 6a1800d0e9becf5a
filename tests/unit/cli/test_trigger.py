"""`autoprof trigger --wait` from another shell, beside a small run that really records."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoprof.rundir import runs
from autoprof.rundir.layout import RunDir
from autoprof.windows import requests
from autoprof.windows.requests import Trigger
from tests.support import helpers
from tests.support.helpers import clean_environment, wait_for
from tests.support.small_trainer import BEGIN, write

# Steps until the file `enough` exists.
LOOP = """
from pathlib import Path
trainer = Trainer()
while not Path("enough").exists():
    trainer.global_step += 1
    trainer.step(lambda: None)
    Path("began").touch()
    while Path("hold").exists() and not Path("enough").exists():
        Path("held").touch()
        time.sleep(0.02)
    time.sleep(0.05)
"""

Start = Callable[..., "subprocess.Popen[str]"]


class Going:
    """A running run, and shells beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer: subprocess.Popen[str] | None = None
        self._shells: list[subprocess.Popen[str]] = []

    @property
    def run(self) -> RunDir:
        return RunDir((self.folder / "autoprof_runs" / "latest").resolve())

    def begin(self, **variables: str) -> None:
        """Start the trainer; its first step is through when this returns."""
        settings = {"AUTOPROF": "1", "AUTOPROF_STEPS": "", "AUTOPROF_RECIPES": str(self.folder / "lib" / "small.toml")}
        path = {"PYTHONPATH": str(self.folder / "lib"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", BEGIN + LOOP]
        self.trainer = helpers.started(command, cwd=self.folder, **settings | path | variables)
        wait_for(self.folder / "began")

    def hold(self) -> None:
        """No step begins from now on."""
        (self.folder / "hold").touch()
        wait_for(self.folder / "held")

    def go_on(self) -> None:
        (self.folder / "hold").unlink()

    def end(self) -> str:
        """End the run, and return its output."""
        (self.folder / "enough").touch()
        assert self.trainer is not None
        said = self.trainer.communicate(timeout=60)[1]
        self.trainer = None
        return said

    def shell(self, *options: str) -> subprocess.Popen[str]:
        """Begin `autoprof trigger`, with `--wait`."""
        command = [sys.executable, "-m", "autoprof", "trigger", "--wait", *options]
        shell = helpers.started(command, cwd=self.folder)
        self._shells.append(shell)
        return shell

    def asked(self) -> str:
        """Wait for the only request, and return its name."""
        deadline = time.monotonic() + 60
        while not (found := requests.waiting(self.run)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (name,) = found
        return name

    def close(self) -> None:
        for process in [*self._shells, *([self.trainer] if self.trainer else [])]:
            process.kill()
            process.communicate()


@pytest.fixture
def going(tmp_path: Path) -> Iterator[Going]:
    write(tmp_path)
    going = Going(tmp_path)
    yield going
    going.close()


def said(shell: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """The exit status, the lines, and what went to stderr."""
    output, errors = shell.communicate(timeout=120)
    return shell.returncode, output.splitlines(), errors


def test_who_waits_sees_the_window_open_and_gets_the_folders(going: Going) -> None:
    going.begin()
    status, lines, errors = said(going.shell("--steps", "2", "--contents", "cpu"))
    assert (status, errors) == (0, "")
    folders = sorted(map(str, going.run.path.glob("global_step_*")))
    assert len(folders) == 2
    assert lines[0].startswith(f"asked run {going.run.path.name} for the next 2 steps, in {going.run.control}/")
    captured = [line for line in lines if "is captured" in line]
    assert captured == [f"step {int(path[-6:])} is captured ({n} of 2)" for n, path in enumerate(folders, 1)]
    assert lines[-3].startswith("captures: 2, ")
    assert lines[-2:] == folders
    for capture in runs.read(going.run.path).captures:
        assert (capture.state, capture.meta.window, capture.meta.contents) == ("complete", "autoprof trigger", ["cpu"])


def test_two_who_ask_for_the_same_wait_for_one_window(going: Going) -> None:
    going.begin()
    going.hold()
    first = going.shell()
    name = going.asked()
    second = going.shell()
    assert second.stdout is not None
    line = second.stdout.readline()
    assert line.startswith(f"run {going.run.path.name} has been asked for the next step already, in ")
    assert name in line
    # Another command may have sent an equal request at the same time.
    requests.ask(going.run, Trigger())
    going.go_on()
    (status, lines, _), (other_status, others, _) = said(first), said(second)
    assert (status, other_status) == (0, 0)
    (folder,) = going.run.path.glob("global_step_*")
    assert lines[-1] == others[-1] == str(folder)
    (one, other) = requests.states(going.run).values()
    assert (one.state, one.captured) == (other.state, other.captured) == ("done", [int(folder.name[-6:])])


def test_who_stops_waiting_leaves_the_request(going: Going) -> None:
    going.begin()
    going.hold()
    shell = going.shell()
    name = going.asked()
    shell.send_signal(signal.SIGINT)
    status, _, errors = said(shell)
    assert status == 130
    assert "the request stays open; run the same command to wait for it again" in errors
    assert requests.waiting(going.run) == [name]
    again = going.shell()
    assert again.stdout is not None
    assert "already" in again.stdout.readline()
    going.go_on()
    status, lines, _ = said(again)
    assert (status, len(list(going.run.path.glob("global_step_*")))) == (0, 1)
    assert lines[-1] == str(*going.run.path.glob("global_step_*"))


def test_one_that_is_killed_leaves_a_whole_request(going: Going) -> None:
    going.begin()
    going.hold()
    shell = going.shell("--contents", "cpu")
    name = going.asked()
    shell.kill()
    shell.wait()
    assert requests.names(going.run) == [name]
    going.go_on()
    done = wait_for_state(going, name, "done")
    assert done.captured
    assert "autoprof: " not in going.end()


def wait_for_state(going: Going, name: str, state: str) -> requests.Became:
    deadline = time.monotonic() + 60
    while True:
        became = requests.states(going.run).get(name)
        if became is not None and became.state == state:
            return became
        assert time.monotonic() < deadline, became
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_run_that_is_over_first_is_said(how: str, going: Going) -> None:
    going.begin()
    shell = going.shell("--from", "1000000")
    assert shell.stdout is not None
    while not shell.stdout.readline().startswith("taken"):
        assert shell.poll() is None
    if how == "ends":
        going.end()
    else:
        assert going.trainer is not None
        going.trainer.kill()
        going.trainer.wait()
    status, _, errors = said(shell)
    assert (status, errors) == (1, "autoprof: trigger: the run has ended\n")


def test_a_run_that_ends_with_part_of_the_window_gives_that_part(going: Going) -> None:
    going.begin()
    shell = going.shell("--steps", "1000000")
    deadline = time.monotonic() + 60
    while len(list(going.run.path.glob("global_step_*/*.meta.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    going.end()
    status, lines, errors = said(shell)
    assert status == 1
    assert "steps captured: " in errors
    assert errors.endswith("; the run has ended\n")
    assert set(lines) >= {str(path) for path in going.run.path.glob("global_step_*")}


def test_a_run_that_is_switched_off_is_not_waited_for(going: Going) -> None:
    going.begin()
    requests.switch(going.run, off=True)
    status, lines, errors = said(going.shell())
    assert (status, lines) == (1, [])
    assert "is switched off in run" in errors
    assert requests.waiting(going.run) == []
    requests.switch(going.run, off=False)
    shell = going.shell("--from", "1000000")
    assert shell.stdout is not None
    shell.stdout.readline()
    requests.switch(going.run, off=True)
    status, _, errors = said(shell)
    assert status == 1
    assert "autoprof is switched off in the run; the request stays open" in errors


def test_a_run_that_captures_no_more_steps_says_so(going: Going) -> None:
    going.begin(AUTOPROF_MAX_STEPS="1")
    status, lines, errors = said(going.shell("--steps", "3"))
    assert status == 1
    (folder,) = going.run.path.glob("global_step_*")
    assert lines[-1] == str(folder)
    most = "AUTOPROF_MAX_STEPS: 1 steps were captured, and no more will be"
    assert errors == f"autoprof: trigger: steps captured: {int(folder.name[-6:])}; {most}\n"
    assert f"autoprof: {most}" in going.end()


def test_a_request_that_is_refused_says_why(going: Going) -> None:
    going.begin()
    going.hold()
    shell = going.shell()
    path = going.run.control / going.asked()
    # Another process has overwritten it.
    path.write_text("{}")
    going.go_on()
    status, _, errors = said(shell)
    assert (status, errors) == (1, "autoprof: trigger: the request was refused: it is for run ''\n")
    assert f"the request {path} is refused: it is for run ''" in going.end()


def test_a_request_that_is_taken_back_is_not_waited_for(going: Going) -> None:
    going.begin()
    going.hold()
    shell = going.shell()
    (going.run.control / going.asked()).unlink()
    status, _, errors = said(shell)
    assert (status, errors) == (1, "autoprof: trigger: the request is gone: its file was removed\n")


def test_on_a_terminal_there_is_a_bar_and_the_folders_at_last(going: Going) -> None:
    going.begin()
    going.hold()
    main, other = pty.openpty()
    command = [sys.executable, "-m", "autoprof", "trigger", "--wait", "--steps", "2"]
    with subprocess.Popen(
        command, cwd=going.folder, env=clean_environment(TERM="xterm"), stdout=other, stderr=other, stdin=other
    ) as shell:
        os.close(other)
        shown = b""
        while True:
            try:
                read = os.read(main, 4096)
            except OSError:  # it is through
                break
            shown += read
            if b"waiting for a step to begin" in shown and (going.folder / "hold").exists():
                going.go_on()
        assert shell.wait(60) == 0
    os.close(main)
    text = shown.decode()
    assert "━" in text
    for folder in going.run.path.glob("global_step_*"):
        assert str(folder) in text.replace("\r\n", "\n").splitlines()
