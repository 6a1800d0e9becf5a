"""The end of a run, or of its last window: files complete, `run.json` brought together, traces merged and the run
copied where that was asked for, the user's command run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import autoprof
from autoprof import interpreter, interrupts, log, store
from autoprof.redaction import is_url, url
from autoprof.runtime import Runtime
from autoprof.settings import MERGE
from autoprof.traces import after

_MARK = ".on_finish"
_AFTER = "import sys; sys.path += sys.argv[1].split(':'); from autoprof.traces import after; after.main()"
# How long it may take to stop being a child, which is some 100 ms.
_HAND_OVER_S = 10.0
_PAUSE_S = 0.1
# A file that has not grown for so long is not being written any more: its process was killed.
_STALE_S = 10.0
# Whether this process runs `AUTOPROF_ON_FINISH`; unknown until somebody has asked the run's other nodes.
_first: bool | None = None


def end_run(run: Runtime) -> None:
    """At exit of the process that started the run. Never raises."""
    try:
        if not run.started_here or not os.path.exists(run.rundir.run_json):
            return
        wait_for_files(run)
        run.complete()
        if run.rundir.steps() or is_url(run.settings.collect):
            _after(run)
    except Exception as error:
        interrupts.pass_on(error)
        log.warning(f"the end of the run could not be noted: {error}")


def window_passed(run: Runtime) -> None:
    """In the trainer, after the last step that could be captured: what comes then need not wait for the run's end.

    It does where each of several ranks runs the trainer: another may not be through with the step. And it does where
    the parts of several nodes are to be collected first.
    """
    if run.settings.collect:
        return
    one_of_several = int(os.environ.get("WORLD_SIZE") or 1) > 1 and not run.started_here
    if one_of_several or not (run.settings.on_finish or _merging(run)):
        return

    def wait_and_go_on() -> None:
        wait_for_files(run)
        _after(run)

    threading.Thread(target=wait_and_go_on, name="autoprof-after", daemon=True).start()


def let_workers_write(run: Runtime) -> None:
    """Wait, where Ray is up, for what its workers are writing, as far as that is seen from this host.

    Ray ends them without a word, with the actors' last handle or with the driver.
    """
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", bool)():
        wait_for_files(run, folders=False)


def wait_for_files(run: Runtime, folders: bool = True) -> None:
    """Wait, within `AUTOPROF_STOP_TIMEOUT_S`, for the files that other processes are still writing.

    Folders are torch_npu's: what is still done to them is done by processes that outlive the run.
    """
    deadline = time.monotonic() + run.settings.stop_timeout_s
    while time.monotonic() < deadline:
        fresh = False
        for part in run.rundir.parts():
            try:
                if not folders and part.is_dir():
                    continue
                # What is of tomorrow was written before the clock was set back.
                fresh |= abs(time.time() - _changed(part)) < _STALE_S
            except FileNotFoundError:
                fresh = True
        if not fresh:
            return
        time.sleep(_PAUSE_S)


def _changed(part: Path) -> float:
    """When a file was written to; Kineto writes beside it and renames (torch 2.13)."""
    beside = part.with_name(f"{part.name}.tmp")
    return max(path.stat().st_mtime for path in (part, beside) if path is part or path.exists())


def _merging(run: Runtime) -> bool:
    return MERGE in run.settings.for_role("rollout").contents


def _after(run: Runtime) -> None:
    """Merge traces, then run `AUTOPROF_ON_FINISH`, the latter once in a run whichever process comes first.

    Merging is done again where a step was captured since.
    """
    command = _command(run) if run.rundir.steps() else ""
    directory = str(run.rundir.path)
    to = run.settings.collect if is_url(run.settings.collect) else ""
    if not _merging(run) and not to:
        if command:
            after.run_command(command, directory)
        return
    # Whoever reads this process's output need not wait for a merge to end; the command's is the user's own.
    output = None if command or to else subprocess.DEVNULL
    job = {"run": directory, "command": command, "merge": _merging(run), "to": to}
    try:
        python = interpreter.find()
        # Another interpreter than this process's may not find its packages.
        others = sys.path if python != sys.executable else []
        path = os.pathsep.join([str(Path(autoprof.__file__).parent.parent), *filter(None, map(str, others))])
        process = subprocess.Popen(
            [python, "-c", _AFTER, path],
            env=os.environ | {"AUTOPROF": "0"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(json.dumps(job).encode())
    except OSError as error:
        interrupts.pass_on(error)
        log.warning(f"no process could be started to merge or copy traces: {error}")
        if command:
            after.run_command(command, directory)
        return
    try:
        process.wait(run.settings.stop_timeout_s if to else _HAND_OVER_S)
    except subprocess.TimeoutExpired:  # it goes on by itself
        if to:
            log.warning(f"the run is still being copied to {url(to)}; autoprof collect --to goes on with it if need be")


def first_to_finish(run: Runtime) -> bool:
    """Whether this process is the one that runs `AUTOPROF_ON_FINISH`, of those on all nodes; to be asked while Ray is
    up, and remembered."""
    global _first
    if _first is None and store.up():
        _first = store.claim(f"finish/{run.info.id}")
    return _first is not False


def _command(run: Runtime) -> str:
    """`AUTOPROF_ON_FINISH`, for the first who asks."""
    if not run.settings.on_finish or not first_to_finish(run):
        return ""
    try:
        os.close(os.open(run.rundir.path / _MARK, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return ""
    return run.settings.on_finish
