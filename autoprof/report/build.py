"""Makes the figures of a run: reads its timeline twice, and the traces of the steps that are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from autoprof import __version__, listing
from autoprof.redaction import writable
from autoprof.report import captures, findings, words
from autoprof.report.details import choose, details, looked_at
from autoprof.report.figures import CaptureFigures, RunFigures, StepRow
from autoprof.report.overview import NOBODY, Overview, StepSpan, shares
from autoprof.report.reading import Reader, Timeline, timelines

# Told of each trace before it is read: its number, of how many, its name.
Progress = Callable[[int, int, str], None]


# So many operators and kernels of a trace are told.
OPERATORS = 50
# The year 2116: what is later is no time.
_MOST_NS = 1 << 62


def figures(
    run: listing.Run,
    chosen: Sequence[int] | None = None,
    progress: Progress | None = None,
    operators: int = OPERATORS,
) -> RunFigures:
    """The figures of a run.

    Args:
        run: The run, as listed.
        chosen: The steps in detail; without it those that `details.choose` picks.
        progress: Told of each trace before it is read.
        operators: How many operators and kernels of each trace are told.

    Raises:
        NotFound: A chosen step is neither in the timeline nor among the captures.
    """
    path = Path(run.path)
    files, clocks = timelines(path)
    reader = Reader()
    folders = {step.number: step for step in run.steps}
    overview = Overview(files, reader, folders)
    rows = overview.cut_off | {row.number: row for row in overview.rows}
    asked = list(dict.fromkeys(choose(overview.rows, overview.cut_off.values()) if chosen is None else chosen))
    if chosen is None and not asked:
        asked = sorted(folders)[-1:]
    for number in asked:
        if number not in rows and number not in folders:
            raise listing.NotFound(_no_step(run, number, overview.rows))
    known = overview.cut_off_spans | overview.spans
    others = looked_at(overview.rows, asked) if chosen is None else []
    spans = {number: known.get(number) or _span_of_captures(rows, folders[number]) for number in (*asked, *others)}
    shifts = {file.host: file.shift_ns for file in files}
    wanted = [folders[number] for number in asked if number in folders]
    summed = _captures(path, wanted, spans, shifts, progress, operators)
    steps = details(list(spans.values()), rows, files, summed)
    stages = shares(overview.rows)
    drivers = {number: files[span.file].name for number, span in overview.spans.items()}
    everything = findings.settled(
        [
            *(finding for step in steps for finding in findings.of_step(step)),
            *findings.of_run(overview.rows, drivers),
            *findings.overall(overview.rows, stages),
        ]
    )
    shown = [
        msgspec.structs.replace(step, findings=[each for each in everything if each.step == step.number])
        for step in steps
        if step.number in asked
    ]
    return RunFigures(
        id=writable(run.id),
        path=writable(run.path),
        command=str(run.info.get("command", "")),
        state=run.state,
        started_ns=_ns(run.info.get("started")),
        hosts=_hosts(run, files),
        versions=_versions(run),
        steps=overview.rows,
        stages=stages,
        median_s=median(row.seconds for row in overview.rows) if overview.rows else None,
        tokens_per_s=_rate(overview.rows),
        findings=findings.abridged(everything),
        details=shown,
        comparison=None,
        notes=[*run.left_out, *_notes(overview, files), *clocks, *reader.notes()],
        autoprof=__version__,
    )


def trimmed(figures: RunFigures) -> RunFigures:
    """The figures with no more operators of a trace than are told."""
    return msgspec.structs.replace(
        figures,
        details=[
            msgspec.structs.replace(
                step,
                captures=[
                    msgspec.structs.replace(
                        capture, operators=capture.operators[:OPERATORS], kernels=capture.kernels[:OPERATORS]
                    )
                    for capture in step.captures
                ],
            )
            for step in figures.details
        ],
    )


def _span_of_captures(rows: dict[int, StepRow], folder: listing.Step) -> StepSpan:
    """A step of which the timeline has nothing, as long as its captures; its row is added."""
    clocks = [clock for capture in folder.captures if (clock := _clock(capture.meta))]
    start = min((start for start, _ in clocks), default=0)
    end = max((end for _, end in clocks), default=0)
    length = (end - start) / 1e9
    rows[folder.number] = StepRow(
        number=folder.number,
        start_ns=start,
        seconds=length,
        captured=True,
        slow=False,
        usual_s=length,
        stages={},
    )
    return StepSpan(folder.number, NOBODY, start, end, "", None, None)


def _captures(
    path: Path,
    folders: Sequence[listing.Step],
    spans: Mapping[int, StepSpan],
    shifts: Mapping[str, int],
    progress: Progress | None,
    operators: int,
) -> dict[int, list[CaptureFigures]]:
    whole = sum(len(folder.captures) for folder in folders)
    done = 0
    found: dict[int, list[CaptureFigures]] = {}
    for folder in folders:
        zero = spans[folder.number].start_ns
        for capture in folder.captures:
            if progress is not None:
                progress(done, whole, capture.name)
            done += 1
            own = zero - shifts.get(str(capture.meta.get("host")), 0) if zero else None
            summed = captures.figures(path, folder.number, capture, own, operators)
            found.setdefault(folder.number, []).append(summed)
    return found


def _clock(meta: Mapping[str, Any]) -> tuple[int, int] | None:
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        start, stop = (int(meta["clock"][side]["unix_ns"]) for side in ("start", "stop"))
        return (start, stop) if 0 < start <= stop < _MOST_NS else None
    return None


def _rate(rows: Sequence[StepRow]) -> float | None:
    known = [(row.response_tokens, row.seconds) for row in rows if row.response_tokens is not None]
    whole = sum(seconds for _, seconds in known)
    return sum(tokens for tokens, _ in known) / whole if whole else None


def _ns(started: object) -> int | None:
    return round(started * 1e9) if isinstance(started, (int, float)) and 0 < started < _MOST_NS / 1e9 else None


def _hosts(run: listing.Run, files: Sequence[Timeline]) -> list[str]:
    said = run.info.get("hosts")
    known = [str(host) for host in said] if isinstance(said, list) else []
    return list(dict.fromkeys([*known, *(file.host for file in files)]))


def _versions(run: listing.Run) -> dict[str, str]:
    said = run.info.get("versions")
    return {str(name): str(version) for name, version in said.items() if version} if isinstance(said, dict) else {}


def _notes(overview: Overview, files: Sequence[Timeline]) -> list[str]:
    notes = []
    if overview.attempts > 1:
        notes.append(f"the run was begun {overview.attempts} times; a step that ran again is told as it ran last")
    if open_ends := list(overview.cut_off):
        said = (
            f"step {open_ends[0]} has" if len(open_ends) == 1 else f"steps {words.listed(map(str, open_ends), 10)} have"
        )
        notes.append(f"{said} no end in the timeline: cut off, or going on")
    if not files:
        notes.append("there is no timeline: the run was made by an autoprof without one, or its folder was removed")
    elif not overview.rows:
        notes.append("no step has ended in the timeline")
    if not any(row.samples for row in overview.rows) and overview.rows:
        notes.append("there are no spans of samples: no hook tells of them in this trainer")
    return notes


def _no_step(run: listing.Run, number: int, rows: Sequence[StepRow]) -> str:
    there = f"{rows[0].number} to {rows[-1].number}" if rows else "none"
    captured = ", ".join(str(step.number) for step in run.steps) or "none"
    return f"{run.id} has no step {number}; in its timeline are {there}, captured are {captured}"
