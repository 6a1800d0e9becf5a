"""The line that a run writes to stderr at its end. It gives the number of captures and their place."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from autoprof.base import files, log, seam, units
from autoprof.base.originals import os
from autoprof.config import settings
from autoprof.config.selection import Steps
from autoprof.run.runtime import Runtime
from autoprof.rundir import journal, layout, processes
from autoprof.rundir.file_names import META, is_merged

# Maximum length of the numbers of steps. Longer text gives only their count, and the first and the last number.
_MAX_STEPS_CHARS = 60


def write(run: Runtime, unfinished: int) -> None:
    """Write the line. Only the process that ends the run calls this function.

    Args:
        run: The run.
        unfinished: The number of captures that other processes are still writing.
    """
    log.closing_line(_text(run, unfinished))


def _text(run: Runtime, unfinished: int) -> str:
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
