"""Rules of captures: idle devices, bare communication, memory, incomplete files."""

from __future__ import annotations

from collections.abc import Iterator

from autoprof.base import units
from autoprof.base.units import seconds
from autoprof.base.units import share as percent
from autoprof.report.figures.captures import place_of
from autoprof.report.findings.registry import LEAST_S, capture_rule
from autoprof.report.model.captures import CaptureFigures
from autoprof.report.model.run import Finding

# A device is idle from such a share of a capture on, communication is not hidden from such a share on.
IDLE_SHARE, BARE_SHARE = 0.4, 0.15
# Memory is nearly full from such a share on.
FULL_SHARE = 0.92


@capture_rule("cpu_bound", "device_idle")
def idle(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a device that does nothing for two fifths of a capture."""
    for device in capture.devices:
        lost = device.idle * device.seconds
        if device.idle < IDLE_SHARE or lost < LEAST_S:
            continue
        bound = capture.bound == "cpu"
        yield Finding(
            kind="cpu_bound" if bound else "device_idle",
            text=f"step {capture.step}: {device.device} did nothing for {percent(device.idle)} of {place_of(capture)}"
            + (", it waited for the CPU" if bound else ""),
            evidence=[
                f"compute {percent(device.compute)} of {seconds(device.seconds)}",
                f"communication {percent(device.communication)}, copies {percent(device.copy)}",
                *([capture.reason] if capture.reason else []),
                *(f"{each.name}: {seconds(each.self_us / 1e6)} by itself" for each in capture.operators[:3]),
            ],
            seconds=lost,
            step=capture.step,
            file=capture.file,
        )


@capture_rule("communication")
def communication(capture: CaptureFigures) -> Iterator[Finding]:
    """Find communication without computation beside it that takes 15 % of a capture."""
    for device in capture.devices:
        bare = device.communication * (1 - (device.overlap or 0.0))
        if bare < BARE_SHARE or bare * device.seconds < LEAST_S:
            continue
        yield Finding(
            kind="communication",
            text=f"step {capture.step}: {place_of(capture)} communicated for {seconds(bare * device.seconds)} in which "
            f"{device.device} computed nothing",
            evidence=[
                f"communication {percent(device.communication)} of {seconds(device.seconds)}",
                f"{percent(device.overlap or 0.0)} of it beside computing",
                *(
                    f"{each.name}: {seconds(each.total_us / 1e6)} in {each.calls} calls"
                    for each in capture.kernels
                    if any(word in each.name.lower() for word in ("nccl", "hccl", "rccl", "allreduce", "hcom"))
                ),
            ][:4],
            seconds=bare * device.seconds,
            step=capture.step,
            file=capture.file,
        )


@capture_rule("memory")
def memory(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a device whose memory is nearly full."""
    peak, total = capture.memory_peak_bytes, capture.memory_total_bytes
    if peak is not None and total and peak >= FULL_SHARE * total:
        yield Finding(
            kind="memory",
            text=f"step {capture.step}: {place_of(capture)} took {percent(peak / total)} of the device's memory",
            evidence=[f"{units.size(peak)} of {units.size(total)}"],
            seconds=0.0,
            step=capture.step,
            file=capture.file,
        )


@capture_rule("bad_capture")
def bad_capture(capture: CaptureFigures) -> Iterator[Finding]:
    """Find a capture that was cut off, failed or can't be read."""
    if capture.state != "complete":
        yield Finding(
            kind="bad_capture",
            text=f"step {capture.step}: the capture of {place_of(capture)} is {capture.state}",
            evidence=[capture.reason] if capture.reason else [],
            seconds=0.0,
            step=capture.step,
            file=capture.file,
        )
