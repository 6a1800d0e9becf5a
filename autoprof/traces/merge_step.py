"""Merge of the traces of one step into one trace, and of traces outside of a run.

The traces get the order, the names and the clock corrections with which viewers show them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from autoprof import __version__
from autoprof.base import files, units
from autoprof.config.settings import Settings
from autoprof.config.values import role_place
from autoprof.rundir import file_names, layout, runs
from autoprof.rundir.file_names import (
    MERGED,
    META,
    NPU_ANALYSED,
    NPU_TIMELINE,
    TRACE,
    is_merged,
    is_whole_step,
    same_place,
    tidy,
)
from autoprof.rundir.journal import EVER
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CaptureMeta, MergedMeta
from autoprof.rundir.runs import CaptureFile, NotFound, Run, Step
from autoprof.traces import clocks
from autoprof.traces import timeline as timeline_reader
from autoprof.traces.merge import Summary, merge
from autoprof.traces.reader import Reader, TraceError
from autoprof.traces.rewrite import Input
from autoprof.traces.timeline import NO_SPANS, Timeline

# Path of the Chrome trace that torch_npu's analysis writes, relative to the folder of torch_npu. The trace is a bare
# list of events.
NPU_TRACE = Path(NPU_ANALYSED, NPU_TIMELINE)

_NUMBER = re.compile(r"(rank|replica)\d+")
_PID = re.compile(r"pid\d+")
_TRACES = ("*.json", "*.json.gz")
_ENDINGS = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")


def traces_of_step(folder: Path, captures: Sequence[CaptureFile]) -> list[Input]:
    """Return the traces of some captures of a step, in the order in which viewers show them.

    Args:
        folder: The folder of the step.
        captures: The captures whose traces are returned.
    """
    npu_folder_of = npu_folders(folder)
    traces = [
        (capture, path, name)
        for capture in sorted(captures, key=_order)
        for path, name in _places(folder, capture, npu_folder_of)
        if path.is_file()
    ]
    has_several_hosts = len({_host(capture) for capture, _, _ in traces}) > 1
    return [_input(path, name, capture, has_several_hosts) for capture, path, name in traces]


def traces_of_files(files_and_folders: Sequence[Path]) -> list[Input]:
    """Return traces outside of a run, such as the traces that vLLM and SGLang write.

    Args:
        files_and_folders: Traces, and folders that contain traces.

    Raises:
        TraceError: A path does not exist.
    """
    paths: list[Path] = []
    for path in files_and_folders:
        if path.is_dir():
            files = {file for pattern in _TRACES for file in path.glob(pattern)}
            paths += sorted(file for file in files if not _is_of_autoprof(file.name))
        elif path.exists():
            paths.append(path)
        else:
            raise TraceError(f"{path}: no such run, folder or trace")
    inputs = []
    for path in paths:
        host = _host_name(path)
        meta = layout.record({"host": host}, CaptureMeta)
        detail = f"on {host}" if host else ""
        inputs.append(Input(path=path, label=_ENDINGS.sub("", path.name), detail=detail, meta=meta))
    return inputs


def _is_of_autoprof(name: str) -> bool:
    """Return True if a file is a merged trace or a meta file. autoprof writes these files, not a profiler."""
    return name.endswith(META) or name.startswith(f"{MERGED}.") or is_merged(_ENDINGS.sub("", name))


def _host_name(path: Path) -> str:
    try:
        with Reader(path, accept_truncated=True) as reader:
            return str(msgspec.json.decode(reader.fields["host_name"]))
    except (TraceError, KeyError, msgspec.DecodeError):
        return ""


def npu_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of torch_npu in the folder of a step: a dict from the name of each capture to its folder."""
    folders = sorted(folder.glob(f"*{file_names.NPU_FOLDER}"))
    return {file_names.FOLDER.sub("", path.name): path for path in folders if path.is_dir()}


