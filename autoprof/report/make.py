"""The figures of a report: of each side, then their comparison."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autoprof.report import build, comparison
from autoprof.report.build import Progress, unseen
from autoprof.report.model.run import RunFigures
from autoprof.rundir.file_names import REPORT, tidy
from autoprof.rundir.runs import Run


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A run or one step of it, and what to hold it against.

    Attributes:
        run: The run.
        step: The only step in detail; without it those that are worth it.
        against: What to hold it against: a run, or a step of one.
        against_step: The step of `against`, only together with `step`, which it is by default.
    """

    run: Run
    step: int | None = None
    against: Run | None = None
    against_step: int | None = None

    @property
    def page(self) -> Path:
        """Return the path of its page. Only that of the whole run, which `autoprof open` shows, is called `REPORT`."""
        words = [] if self.step is None else [f"step{self.step}"]
        if self.against is not None:
            words += ["against", tidy(self.against.id)]
            words += [] if self.against_step is None else [f"step{self.against_step}"]
        stem, ending = REPORT.split(".")
        return Path(self.run.path, ".".join([stem, *words, ending]))


def figures(request: Request, progress: Progress = unseen) -> RunFigures:
    """Make the figures that a report shows.

    Raises:
        NotFound: There is no such step.
    """
    own_step, run = request.step, request.run
    if request.against is None:
        return build.figures(run, [] if own_step is None else [own_step], progress)
    other_step = own_step if request.against_step is None else request.against_step
    own_steps, other_steps = ([] if step is None else [step] for step in (own_step, other_step))
    one_run = bool(own_steps) and request.against.path == run.path
    if one_run:
        own = others = build.figures(run, own_steps + other_steps, progress, comparison.OPERATORS)
    else:
        own = build.figures(run, own_steps, progress, comparison.OPERATORS)
        others = build.figures(request.against, other_steps, progress, comparison.OPERATORS)
    before, after = comparison.side(others, other_step, not one_run), comparison.side(own, own_step, not one_run)
    return msgspec.structs.replace(build.trimmed(own), comparison=comparison.compare(before, after))
