"""Start of the process that finishes a capture (`job.py`) and outlives this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import autoprof
from autoprof.base import files, interpreter, interrupts, log, process
from autoprof.base.originals import subprocess, threading
from autoprof.capture.finisher import job as finisher_job

# The folder that has the package, from which `-m` takes it.
_PACKAGES = Path(autoprof.__file__).parent.parent
# How long that process may take to start: some 10 ms, and more on a machine that is busy.
_HAND_OVER_S = 60.0


class _State(process.State):
    """The lock for the start of that process, which the user's forks take, too, for some milliseconds.

    `Popen` waits for the other end of a pipe to be closed, which a child that is forked meanwhile would have (CPython,
    `subprocess._execute_child`).
    """

    def __init__(self) -> None:
        self.starting = threading.RLock()
        super().__init__()

    def before_fork(self) -> None:
        self.starting.acquire()

    def in_parent(self) -> None:
        self.starting.release()

    def in_child(self) -> None:
        self.starting.release()


_state = _State()


def spawn(job: dict[str, Any]) -> None:
    """Compress and name a trace without the training thread waiting for it, in a process that outlives this one."""
    try:
        python = interpreter.find()
        described = job | {"python": job.get("python") and python}
        with interpreter.job_file(described) as file, _state.starting, files.low_numbers_taken():
            started = subprocess.Popen(
                [python, "-E", "-s", "-S", "-m", __package__],
                cwd=_PACKAGES,
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        # The child forks, and ends when its own child is at work.
        try:
            status = started.wait(_HAND_OVER_S)
        except subprocess.TimeoutExpired:
            started.kill()  # it is done here then, and by nobody else
            raise
        if status:
            raise subprocess.CalledProcessError(status, started.args)
    except (OSError, subprocess.SubprocessError) as error:
        interrupts.pass_on(error)
        log.warning_once(f"no process could be started to compress traces ({error}); this process compresses them")
        # Analysing a folder of torch_npu's takes too long for the training thread.
        finisher_job.finish(job | {"python": ""})