def not_merged(folder: Path) -> Iterable[str]:
    """Yield a message for each of torch_npu's folders without a Chrome trace."""
    for path in npu_folders(folder).values():
        if not (path / NPU_TRACE).is_file():
            content = ", ".join(sorted(each.name for each in path.iterdir())[:5]) or "nothing"
            yield (
                f"not merged, no Chrome trace: {path.name} (it contains: {content}); MindStudio Insight opens the "
                f"folder, and autoprof analyse makes {NPU_TRACE.name} from it"
            )


def placed(inputs: Sequence[Input], timeline: Timeline, run: Path, how: str) -> tuple[list[Input], Timeline, list[str]]:
    """Put the traces and the timeline of a step on the clock of the driver's host.

    Args:
        inputs: The traces.
        timeline: The timeline of the step.
        run: The directory of the run.
        how: `measured` to correct the clocks by measured offsets, or `as-set` to leave the clock of each host as it is.

    Returns:
        The traces with their shifts, the timeline with its shifts, and a list with a message about the clocks. If all
        times come from one host, the list is empty.

    Raises:
        TraceError: The times come from several hosts, and the offsets of the clocks are not known precisely enough.
    """
    names = {each.meta.host for each in inputs if each.meta.host} | {journal.host for journal in timeline}
    if len(names) < 2:
        return list(inputs), timeline, []
    if how == clocks.AS_SET:
        return list(inputs), timeline, [f"clocks of {len(names)} hosts are not corrected; their own settings are used"]
    measured_clocks = clocks.read_offsets(run)

    def shift(host: str, unix_ns: int) -> int:
        return -clocks.offset_ns(measured_clocks, host, unix_ns)

    shifted_inputs = [
        msgspec.structs.replace(each, shift_ns=shift(each.meta.host, each.meta.clock.start.unix_ns))
        if each.meta.host
        else each
        for each in inputs
    ]
    # All processes of a host get the same correction.
    first_start_ns = {journal.host: spans[0].start_ns for journal, spans in timeline.items()}
    shifts = {host: shift(host, unix_ns) for host, unix_ns in first_start_ns.items()}
    shifted_timeline = {
        msgspec.structs.replace(journal, shift_ns=shifts[journal.host]): spans for journal, spans in timeline.items()
    }
    return shifted_inputs, shifted_timeline, [f"clocks of {len(names)} hosts are corrected by measured offsets"]


def capture_role(capture: CaptureFile) -> str:
    """Return the role in the name of a capture. For a capture of a whole step, the roles are joined by `+`."""
    return capture.name.split(".", 1)[0]


def capture_roles(capture: CaptureFile) -> list[str]:
    """Return the roles of a capture. A capture of a whole step has all roles of its process, others have one role."""
    return capture_role(capture).split("+")


def _places(folder: Path, capture: CaptureFile, npu: Mapping[str, Path]) -> Iterable[tuple[Path, str]]:
    path = folder / f"{capture.name}{TRACE}"
    yield path, path.name
    if capture.name in npu:
        yield npu[capture.name] / NPU_TRACE, f"{npu[capture.name].name}/{NPU_TRACE}"


def _input(path: Path, name: str, capture: CaptureFile, with_host: bool) -> Input:
    label, host = _label(capture.name), _host(capture)
    state = "" if capture.state == "complete" else capture.state
    return Input(
        path=path,
        label=f"{label} {host}" if with_host and host else label,
        detail=", ".join(filter(None, [host and f"on {host}", state])),
        meta=msgspec.structs.replace(capture.meta, host=host),
        name=name,
        pid=_process_id(capture),
        roles=tuple(capture_roles(capture)),
        words=label.partition(" ")[2],
    )


def _process_id(capture: CaptureFile) -> int | None:
    """Return the pid of a capture from the meta file. Without one, return the pid in the capture's name."""
    word = capture.name.rpartition(".")[2]
    return capture.meta.pid or (int(word.removeprefix("pid")) if _PID.fullmatch(word) else None)


def _host(capture: CaptureFile) -> str:
    """Return the host of a capture from the meta file. Without a meta file, return the host in the capture's name."""
    words = capture.name.split(".")
    host_in_name = words[-2] if len(words) > 2 and _PID.fullmatch(words[-1]) else ""
    return capture.meta.host or host_in_name


