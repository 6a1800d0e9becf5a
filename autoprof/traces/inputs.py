"""Selection of the traces to merge: their order, names and clocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.config.values import role_place
from autoprof.rundir import decoder, file_names
from autoprof.rundir.file_names import MERGED, META, NPU_ANALYSED, NPU_TIMELINE, TRACE, is_merged
from autoprof.rundir.journal import Journal
from autoprof.rundir.records import CaptureMeta, Line
from autoprof.rundir.runs import CaptureFile
from autoprof.traces import clocks
from autoprof.traces.merge import Input
from autoprof.traces.reader import Reader, TraceError
from autoprof.traces.timeline import StepTimeline

# Chrome trace that torch_npu's analysis writes into its folder. It is a bare list of events.
NPU_TRACE = Path(NPU_ANALYSED, NPU_TIMELINE)

_NUMBER = re.compile(r"(rank|replica)\d+")
_PID = re.compile(r"pid\d+")
_TRACES = ("*.json", "*.json.gz")
_ENDINGS = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")


def of_step(folder: Path, captures: Sequence[CaptureFile]) -> list[Input]:
    """Return the traces of some captures in a step's folder, in display order."""
    npu = npu_folders(folder)
    traces = [
        (capture, path, name)
        for capture in sorted(captures, key=_order)
        for path, name in _places(folder, capture, npu)
        if path.is_file()
    ]
    several = len({_host(capture) for capture, _, _ in traces}) > 1
    return [_input(path, name, capture, several) for capture, path, name in traces]


def of_files(files_and_folders: Sequence[Path]) -> list[Input]:
    """Return traces outside of a run: files, and the files in folders, such as the ones that vLLM and SGLang write.

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
        meta = decoder.record({"host": host}, CaptureMeta)
        detail = f"on {host}" if host else ""
        inputs.append(Input(path=path, label=_ENDINGS.sub("", path.name), detail=detail, meta=meta))
    return inputs


def _is_made(name: str) -> bool:
    """Return True if autoprof wrote the file, not a profiler: a merged trace or a meta file."""
    return name.endswith(META) or name.startswith(f"{MERGED}.") or is_merged(_ENDINGS.sub("", name))


def _host_name(path: Path) -> str:
    try:
        with Reader(path, partial=True) as reader:
            return str(msgspec.json.decode(reader.fields["host_name"]))
    except (TraceError, KeyError, msgspec.DecodeError):
        return ""


def npu_folders(folder: Path) -> dict[str, Path]:
    """Return torch_npu's folders in a step's folder, by the names of their captures."""
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
    """Return traces and timeline on the clock of the driver's host, and a message about the clocks.

    Args:
        inputs: The traces.
        timeline: The step's timeline.
        run: The run's directory.
        how: `measured`, or `as-set` to keep each host's clock as it is.

    Raises:
        TraceError: They come from several hosts whose clocks are not known precisely enough.
    """
    names = {each.meta.host for each in inputs if each.meta.host} | timeline.hosts
    if len(names) < 2:
        return list(inputs), timeline, ""
    if how == clocks.AS_SET:
        return list(inputs), timeline, f"clocks of {len(names)} hosts are not corrected; their own settings are used"
    measured = clocks.read_offsets(run)
    times = {process.host: spans[0].start_ns for process, spans in timeline.processes.items() if spans}

    def shift(host: str, unix_ns: int) -> int:
        return -clocks.offset_ns(measured, host, unix_ns)

    moved = [
        msgspec.structs.replace(each, shift_ns=shift(each.meta.host, each.meta.clock.start.unix_ns))
        if each.meta.host
        else each
        for each in inputs
    ]
    shifts = {host: shift(host, unix_ns) for host, unix_ns in times.items()}
    return (
        moved,
        StepTimeline(timeline.processes, shifts),
        f"clocks of {len(names)} hosts are corrected by measured offsets",
    )


def timeline_of(spans: dict[Journal, list[Line]], takes: Any) -> StepTimeline:
    """Return the timeline of the roles for which `takes` is true."""
    kept = {process: [span for span in lines if takes(span.role)] for process, lines in spans.items()}
    return StepTimeline({process: lines for process, lines in kept.items() if lines})


def role(capture: CaptureFile) -> str:
    """Return the role of a capture from its name."""
    return capture.name.split(".", 1)[0]


def roles(capture: CaptureFile) -> list[str]:
    """Return the roles of a capture. The capture of a whole step has all roles of its process."""
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
    """Return the host of a capture from its meta file, or from its name if there is no meta file (yet)."""
    words = capture.name.split(".")
    named = words[-2] if len(words) > 2 and _PID.fullmatch(words[-1]) else ""
    return capture.meta.host or named


def _label(name: str) -> str:
    """Return `actor.update_actor.rank0.node1.pid7` as `actor.update_actor rank0`."""
    words = name.split(".")
    if _PID.fullmatch(words[-1]):
        words = words[:-2]
    number = next((place for place, word in enumerate(words) if _NUMBER.fullmatch(word)), len(words))
    return " ".join(filter(None, [".".join(words[:number]), *words[number:]]))


def _order(capture: CaptureFile) -> tuple[int, str, int, int, int, str]:
    name, meta = roles(capture)[0], capture.meta
    return role_place(name), name, meta.replica or 0, meta.rank or 0, meta.clock.start.unix_ns, capture.name
