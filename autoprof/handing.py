"""Hands what was recorded to another process, which finishes it (`_finish.py`) and outlives this one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from typing import Any

from autoprof import _finish, interpreter, interrupts, log

# How long that process may take to start: some 10 ms, and more on a machine that is busy.
_HAND_OVER_S = 60.0
# `Popen` waits for the other end of a pipe to be closed, which a child that is forked meanwhile would have (CPython,
# `subprocess._execute_child`). So forks of the user's wait for the few milliseconds that it takes.
_starting = threading.RLock()
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def over(job: dict[str, Any]) -> None:
    """Compress and name a trace without the training thread waiting for it, in a process that outlives this one."""
    try:
        python = interpreter.find()
        # In a file: a pipe would end only when a child that the user forks meanwhile has ended, too.
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(job | {"python": job.get("python") and python}, default=str).encode())
            file.seek(0)
            with _starting:
                process = subprocess.Popen(
                    [python, "-I", "-S", _finish.__file__],
                    stdin=file,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        # The child forks, and ends when its own child is at work.
        try:
            status = process.wait(_HAND_OVER_S)
        except subprocess.TimeoutExpired:
            process.kill()  # it is done here then, and by nobody else
            raise
        if status:
            raise subprocess.CalledProcessError(status, process.args)
    except (OSError, subprocess.SubprocessError) as error:
        interrupts.pass_on(error)
        log.warning_once(f"no process could be started to compress traces ({error}); it is done here")
        # Analysing a folder of torch_npu's takes too long for the training thread.
        _finish.finish(job | {"python": ""})