def _label(name: str) -> str:
    """Return the label of a capture: for the name `actor.update_actor.rank0.node1.pid7`, `actor.update_actor rank0`."""
    words = name.split(".")
    if _PID.fullmatch(words[-1]):
        words = words[:-2]
    number = next((place for place, word in enumerate(words) if _NUMBER.fullmatch(word)), len(words))
    return " ".join(filter(None, [".".join(words[:number]), *words[number:]]))


def _order(capture: CaptureFile) -> tuple[int, str, int, int, int, str]:
    name, meta = capture_roles(capture)[0], capture.meta
    return role_place(name), name, meta.replica or 0, meta.rank or 0, meta.clock.start.unix_ns, capture.name


ROLLOUT = "rollout"
# The period of a run without loops.
ALWAYS = [(0, EVER)]

# Pattern that matches every role.
ALL = "*"
# Size of the uncompressed JSON above which a browser may fail to show a trace. Perfetto needs 2.7 times this size in
# memory (0.83 GB for 307 MB, v52), and a browser gives Perfetto 4 GB.
_VIEWER_BYTES = 1 << 30


class MergeOptions(Struct, frozen=True, kw_only=True):
    """Options of a merge.

    Attributes:
        roles: The patterns of the roles to merge, separated by commas.
        output: The path of the file to write. By default it is `merged.pt.trace.json.gz` in the step's folder. If only
            some roles are merged, it is `merged.<roles>.pt.trace.json.gz`.
        clocks: `measured` to correct the clocks of the hosts by measured offsets, or `as-set` to leave them as they
            are.
    """

    roles: str = ALL
    output: Path | None = None
    clocks: str = clocks.MEASURED


class Work(Struct, frozen=True):
    """The inputs and the output files of a merge that is still to be done.

    Attributes:
        inputs: The traces to merge.
        timeline: The spans to merge.
        output: The path of the trace to write.
        messages: Messages for the user, one line each.
        meta: The path of the meta file to write. None if the merge writes no meta file.
        step: The number of the step. None for traces outside of a run.
    """

    inputs: list[Input]
    timeline: Timeline
    output: Path
    messages: list[str]
    meta: Path | None = None
    step: int | None = None

    @property
    def bytes(self) -> int:
        """Return the total size of the traces to read."""
        return sum(each.path.stat().st_size for each in self.inputs)


def chosen(run: Run, number: int | None, loop: int | None = None) -> Step:
    """Return the step `number` of a run. If `number` is None, return the only captured step.

    Args:
        run: The run.
        number: The global step.
        loop: The number of the step's loop; None if only one loop has the step.

    Raises:
        NotFound: The step has no captures and no spans in the timeline, or several loops have the step.
    """
    attempts = timeline_reader.attempts_of(run)
    captured_steps = clocks.steps_by_loop(run.steps, attempts)
    try:
        return runs.choose_step(run.id, captured_steps, number, loop, attempts.titles)
    except NotFound:
        if number is None or any(step.number == number and loop in (None, step.loop) for step in captured_steps):
            raise
        having = _loops_with_step(run, attempts, number, loop)
        if len(having) > 1:
            titles = [attempts.titles[each] for each in having]
            raise NotFound(runs.in_several_loops(run.id, number, titles)) from None
        if not having:
            raise
        on_disk = attempts.loops[having[0]].on_disk if attempts.loops else 1
        return Step(number, str(RunDir(Path(run.path)).step(number, on_disk)), loop=having[0])


def _loops_with_step(run: Run, attempts: clocks.Attempts, number: int, loop: int | None) -> list[int]:
    """Return the numbers of the loops whose timeline has spans of a step: of all loops, or only of `loop`."""
    return [
        each
        for each in (attempts.loops or {1})
        if loop in (None, each)
        and timeline_reader.spans_of_step(Path(run.path), number, periods=attempts.periods(each) or ALWAYS)
    ]


