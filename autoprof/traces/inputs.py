"""Selection of the traces to merge, and the order, the names and the clock corrections of these traces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.config.values import role_place
from autoprof.rundir import file_names, layout
from autoprof.rundir.file_names import MERGED, META, NPU_ANALYSED, NPU_TIMELINE, TRACE, is_merged
from autoprof.rundir.journal import Journal
from autoprof.rundir.records import CaptureMeta, Line
from autoprof.rundir.runs import CaptureFile
from autoprof.traces import clocks
from autoprof.traces.merge import Input
from autoprof.traces.reader import Reader, TraceError
from autoprof.traces.timeline import StepTimeline

# Path of the Chrome trace that torch_npu's analysis writes, relative to the folder of torch_npu. The trace is a bare
# list of events.
NPU_TRACE = Path(NPU_ANALYSED, NPU_TIMELINE)

_NUMBER = re.compile(r"(rank|replica)\d+")
_PID = re.compile(r"pid\d+")
_TRACES = ("*.json", "*.json.gz")
_ENDINGS = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")


def of_step(folder: Path, captures: Sequence[CaptureFile]) -> list[Input]:
    """Return the traces of some captures of a step, in the order in which viewers show them.

    Args:
        folder: The folder of the step.
        captures: The captures.
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


def of_files(files_and_folders: Sequence[Path]) -> list[Input]:
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
            paths += sorted(file for file in files if not _is_made(file.name))
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


def _is_made(name: str) -> bool:
    """Return True if a file is a merged trace or a meta file. autoprof writes these files, not a profiler."""
    return name.endswith(META) or name.startswith(f"{MERGED}.") or is_merged(_ENDINGS.sub("", name))


def _host_name(path: Path) -> str:
    try:
        with Reader(path, partial=True) as reader:
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


def placed(
    inputs: Sequence[Input], timeline: StepTimeline, run: Path, how: str
) -> tuple[list[Input], StepTimeline, str]:
    """Put the traces and the timeline of a step on the clock of the driver's host.

    Args:
        inputs: The traces.
        timeline: The timeline of the step.
        run: The directory of the run.
        how: `measured` to correct the clocks by measured offsets, or `as-set` to leave the clock of each host as it is.

    Returns:
        The traces with their shifts, the timeline with its shifts, and a message about the clocks. If all times come
        from one host, the message is empty.

    Raises:
        TraceError: The times come from several hosts, and the offsets of the clocks are not known precisely enough.
    """
    names = {each.meta.host for each in inputs if each.meta.host} | timeline.hosts
    if len(names) < 2:
        return list(inputs), timeline, ""
    if how == clocks.AS_SET:
        return list(inputs), timeline, f"clocks of {len(names)} hosts are not corrected; their own settings are used"
    measured_clocks = clocks.read_offsets(run)
    first_start_ns = {process.host: spans[0].start_ns for process, spans in timeline.processes.items() if spans}

    def shift(host: str, unix_ns: int) -> int:
        return -clocks.offset_ns(measured_clocks, host, unix_ns)

    shifted_inputs = [
        msgspec.structs.replace(each, shift_ns=shift(each.meta.host, each.meta.clock.start.unix_ns))
        if each.meta.host
        else each
        for each in inputs
    ]
    shifts = {host: shift(host, unix_ns) for host, unix_ns in first_start_ns.items()}
    return (
        shifted_inputs,
        StepTimeline(timeline.processes, shifts),
        f"clocks of {len(names)} hosts are corrected by measured offsets",
    )


def timeline_of(spans: dict[Journal, list[Line]], takes: Any) -> StepTimeline:
    """Return the timeline with only the spans of the roles for which `takes` returns True."""
    spans_to_keep = {process: [span for span in lines if takes(span.role)] for process, lines in spans.items()}
    return StepTimeline({process: lines for process, lines in spans_to_keep.items() if lines})


def role(capture: CaptureFile) -> str:
    """Return the role in the name of a capture. For a capture of a whole step, the roles are joined by `+`."""
    return capture.name.split(".", 1)[0]


def roles(capture: CaptureFile) -> list[str]:
    """Return the roles of a capture. A capture of a whole step has all roles of its process, others have one role."""
    return role(capture).split("+")


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
    )


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
    name, meta = roles(capture)[0], capture.meta
    return role_place(name), name, meta.replica or 0, meta.rank or 0, meta.clock.start.unix_ns, capture.name
