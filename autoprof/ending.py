"""The end of a run, or of its last window: files complete, `run.json` brought together, the user's command run."""

from __future__ import annotations

import os
import subprocess
import threading
import time

from autoprof import log
from autoprof.runtime import Runtime

_MARK = ".on_finish"
_PAUSE_S = 0.1
# A file that has not grown for so long is not being written any more: its process was killed.
_STALE_S = 10.0


def end_run(run: Runtime) -> None:
    """At exit of the process that started the run. Never raises."""
    try:
        if not run.started_here or not run.rundir.run_json.exists():
            return
        wait_for_files(run)
        run.complete()
        if run.rundir.steps():
            _run_command(run)
    except Exception as error:
        log.warning(f"the end of the run could not be noted: {error}")


def window_passed(run: Runtime) -> None:
    """In the trainer, after the last step that could be captured: the command need not wait for the run's end."""
    if not run.settings.on_finish:
        return

    def wait_and_run() -> None:
        wait_for_files(run)
        _run_command(run)

    threading.Thread(target=wait_and_run, name="autoprof-on-finish", daemon=True).start()


def wait_for_files(run: Runtime) -> None:
    """Wait, within `AUTOPROF_STOP_TIMEOUT_S`, for the files that other processes are still writing."""
    deadline = time.monotonic() + run.settings.stop_timeout_s
    while time.monotonic() < deadline:
        fresh = False
        for part in run.rundir.parts():
            try:
                fresh |= time.time() - part.stat().st_mtime < _STALE_S
            except FileNotFoundError:
                fresh = True
        if not fresh:
            return
        time.sleep(_PAUSE_S)


def _run_command(run: Runtime) -> None:
    """Run `AUTOPROF_ON_FINISH`, once in a run whichever process comes first."""
    if not run.settings.on_finish:
        return
    try:
        os.close(os.open(run.rundir.path / _MARK, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    environment = os.environ | {"AUTOPROF": "0", "AUTOPROF_RUN_DIR": str(run.rundir.path)}
    subprocess.Popen(
        run.settings.on_finish, shell=True, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