def plan_step_merge(run: Run, step: Step, options: MergeOptions) -> Work:
    """Return the merge to do for a step of a run.

    Raises:
        NotFound: The step has no traces and no spans of the chosen roles.
        TraceError: The clocks of the step's hosts are not known precisely enough, or the chosen output file has a
            name that is not allowed.
    """
    folder = Path(step.folder)
    role_settings = Settings(roles=tuple(word.strip() for word in options.roles.split(",")))
    captures = [capture for capture in step.captures if any(map(role_settings.takes_role, capture_roles(capture)))]
    timeline_messages: list[str] = []
    periods = timeline_reader.attempts_of(run).periods(step.loop) or ALWAYS
    spans_of = timeline_reader.spans_of_step(Path(run.path), step.number, timeline_messages, periods)
    timeline: Timeline = {
        journal: spans_to_draw
        for journal, spans in spans_of.items()
        if (spans_to_draw := [span for span in spans if role_settings.takes_role(span.role)])
    }
    traces = traces_of_step(folder, captures)
    if not traces and not timeline:
        captured = ", ".join(dict.fromkeys(map(capture_role, step.captures))) or "none"
        raise NotFound(f"{run.id} has no trace of {options.roles} in step {step.number}; captured roles: {captured}")
    traces, timeline, messages = placed(traces, timeline, Path(run.path), options.clocks)
    files.open_as(run.path)
    drawn_roles = {span.role for spans in timeline.values() for span in spans} - {""}
    all_roles = drawn_roles.union(*map(capture_roles, captures))
    # The file name contains the roles, not the pattern: the patterns `actor*` and `!ref` would give the same file name.
    role_names = "" if options.roles == ALL else "+".join(sorted(all_roles)) or "other"
    loop_name = f"loop{step.loop}" if step.shares_folder and step.loop > 1 else ""
    name = _name("+".join(filter(None, [loop_name, role_names])))
    # A folder of a step means that the step was captured. So don't create a folder for a step without captures.
    default_output = (
        folder / f"{name}{TRACE}" if step.captures else Path(run.path, "journal", f"{folder.name}.{name}{TRACE}")
    )
    output = (
        _check_output(options.output, None if role_names else default_output)
        or RunDir(Path(run.path)).make(default_output.parent) / default_output.name
    )
    meta = folder / f"{name}{META}" if options.output is None and step.captures else None
    messages += [*not_merged(folder), *timeline_messages]
    return Work(traces, timeline, output, messages, meta, step.number)


def _name(part: str) -> str:
    """Return the name of a merged trace without the ending.

    Args:
        part: A text that names the merged roles or files. It is empty if a whole step or folder is merged.
    """
    return f"{MERGED}.{tidy(part)}" if part else MERGED


def _check_output(output: Path | None, reserved: Path | None) -> Path | None:
    """Return `output` if its name is allowed.

    Args:
        output: The path that the user chose, or None.
        reserved: The path that is reserved for the merged trace of this whole step. None if not a whole step is merged.

    Raises:
        TraceError: `output` is a `.tar`, or it is reserved for the trace of a whole step, but something else is merged.
    """
    if output is not None and output.suffix == ".tar":
        raise TraceError(f"{output}: autoprof merge writes *{TRACE}; choose such a name with -o")
    if output is not None and is_whole_step(output) and (reserved is None or not same_place(output, reserved)):
        raise TraceError(f"{output}: this name is reserved for the trace of the whole step; choose another with -o")
    return output


def plan_file_merge(paths: Sequence[Path], options: MergeOptions) -> Work:
    """Return the merge to do for traces outside of a run.

    Args:
        paths: The traces, and folders with traces.
        options: The options. `roles` is not used.

    Raises:
        TraceError: There are no traces, or the traces come from several hosts and their clocks shall be corrected.
    """
    traces = traces_of_files(paths)
    if not traces:
        folders = "; ".join(runs.describe_no_run(path) for path in paths)
        raise TraceError(f"{folders}; no trace either (*.json or *.json.gz)")
    folder = paths[0] if paths[0].is_dir() else paths[0].parent
    in_step = is_whole_step(folder / f"{MERGED}{TRACE}")
    # The merged trace of a whole folder needs no labels in its name. The folder of a step is an exception: that name is
    # reserved for a merge with the timeline, which this merge lacks.
    labels = "" if [folder] == list(paths) and not in_step else "+".join(each.label for each in traces)
    output = _check_output(options.output, None) or folder / f"{_name(labels)}{TRACE}"
    meta = folder / f"{_name(labels)}{META}" if in_step and options.output is None else None
    traces, timeline, messages = placed(traces, NO_SPANS, paths[0].parent, options.clocks)
    return Work(traces, timeline, output, messages, meta)


