"""Watch for a step that takes too long: `hang>10m` and `hang>5x` in `AUTOPROF_WHEN`, with a default.

Each process watches the step that is open in it; one without a step watches its oldest stage or request. Whoever finds
that it takes too long makes a folder in `hangs/`, which asks every process on that disk where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from autoprof.base import files, identity, interrupts, log
from autoprof.base.originals import os, time
from autoprof.base.units import seconds as in_words
from autoprof.config.conditions import HANG, Condition
from autoprof.config.settings import Settings
from autoprof.run.span import Span
from autoprof.run.timeline import Timeline
from autoprof.rundir import file_names, layout
from autoprof.rundir.layout import RunDir
from autoprof.rundir.stacks import HANGS, MOST_BYTES, WHY, Why

# Without a condition of the user's both must be passed, and the time alone while there is no median.
TIME_S, FACTOR = 1800.0, 5.0
# So many ended steps, or stages of a name, make a median.
FEWEST = 3
# So often all processes write where they stand, unless a condition says more or less.
AT_MOST = 3
# The folder of what belongs to no step, and how much longer that takes than a step may: processes that know no step
# leave it to the trainer, which looks every ten seconds.
NO_STEP = "no_step"
_LATER_S = 25.0
# Stages that take long where nothing is wrong, outside of any step: of those that are no step's, they are left out.
_LONG = ("validate", "checkpoint")


class Watched(Protocol):
    """The run of this process, as the watch for hangs sees it."""

    @property
    def settings(self) -> Settings:
        """Return its settings."""

    @property
    def rundir(self) -> RunDir:
        """Return its directory."""

    @property
    def timeline(self) -> Timeline:
        """Return the timeline of this process."""

    @property
    def speaks(self) -> bool:
        """Return whether this process says what concerns the whole run."""


class Limit(NamedTuple):
    """Limit of a duration: seconds, and multiples of the median."""

    text: str
    seconds: float = 0.0
    factor: float = 0.0

    def passed(self, took: float, usual: float | None, endless: bool = False) -> bool:
        """Return whether it is passed; `endless` is what may go on for ever where nothing is wrong."""
        if usual is None:
            return bool(self.seconds) and took > self.seconds and not (endless and self.factor)
        return took > self.seconds and took > self.factor * usual


def limits(conditions: Iterable[Condition]) -> tuple[list[Limit], int]:
    """Return the limits, of which one is to be passed, and how often all processes write where they stand."""
    given = [condition for condition in conditions if condition.what == HANG]
    if any(condition.off for condition in given):
        return [], 0
    if not given:
        text = f"{in_words(TIME_S)} and {FACTOR:g} times the median"
        return [Limit(text, TIME_S, FACTOR)], AT_MOST
    found = [Limit(str(each), each.seconds, 0.0 if each.unit else each.above) for each in given]
    return found, max(condition.at_most for condition in given)


class HangWatch:
    """The watch for hangs of one process."""

    def __init__(self, run: Watched) -> None:
        self._run = run
        self._limits, self._at_most = limits(run.settings.when)
        # What was judged as hanging, by the name of its folder: once each.
        self._seen = set(self._folders())
        self._said = set(self._seen)

    def look(self) -> None:
        """Ask all processes where they stand if something takes too long here; say where one has done so.

        Raises:
            OSError: The folder can't be made.
        """
        if not self._limits:
            return
        try:
            if (span := watched(self._run.timeline.open())) is not None:
                self._judge(span)
        finally:
            if self._run.speaks:
                self._say()

    def _judge(self, span: Span) -> None:
        line = span.line
        name = NO_STEP if line.step is None else f"step_{line.step:06d}"
        if name in self._seen:
            return
        took = (time.monotonic_ns() - span.begun_ns) / 1e9
        late = took if line.step is not None else took - _LATER_S
        usual = usual_s(self._run.timeline.took, line.span, line.name)
        # A batch of a server that is never idle.
        endless = line.span == "step" and line.role == "rollout"
        limit = next((limit for limit in self._limits if limit.passed(late, usual, endless)), None)
        if limit is None or (line.step is None and self._asked_since(time.time_ns() - round(took * 1e9))):
            return
        self._seen.add(name)
        there = self._folders()
        if name in there or len(there) >= self._at_most or layout.switched_off(self._run.rundir):
            return
        whose = line.name if line.span == "step" else f"{line.span} {line.name}"
        if line.step is not None:
            whose = f"step {line.step}" if line.span == "step" else f"{whose} of step {line.step}"
        times = f", {took / usual:.1f} times the median of {in_words(usual)}" if usual else ""
        self._ask(
            name,
            Why(
                host=identity.HOST,
                pid=os.getpid(),
                unix_ns=time.time_ns(),
                step=line.step,
                since_ns=line.start_ns,
                condition=limit.text,
                reason=f"{whose} has taken {in_words(took)}{times}",
            ),
        )

    def _asked_since(self, unix_ns: int) -> bool:
        """Return whether all processes have written where they stood since then, for a step's sake."""
        place = self._run.rundir.path / HANGS
        try:
            return any(os.stat(place / name / WHY).st_mtime_ns > unix_ns for name in self._folders())
        except OSError as error:  # somebody removes it
            interrupts.pass_on(error)
            return False

    def _ask(self, name: str, why: Why) -> None:
        """Make the folder with its `why.json` in it, unless another process has done so first."""
        place = self._run.rundir.path / HANGS
        self._run.rundir.make(place)
        # Who looks at requests leaves out names that begin so.
        part = place / f".{name}.{os.urandom(4).hex()}{file_names.PART}"
        try:
            layout.write_json(part / WHY, why)
            os.rename(part, place / name)
        except OSError as error:
            interrupts.pass_on(error)
            files.remove(str(part))
            if not os.path.isdir(place / name):
                raise

    def _say(self) -> None:
        """Say in one line which folders are new."""
        for name in self._folders():
            if name in self._said:
                continue
            self._said.add(name)
            run = self._run.rundir.path
            try:
                content = files.read(run / HANGS / name / WHY, MOST_BYTES)
                reason = msgspec.json.decode(content, type=Why).reason
            except (OSError, ValueError) as error:  # it is somebody else's
                interrupts.pass_on(error)
                continue
            folder = run / HANGS / name
            log.warning_aside(f"{reason}; stacks are in {folder}; autoprof doctor {run} says who is late")

    def _folders(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._run.rundir.path / HANGS) if not name.startswith("."))
        except OSError as error:  # nothing has hung
            interrupts.pass_on(error)
            return []


def watched(spans: Iterable[Span]) -> Span | None:
    """Return the span that is watched, of those that are open, the oldest first."""
    found = None
    for span in spans:
        if span.kind == "step":
            # One before it was interrupted where it should have ended.
            found = span
        elif found is None and span.kind in ("stage", "request") and span.line.stage_kind not in _LONG:
            found = span
    return found


def usual_s(took: Mapping[tuple[str, str], Iterable[int]], kind: str, name: str) -> float | None:
    """Return the median of the seconds that spans of a kind and name took; None while too few have ended."""
    # Without `statistics`, which imports much.
    durations = sorted(took.get((kind, name), ()))
    middle = len(durations) // 2
    return (durations[middle] + durations[~middle]) / 2e9 if len(durations) >= FEWEST else None
