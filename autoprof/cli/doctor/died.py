"""Check of a run for processes that died."""

from __future__ import annotations

from autoprof.cli.doctor.environment import Report
from autoprof.rundir import death_words, deaths
from autoprof.rundir.runs import Run


def check(report: Report, run: Run) -> bool:
    """Add to a report which process died, in front of all other problems; return whether one did."""
    found = deaths.of_run(run)
    if found:
        hosts = len(run.info.hosts)
        report.problems.insert(0, death_words.text(found[0], hosts))
        report.notes[:0] = death_words.evidence(found, hosts)
    return bool(found)
