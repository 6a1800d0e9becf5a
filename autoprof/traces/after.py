"""What is done with a run's traces when they are there: a merged one for each rollout replica, a copy of the run, then
the user's command.

`ending.py` starts it, in a process that is nobody's child: Ray kills the children of a worker that exits (core worker,
kill_child_processes_on_worker_exit), and neither a run's end nor its next step waits for a merge.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Take one job on stdin, leave the process that started this one, and do it."""
    job = json.load(sys.stdin)
    # A copy is waited for, at the end of the run.
    if not job["to"] and os.fork():
        os._exit(0)
    os.nice(10)
    try:
        # Not before the fork: whoever started this one waits for it.
        from autoprof import _files

        _files.open_as(job["run"])
        if job["merge"]:
            from autoprof.traces.steps import merge_replicas

            merge_replicas(Path(job["run"]))
        if job["to"]:
            from autoprof.collect import at_end

            at_end.copy(Path(job["run"]), job["to"])
    finally:
        if job["command"]:
            run_command(job["command"], job["run"])


def run_command(command: str, run: str) -> None:
    """Start `AUTOPROF_ON_FINISH`, without waiting for it."""
    environment: dict[str, Any] = os.environ | {"AUTOPROF": "0", "AUTOPROF_RUN_DIR": run}
    subprocess.Popen(command, shell=True, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
