"""Work at the end of a run or after its last window.

autoprof waits for files that are being written, completes `run.json` and writes a line to stderr. Then it merges and
copies traces, and runs the user's command.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import autoprof
from autoprof.base import files, identity, interpreter, log, process, seam, units
from autoprof.base.originals import os, subprocess, threading, time
from autoprof.base.redact import is_url, url
from autoprof.config import settings
from autoprof.config.selection import Steps
from autoprof.config.values import MERGE
from autoprof.run import cluster, raised
from autoprof.run.runtime import Runtime
from autoprof.rundir import journal, layout, processes
from autoprof.rundir.file_names import META, PART, SNAPSHOT, TAKEN, TRACE, is_merged

_MARK = ".on_finish"
_AFTER = "autoprof.cli.after_run"
# Maximum wait until the process that works after the run has detached itself from this process. It usually takes 100
# ms.
_HAND_OVER_S = 10.0
_PAUSE_S = 0.1
# If a file has not grown for this time, no process is writing it any more.
_STALE_S = 10.0
# If the recording of a dead process has not grown for this time, no process is finishing it. The process that finishes
# such a recording needs less than 0.1 s to start.
_ORPHAN_S = 2.0
_GZ = ".gz"
# Maximum number of captures that a message names.
_MAX_NAMED = 3
_RECORDINGS = (TRACE.removesuffix(_GZ), SNAPSHOT)
_MADE_BY = re.compile(rf"\.{re.escape(identity.HOST)}\.pid(\d{{1,7}})\.")


def end_run(run: Runtime) -> None:
    """End the run if this process started the run, or if it is the last rank. Called at exit. Never raises."""
    with seam.guard("the end of the run can't be written", run.rundir.report):
        run.restore()
        if not _run_ends_here(run) or not files.exists(run.rundir.run_json):
            return
        wait_for_files(run)
        # After Ctrl-C, the launcher does not end the run (`_boot._end`).
        if run.stopped or not run.launcher() or raised.exception_type() == "SIGINT":
            run.complete()
            if not run.stopped:
                raised.keep_status(run.rundir.exit_status)
            report_captures(run)
        if run.rundir.steps() or is_url(run.settings.collect):
            _work_after_run(run)


def report_captures(run: Runtime) -> None:
    """Warn about captures that were cut off, and write the line at the end of the run."""
    written, cut_off = _unfinished(run)
    _report_cut_off(run, cut_off)
    with seam.guard("the line at the end of the run can't be written", run.rundir.report):
        log.closing_line(_closing_line(run, len(written)))


# Maximum length of the numbers of steps. Longer text gives only their count, and the first and the last number.
_MAX_STEPS_CHARS = 60


def _closing_line(run: Runtime, unfinished: int) -> str:
    """Return the line that a run writes to stderr at its end. It gives the number of captures and their place.

    Args:
        run: The run.
        unfinished: The number of captures that other processes are still writing.
    """
    names = [name for folder in run.rundir.steps() for name in files.names_in(folder)]
    complete = sum(name.endswith(META) and not is_merged(name.removesuffix(META)) for name in names)
    place = _place(run.rundir.path)
    report = f"autoprof report{_argument(run.rundir.path)}"
    if complete == len(names) > 0 and not unfinished:
        why = f"autoprof doctor {shlex.quote(place)} shows why"
        return f"{units.count(complete, 'capture')} in {place}, without a trace; {why}"
    if complete or unfinished:
        being_written = f" and {unfinished} that {_are(unfinished)} still being written" if unfinished else ""
        shown = f"{report} shows {'it' if complete + unfinished == 1 else 'them'}"
        return f"{units.count(complete, 'capture')}{being_written} in {place}; {shown}"
    numbers = executed_steps(run.rundir.path)
    steps = Steps.parse(run.settings.steps)
    if numbers and not steps.any and not run.settings.when:
        return f"{_steps(numbers)} {_are(len(numbers))} on the timeline in {place}; {report} shows it"
    doctor = f"autoprof doctor {shlex.quote(place)} shows why"
    if not numbers:
        return f"no step was captured: no step was recorded; {doctor}"
    requested = [number for ordinal, number in enumerate(numbers, 1) if steps.matches(number, ordinal)]
    if requested:
        return f"no step was captured, although {_steps(requested)} ran; {doctor}"
    when = f", AUTOPROF_WHEN={','.join(map(str, run.settings.when))}" if run.settings.when else ""
    off = ", then autoprof was switched off" if layout.switched_off(run.rundir) else ""
    return f"no step was captured: AUTOPROF_STEPS={run.settings.steps}{when}, {_steps(numbers)} ran{off}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def executed_steps(run: Path) -> list[int]:
    """Return the sorted numbers of the steps of a run that have ended.

    If several ranks run the trainer, only rank 0 is read, because the others run the same steps.
    """
    driving = [state for state in processes.read(run) if state.drives]
    leading = [state for state in driving if state.stepped is None or not state.stepped.rank]
    drivers = {state.file for state in leading or driving}
    return sorted(
        {
            span.step
            for file in journal.journals(run)
            if file.name in drivers
            for span in journal.search(file, (b'"kind":"step"',))
            if span.step is not None
        }
    )


def _steps(numbers: Sequence[int]) -> str:
    """Return sorted numbers of steps as text: `step 3`, `steps 1 to 4`, `steps 1-3,7`, `90 steps from 10 to 900`."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    text = f"steps {units.ranges(numbers)}"
    return text if len(text) <= _MAX_STEPS_CHARS else f"{len(numbers)} steps from {numbers[0]} to {numbers[-1]}"


