"""Order of a hang and the deaths after it: if a stuck step was killed or timed out, the hang is the cause."""

from __future__ import annotations

from collections.abc import Sequence

from autoprof.report import hang_state, hangs
from autoprof.rundir import deaths
from autoprof.rundir.records import Death
from autoprof.rundir.runs import Run

# Exceptions with which a launcher or a user ends a run. torchrun raises the first one on SIGTERM.
_ENDS = ("SignalException", "KeyboardInterrupt", "SystemExit")


def hang_came_first(run: Run, died: Sequence[Death]) -> bool:
    """Return True if the deaths of a run are a consequence of its last hang.

    That is so if processes of the hang outlive the process that started the run, or if processes that had written
    their stacks for the hang died in the same step: they were killed, or a collective timed out. A crash, another
    exception, or a kill for memory is a separate cause.

    Args:
        run: The run.
        died: The deaths of the run, the likely cause first.
    """
    *_, hang = (None, *hang_state.read_hangs(run.path))
    if hang is None or not died or died[0].earlier:
        return False
    if any(state.stepped is not None and state.stepped.end_ns > hang.why.unix_ns for state in run.processes):
        return False  # the hang was over
    stuck = {(process.host, process.pid) for process in hang.processes}
    died_stuck = [
        death
        for death in died
        if (death.host, death.pid) in stuck and (death.step, death.loop) == (hang.step, hang.loop)
    ]
    first = died[0]
    if first.started and any((state.host, state.pid) in stuck for state in run.survivors):
        return True
    if first in died_stuck:
        return _gave_up(first)
    return first.started and bool(died_stuck) and (_gave_up(first) or _ends_run(first))


def _gave_up(death: Death) -> bool:
    """Return True if a process was killed, vanished, or ended with an exception about other processes."""
    if death.killer:
        return False
    if death.how == deaths.CRASH:
        return death.signal == "SIGABRT"  # NCCL's watchdog aborts the process after a timeout
    return death.how in (deaths.KILLED, deaths.GONE_DEAD) or deaths.is_consequence(death)


def _ends_run(death: Death) -> bool:
    return death.how == deaths.EXIT or (death.exception is not None and death.exception.type in _ENDS)


def first_sentence(run: Run) -> str:
    """Return the sentence about the cause of a run's end: a death, or the hang before it. Empty if no process died."""
    died = deaths.find_in_run(run)
    if not died:
        return ""
    if hang_came_first(run, died):
        findings, _ = hangs.hangs_of_run(run.path, hang_state.read_open_spans(run, {}), {})
        if findings:
            return findings[-1].text
    return deaths.sentence(died[0], len(run.info.hosts))
