"""Merged traces in Perfetto's own engine: complete, without duplicates, named, sorted, and below the timeline."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autoprof.rundir.journal import Journal
from autoprof.rundir.records import Line
from autoprof.traces.merge import merge
from autoprof.traces.rewrite import Input
from tests.support.perfetto import (
    ERRORS,
    FLOWS,
    FLOWS_BETWEEN_PROCESSES,
    LEFT_OUT,
    PROCESSES,
    SLICES,
    WITH_LEFT_OUT,
    query,
)
from tests.support.traces import BASE_NS, kineto, load, process, save

LATER_NS = BASE_NS + 7889238 * 10**9
GPU = [
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    {"ph": "M", "name": "process_sort_index", "pid": 0, "tid": 0, "args": {"sort_index": 5000000}},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 101.5, "dur": 1.25},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 50, "pid": 9, "tid": 9, "ts": 100.1},
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 50, "pid": 0, "tid": 7, "ts": 101.5, "bp": "e"},
]


def span(kind: str, name: str, start_us: int, end_us: int, role: str = "trainer", **ids: str | int) -> Line:
    return Line(kind, name, 2, role, 0, LATER_NS + start_us * 1000, LATER_NS + end_us * 1000, None, ids)


TIMELINE = {
    Journal(path=Path("h-5.jsonl"), host="h", pid=5): [
        span("stage", "update_actor", 200, 300),
        span("step", "step", 0, 400),
        span("stage", "rollout", 10, 150),
    ],
    Journal(path=Path("h-6.jsonl"), host="h", pid=6): [
        *(span("sample", "single_turn", 10 + n, 100 + n, "agent_loop", sample=n) for n in range(3)),
        *(span("turn", "generate", 20 + n, 60 + n, "agent_loop", sample=n) for n in range(3)),
    ],
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two that torch wrote here, and two as ranks of GPUs leave them: the same pids, flows of the same numbers."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("parts")
    paths = []
    for rank in range(2):
        x = torch.randn(4, 4, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
            (x @ x).tanh().sum().backward()
        paths.append(folder / f"{rank}.json")
        profile.export_chrome_trace(str(paths[-1]))
    for rank in (2, 3):
        base = LATER_NS if rank == 3 else BASE_NS
        paths.append(save(folder / f"{rank}.json.gz", kineto(process(9, "python") + GPU, base_ns=base)))
    return paths


@pytest.fixture(scope="module")
def alone(parts: list[Path]) -> list[list[list[list[Any]]]]:
    """The slices, the flows and the errors of each part by itself."""
    return [query(path, WITH_LEFT_OUT, FLOWS, ERRORS) for path in parts]


def test_all_slices_and_flows_are_there_and_none_goes_astray(tmp_path: Path, parts: list[Path], alone: Any) -> None:
    made = tmp_path / "out.json.gz"
    merge([Input(path=path, label=f"part{path.name[0]}") for path in parts], made, timeline=TIMELINE)
    ends_of_flows = """select distinct m.name, n.name from flow f join slice a on f.slice_out = a.id join slice b on
        f.slice_in = b.id join thread_track x on a.track_id = x.id join thread_track y on b.track_id = y.id
        join thread t on t.utid = x.utid join thread u on u.utid = y.utid join process m on m.upid = t.upid
        join process n on n.upid = u.upid where m.upid != n.upid order by 1"""
    slices, flows, astray, errors, processes, ends = query(
        made, WITH_LEFT_OUT, FLOWS, FLOWS_BETWEEN_PROCESSES, ERRORS, PROCESSES, ends_of_flows
    )
    # Three months lie between the first and the last of these, so that torch's times can't be small here.
    assert sum(count for (count,) in slices) == sum(count for found in alone for (count,) in found[0]) + 9
    assert flows == [[sum(found[1][0][0] for found in alone)]]
    assert flows[0][0] > 4
    theirs: Counter[str] = Counter()
    for found in alone:
        theirs.update({name: count for name, count in found[2] if name != LEFT_OUT})
    assert {name: count for name, count in errors if name != LEFT_OUT} == theirs
    # Kernels have a separate process: one flow from each rank to its own device, and no other.
    assert astray == [[2]]
    assert ends == [[f"part{rank} (host)", f"part{rank} (GPU 0)"] for rank in (2, 3)]
    events = load(made)["traceEvents"]
    said = {
        what: {event["pid"]: event["args"][field] for event in events if event["name"] == f"process_{what}"}
        for what, field in (("name", "name"), ("sort_index", "sort_index"))
    }
    full = {name for name, count in processes if count}
    assert full <= set(said["name"].values())
    names = [said["name"][pid] for pid in sorted(said["name"], key=lambda pid: said["sort_index"][pid])]
    names = [name for name in names if name in full]
    assert names[:2] == ["trainer rank0", "agent_loop rank0"]
    assert [name for name in names if "(host)" in name or "GPU" in name] == [
        *("part0 (host)", "part1 (host)", "part2 (host)", "part2 (GPU 0)", "part3 (host)", "part3 (GPU 0)")
    ]


def test_no_slice_of_torchs_is_left_out_for_a_rounded_time(tmp_path: Path, parts: list[Path]) -> None:
    made = tmp_path / "out.json.gz"
    merge([Input(path=path, label=path.name) for path in parts[:2]], made)
    drawn = sum(event["ph"] in "Xi" for path in parts[:2] for event in json.loads(path.read_bytes())["traceEvents"])
    slices, errors = query(made, SLICES, ERRORS)
    assert slices == [[drawn]]
    assert LEFT_OUT not in dict(errors)


def test_spans_nest_and_samples_have_tracks_of_their_own(tmp_path: Path, parts: list[Path]) -> None:
    made = tmp_path / "out.json.gz"
    merge([Input(path=parts[3], label="late")], made, timeline=TIMELINE)
    nested, tracks, times = query(
        made,
        "select s.name, p.name from slice s left join slice p on s.parent_id = p.id where s.category in "
        "('step', 'stage', 'sample', 'turn') order by s.ts, s.dur desc",
        "select count(distinct track_id) from slice where category = 'sample'",
        "select (select ts from slice where name = 'update_actor') - (select ts from slice where name = 'gemm'), "
        "(select extract_arg(arg_set_id, 'args.sample') from slice where category = 'turn' order by ts limit 1)",
    )
    assert nested[:2] == [["step", None], ["rollout", "step"]]
    assert nested.count(["generate", "single_turn"]) == tracks[0][0] == 3
    assert times == [[200_000 - 101_500, 0]]