def _place(folder: Path) -> str:
    """Return the path of a run's folder, relative to the working directory if it is inside."""
    with seam.suppress(OSError, ValueError):
        return str(folder.relative_to(os.getcwd()))
    return str(folder)


def _argument(folder: Path) -> str:
    """Return the argument with which commands find the run; empty if they find it as the latest run."""
    with seam.suppress(OSError):
        if folder.parent == Path(os.getcwd(), settings.Settings().dir):
            return ""
    return f" {shlex.quote(_place(folder))}"


def _run_ends_here(run: Runtime) -> bool:
    """Return True if the run ends with this process. If this process is a rank, record that the rank ends."""
    if run.seat is None:
        return run.started_here
    run.timeline.flush()
    is_last = run.seat.leave("" if run.stopped else raised.exception_type())
    if is_last and not files.exists(run.rundir.run_json):
        run.seat.clear()
    return is_last


def window_passed(run: Runtime) -> None:
    """Merge traces and run the user's command. The trainer calls this after the last step that could be captured.

    Do nothing if each of several ranks runs the trainer, because another rank may still be in the step. Also do nothing
    if the files of several nodes must be collected first. In both cases, the end of the run does this work.
    """
    if run.settings.collect:
        return
    one_of_several = identity.ranks() > 1 and (run.seat is not None or not run.started_here)
    if one_of_several or not (run.settings.on_finish or _must_merge(run)):
        return

    def wait_and_merge() -> None:
        wait_for_files(run)
        _work_after_run(run)

    process.start_thread(threading.Thread(target=wait_and_merge, name="autoprof-after", daemon=True).start)


def let_workers_write(run: Runtime) -> None:
    """If Ray is up, wait for files that Ray's workers are writing on a disk of this host.

    Ray kills a worker without warning when the last handle of its actor is deleted, or when the driver ends.
    """
    if cluster.is_up():
        wait_for_files(run, folders=False)


def wait_for_files(run: Runtime, folders: bool = True) -> None:
    """Wait for files that other processes are writing, at most `AUTOPROF_STOP_TIMEOUT_S`.

    If `folders` is false, do not wait for the folders of torch_npu, because processes that outlive the run finish them.
    """
    deadline = time.monotonic() + run.settings.stop_timeout_s
    while time.monotonic() < deadline:
        parts = (part for part in run.rundir.parts() if folders or not files.is_folder(part))
        if not any(_is_fresh(part, run.began) for part in parts):
            return
        time.sleep(_PAUSE_S)


def _is_fresh(part: Path, run_began: float) -> bool:
    """Return True if a process is writing a `.part` file, or has just renamed it.

    Args:
        part: The file.
        run_began: Seconds since the epoch at which this process began its work for the run (`Runtime.began`).
    """
    age = _age_s(part)
    return age < _STALE_S and not (age > _ORPHAN_S and _is_orphan(part, run_began))


def _unfinished(run: Runtime) -> tuple[list[str], list[str]]:
    """Return the captures without a meta file: those that a process is writing, and those of this attempt without one.

    No process writes the latter, because their processes have died.
    """
    parts = [str(part) for part in run.rundir.parts() if _age_s(part) < _STALE_S]
    attempt_s = time.time() - run.info.started
    written, cut_off = [], []
    for folder in run.rundir.steps():
        names = files.names_in(folder)
        for name in [name.removesuffix(TAKEN) for name in names if name.endswith(TAKEN)]:
            if f"{name}{META}" in names:
                continue
            if any(part.startswith(f"{folder}/{name}.") for part in parts):
                written.append(f"{folder.name}/{name}")
            elif 0 < _age_s(folder / f"{name}{TAKEN}") <= attempt_s:
                cut_off.append(f"{folder.name}/{name}")
    return written, cut_off


def _report_cut_off(run: Runtime, captures: list[str]) -> None:
    """Warn about captures that were cut off."""
    if captures:
        more_text = f" and {len(captures) - _MAX_NAMED} more" if len(captures) > _MAX_NAMED else ""
        listed_captures = f"{', '.join(captures[:_MAX_NAMED])}{more_text}"
        log.warning(f"captures were cut off: {listed_captures}; see autoprof doctor {run.info.id}")


def _age_s(part: Path) -> float:
    """Return the seconds since the last write to a `.part` file; 0 if the file no longer exists.

    The result is also positive if the time of the write is in the future, because the clock may have been set back.
    """
    changed = _last_write_s(part)
    return abs(time.time() - changed) if changed else 0


