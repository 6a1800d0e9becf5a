"""Figures of a made run, of any size and with any names, for tests of the pages."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from autoprof.report import build, findings
from autoprof.report.model import (
    OTHER,
    OWN,
    CaptureFigures,
    Comparison,
    ComparisonRow,
    RunFigures,
    SampleFigures,
    StepFigures,
)
from autoprof.rundir import runs
from autoprof.traces.flame import FlameNode, FlameThread
from tests.support import report_runs

ID, MADE_STEPS = "20261122-010203-abcdef", 12
# Text that a browser could take for markup, and the page for the end of its JSON.
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>%{x}<a href='//h'>&amp;\"'"
# Fields that contain names, and fields whose keys are names.
_NAMED = {"id", "path", "command", "hosts", "label", "name", "text", "evidence", "file", "stage", "lane", "held_by"}
_NAMED |= {"slowest", "samples", "after", "before", "within", "device", "reason", "engine", "a"}
_KEYS = {"stages", "kinds", "recorded", "versions"}


def figures(
    steps: int = MADE_STEPS,
    samples: int = 64,
    ranks: int = 8,
    named: str = "",
    compared: bool = False,
    details: int = 1,
) -> RunFigures:
    """Return the figures of a run of `steps` steps, the last `details` of them in detail; `named` is in all names."""
    made = _made()
    rows = [
        msgspec.structs.replace(
            made.steps[number % MADE_STEPS], number=number, slow=number % 9 == 5, captured=number % 5000 == 5
        )
        for number in range(1, steps + 1)
    ]
    shown = made.details[len(made.details) - details :]
    found = msgspec.structs.replace(
        made,
        steps=rows,
        details=[_sized(each, steps + each.number - MADE_STEPS, samples, ranks) for each in shown],
        findings=[msgspec.structs.replace(each, step=steps) for each in made.findings],
        comparison=_COMPARISON if compared else None,
        notes=["journal/n2-7.jsonl: 1 line was cut off"],
    )
    if not steps:
        found = msgspec.structs.replace(found, stages=[], kinds=[], findings=[], verdict=findings.verdict([], False))
    return _renamed(found, named) if named else found


@functools.cache
def _made() -> RunFigures:
    """Return the figures of a run whose last step waits for a tool and is captured; its last 3 steps are in detail."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, ID)
        report_runs.write(run, MADE_STEPS, captured=MADE_STEPS, slow_tool=MADE_STEPS)
        found = build.figures(runs.read(run), list(range(MADE_STEPS - 2, MADE_STEPS + 1)))
    (finding,) = found.findings
    finding = msgspec.structs.replace(finding, remedy="", command="")
    last = found.details[-1]
    last = msgspec.structs.replace(last, captures=[_with_flame(each) for each in last.captures], findings=[finding])
    path = f"/data/autoprof_runs/{ID}"
    return msgspec.structs.replace(found, path=path, findings=[finding], details=[*found.details[:-1], last])


def _with_flame(capture: CaptureFigures) -> CaptureFigures:
    if capture.stage != "update_actor":
        return msgspec.structs.replace(capture, flame=[], state="truncated")
    nodes = [
        FlameNode(parent=-1, name="actor.update_actor", category="user_annotation", us=9e5),
        FlameNode(parent=0, name="aten::op0", category="cpu_op", us=6e5),
        FlameNode(parent=0, name="train.py(7): loss", category="python_function", us=2e5),
        FlameNode(parent=2, name="aten::op1", category="cpu_op", us=1e5),
    ]
    memory = {"memory_peak_bytes": 61_000_000_000, "memory_total_bytes": 80_000_000_000}
    return msgspec.structs.replace(capture, flame=[FlameThread(name="thread 200", us=9e5, nodes=nodes)], **memory)


def _sized(step: StepFigures, number: int, samples: int, ranks: int) -> StepFigures:
    """Return a step with another number, and with these numbers of samples and actor ranks."""
    of_samples = step.samples
    assert isinstance(of_samples, SampleFigures)
    actors = [lane for lane in step.lanes if lane.role == "actor"]
    more = [
        msgspec.structs.replace(actors[rank % len(actors)], label=f"actor rank {rank}", rank=rank, pid=200 + rank)
        for rank in range(len(actors), ranks)
    ]
    return msgspec.structs.replace(
        step, number=number, samples=msgspec.structs.replace(of_samples, count=samples), lanes=[*step.lanes, *more]
    )


def _renamed(value: Any, named: str, field: str = "") -> Any:
    """Return the figures with `named` at the end of each name."""
    if isinstance(value, msgspec.Struct):
        fields = {name: _renamed(getattr(value, name), named, name) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, list):
        return [_renamed(each, named, field) for each in value]
    if isinstance(value, dict):
        keys = "name" if field in _KEYS else ""
        return {_renamed(key, named, keys): _renamed(each, named) for key, each in value.items()}
    is_name = isinstance(value, str) and field in _NAMED and value not in ("", OTHER, OWN)
    return f"{value}{named}" if is_name else value


_COMPARISON = Comparison(
    a="run a",
    b="run b",
    rows=[
        ComparisonRow(kind="stage", name="gen", unit="s", a=10.0, b=15.0, change=5.0, worse=True),
        ComparisonRow(kind="rate", name="tokens", unit="1/s", a=2000.0, b=1320.0, change=-680.0, worse=True),
        ComparisonRow(kind="stage", name="ref", unit="s", a=4.0, b=3.1, change=-0.9, worse=False),
        ComparisonRow(kind="stage", name="testing", unit="s", a=None, b=0.5, change=0.5, worse=True, where="step 5"),
    ],
    findings=[],
)
