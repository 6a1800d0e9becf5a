"""Work on a run's traces once they are there: merged traces of rollout replicas, a copy of the run, the user's command.

`run/end.py` starts it, in a process that is nobody's child: Ray kills the children of a worker that exits (core worker,
kill_child_processes_on_worker_exit), and neither a run's end nor its next step waits for a merge.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Take one job on stdin, leave the process that started this one, and do it.

    The first argument has folders of packages, where another interpreter than the run's is at work. All imports come
    after that.
    """
    # The thread that started this process blocks all signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # `-m` puts the folder of autoprof first, in which this process was started: the command is run where the run was.
    sys.path += [sys.path.pop(0), *filter(None, sys.argv[1].split(os.pathsep))]
    job = json.load(sys.stdin)
    # This user may not enter it any more; the command is run all the same.
    with contextlib.suppress(OSError):
        os.chdir(job["cwd"])
    # A copy is waited for, at the end of the run.
    if not job["to"] and os.fork():
        os._exit(0)
    os.nice(10)
    try:
        # Not before the fork: whoever started this one waits for it.
        from autoprof.base import files

        files.open_as(job["run"])
        if job["merge"]:
            from autoprof.traces.merge_step import merge_replicas

            merge_replicas(Path(job["run"]))
        if job["to"]:
            _copy(Path(job["run"]), job["to"])
    finally:
        if job["command"]:
            from autoprof.run import end

            end.run_command(job["command"], job["run"])


def _copy(run: Path, to: str) -> None:
    """Copy a run that is over, and log failures. Nothing is raised."""
    from autoprof.base import interrupts, log
    from autoprof.run.collect.fetch import Patience
    from autoprof.run.collect.gather import warn_missing
    from autoprof.run.collect.upload import NoTarget, Sending

    log.configure("warning")
    try:
        missing = Sending(run, to, Patience()).send(lambda done: None)
        warn_missing(missing, f"autoprof collect {run.name} --to URL goes on with it")
    except (NoTarget, OSError) as error:
        interrupts.pass_on(error)
        log.warning(f"the run is not copied: {error}")


if __name__ == "__main__":
    main()
