"""Hands what was recorded to another process, which finishes it (`_finish.py`) and outlives this one."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from autoprof import _finish, interpreter, log

# How long that process may take to start: some 10 ms, and more on a machine that is busy.
_HAND_OVER_S = 60.0


def over(job: dict[str, Any]) -> None:
    """Compress and name a trace without the training thread waiting for it, in a process that outlives this one."""
    try:
        python = interpreter.find()
        subprocess.run(
            [python, "-I", "-S", _finish.__file__],
            input=json.dumps(job | {"python": job.get("python") and python}, default=str).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_HAND_OVER_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning_once(f"no process could be started to compress traces ({error}); it is done here")
        # Analysing a folder of torch_npu's takes too long for the training thread.
        _finish.finish(job | {"python": ""})
