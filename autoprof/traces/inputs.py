"""Selection of the traces to merge: their order, names and clocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.rundir import decoder, file_names
from autoprof.rundir.file_names import MERGED, META, NPU_ANALYSED, NPU_TIMELINE, TRACE, is_merged
from autoprof.rundir.records import CaptureMeta, Line
from autoprof.rundir.runs import CaptureFile
from autoprof.traces import clocks
from autoprof.traces.merge import Input
from autoprof.traces.reader import Reader, TraceError
from autoprof.traces.timeline import ROLES, Process, Timeline

# What torch_npu's analysis makes of its folder; a Chrome trace, a bare list of events.
NPU_TRACE = Path(NPU_ANALYSED, NPU_TIMELINE)

_WHO = re.compile(r"(rank|replica)\d+")
_PID = re.compile(r"pid\d+")
_TRACES = ("*.json", "*.json.gz")
_ENDINGS = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")


def of_step(folder: Path, captures: Sequence[CaptureFile]) -> list[Input]:
    """Return the traces of a step's folder among `captures`, in the order in which they are shown."""
    npu = npu_folders(folder)
    found = [
        (capture, path, name)
        for capture in sorted(captures, key=_order)
        for path, name in _places(folder, capture, npu)
        if path.is_file()
    ]
    several = len({_host(capture) for capture, _, _ in found}) > 1
    return [_input(path, name, capture, several) for capture, path, name in found]


def of_files(given: Sequence[Path]) -> list[Input]:
    """Return traces that are no run's: files, and those in folders, as vLLM and SGLang leave them.

    Raises:
        TraceError: One is not there.
    """
    paths: list[Path] = []
    for path in given:
        if path.is_dir():
            there = {found for pattern in _TRACES for found in path.glob(pattern)}
            paths += sorted(found for found in there if not _is_made(found.name))
        elif path.exists():
            paths.append(path)
        else:
            raise TraceError(f"{path}: there is no such run, folder or trace")
    found = []
    for path in paths:
        host = _host_name(path)
        meta = decoder.record({"host": host}, CaptureMeta)
        detail = f"on {host}" if host else ""
        found.append(Input(path=path, label=_ENDINGS.sub("", path.name), detail=detail, meta=meta))
    return found


def _is_made(name: str) -> bool:
    """Return whether a file is none that a profiler wrote: one of merge's own, or what is said of a capture."""
    return name.endswith(META) or name.startswith(f"{MERGED}.") or is_merged(_ENDINGS.sub("", name))


def _host_name(path: Path) -> str:
    try:
        with Reader(path, partial=True) as reader:
            return str(msgspec.json.decode(reader.fields["host_name"]))
    except (TraceError, KeyError, msgspec.DecodeError):
        return ""


def npu_folders(folder: Path) -> dict[str, Path]:
    """Return torch_npu's folders in a step's folder, by the names of their captures."""
    found = sorted(folder.glob(f"*{file_names.NPU_FOLDER}"))
    return {file_names.FOLDER.sub("", path.name): path for path in found if path.is_dir()}


def not_taken(folder: Path) -> Iterable[str]:
    """Yield what is to be said of torch_npu's folders that have no Chrome trace."""
    for path in npu_folders(folder).values():
        if not (path / NPU_TRACE).is_file():
            there = ", ".join(sorted(each.name for each in path.iterdir())[:5]) or "nothing"
            yield (
                f"not merged, no Chrome trace: {path.name} (in it: {there}); MindStudio Insight opens the folder, and "
                f"autoprof analyse makes {NPU_TRACE.name} of it"
            )


def placed(inputs: Sequence[Input], timeline: Timeline, run: Path, how: str) -> tuple[list[Input], Timeline, str]:
    """Return traces and timeline on the clock of the driver's host, and what is to be said of that.

    Args:
        inputs: The traces.
        timeline: The step's timeline.
        run: The run's directory.
        how: `measured`, or `as-set` to take each host's clock as it is.

    Raises:
        TraceError: They are of several hosts whose clocks are not known well enough.
    """
    names = {each.meta.host for each in inputs if each.meta.host} | timeline.hosts
    if len(names) < 2:
        return list(inputs), timeline, ""
    if how == clocks.AS_SET:
        return list(inputs), timeline, f"the clocks of {len(names)} hosts are taken as they are set"
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
    return moved, Timeline(timeline.processes, shifts), f"the clocks of {len(names)} hosts are set right as measured"


def timeline_of(spans: dict[Process, list[Line]], takes: Any) -> Timeline:
    """Return the timeline of the roles that are wanted."""
    kept = {process: [span for span in found if takes(span.role)] for process, found in spans.items()}
    return Timeline({process: found for process, found in kept.items() if found})


def role(capture: CaptureFile) -> str:
    """Return the role of a capture, as its name says it."""
    return capture.name.split(".", 1)[0]


def roles(capture: CaptureFile) -> list[str]:
    """Return the roles of a capture: one of a whole step holds all that its process has."""
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
    """Return the host of a capture, by its name where there is no meta file (yet)."""
    words = capture.name.split(".")
    named = words[-2] if len(words) > 2 and _PID.fullmatch(words[-1]) else ""
    return capture.meta.host or named


def _label(name: str) -> str:
    """Return `actor.update_actor.rank0.node1.pid7` as `actor.update_actor rank0`."""
    words = name.split(".")
    if _PID.fullmatch(words[-1]):
        words = words[:-2]
    who = next((place for place, word in enumerate(words) if _WHO.fullmatch(word)), len(words))
    return " ".join(filter(None, [".".join(words[:who]), *words[who:]]))


def _order(capture: CaptureFile) -> tuple[int, str, int, int, int, str]:
    name, meta = roles(capture)[0], capture.meta
    place = ROLES.index(name) if name in ROLES else len(ROLES)
    return place, name, meta.replica or 0, meta.rank or 0, meta.clock.start.unix_ns, capture.name
