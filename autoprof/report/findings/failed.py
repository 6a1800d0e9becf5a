"""Finding of samples and rewards that ended with an exception, with the place where it was raised.

Trainers go on without them: verl 0.9.1 trains on the samples that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from autoprof.base.redact import writable
from autoprof.report.figures.open_now import OpenSpans
from autoprof.report.model.run import Finding
from autoprof.rundir import death_words
from autoprof.rundir.lines import RaisedLine

# That of the rule on a step in detail, which counts them.
KIND = "failed_samples"
_MOST = 8


def of_run(opened: OpenSpans) -> list[Finding]:
    """Return a finding for each place at which such an exception was raised, as it was seen first."""
    found: dict[str, tuple[RaisedLine, str]] = {}
    for state in opened.states:
        for line in state.lost:
            what = f"{line.span} {line.name} ended with {death_words.exception(line.exception)}"
            if what not in found or line.unix_ns < found[what][0].unix_ns:
                found[what] = line, f"timeline/{state.file.name}"
    first = sorted(found.items(), key=lambda each: each[1][0].unix_ns)[:_MOST]
    return [_finding(what, line, file) for what, (line, file) in first]


def _finding(what: str, line: RaisedLine, file: str) -> Finding:
    step = f"step {line.step}: " if line.step is not None else ""
    return Finding(
        kind=KIND,
        text=writable(f"{step}{what}"),
        evidence=[writable(f"at {death_words.frame(each)}") for each in reversed(line.exception.frames[-_MOST:])],
        seconds=0.0,
        step=line.step,
        file=writable(file),
    )


def with_places(findings: Iterable[Finding], lost: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings, and those of lost samples: where a step's are counted, the places are its evidence."""
    counted = set()
    for finding in findings:
        if finding.kind == KIND:
            counted.add(finding.step)
            places = [each.text.partition(": ")[2] for each in lost if each.step == finding.step]
            text = ": ".join([finding.text, *places[:1]])
            yield msgspec.structs.replace(finding, text=text, evidence=[*places[1:], *finding.evidence])
        else:
            yield finding
    yield from (each for each in lost if each.step not in counted)
