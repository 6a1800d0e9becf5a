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
from autoprof.rundir.file_names import MERGED, META, TRACE, is_whole_step, same_place, tidy
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import MergedMeta
from autoprof.rundir.runs import CaptureFile, NotFound, Run, Step
from autoprof.traces import clocks, inputs
from autoprof.traces import timeline as timeline_reader
from autoprof.traces.merge import Input, Summary, merge
from autoprof.traces.reader import TraceError
from autoprof.traces.timeline import StepTimeline

ROLLOUT = "rollout"

# Pattern for every role.
ALL = "*"
# JSON above which a browser may fail. Perfetto needs 2.7 times the JSON in memory (307 MB: 0.83 GB, v52), and a browser
# gives it 4 GB.
_VIEWER_BYTES = 1 << 30


class MergeOptions(Struct, frozen=True, kw_only=True):
    """Options of a merge.

    Attributes:
        roles: Patterns of the roles to merge.
        output: The file. By default it is `merged.pt.trace.json.gz` in the step's folder, or
            `merged.<roles>.pt.trace.json.gz` for some roles.
        clocks: `measured`, or `as-set` to keep each host's clock as it is.
    """

    roles: str = ALL
    output: Path | None = None
    clocks: str = clocks.MEASURED


class Work(Struct, frozen=True):
    """A merge to do.

    Attributes:
        inputs: The traces to merge.
        timeline: The spans to merge.
        output: The file to write.
        messages: Lines for the user.
        meta: The meta file to write; None for none.
        step: The step; None for traces outside of a run.
    """

    inputs: list[Input]
    timeline: StepTimeline
    output: Path
    messages: list[str]
    meta: Path | None = None
    step: int | None = None

    @property
    def bytes(self) -> int:
        """Return the number of bytes to read."""
        return sum(each.path.stat().st_size for each in self.inputs)


def chosen(run: Run, number: int | None) -> Step:
    """Return a step of a run that has captures or spans in the timeline.

    Raises:
        NotFound: The step has neither.
    """
    try:
        return runs.step(run, number)
    except NotFound:
        if number is None or not timeline_reader.of_step(Path(run.path), number):
            raise
        return Step(number, str(RunDir(Path(run.path)).step(number)))


def of_step(run: Run, step: Step, options: MergeOptions) -> Work:
    """Return the work to merge a step.

    Raises:
        NotFound: There is nothing to merge.
        TraceError: The clocks of its hosts are not known precisely enough.
    """
    folder = RunDir(Path(run.path)).step(step.number)
    wanted = Settings(roles=tuple(word.strip() for word in options.roles.split(",")))
    captures = [capture for capture in step.captures if any(map(wanted.takes_role, inputs.roles(capture)))]
    missing: list[str] = []
    timeline = inputs.timeline_of(timeline_reader.of_step(Path(run.path), step.number, missing), wanted.takes_role)
    taken = inputs.of_step(folder, captures)
    if not taken and not timeline.processes:
        captured = ", ".join(dict.fromkeys(map(inputs.role, step.captures))) or "none"
        raise NotFound(f"{run.id} has no trace of {options.roles} in step {step.number}; captured roles: {captured}")
    taken, timeline, message = inputs.placed(taken, timeline, Path(run.path), options.clocks)
    files.open_as(run.path)
    # Use the roles for the name, not the pattern: `actor*` and `!ref` would give the same file name.
    part = "" if options.roles == ALL else "+".join(sorted(_roles(captures, timeline))) or "other"
    name = _name(part)
    # A step's folder means that the step was captured, so don't create one for a step without captures.
    place = folder / f"{name}{TRACE}" if step.captures else Path(run.path, "journal", f"{folder.name}.{name}{TRACE}")
    made = _checked(options.output, None if part else place) or RunDir(Path(run.path)).make(place.parent) / place.name
    meta = folder / f"{name}{META}" if options.output is None and step.captures else None
    lines = [*filter(None, [message]), *inputs.not_merged(folder), *missing]
    return Work(taken, timeline, made, lines, meta, step.number)


def _roles(captures: Sequence[CaptureFile], timeline: StepTimeline) -> set[str]:
    drawn = {span.role for spans in timeline.processes.values() for span in spans} - {""}
    return {role for capture in captures for role in inputs.roles(capture)} | drawn


def _name(part: str) -> str:
    """Return the name of a merged trace without its ending. `part` names its content; it is empty for a whole step."""
    return f"{MERGED}.{tidy(part)}" if part else MERGED


