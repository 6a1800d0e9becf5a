"""Merge of a step's traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from autoprof import __version__
from autoprof.base import files, units
from autoprof.config.settings import Settings
from autoprof.rundir import decoder, layout, runs
from autoprof.rundir.file_names import MERGED, META, TAR, TRACE, is_whole_step, same_place, tidy
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import MergedMeta
from autoprof.rundir.runs import CaptureFile, NotFound, Run, Step
from autoprof.traces import archive, clocks, inputs
from autoprof.traces import timeline as timeline_reader
from autoprof.traces.merge import Input, Summary, merge
from autoprof.traces.reader import TraceError
from autoprof.traces.timeline import Timeline

ROLLOUT = "rollout"

# The patterns that take every role.
ALL = "*"
# Perfetto in a browser takes 2.7 times the JSON in memory (307 MB: 0.83 GB, v52), of which it has 4 GB.
_VIEWER_BYTES = 1 << 30


class Wishes(Struct, frozen=True, kw_only=True):
    """The options of a merge.

    Attributes:
        roles: Patterns for the roles that are merged.
        output: The file; by default `merged.pt.trace.json.gz` or `merged.tar` in the step's folder, of some roles
            `merged.<roles>.pt.trace.json.gz`.
        tar: Whether the traces are put into an archive as they are.
        clocks: `measured`, or `as-set` for each host's clock as it is.
    """

    roles: str = ALL
    output: Path | None = None
    tar: bool = False
    clocks: str = clocks.MEASURED


class Work(Struct, frozen=True):
    """The traces to merge, and the file to make of them; `said` are lines for who asked."""

    taken: list[Input]
    timeline: Timeline
    made: Path
    said: list[str]
    meta: Path | None = None
    step: int | None = None

    @property
    def bytes(self) -> int:
        """Return how much is read."""
        return sum(each.path.stat().st_size for each in self.taken)


def chosen(run: Run, number: int | None) -> Step:
    """Return a step of a run that has captures, or of which the timeline tells.

    Raises:
        NotFound: There is neither.
    """
    try:
        return runs.step(run, number)
    except NotFound:
        if number is None or not timeline_reader.of_step(Path(run.path), number):
            raise
        return Step(number, str(RunDir(Path(run.path)).step(number)))


def of_step(run: Run, step: Step, wishes: Wishes) -> Work:
    """Return what merging a step comes to.

    Raises:
        NotFound: There is nothing to merge.
        TraceError: The clocks of its hosts are not known well enough.
    """
    folder = RunDir(Path(run.path)).step(step.number)
    wanted = Settings(roles=tuple(word.strip() for word in wishes.roles.split(",")))
    captures = [capture for capture in step.captures if any(map(wanted.takes_role, inputs.roles(capture)))]
    missing: list[str] = []
    timeline = inputs.timeline_of(timeline_reader.of_step(Path(run.path), step.number, missing), wanted.takes_role)
    taken = inputs.of_step(folder, captures)
    if not taken and not timeline.processes:
        there = ", ".join(dict.fromkeys(map(inputs.role, step.captures))) or "none"
        raise NotFound(f"{run.id} has no trace of {wishes.roles} in step {step.number}; there are roles {there}")
    taken, timeline, said = inputs.placed(taken, timeline, Path(run.path), wishes.clocks)
    files.open_as(run.path)
    # Patterns such as `actor*` and `!ref` are the same by their letters alone: the name says what is in it.
    part = "" if wishes.roles == ALL else "+".join(sorted(_roles(captures, timeline))) or "other"
    ending = TAR if wishes.tar else TRACE
    name = _name(part)
    # A folder of a step says that it was captured.
    place = folder / f"{name}{ending}" if step.captures else Path(run.path, "timeline", f"{folder.name}.{name}{ending}")
    made = _checked(wishes.output, None if part else place) or RunDir(Path(run.path)).make(place.parent) / place.name
    meta = folder / f"{name}{META}" if wishes.output is None and step.captures and not wishes.tar else None
    lines = [*filter(None, [said]), *inputs.not_taken(folder), *missing]
    return Work(taken, timeline, made, lines, meta, step.number)


def _roles(captures: Sequence[CaptureFile], timeline: Timeline) -> set[str]:
    drawn = {span.role for spans in timeline.processes.values() for span in spans} - {""}
    return {role for capture in captures for role in inputs.roles(capture)} | drawn


def _name(part: str) -> str:
    """Return what a merged trace is called, without its ending; `part` says what it holds, if not all there is."""
    return f"{MERGED}.{tidy(part)}" if part else MERGED


def _checked(output: Path | None, own: Path | None) -> Path | None:
    """Return the file that was asked for; `own` is the place of the whole step that is merged, if it is a whole one.

    Raises:
        TraceError: It would take the place of a whole step's.
    """
    if output is not None and is_whole_step(output) and (own is None or not same_place(output, own)):
        raise TraceError(f"{output}: this name is kept for the trace of the whole step; give another one with -o")
    return output


def of_files(given: Sequence[Path], wishes: Wishes) -> Work:
    """Return what merging traces that are no run's comes to.

    Raises:
        TraceError: There are none, or they are of several hosts.
    """
    taken = inputs.of_files(given)
    if not taken:
        folders = "; ".join(runs.describe_no_run(path) for path in given)
        raise TraceError(f"{folders}; a trace would be a *.json or *.json.gz")
    ending = TAR if wishes.tar else TRACE
    folder = given[0] if given[0].is_dir() else given[0].parent
    in_step = is_whole_step(folder / f"{MERGED}{ending}")
    # All of a folder that is no step's is a whole, too. A step's lacks the timeline.
    part = "" if [folder] == list(given) and not in_step else "+".join(each.label for each in taken)
    made = _checked(wishes.output, None) or folder / f"{_name(part)}{ending}"
    meta = folder / f"{_name(part)}{META}" if in_step and wishes.output is None and not wishes.tar else None
    taken, timeline, said = inputs.placed(taken, Timeline({}), given[0].parent, wishes.clocks)
    return Work(taken, timeline, made, [*filter(None, [said])], meta)


def is_current(work: Work) -> bool:
    """Return whether the file that is there is what this work would make of the same traces, by its meta file."""
    if work.meta is None:
        return True
    meta = decoder.read(work.meta, MergedMeta)
    try:
        size = work.made.stat().st_size
    except OSError:
        return False
    return (meta.state, meta.bytes) == ("complete", size) and _told(meta) == {each.name for each in work.taken}


def _told(meta: MergedMeta) -> set[str]:
    return {*meta.merged, *meta.left_out}


def do(work: Work, tar: bool = False, progress: Callable[[int], object] = lambda read: None) -> Iterable[str]:
    """Merge, and say what came of it.

    Raises:
        TraceError: None of the traces can be used.
        OSError: The file can't be written.
    """
    timeline = work.timeline if work.timeline.processes else None
    if tar:
        size, left_out = archive.pack(work.taken, work.made, timeline, work.step)
        yield f"{work.made}: {units.count(len(work.taken) - len(left_out), 'trace')} as they are, {units.size(size)}"
        yield from _named("left out", left_out)
        yield from work.said
        return
    summary = merge(work.taken, work.made, timeline=timeline, progress=progress)
    if work.meta is not None:
        layout.write_json(work.meta, _meta(work.step, work.taken, summary, said=work.said))
    drawn = f"{units.number(summary.spans)} of them {'a span' if summary.spans == 1 else 'spans'}"
    spans = f", {drawn} of the timeline" if summary.spans else ""
    yield (
        f"{work.made}: {units.count(summary.traces, 'trace')}, {units.count(summary.events, 'event')}{spans}, "
        f"{units.size(summary.bytes)} ({units.size(summary.json_bytes)} of JSON)"
    )
    yield from _named("cut off, merged up to there", summary.cut)
    yield from _named("left out", summary.left_out)
    yield from work.said
    if summary.json_bytes > _VIEWER_BYTES:
        yield "a browser may not open that much; --role chooses, or use Perfetto's trace_processor"


def _named(what: str, found: dict[str, str]) -> Iterable[str]:
    for name, why in found.items():
        yield f"{what}: {why if name in why else f'{name}: {why}'}"


def merge_replicas(path: Path) -> None:
    """Give each rollout replica that has several traces of a step one that holds them all, where it has none yet.

    What goes wrong stands in the meta file. Nothing is raised.
    """
    for step in runs.read(path).steps:
        folder = RunDir(path).step(step.number)
        replicas: dict[str, list[CaptureFile]] = {}
        for capture in step.captures:
            if inputs.role(capture) == ROLLOUT and capture.meta.replica is not None:
                replicas.setdefault(f"{ROLLOUT}.replica{capture.meta.replica}.{MERGED}", []).append(capture)
        known = {capture.name: _told(capture.merged) for capture in step.merged if capture.state == "complete"}
        for name, captures in replicas.items():
            taken = inputs.of_step(folder, captures)
            if len(taken) < 2 or known.get(name) == {each.name for each in taken}:
                continue
            try:
                content = _merge_replica(path, step.number, taken, folder / f"{name}{TRACE}")
            except (TraceError, OSError) as error:
                content = _meta(step.number, taken, reason=str(error))
            try:
                of = taken[0].meta
                content = msgspec.structs.replace(content, role=ROLLOUT, stage=of.stage, replica=of.replica)
                layout.write_json(folder / f"{name}{META}", content)
            except OSError:  # the disk is full; there is nobody to tell
                pass


def _merge_replica(run: Path, step: int, taken: list[Input], made: Path) -> MergedMeta:
    """Merge without asking anybody: clocks that are not known are taken as they are set, and the meta file says so."""
    try:
        taken, _, said = inputs.placed(taken, Timeline({}), run, clocks.MEASURED)
    except TraceError as error:
        said = f"the clocks of the hosts are taken as they are set: {error}"
    return _meta(step, taken, merge(taken, made, jobs=1), said=[*filter(None, [said])])


def _meta(
    step: int | None,
    taken: list[Input],
    summary: Summary | None = None,
    reason: str = "",
    said: Sequence[str] = (),
) -> MergedMeta:
    left_out = summary.left_out if summary else {}
    return MergedMeta(
        step=step,
        tool="merge",
        merged=[each.name for each in taken if each.name not in left_out],
        cut=summary.cut if summary else {},
        left_out=left_out,
        versions={"autoprof": __version__},
        bytes=summary.bytes if summary else 0,
        state="complete" if summary else "failed",
        reason=reason,
        said=list(said),
    )
