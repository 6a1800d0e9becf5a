"""Merges of several hosts with and without measured clocks, of traces outside of runs, and of torch_npu's folders."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import Line
from autoprof.traces.rewrite import lay_out
from tests.support.merges import capture, command, meta
from tests.support.traces import BASE_NS, dumped, kineto, load, process, save

MS = 1_000_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "autoprof_runs" / "20261120-101010-aaaaaa"
    for host, role in (("n1", "actor"), ("n2", "rollout")):
        capture(path, 2, f"{role}.x.rank0.{host}.pid7", kineto(process(7, "p")), **meta(host, BASE_NS, 5))
    (path / "run.json").write_text(json.dumps({"id": path.name, "state": "ended"}))
    return path


def measured(run: Path, *lines: dict[str, Any], driver: str = "n1-9") -> None:
    (run / "clocks").mkdir(exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (run / "clocks" / f"{driver}.jsonl").write_text(text + '{"host": "n2", "off')


def offset(offset_ms: float, error_ms: float = 0.3, seconds: float = 0, host: str = "n2") -> dict[str, Any]:
    unix_ns = BASE_NS + round(seconds * 1000) * MS
    return {"host": host, "offset_ns": round(offset_ms * MS), "error_ns": round(error_ms * MS), "unix_ns": unix_ns}


def starts(run: Path) -> dict[str, float]:
    events = load(RunDir(run).step(2) / "merged.pt.trace.json.gz")["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return {names[event["pid"]].split()[0]: event["ts"] for event in events if event["name"] == "aten::op0"}


def test_the_offset_nearest_in_time_is_taken(run: Path, tmp_path: Path) -> None:
    measured(run, offset(40, seconds=-900), offset(-120, seconds=1), offset(3, seconds=500), offset(7, host="n3"))
    result = command(tmp_path, "merge", run.name)
    # The clock was set between 900 s before and 1 s after; the exact time is unknown.
    assert result.returncode == 1
    assert "the clock of n2 was set while the step ran: " in result.stderr
    measured(run, offset(-120.1, seconds=-100), offset(-120, seconds=1), offset(3, seconds=500))
    result = command(tmp_path, "merge", run.name)
    assert "clocks of 2 hosts are corrected by measured offsets" in result.stdout
    assert starts(run) == {"actor": 100.0, "rollout": 120_100.0}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "the clock of n2 was not measured"),
        ([offset(1, host="n3")], "the clock of n2 was not measured"),
        ([offset(1, error_ms=80)], "the offset of n2's clock is too uncertain: 80.0 ms"),
    ],
)
def test_what_is_not_known_is_refused(run: Path, tmp_path: Path, lines: list[dict[str, Any]], said: str) -> None:
    measured(run, *lines)
    result = command(tmp_path, "merge", run.name)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)
    assert said in result.stderr
    assert "--clocks as-set" in result.stderr
    result = command(tmp_path, "merge", run.name, "--clocks", "as-set")
    assert "clocks of 2 hosts are not corrected" in result.stdout
    assert starts(run) == {"actor": 100.0, "rollout": 100.0}


def test_a_run_that_measured_nothing_is_refused_too(run: Path, tmp_path: Path) -> None:
    assert "this run measured no clocks" in command(tmp_path, "merge", run.name).stderr
    measured(run, offset(1))
    measured(run, offset(1), driver="n4-3")
    assert "measured from several hosts (n1, n4)" in command(tmp_path, "merge", run.name).stderr


def write_timeline(run: Path, host: str, *lines: dict[str, Any]) -> None:
    (run / "journal").mkdir(exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (run / "journal" / f"{host}-3.jsonl").write_text(text + '{"kind": "stage", "na')


def line(kind: str, step: int | None, start_ms: int, end_ms: int, **more: Any) -> dict[str, Any]:
    span = {"kind": kind, "name": kind, "step": step, "role": "trainer", "rank": 0}
    return {**span, "start_ns": BASE_NS + start_ms * MS, "end_ns": BASE_NS + end_ms * MS, **more}


def test_the_steps_timeline_is_merged_also_without_captures(run: Path, tmp_path: Path) -> None:
    spans = [
        {"kind": "process", "host": "n1", "pid": 3, "clock": {}, "version": "0.1.0"},
        line("stage", 2, 0, 5),
        line("stage", 3, 10, 15),
        line("request", None, 12, 30),  # no number, but it begins while step 3 runs
        line("request", None, 21, 30),
        line("step", 3, 9, 20),
    ]
    write_timeline(run, "n1", *spans)
    result = command(tmp_path, "merge", run.name, "--step", "3")
    assert "0 traces" in result.stdout
    made = run / "journal" / "global_step_000003.merged.pt.trace.json.gz"
    found = [event for event in load(made)["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["dur"]) for event in found] == [("step", 11000), ("stage", 5000), ("request", 18000)]
    assert not RunDir(run).step(3).exists()
    assert "has no step 4; there are 2" in command(tmp_path, "merge", run.name, "--step", "4").stderr


def test_the_timeline_of_another_host_is_moved_with_its_traces(run: Path, tmp_path: Path) -> None:
    measured(run, offset(5))
    write_timeline(run, "n1", line("step", 2, 0, 50))
    write_timeline(run, "n2", line("stage", 2, 10, 15, role="rollout"))
    assert command(tmp_path, "merge", run.name).returncode == 0
    events = load(RunDir(run).step(2) / "merged.pt.trace.json.gz")["traceEvents"]
    assert [event["ts"] for event in events if event.get("cat") in ("step", "stage")] == [0.0, 5000.0]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names[:2] == ["trainer rank0 n1", "rollout rank0 n2 pid 3"]


# Traces outside of a run.


def test_files_of_engines_as_they_lie(tmp_path: Path) -> None:
    folder = tmp_path / "sglang"
    for rank in range(2):
        save(folder / f"1770000000.1-TP-{rank}.trace.json.gz", dumped(process(9, "sglang")))
    result = command(tmp_path, "merge", "sglang")
    assert ": 2 traces, " in result.stdout
    assert ": 2 traces, " in command(tmp_path, "merge", "sglang").stdout  # what it made is no input
    names = {
        event["args"]["name"]
        for event in load(folder / "merged.pt.trace.json.gz")["traceEvents"]
        if event["name"] == "process_name"
    }
    assert "1770000000.1-TP-0 (host)" in names
    files = [str(path) for path in sorted(folder.glob("177*"))]
    # One is a link to a file in another folder.
    (tmp_path / "elsewhere.gz").symlink_to(Path(files[0]).rename(tmp_path / "moved.gz"))
    Path(files[0]).symlink_to(tmp_path / "elsewhere.gz")
    assert ": 2 traces, " in command(tmp_path, "merge", *files, "-o", "x.json.gz").stdout
    assert "no such run" in command(tmp_path, "merge", files[0], "gone.json").stderr


def test_torch_npus_folders(run: Path, tmp_path: Path) -> None:
    step = RunDir(run).step(2)
    for rank, name in ((1, "raw"), (2, "analysed")):
        folder = step / f"actor.{name}.rank{rank}.n1.pid7_7_20261120185402117_ascend_pt"
        (folder / "FRAMEWORK").mkdir(parents=True)
        state = {"state": "complete", "host": "n1", "rank": rank}
        (step / f"actor.{name}.rank{rank}.n1.pid7.meta.json").write_text(json.dumps(state))
    listed = [{"ph": "X", "name": "MatMulV3", "pid": 5, "tid": 2, "ts": f"{BASE_NS // 1000 + 7}.125", "dur": 4}]
    save(folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json", json.dumps(listed).encode())
    result = command(tmp_path, "merge", run.name, "--role", "actor", "-o", "x.gz")
    assert ": 2 traces, " in result.stdout
    assert "not merged, no Chrome trace: actor.raw.rank1" in result.stdout
    assert "(it contains: FRAMEWORK); MindStudio Insight opens the folder, and autoprof analyse" in result.stdout
    (event,) = [event for event in load(tmp_path / "x.gz")["traceEvents"] if event["name"] == "MatMulV3"]
    assert event["ts"] == 7.125


# Tracks.


def test_spans_that_overlap_lie_beside_each_other() -> None:
    def span(kind: str, start: int, end: int, **ids: Any) -> Line:
        return Line(kind, kind, None, "", None, start, end, ids=ids)

    spans = [
        span("step", 0, 100),
        span("stage", 10, 50),
        span("timer", 20, 60),  # overlaps the stage
        span("sample", 0, 30, sample=1),
        span("sample", 5, 20, sample=2),
        span("tool", 6, 9, sample=2),
        span("tool", 7, 12, sample=2),  # at the same time as the other
        span("sample", 40, 50, sample=3),
        span("request", 0, 9),
        span("request", 1, 3),  # inside of the other by accident
    ]
    found = {lane.name: [(each.kind, each.start_ns) for each in lane.spans] for lane in lay_out(reversed(spans))}
    assert found == {
        "stages": [("step", 0), ("stage", 10)],
        "stages 2": [("timer", 20)],
        "samples 1": [("sample", 0), ("sample", 40)],
        "samples 2": [("sample", 5), ("tool", 6)],
        "samples 3": [("tool", 7)],
        "requests 1": [("request", 0)],
        "requests 2": [("request", 1)],
    }


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stage", "timer", "sample", "turn", "tool", "request"]),
            st.integers(0, 30),
            st.integers(0, 30),
            st.integers(0, 3),
        ),
        max_size=40,
    )
)
def test_each_span_has_a_track_in_which_it_overlaps_with_none(made: list[tuple[str, int, int, int]]) -> None:
    spans = [
        Line(kind, kind, None, "", None, start, start + long, ids={"sample": sample})
        for kind, start, long, sample in made
    ]
    lanes = lay_out(spans)
    assert sorted(map(repr, spans)) == sorted(repr(span) for lane in lanes for span in lane.spans)
    assert len({lane.name for lane in lanes}) == len(lanes)
    for lane in lanes:
        for one, other in itertools.combinations(lane.spans, 2):
            assert other.start_ns >= one.end_ns or other.end_ns <= one.end_ns