def _is_orphan(part: Path, run_began: float) -> bool:
    """Return True if a `.part` file is the recording of a dead process, and no process is finishing the recording.

    A process that has the same pid as this one wrote a file that was changed last before `run_began`. Such a process is
    dead.

    Args:
        part: The file.
        run_began: Seconds since the epoch at which this process began its work for the run (`Runtime.began`).
    """
    name = part.name.removesuffix(PART).removesuffix(_GZ)
    match = _MADE_BY.search(name)
    if match is None or not name.endswith(_RECORDINGS):
        return False
    pid = int(match[1])
    is_dead = _last_write_s(part) < run_began if pid == os.getpid() else identity.start_ticks(pid) is None
    return is_dead and not _is_locked(part.with_name(f"{name}{PART}"))


def _is_locked(path: Path) -> bool:
    """Return True if a process has a lock on a file, or if that is unknown. Return False if the file does not exist.

    The function does not try to take the lock, because it would block the process that finishes the file.
    """
    status, locks = files.status(path), files.text("/proc/locks")
    return status is not None and (f":{status.st_ino} " in locks or not files.exists("/proc/locks"))


def _last_write_s(part: Path) -> float:
    """Return the time of the last write to a `.part` file, in seconds since the epoch; 0 if it no longer exists.

    Kineto first writes to `<name>.tmp` (torch 2.13), so a write to that file counts too.
    """
    if (status := files.status(part)) is None:
        return 0
    temporary = files.status(part.with_name(f"{part.name}.tmp"))
    return max(status.st_mtime, temporary.st_mtime if temporary is not None else 0)


def _must_merge(run: Runtime) -> bool:
    return MERGE in run.settings.for_role("rollout").contents


def _work_after_run(run: Runtime) -> None:
    """Merge and copy traces, then run `AUTOPROF_ON_FINISH`. All this work is done in a separate process.

    The command is run only once per run, by the first process that calls this function. A later call merges the steps
    that were captured since the earlier call.
    """
    command = _command(run) if run.rundir.steps() else ""
    directory = str(run.rundir.path)
    url_of_copy = run.settings.collect if is_url(run.settings.collect) else ""
    if not _must_merge(run) and not url_of_copy:
        if command:
            run_command(command, directory)
        return
    # If only a merge runs, it must not keep the output of this process open, because a reader of the output would wait
    # for the merge. The user's command may write to the output.
    output = None if command or url_of_copy else subprocess.DEVNULL
    job = {
        "run": directory,
        "command": command,
        "merge": _must_merge(run),
        "to": url_of_copy,
        "cwd": _cwd() or directory,
    }
    try:
        python = interpreter.find()
        # A different interpreter may not find the packages of this process.
        extra_paths = sys.path if python != sys.executable else []
        path = os.pathsep.join(filter(None, map(str, extra_paths)))
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
        seam.pass_on(error)
        log.warning(f"no process could be started to merge or copy traces: {error}")
        if command:
            run_command(command, directory)
        return
    try:
        if status := after.wait(run.settings.stop_timeout_s if url_of_copy else _HAND_OVER_S):
            log.warning(
                f"the process that merges and copies traces ended with status {status}; "
                "run autoprof merge and autoprof collect instead"
            )
            # If the process copies the run, it runs the command even if the copy fails. If it does not copy the run, it
            # failed before it could run the command.
            if command and not url_of_copy:
                run_command(command, directory)
    except subprocess.TimeoutExpired:  # the process continues in the background
        if url_of_copy:
            log.warning(
                f"the copy to {url(url_of_copy)} continues in the background; "
                "if it stops, autoprof collect --to resumes it"
            )


def _cwd() -> str:
    """Return the working directory, or an empty text if it was removed."""
    with seam.suppress(OSError):
        return os.getcwd()
    return ""


def first_to_finish(run: Runtime) -> bool:
    """Return True if this process runs `AUTOPROF_ON_FINISH`. If Ray is up, only one process of all nodes gets True.

    The answer is kept, because Ray may not be up any more at a later call.
    """
    if run.first_to_finish is None and cluster.is_up():
        run.first_to_finish = cluster.claim(f"finish/{run.info.id}")
    return run.first_to_finish is not False


def _command(run: Runtime) -> str:
    """Return `AUTOPROF_ON_FINISH` in the first process that calls this function, and an empty text in all others."""
    if not run.settings.on_finish or not first_to_finish(run):
        return ""
    return run.settings.on_finish if files.claim(run.rundir.path / _MARK) else ""


def run_command(command: str, run: str) -> None:
    """Start the command `AUTOPROF_ON_FINISH`, and do not wait for its end. `run` is the path of the run directory."""
    environment: dict[str, Any] = os.environ | {"AUTOPROF": "0", "AUTOPROF_RUN_DIR": run}
    start = partial(subprocess.Popen, shell=True, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    process.start_program(partial(start, command))
