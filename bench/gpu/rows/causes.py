"""Planted causes, and the findings of the report for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu.facts import CAUSES, Fact, row
from bench.gpu.workbench import Workbench

# Findings that would be wrong for a step in which the device works all the time.
_IDLE = {"cpu_bound", "device_idle"}


@row(90)
def causes(bench: Workbench) -> Iterator[Fact]:
    """Stages that compute, use memory, copy, launch or idle, and the report's findings"""
    ran = bench.program("causes", "--seconds", "1.6" if bench.gpu else "0.05", steps="1")
    report = bench.autoprof("report", str(ran.run), folder=ran.folder)
    captures = {capture["stage"]: capture for step in report["details"] for capture in step["captures"]}
    yield bench.fact("the report has the captures of all causes", set(captures) == set(CAUSES), len(captures))
    for cause in CAUSES:
        capture = captures.get(cause, {})
        kinds = {finding["kind"] for finding in report["findings"] if finding["file"] == capture.get("file", "")}
        yield bench.on_gpu(f"{cause}: {_RULE[cause]}", *_verdict(cause, capture, kinds))


_RULE = {
    "compute": "the device computes for most of the stage, and is not called idle",
    "memory": "the same for kernels that only read and write",
    "copy": "copies take most of the stage",
    "launch": "the finding says that the device waits for the CPU",
    "idle": "the finding says that the device does nothing",
}


def _verdict(cause: str, capture: dict[str, Any], kinds: set[str]) -> tuple[bool, str]:
    """Return True if the figures and findings fit the cause, and the figures."""
    if not capture.get("devices"):
        return False, "no device was recorded"
    device = capture["devices"][0]
    shares = ", ".join(f"{name} {device[name]:.0%}" for name in ("compute", "copy", "idle"))
    figure = f"{shares}; findings: {', '.join(sorted(kinds)) or 'none'}"
    fits = {
        "compute": device["compute"] >= 0.7 and not kinds & _IDLE,
        "memory": device["compute"] >= 0.7 and not kinds & _IDLE,
        "copy": device["copy"] >= 0.5,
        "launch": device["idle"] >= 0.7 and "cpu_bound" in kinds,
        "idle": device["idle"] >= 0.9 and bool(kinds & _IDLE),
    }
    return fits[cause], figure