def is_current(work: Work) -> bool:
    """Return True if the existing output file was merged from the same traces, according to its meta file.

    Also return True if the merge writes no meta file.
    """
    if work.meta is None:
        return True
    meta = layout.read_json(work.meta, MergedMeta)
    try:
        size = work.output.stat().st_size
    except OSError:
        return False
    return (meta.state, meta.bytes) == ("complete", size) and _names_in(meta) == {each.name for each in work.inputs}


def _names_in(meta: MergedMeta) -> set[str]:
    return {*meta.merged, *meta.left_out}


def do(work: Work, progress: Callable[[int], object] = lambda read: None) -> Iterable[str]:
    """Do the merge, and yield messages about the result, one line each.

    Raises:
        TraceError: There is no readable trace and no timeline.
        OSError: The file can't be written.
    """
    summary = merge(work.inputs, work.output, timeline=work.timeline, progress=progress)
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
    """Merge the traces of each rollout replica that has several traces in a step.

    If the traces of a replica are merged already, skip the replica. Write the error of a failed merge to the meta file
    of the merge. Never raise.
    """
    for step in runs.read(path).steps:
        folder = Path(step.folder)
        replicas: dict[str, list[CaptureFile]] = {}
        for capture in step.captures:
            if capture_role(capture) == ROLLOUT and capture.meta.replica is not None:
                replicas.setdefault(f"{ROLLOUT}.replica{capture.meta.replica}.{MERGED}", []).append(capture)
        merged_traces = {
            capture.name: _names_in(capture.merged) for capture in step.merged if capture.state == "complete"
        }
        for name, captures in replicas.items():
            traces = traces_of_step(folder, captures)
            if len(traces) < 2 or merged_traces.get(name) == {each.name for each in traces}:
                continue
            try:
                content = _merge_replica(path, step.number, traces, folder / f"{name}{TRACE}")
            except (TraceError, OSError) as error:
                content = _meta(step.number, traces, reason=str(error))
            try:
                first_meta = traces[0].meta
                content = msgspec.structs.replace(
                    content, role=ROLLOUT, stage=first_meta.stage, replica=first_meta.replica
                )
                layout.write_json(folder / f"{name}{META}", content)
            except OSError:  # the disk is full, and no user is here to read a message
                pass


def _merge_replica(run: Path, step: int, traces: list[Input], output: Path) -> MergedMeta:
    """Merge the traces of a replica, and return the content of the meta file.

    If the offsets of the clocks are not known, leave the clocks as they are, and put a message into the meta file.
    """
    try:
        traces, _, messages = placed(traces, NO_SPANS, run, clocks.MEASURED)
    except TraceError as error:
        messages = [f"clocks of the hosts are not corrected; their own settings are used: {error}"]
    return _meta(step, traces, merge(traces, output, jobs=1), messages=messages)


def _meta(
    step: int | None,
    traces: list[Input],
    summary: Summary | None = None,
    reason: str = "",
    messages: Sequence[str] = (),
) -> MergedMeta:
    left_out = summary.left_out if summary else {}
    return MergedMeta(
        step=step,
        tool="merge",
        merged=[each.name for each in traces if each.name not in left_out],
        cut=summary.cut if summary else {},
        left_out=left_out,
        versions={"autoprof": __version__},
        bytes=summary.bytes if summary else 0,
        state="complete" if summary else "failed",
        reason=reason,
        said=list(messages),
    )
