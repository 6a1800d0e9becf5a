"""Finding of processes that died: the first one of a run, whatever else it lost."""

from __future__ import annotations

from autoprof.base.redact import writable
from autoprof.report.findings.registry import KINDS
from autoprof.report.model.run import Finding
from autoprof.rundir import death_words, deaths
from autoprof.rundir.runs import Run

_KIND = "death"
KINDS.append(_KIND)


def of_run(run: Run) -> list[Finding]:
    """Return the finding of a run in which a process died; none of one without."""
    found = deaths.of_run(run)
    if not found:
        return []
    hosts = len(run.info.hosts)
    evidence = [writable(line) for line in death_words.evidence(found, hosts)]
    text = writable(death_words.text(found[0], hosts))
    return [Finding(kind=_KIND, text=text, evidence=evidence, seconds=0.0, file=found[0].file or None)]