def _checked(output: Path | None, own: Path | None) -> Path | None:
    """Return the output that the user chose, or None.

    Args:
        output: The output that the user chose.
        own: The reserved name of the whole step, if a whole step is merged.

    Raises:
        TraceError: The output is a `.tar`, or has the reserved name of a whole step but is not one.
    """
    if output is not None and output.suffix == ".tar":
        raise TraceError(f"{output}: autoprof merge writes *{TRACE}; choose such a name with -o")
    if output is not None and is_whole_step(output) and (own is None or not same_place(output, own)):
        raise TraceError(f"{output}: this name is reserved for the trace of the whole step; choose another with -o")
    return output


def of_files(paths: Sequence[Path], options: MergeOptions) -> Work:
    """Return the work to merge traces outside of a run.

    Raises:
        TraceError: There are no traces, or they come from several hosts.
    """
    taken = inputs.of_files(paths)
    if not taken:
        folders = "; ".join(runs.describe_no_run(path) for path in paths)
        raise TraceError(f"{folders}; no trace either (*.json or *.json.gz)")
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    in_step = is_whole_step(folder / f"{MERGED}{TRACE}")
    # A whole folder needs no part in its name, unless it is a step's: then the merge lacks the timeline.
    part = "" if [folder] == list(paths) and not in_step else "+".join(each.label for each in taken)
    made = _checked(options.output, None) or folder / f"{_name(part)}{TRACE}"
    meta = folder / f"{_name(part)}{META}" if in_step and options.output is None else None
    taken, timeline, message = inputs.placed(taken, StepTimeline({}), paths[0].parent, options.clocks)
    return Work(taken, timeline, made, [*filter(None, [message])], meta)


def is_current(work: Work) -> bool:
    """Return True if the existing file was merged from the same traces, according to its meta file."""
    if work.meta is None:
        return True
    meta = decoder.read(work.meta, MergedMeta)
    try:
        size = work.output.stat().st_size
    except OSError:
        return False
    return (meta.state, meta.bytes) == ("complete", size) and _names_in(meta) == {each.name for each in work.inputs}


def _names_in(meta: MergedMeta) -> set[str]:
    return {*meta.merged, *meta.left_out}


def do(work: Work, progress: Callable[[int], object] = lambda read: None) -> Iterable[str]:
    """Do the merge, and yield lines about the result.

    Raises:
        TraceError: None of the traces can be used.
        OSError: The file can't be written.
    """
    timeline = work.timeline if work.timeline.processes else None
    summary = merge(work.inputs, work.output, timeline=timeline, progress=progress)
    if work.meta is not None:
        layout.write_json(work.meta, _meta(work.step, work.inputs, summary, messages=work.messages))
    drawn = f"{units.number(summary.spans)} of them {'a span' if summary.spans == 1 else 'spans'}"
    spans = f", {drawn} of the timeline" if summary.spans else ""
    yield (
        f"{work.output}: {units.count(summary.traces, 'trace')}, {units.count(summary.events, 'event')}{spans}, "
        f"{units.size(summary.bytes)} ({units.size(summary.json_bytes)} of JSON)"
    )
    yield from _named("truncated, merged up to its end", summary.cut)
    yield from _named("left out", summary.left_out)
    yield from work.messages
    if summary.json_bytes > _VIEWER_BYTES:
        yield "a browser may not open a trace of this size; choose roles with --role, or use Perfetto's trace_processor"


def _named(effect: str, reasons: dict[str, str]) -> Iterable[str]:
    for name, reason in reasons.items():
        yield f"{effect}: {reason if name in reason else f'{name}: {reason}'}"


def merge_replicas(path: Path) -> None:
    """Merge the traces of each rollout replica that has several in a step, unless they are merged already.

    Errors are written to the meta file. Never raises.
    """
    for step in runs.read(path).steps:
        folder = RunDir(path).step(step.number)
        replicas: dict[str, list[CaptureFile]] = {}
        for capture in step.captures:
            if inputs.role(capture) == ROLLOUT and capture.meta.replica is not None:
                replicas.setdefault(f"{ROLLOUT}.replica{capture.meta.replica}.{MERGED}", []).append(capture)
        known = {capture.name: _names_in(capture.merged) for capture in step.merged if capture.state == "complete"}
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
            except OSError:  # the disk is full, and no user is here to read a message
                pass


def _merge_replica(run: Path, step: int, taken: list[Input], made: Path) -> MergedMeta:
    """Merge the traces of a replica. If the clocks are unknown, keep them as they are, with a line in the meta file."""
    try:
        taken, _, message = inputs.placed(taken, StepTimeline({}), run, clocks.MEASURED)
    except TraceError as error:
        message = f"clocks of the hosts are not corrected; their own settings are used: {error}"
    return _meta(step, taken, merge(taken, made, jobs=1), messages=[*filter(None, [message])])


def _meta(
    step: int | None,
    taken: list[Input],
    summary: Summary | None = None,
    reason: str = "",
    messages: Sequence[str] = (),
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
        said=list(messages),
    )
