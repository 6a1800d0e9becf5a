"""Data that the report shows for the captures of a step, computed from the sums of their traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from autoprof.base.redact import writable
from autoprof.config import kinds
from autoprof.config.values import PREFIX
from autoprof.report.model import CaptureFigures, DeviceShares, EngineFigures, Operator, Phase
from autoprof.rundir import file_names, layout
from autoprof.rundir.file_names import NSYS_REPORT, SNAPSHOT, TRACE
from autoprof.rundir.runs import CaptureFile
from autoprof.traces.device_sums import DeviceSums, EngineSums, PassSums
from autoprof.traces.reader import NO_JSON, Reader, TraceError
from autoprof.traces.summary import OperatorSums, TraceSums, summarize

DAMAGED = "damaged"
# For the ending of each kind of file that is not a Chrome trace: the tool that writes the file, and the program that
# opens the file.
_TOOLS = {
    NSYS_REPORT: ("nsys", "Nsight Systems: nsys-ui FILE, or nsys stats FILE"),
    SNAPSHOT: ("memory", "pytorch.org/memory_viz, which loads it in the browser"),
}
_ASCEND = "MindStudio Insight; if torch_npu has not analysed the folder yet, run autoprof analyse first"


# Maximum number of captures of one stage that are read. Reading a real trace takes seconds, and most ranks have similar
# traces.
_MAX_RANKS = 16
# Numbers of captures among them that are not complete, that are the longest and that are the shortest.
_MAX_FAILED, _LONGEST, _SHORTEST = 4, 6, 2


def chosen(captures: Sequence[CaptureFile]) -> list[CaptureFile]:
    """Return the captures to read. If a stage has more than 16 captures, return 16 of them.

    At most 4 captures that are not complete come first, then the 6 longest and the 2 shortest captures, then others.
    """
    stages: dict[tuple[str, str, str], list[CaptureFile]] = {}
    for capture in captures:
        meta = capture.meta
        stages.setdefault((meta.role or capture.name.split(".")[0], meta.stage, meta.part), []).append(capture)
    kept_names: set[str] = set()
    for of_stage in stages.values():
        failed = [capture for capture in of_stage if capture.state != "complete"][:_MAX_FAILED]
        by_length = sorted((capture for capture in of_stage if capture.state == "complete"), key=_recorded_ns)
        ordered_captures = [*failed, *by_length[-_LONGEST:], *by_length[:_SHORTEST], *of_stage]
        kept_names |= set(list(dict.fromkeys(capture.name for capture in ordered_captures))[:_MAX_RANKS])
    return [capture for capture in captures if capture.name in kept_names]


def _recorded_ns(capture: CaptureFile) -> int:
    return capture.meta.clock.stop.unix_ns - capture.meta.clock.start.unix_ns


def figures(run: Path, step: int, capture: CaptureFile, zero_ns: int | None, operators: int) -> CaptureFigures:
    """Return the data that the report shows for one capture. If the trace can't be read, the state is `DAMAGED`.

    Args:
        run: The directory of the run.
        step: The number of the step whose folder contains the capture.
        capture: The capture.
        zero_ns: The start of the step, on the clock of the capture's host. None if unknown.
        operators: The maximum number of operators, and of kernels, to keep.
    """
    folder = layout.RunDir(run).step(step)
    path = _file(folder, capture.name)
    capture_figures = CaptureFigures(
        name=writable(capture.name),
        step=step,
        role=capture.meta.role or capture.name.split(".")[0],
        stage=capture.meta.stage,
        stage_kind=capture.meta.stage_kind or kinds.of(capture.meta.stage),
        rank=capture.meta.rank,
        replica=capture.meta.replica,
        host=capture.meta.host or None,
        pid=capture.meta.pid,
        part=capture.meta.part,
        file=writable(f"{folder.name}/{path.name if path else capture.name}"),
        state=capture.state,
        tool=capture.meta.tool,
        bytes=capture.bytes,
        reason=capture.meta.reason,
        window=capture.meta.window,
        slowest=capture.meta.slowest,
    )
    if path is None:
        return capture_figures
    for ending, (tool, opening_program) in _TOOLS.items():
        if path.name.endswith(ending):
            return msgspec.structs.replace(
                capture_figures, tool=capture_figures.tool or tool, opens_with=opening_program
            )
    if path.is_dir():
        return msgspec.structs.replace(capture_figures, tool=capture_figures.tool or "npu", opens_with=_ASCEND)
    try:
        sums = summarize(path)
    except (TraceError, OSError) as error:
        return msgspec.structs.replace(
            capture_figures, state=DAMAGED, reason=writable(str(error).replace(f"{path}: ", ""))
        )
    sums = msgspec.structs.replace(sums, operators=sums.operators[:operators], kernels=sums.kernels[:operators])
    return _summed(capture_figures, sums, zero_ns, _memory_total(path))


def place_of(capture: CaptureFigures) -> str:
    """Return a text that names the stage and process of a capture.

    Examples are `actor.update_actor rank 0` and `rollout replica 1 frontend`.
    """
    stage = f".{capture.stage}" if capture.stage and capture.stage != capture.role else ""
    if capture.replica is not None:
        return f"{capture.role}{stage} replica {capture.replica} {capture.part}".rstrip()
    return f"{capture.role}{stage}" + ("" if capture.rank is None else f" rank {capture.rank}")


def windows(captures: Sequence[CaptureFigures]) -> list[str]:
    """Return the reasons for some captures, each reason once. Leave out the reason `AUTOPROF_STEPS`."""
    reasons = dict.fromkeys(capture.window for capture in captures)
    return [reason for reason in reasons if reason and not reason.startswith(f"{PREFIX}STEPS=")]


def _file(folder: Path, name: str) -> Path | None:
    for ending in (TRACE, NSYS_REPORT, SNAPSHOT):
        if (path := folder / f"{name}{ending}").is_file():
            return path
    return next((path for path in sorted(folder.glob(f"{name}*{file_names.NPU_FOLDER}")) if path.is_dir()), None)


def _summed(
    capture_figures: CaptureFigures, sums: TraceSums, zero_ns: int | None, total_bytes: int | None
) -> CaptureFigures:
    peaks = sorted(sums.memory, key=lambda peak: (peak.device != "cpu", peak.allocated_bytes))
    return msgspec.structs.replace(
        capture_figures,
        tool=capture_figures.tool or "torch",
        state="truncated" if sums.cut and capture_figures.state == "complete" else capture_figures.state,
        start_s=None if zero_ns is None or sums.first_ns is None else (sums.first_ns - zero_ns) / 1e9,
        seconds=sums.span_us / 1e6,
        collectives_s=None if sums.collectives_us is None else sums.collectives_us / 1e6,
        events=sums.events,
        operators=_operators(sums.operators),
        kernels=_operators(sums.kernels),
        devices=[_device(device) for device in sums.devices],
        engine=_engine(sums.engine),
        memory_peak_bytes=max(peaks[-1].allocated_bytes, peaks[-1].reserved_bytes) if peaks else None,
        memory_total_bytes=total_bytes if peaks and peaks[-1].device != "cpu" else None,
        bound=sums.bound,
        reason="; ".join(filter(None, [capture_figures.reason, sums.cut, sums.reason])),
    )


def _operators(sums: list[OperatorSums]) -> list[Operator]:
    return [
        Operator(name=each.name, category=each.category, calls=each.calls, total_us=each.total_us, self_us=each.self_us)
        for each in sums
    ]


def _device(sums: DeviceSums) -> DeviceShares:
    span = sums.span_us or 1.0
    return DeviceShares(
        device=sums.name or f"device {sums.device}",
        seconds=sums.span_us / 1e6,
        compute=sums.compute_us / span,
        communication=sums.communication_us / span,
        copy=sums.copy_us / span,
        idle=sums.idle_us / span,
        overlap=sums.overlap_us / sums.communication_us if sums.communication_us else None,
    )


def _engine(sums: EngineSums | None) -> EngineFigures | None:
    if sums is None:
        return None
    kinds = (sums.prefill, sums.decode, sums.mixed, sums.other)
    prefill, decode, mixed, other = map(_phase, kinds)
    return EngineFigures(
        engine=sums.engine,
        passes=sum(kind.passes for kind in kinds),
        prefill=prefill,
        decode=decode,
        mixed=mixed,
        other=other,
    )


def _phase(sums: PassSums) -> Phase:
    return Phase(passes=sums.passes, seconds=(sums.device_us or sums.host_us) / 1e6, tokens=sums.tokens or None)


class _Device(msgspec.Struct):
    """A GPU in `deviceProperties` of a trace, as Kineto writes it."""

    totalGlobalMem: int = 0


def _memory_total(path: Path) -> int | None:
    """Return the memory of the smallest device that the trace describes, in bytes. Return None if it describes none."""
    try:
        with Reader(path) as reader:
            devices = msgspec.json.decode(reader.fields.get("deviceProperties", b"[]"), type=list[_Device])
    except (TraceError, *NO_JSON):
        return None
    return min((device.totalGlobalMem for device in devices if device.totalGlobalMem), default=None)
