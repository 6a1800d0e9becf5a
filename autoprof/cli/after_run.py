"""Work after the traces of a run are written: merge the traces of rollout replicas, copy the run, run a command.

`run/end.py` starts this module in a detached process, for two reasons: Ray kills the children of a worker that exits
(core worker, kill_child_processes_on_worker_exit), and a merge must not delay the run's end or its next step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Read one job from stdin, detach from the parent process, and do the job.

    The first argument of the command line lists folders with packages. They are added to `sys.path`, because this
    interpreter may differ from the run's and then does not find these packages. autoprof's modules are imported only
    after that.
    """
    # Unblock all signals: this process inherits the mask of the thread that started it, which blocks them all.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # `-m` puts autoprof's folder, in which this process was started, first in sys.path. That folder belongs after the
    # other ones.
    sys.path += [sys.path.pop(0), *filter(None, sys.argv[1].split(os.pathsep))]
    job = json.load(sys.stdin)
    # Run the command even if this user can no longer enter the working directory of the run.
    with contextlib.suppress(OSError):
        os.chdir(job["cwd"])
    # If the run is copied, the end of the run waits for this process. Then this process must not detach.
    if not job["to"] and os.fork():
        os._exit(0)
    os.nice(10)
    try:
        # Imported after the fork, because the parent process waits until the fork.
        from autoprof.base import files

        files.open_as(job["run"])
        if job["merge"]:
            from autoprof.traces.merge_step import merge_replicas

            merge_replicas(Path(job["run"]))
        if job["to"]:
            _copy_run(Path(job["run"]), job["to"])
    finally:
        if job["command"]:
            from autoprof.run import end

            end.run_command(job["command"], job["run"])


def _copy_run(run: Path, to: str) -> None:
    """Copy an ended run to the URL `to`. Log NoTarget and OSError instead of raising them."""
    from autoprof.base import log, seam
    from autoprof.run.gather import warn_missing
    from autoprof.run.upload import NoTarget, Sending

    log.configure("warning")
    try:
        missing_parts = Sending(run, to).send(lambda done: None)
        warn_missing(missing_parts, f"autoprof collect {run.name} --to URL continues the copy")
    except (NoTarget, OSError) as error:
        seam.pass_on(error)
        log.warning(f"the run is not copied: {error}")


if __name__ == "__main__":
    main()
