"""End of a run, or of its last window: complete files, `run.json`, merged traces, a copy, the user's command."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import autoprof
from autoprof.base import files, identity, interpreter, interrupts, log, process, threads
from autoprof.base.exception_text import reason
from autoprof.base.originals import os, subprocess, threading, time
from autoprof.base.redact import is_url, url
from autoprof.config.values import MERGE
from autoprof.run import cluster, raised, seat
from autoprof.run.runtime import Runtime
from autoprof.rundir.file_names import PART, SNAPSHOT, TRACE

_MARK = ".on_finish"
_AFTER = "autoprof.cli.after_run"
# How long the process may take to stop being a child, which is some 100 ms.
_HAND_OVER_S = 10.0
_PAUSE_S = 0.1
# A file that has not grown for this long is not being written any more.
_STALE_S = 10.0
# The same for a recording whose process is gone. A finisher takes less than 0.1 s to start.
_ORPHAN_S = 2.0
_GZ = ".gz"
_RECORDINGS = (TRACE.removesuffix(_GZ), SNAPSHOT)
_MADE_BY = re.compile(rf"\.{re.escape(identity.HOST)}\.pid(\d{{1,7}})\.")


class _State(process.State):
    """The state of the end in this process.

    Attributes:
        first: True if this process runs `AUTOPROF_ON_FINISH`; None until it has asked other nodes.
        began: Seconds since the epoch when this program began; another one may have had the same process, by `os.exec`.
    """

    def begin(self) -> None:
        self.first: bool | None = None
        self.began = time.time()


_state = _State()


def end_run(run: Runtime) -> None:
    """End the run in the process that started it, or in the last of its ranks, at its exit. Never raises."""
    try:
        if not _ends(run) or not files.exists(run.rundir.run_json):
            return
        wait_for_files(run)
        run.complete()
        if not run.stopped:
            raised.keep_status(run.rundir.exit_status)
        if run.rundir.steps() or is_url(run.settings.collect):
            _after(run)
    except Exception as error:
        interrupts.pass_on(error)
        log.warning(f"the end of the run can't be written: {reason(error)}")


def _ends(run: Runtime) -> bool:
    """Return whether the run ends with this process."""
    if (own := seat.own_seat()) is None:
        return run.started_here
    run.timeline.flush()
    last = own.leave("" if run.stopped else raised.exception_type())
    if last and not files.exists(run.rundir.run_json):
        own.clear()
    return last


def window_passed(run: Runtime) -> None:
    """Merge and run the user's command in the trainer, after the last step that could be captured.

    They wait for the run's end where each of several ranks runs the trainer, since another may not be through with the
    step, and where the parts of several nodes are collected first.
    """
    if run.settings.collect:
        return
    one_of_several = identity.ranks() > 1 and (seat.own_seat() is not None or not run.started_here)
    if one_of_several or not (run.settings.on_finish or _merging(run)):
        return

    def wait_and_go_on() -> None:
        wait_for_files(run)
        _after(run)

    threads.start(threading.Thread(target=wait_and_go_on, name="autoprof-after", daemon=True).start)


def let_workers_write(run: Runtime) -> None:
    """Wait, where Ray is up, for files that its workers are writing on a disk of this host.

    Ray kills workers without warning, with the actors' last handle or with the driver.
    """
    if cluster.is_up():
        wait_for_files(run, folders=False)


def wait_for_files(run: Runtime, folders: bool = True) -> None:
    """Wait, within `AUTOPROF_STOP_TIMEOUT_S`, for the files that other processes are still writing.

    Folders are torch_npu's: processes that outlive the run finish them.
    """
    deadline = time.monotonic() + run.settings.stop_timeout_s
    while time.monotonic() < deadline:
        fresh = False
        for part in run.rundir.parts():
            try:
                if not folders and files.is_folder(part):
                    continue
                # A file of tomorrow was written before the clock was set back.
                age = abs(time.time() - _changed(part))
                fresh |= age < _STALE_S and not (age > _ORPHAN_S and _is_orphan(part))
            except FileNotFoundError as error:
                interrupts.pass_on(error)
                fresh = True
        if not fresh:
            return
        time.sleep(_PAUSE_S)


def _is_orphan(part: Path) -> bool:
    """Return True if a part is of a recording whose process is gone, and that no finisher works on."""
    name = part.name.removesuffix(PART).removesuffix(_GZ)
    found = _MADE_BY.search(name)
    if found is None or not name.endswith(_RECORDINGS):
        return False
    pid = int(found[1])
    gone = _changed(part) < _state.began if pid == os.getpid() else identity.start_ticks(pid) is None
    return gone and not _is_locked(part.with_name(f"{name}{PART}"))


def _is_locked(path: Path) -> bool:
    """Return True if a process holds a lock of a file, or if that can't be seen. Taking the lock would show it, too,
    but keep a finisher from it."""
    try:
        inode = os.stat(path).st_ino
    except FileNotFoundError as error:
        interrupts.pass_on(error)
        return False
    try:
        return f":{inode} " in files.text("/proc/locks")
    except OSError as error:
        interrupts.pass_on(error)
        return True


def _changed(part: Path) -> float:
    """Return when a file was written to; Kineto writes beside it and renames (torch 2.13)."""
    beside = part.with_name(f"{part.name}.tmp")
    return max(os.stat(path).st_mtime for path in (part, beside) if path is part or files.exists(path))


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
            run_command(command, directory)
        return
    # A reader of this process's output need not wait for a merge to end; the command's output is the user's own.
    output = None if command or to else subprocess.DEVNULL
    job = {"run": directory, "command": command, "merge": _merging(run), "to": to, "cwd": _cwd() or directory}
    try:
        python = interpreter.find()
        # Another interpreter than this process's may not find its packages.
        others = sys.path if python != sys.executable else []
        path = os.pathsep.join(filter(None, map(str, others)))
        with interpreter.job_file(job) as file, files.low_numbers_taken():
            after = subprocess.Popen(
                [python, "-m", _AFTER, path],
                cwd=Path(autoprof.__file__).parent.parent,
                env=os.environ | {"AUTOPROF": "0"},
                stdin=file,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        interrupts.pass_on(error)
        log.warning(f"no process could be started to merge or copy traces: {error}")
        if command:
            run_command(command, directory)
        return
    try:
        if status := after.wait(run.settings.stop_timeout_s if to else _HAND_OVER_S):
            log.warning(
                f"the process that merges and copies traces ended with status {status}; "
                "autoprof merge and autoprof collect do its work by hand"
            )
            # With a copy it runs the command whatever fails; else it ends by itself before it has begun.
            if command and not to:
                run_command(command, directory)
    except subprocess.TimeoutExpired:  # it goes on by itself
        if to:
            log.warning(
                f"the copy to {url(to)} goes on in the background; if it stops, autoprof collect --to resumes it"
            )


def _cwd() -> str:
    """Return the working directory, or an empty text where somebody has removed it."""
    try:
        return os.getcwd()
    except OSError as error:
        interrupts.pass_on(error)
        return ""


def first_to_finish(run: Runtime) -> bool:
    """Return whether this process, of those on all nodes, runs `AUTOPROF_ON_FINISH`.

    The answer is found while Ray is up, and remembered.
    """
    if _state.first is None and cluster.is_up():
        _state.first = cluster.claim(f"finish/{run.info.id}")
    return _state.first is not False


def _command(run: Runtime) -> str:
    """Return `AUTOPROF_ON_FINISH` to the first caller, and an empty text to all others."""
    if not run.settings.on_finish or not first_to_finish(run):
        return ""
    try:
        os.close(files.descriptor(run.rundir.path / _MARK, os.O_CREAT | os.O_EXCL))
    except FileExistsError as error:
        interrupts.pass_on(error)
        return ""
    return run.settings.on_finish


def run_command(command: str, run: str) -> None:
    """Start `AUTOPROF_ON_FINISH`, without waiting for it."""
    environment: dict[str, Any] = os.environ | {"AUTOPROF": "0", "AUTOPROF_RUN_DIR": run}
    start = partial(subprocess.Popen, shell=True, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    threads.start_process(partial(start, command))
