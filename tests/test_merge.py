"""Traces are merged: every event once, nothing shared that was not, one clock."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, clean_environment, wait_for
from hypothesis import given
from hypothesis import strategies as st
from traces import BASE_NS, Event, dumped, kineto, load, process, save

from autoprof import ending, listing, opening
from autoprof.report.serve import Server
from autoprof.rundir import RunDir, is_merged
from autoprof.settings import Settings
from autoprof.traces.clocks import corrections_ns
from autoprof.traces.merge import Input, Summary, merge
from autoprof.traces.reader import TraceError
from autoprof.traces.steps import merge_replicas

DESCRIBED = ("process_name", "process_labels", "process_sort_index")


def merged(folder: Path, *contents: bytes, jobs: int = 1, **metas: dict[str, Any]) -> tuple[list[Event], Summary]:
    paths = [save(folder / f"{number}.json.gz", content) for number, content in enumerate(contents)]
    inputs = [Input(path=path, label=path.name[0], meta=metas.get(f"m{path.name[0]}", {})) for path in paths]
    summary = merge(inputs, folder / "out.json.gz", jobs)
    assert not list(folder.glob("*.part"))
    events: list[Event] = load(folder / "out.json.gz")["traceEvents"]
    assert summary.events == len(events)
    return events, summary


def described(events: list[Event], what: str, field: str) -> dict[int, Any]:
    return {event["pid"]: event["args"][field] for event in events if event["name"] == what}


@pytest.mark.parametrize("jobs", [1, 2])
def test_processes_are_named_and_ordered(tmp_path: Path, jobs: int) -> None:
    device = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "process_sort_index", "pid": 0, "args": {"sort_index": 5000000}},
        {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 101, "dur": 1},
        {"ph": "M", "name": "process_labels", "pid": 1, "args": {"labels": "GPU 1"}},  # one that did nothing
    ]
    one = kineto(process(4321, "python") + device)
    events, summary = merged(tmp_path, one, one, jobs=jobs)
    assert summary.traces == 2
    names = described(events, "process_name", "name")
    places = described(events, "process_sort_index", "sort_index")
    assert all(isinstance(pid, int) for pid in names)
    assert [names[pid] for pid in sorted(names, key=lambda pid: places[pid])] == [
        *("0 (host)", "0 (GPU 0)", "1 (host)", "1 (GPU 0)"),
        *("0 (Spans)", "0 (window)", "1 (Spans)", "1 (window)"),
    ]
    assert set(described(events, "process_labels", "labels").values()) == {"python 4321", "python 0", ""}
    assert Counter(event["name"] for event in events)["thread 4321"] == 0
    assert {event["pid"] for event in events if event["name"] == "thread_name"} == {2, 3}


pids = st.integers(0, 3) | st.integers(2**31, 2**33) | st.sampled_from(["Spans", "", "1", "[TP00] 7"])
ids = st.integers(0, 3) | st.integers(-3, 2**60) | st.sampled_from(["0x1f", "7", "a", ""])
events_of_one = st.lists(
    st.fixed_dictionaries(
        {"ph": st.sampled_from(["X", "s", "t", "f", "b", "e", "n", "i", "C", "M"]), "pid": pids},
        optional={"id": ids, "bind_id": ids, "name": st.text(max_size=5), "ts": st.integers(0, 9), "tid": ids},
    ),
    max_size=8,
)


@given(st.lists(events_of_one, min_size=1, max_size=4))
def test_every_event_is_there_once_and_nothing_collides(tmp_path: Path, traces: list[list[Event]]) -> None:
    marked = [
        [event | {"args": {"is": [trace, place]}} for place, event in enumerate(events)]
        for trace, events in enumerate(traces)
    ]
    events, _ = merged(tmp_path, *(kineto(one) for one in marked))
    kept = {tuple(event["args"]["is"]): event for event in events if "is" in event.get("args", {})}
    assert len(kept) == sum("is" in event.get("args", {}) for event in events) == sum(map(len, traces))
    for field, kinds in (("pid", None), ("id", "stfbne"), ("bind_id", None)):
        old_by_new: dict[Any, set[Any]] = {}
        new_by_old: dict[Any, set[Any]] = {}
        for (trace, place), event in kept.items():
            before = traces[trace][place]
            assert {name for name in before if name not in event} == set()
            if field not in before or (kinds and before["ph"] not in kinds):
                continue
            # A number that is written as text is the same flow to Perfetto.
            old = before[field]
            if field != "pid" and isinstance(old, str) and old not in ("a", ""):
                old = int(old, 0)
            old_by_new.setdefault(event[field], set()).add((trace, old))
            new_by_old.setdefault((trace, old), set()).add(event[field])
        assert all(len(olds) == 1 for olds in old_by_new.values())
        assert all(len(news) == 1 for news in new_by_old.values())
    for (trace, place), event in kept.items():
        unchanged = set(event) - {"pid", "id", "bind_id", "args"}
        assert {name: event[name] for name in unchanged} == {name: traces[trace][place][name] for name in unchanged}


def test_flow_ids_stay_numbers(tmp_path: Path) -> None:
    events, _ = merged(tmp_path, kineto(process(1, "a")), dumped(process(1, "b")))
    starts = {event["id"]: event["pid"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["pid"] for event in events if event["ph"] == "f"}
    assert starts == ends
    assert len(starts) == 6
    assert all(isinstance(number, int) for number in starts)


def test_scoped_ids(tmp_path: Path) -> None:
    one = dumped([{"ph": "b", "pid": 1, "id2": {"global": "0x1", "local": "0x2"}, "name": "n", "cat": "c", "ts": 1}])
    events, _ = merged(tmp_path, one, one)
    assert [event["id2"] for event in events if "id2" in event] == [
        {"global": 4, "local": "0x2"},
        {"global": 5, "local": "0x2"},
    ]


def test_empty_traces_leave_valid_json(tmp_path: Path) -> None:
    empty, full = kineto([]), kineto(process(1, "a"))
    assert len(merged(tmp_path, empty, full, empty, full, empty)[0]) == 2 * (3 * 3 + 3 + 9)
    assert merged(tmp_path, empty)[0] == []


# Clocks.


def test_times_are_small_and_right_to_the_nanosecond(tmp_path: Path) -> None:
    """Kineto's are too large for that as floats, which is how viewers read them."""
    texts = ["4476518540898.979", "4476518542378.479", "4476518544946.771", "4476518544946", "4476518544946.5"]
    content = kineto([op(0)[0] | {"ts": place} for place in range(len(texts))])
    for place, text in enumerate(texts):
        content = content.replace(b'"ts": %d,' % place, b'"ts": %s,' % text.encode())
    events, _ = merged(tmp_path, content)
    base = load(tmp_path / "out.json.gz")["baseTimeNanoseconds"]
    assert [base + round(event["ts"] * 1000) for event in events if event["name"] == "op"] == [
        BASE_NS + int(Decimal(text) * 1000) for text in texts
    ]
    assert all(6 * 3600e6 < event["ts"] < 8 * 3600e6 for event in events if event["name"] == "op")


def op(us: float) -> list[Event]:
    return [{"ph": "X", "name": "op", "pid": 1, "tid": 1, "ts": us, "dur": 1}]


def times_ns(folder: Path, events: list[Event]) -> list[int]:
    base = load(folder / "out.json.gz")["baseTimeNanoseconds"]
    return [base + round(event["ts"] * 1000) for event in events if event["name"] == "op"]


def test_different_bases_become_one(tmp_path: Path) -> None:
    later = BASE_NS + 7889238 * 10**9
    absolute = BASE_NS / 1000 + 2500.0
    events, _ = merged(
        tmp_path,
        kineto(op(1000.125)),
        kineto(op(7.25), base_ns=later),
        kineto(op(2000.5), base_last=True),
        kineto(op(absolute), base_ns=None),
    )
    assert times_ns(tmp_path, events) == [BASE_NS + 1000125, later + 7250, BASE_NS + 2000500, BASE_NS + 2500000]
    # A trace on the common base is not touched.
    assert next(event["ts"] for event in events if event["name"] == "op") == 1000.125


def test_a_trace_without_a_clock_is_left_out_and_said(tmp_path: Path) -> None:
    events, summary = merged(tmp_path, kineto(op(1.0)), kineto(op(1.0), base_ns=None))
    assert len(times_ns(tmp_path, events)) == summary.traces == 1
    assert "1.json.gz: it does not say what its times count from" in summary.left_out["1.json.gz"]
    with pytest.raises(TraceError, match="is no number"):
        merged(tmp_path, kineto(op(1.0)).replace(str(BASE_NS).encode(), b'"x"'))


def test_microseconds_since_the_epoch_keep_their_nanoseconds(tmp_path: Path) -> None:
    absolute = f"{BASE_NS // 1000 + 2500}.123"
    events, _ = merged(tmp_path, kineto(op(1)), kineto([op(0)[0] | {"ts": absolute}], base_ns=None))
    assert events[-1 - 3]["ts"] == 2500.123


def meta(host: str, unix_ns: int, monotonic_ns: int) -> dict[str, Any]:
    return {"host": host, "clock": {"start": {"unix_ns": unix_ns, "monotonic_ns": monotonic_ns}}}


def test_a_wall_clock_that_was_set_in_the_step_is_set_right(tmp_path: Path) -> None:
    second = 10**9
    metas = [
        meta("a", 1000 * second, 10 * second),
        meta("a", 1003 * second, 11 * second),  # set forward by 2 s
        meta("b", 5000 * second, 20 * second),  # another host has another monotonic clock
        meta("b", 5001 * second + 1000, 21 * second),  # a microsecond between two readings is no step
        {},
    ]
    assert corrections_ns(metas) == [2 * second, 0, 0, 0, 0]
    events, summary = merged(tmp_path, kineto(op(100)), kineto(op(100)), m0=metas[0], m1=metas[1])
    assert times_ns(tmp_path, events) == [BASE_NS + 2 * second + 100000, BASE_NS + 100000]
    assert summary.traces == 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_garbage_is_left_out_and_named(tmp_path: Path, jobs: int) -> None:
    content = kineto(process(1, "a"))
    whole = len(merged(tmp_path, content)[0])
    for bad in (b"hello", content.replace(b'"ph"', b'"pp"', 2)):
        events, summary = merged(tmp_path, content, bad, content, jobs=jobs)
        assert (len(events), summary.traces, list(summary.left_out)) == (2 * whole, 2, ["1.json.gz"])
        assert re.search(r"1\.json\.gz: (it|an event) ", summary.left_out["1.json.gz"])
    events, summary = merged(tmp_path, content, content + b"}", jobs=jobs)
    assert (len(events), summary.left_out) == (2 * whole, {})
    assert "what follows the events is not valid JSON" in summary.cut["1.json.gz"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trace_that_is_cut_off_is_merged_up_to_there(tmp_path: Path, jobs: int) -> None:
    whole = kineto(process(1, "a", count=500))
    events, summary = merged(tmp_path, whole, whole[: len(whole) // 2], jobs=jobs)
    assert summary.cut == {"1.json.gz": "it ends in the middle of its events"}
    assert (summary.traces, summary.left_out) == (2, {})
    assert len(merged(tmp_path, whole)[0]) * 1.4 < len(events) < len(merged(tmp_path, whole)[0]) * 1.6


def test_where_nothing_can_be_merged_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "out.json.gz").write_bytes(b"what was there before")
    with pytest.raises(TraceError, match=r"0\.json\.gz: it is no Chrome trace"):
        merged(tmp_path, b"hello", b"you")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json.gz", "1.json.gz", "out.json.gz"]
    assert (tmp_path / "out.json.gz").read_bytes() == b"what was there before"


# Runs.


def capture(run: Path, step: int, name: str, content: bytes, **fields: Any) -> None:
    folder = RunDir(run).step(step)
    save(folder / f"{name}.pt.trace.json.gz", content)
    state = {"state": "complete", "host": "h", "rank": 0, "replica": None} | fields
    (folder / f"{name}.meta.json").write_text(json.dumps(state))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps; in step 2 a replica of two ranks, one of one rank, and a trainer."""
    path = tmp_path / "autoprof_runs" / "20261120-101010-aaaaaa"
    for rank in (1, 0):
        name = f"rollout.replica0.TP-{rank}.h.pid9"
        capture(path, 2, name, kineto(process(9, "sglang")), replica=0, rank=rank, stage="rollout")
    capture(path, 2, "rollout.replica1.TP-0.h.pid8", kineto(process(8, "sglang")), replica=1, rank=2)
    capture(path, 2, "actor.update_actor.2.rank0.h.pid7", kineto(process(7, "ray")))
    capture(path, 2, "trainer.compute_advantage.rank0.h.pid6", kineto(process(6, "ray")))
    capture(path, 4, "actor.update_actor.rank0.h.pid7", kineto(process(7, "ray")))
    (path / "run.json").write_text(json.dumps({"id": path.name, "state": "ended", "settings": {"steps": "2,4"}}))
    return path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoprof", *arguments],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_merge_makes_one_file_of_a_step(run: Path, tmp_path: Path) -> None:
    result = command(tmp_path, "merge", run.name, "--step", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert ": 5 traces, " in result.stdout
    made = RunDir(run).step(2) / "merged.pt.trace.json.gz"
    names = described(load(made)["traceEvents"], "process_name", "name")
    assert [name for name in names.values() if name.endswith("(host)")] == [
        "trainer.compute_advantage rank0 (host)",
        "actor.update_actor.2 rank0 (host)",
        "rollout replica0 TP-0 (host)",
        "rollout replica0 TP-1 (host)",
        "rollout replica1 TP-0 (host)",
    ]
    (step, _) = listing.read(run).steps
    assert (len(step.captures), [each.name for each in step.merged], step.merged[0].state) == (
        5,
        ["merged"],
        "complete",
    )
    # What is merged already is not merged again.
    assert ": 5 traces, " in command(tmp_path, "merge", run.name, "--step", "2").stdout


def test_merge_of_some_roles_into_a_file_of_ones_own(run: Path, tmp_path: Path) -> None:
    (RunDir(run).step(2) / "actor.update_actor.rank0.h.pid7_ascend_pt").mkdir()
    result = command(tmp_path, "merge", str(run), "--step", "2", "--role", "!rollout", "-o", "mine.json.gz")
    assert "mine.json.gz: 2 traces, " in result.stdout
    assert "not merged, no Chrome trace: actor.update_actor.rank0.h.pid7_ascend_pt" in result.stdout
    assert len(load(tmp_path / "mine.json.gz")["autoprof"]["merged"]) == 2
    assert listing.read(run).steps[0].merged == []


def roles_in(trace: Path) -> set[str]:
    names = described(load(trace)["traceEvents"], "process_name", "name").values()
    return {name.split()[0].split(".")[0] for name in names}


@pytest.mark.fault("a part of a step is merged", "makes a file of its own", "nothing: the whole step's stays")
@pytest.mark.parametrize("tar", [False, True], ids=["json", "tar"])
def test_a_part_of_a_step_never_has_the_name_of_the_whole(run: Path, tmp_path: Path, tar: bool) -> None:
    folder, more = RunDir(run).step(2), ["--tar"] if tar else []
    whole = folder / ("merged.tar" if tar else "merged.pt.trace.json.gz")
    ending = whole.name.removeprefix("merged")
    assert command(tmp_path, "merge", run.name, "--step", "2", *more).returncode == 0
    content = whole.read_bytes()
    traces = sorted(str(path) for path in folder.glob("rollout.replica0.*.gz"))
    made = set()
    for part in (
        [run.name, "--step", "2", "--role", "actor"],
        [run.name, "--step", "2", "--role", "!actor"],
        [run.name, "--step", "2", "--role", "actor,rollout"],
        traces,
        traces[:1],
        [str(folder)],
    ):
        result = command(tmp_path, "merge", *part, *more)
        assert (result.returncode, result.stderr) == (0, "")
        made.add(Path(result.stdout.split(": ")[0]).name)
        assert whole.read_bytes() == content, part
    assert len(made) == 6
    assert {f"merged.{roles}{ending}" for roles in ("actor", "actor+rollout", "rollout+trainer")} < made
    for asked in (["merge", run.name, "--step", "2", "--role", "actor"], ["merge", *traces]):
        result = command(tmp_path, *asked, "-o", str(whole), *more)
        assert (result.returncode, whole.read_bytes() == content) == (1, True)
        assert "this name is kept for the trace of the whole step" in result.stderr
    # They are no captures, and not half written ones.
    (step, _) = listing.read(run).steps
    assert len(step.captures) == 5
    assert {each.state for each in step.merged} == (set() if tar else {"complete"})


@pytest.mark.parametrize("by", ["an older autoprof", "hand"])
def test_what_is_served_as_the_step_is_all_of_it(run: Path, tmp_path: Path, by: str) -> None:
    """Whoever has put a part into its place."""
    folder = RunDir(run).step(2)
    part = command(tmp_path, "merge", run.name, "--step", "2", "--role", "actor").stdout.split(": ")[0]
    assert command(tmp_path, "merge", run.name, "--step", "2").returncode == 0
    whole = folder / "merged.pt.trace.json.gz"
    roles = roles_in(whole)
    whole.write_bytes(Path(part).read_bytes())
    if by != "hand":
        meta = folder / "merged.actor.meta.json"
        meta.rename(folder / "merged.meta.json")
    with Server(0) as server:
        opening.fill(server, listing.read(run), 2)
        (served,) = [content.file for content in server.contents.values() if content.for_perfetto]
    assert served == whole
    assert roles_in(whole) == roles > {"actor"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("merge",), "several steps; choose with --step: 2, 4"),
        (("merge", "--step", "3"), "has no step 3; there are 2, 4"),
        (("merge", "--step", "4", "--role", "critic"), "no trace of critic in step 4; there are roles actor"),
        (("merge", "--step", "4", "-o", "/nowhere/x.gz"), "merge: "),
        (("merge", "2025"), "no run matches '2025'"),
    ],
)
def test_what_can_not_be_merged_is_one_line(run: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (run.parent / "latest").symlink_to(run.name)
    result = command(tmp_path, *arguments)
    assert result.returncode == 1
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_step_with_a_broken_trace_names_it(run: Path, tmp_path: Path) -> None:
    capture(run, 4, "ref.x.rank0.h.pid7", b"hello")
    cut = kineto(process(5, "p", count=300))
    capture(run, 4, "ref.y.rank0.h.pid5", cut[: len(cut) // 2])
    result = command(tmp_path, "merge", run.name, "--step", "4")
    assert result.returncode == 0
    assert ": 2 traces, " in result.stdout
    assert re.search(r"left out: .*ref\.x\.rank0\.h\.pid7\.pt\.trace\.json\.gz: it is no Chrome trace", result.stdout)
    assert "cut off, merged up to there: ref.y.rank0.h.pid5.pt.trace.json.gz: it ends in the middle" in result.stdout
    (found,) = listing.read(run).steps[1].merged
    assert list(found.meta["left_out"]) == ["ref.x.rank0.h.pid7.pt.trace.json.gz"]
    assert list(found.meta["cut"]) == ["ref.y.rank0.h.pid5.pt.trace.json.gz"]
    # Where there is nothing else, that is all there is to say.
    for path in RunDir(run).step(4).glob("*.gz"):
        save(path, b"hello")
    result = command(tmp_path, "merge", run.name, "--step", "4")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)


def test_each_replica_of_several_traces_gets_one(run: Path) -> None:
    merge_replicas(run)
    step = listing.read(run).steps[0]
    (found,) = step.merged
    assert (found.name, found.state, found.meta["replica"]) == ("rollout.replica0.merged", "complete", 0)
    ranks = [f"rollout.replica0.TP-{rank}.h.pid9.pt.trace.json.gz" for rank in (0, 1)]
    assert found.meta["merged"] == ranks
    assert len(step.captures) == 5
    made = RunDir(run).step(2) / "rollout.replica0.merged.pt.trace.json.gz"
    assert found.meta["bytes"] == made.stat().st_size
    before = made.stat().st_mtime_ns
    merge_replicas(run)
    assert made.stat().st_mtime_ns == before
    # A trace that came later, of which nothing can be had.
    capture(run, 2, "rollout.replica0.TP-2.h.pid9", b"hello", replica=0, rank=2)
    merge_replicas(run)
    (found,) = listing.read(run).steps[0].merged
    assert found.state == "complete"
    assert "TP-2" in str(found.meta["left_out"])
    assert found.meta["merged"] == ranks
    for rank in range(3):
        capture(run, 2, f"rollout.replica0.TP-{rank}.h.pid9", b"hello", replica=0, rank=rank)
    capture(run, 2, "rollout.replica0.TP-3.h.pid9", b"hello", replica=0, rank=3)
    merge_replicas(run)
    (found,) = listing.read(run).steps[0].merged
    assert found.state == "failed"
    assert "TP-0" in found.meta["reason"]


def test_names_of_merged_files() -> None:
    assert is_merged("merged")
    assert is_merged("rollout.replica10.merged")
    assert not is_merged("rollout.replica0.TP-0.merged.pid7")
    assert not is_merged("actor.merged.rank0.h.pid7")
    assert is_merged("merged.actor+ref")
    assert not is_merged("merged.x.rank0.h.pid7")


@pytest.mark.parametrize("contents", ['("merge-profiles",)', "()"])
def test_the_users_command_comes_after_the_merge(run: Path, tmp_path: Path, contents: str) -> None:
    """As at the end of a run: nobody waits, and what merges is no child of the process that ends."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from types import SimpleNamespace
from autoprof import ending
from autoprof.rundir import RunDir
from autoprof.settings import Settings
command = 'ls $AUTOPROF_RUN_DIR/global_step_000002 > said.part; mv said.part said'
settings = Settings(contents={contents}, on_finish=command)
run = SimpleNamespace(settings=settings, rundir=RunDir(Path({str(run)!r})))
ending._after(run)
ending._after(run)
"""
    # Not through a pipe that the user's command would hold open.
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=clean_environment(), timeout=120, check=True)
    said = wait_for(tmp_path / "said")
    assert ("rollout.replica0.merged.meta.json" in said) == bool(contents != "()")


def test_the_last_window_is_enough_for_a_merge(run: Path, mocker: Any) -> None:
    done = mocker.patch.object(ending, "_after")
    mocker.patch.object(ending, "wait_for_files")
    for contents, times in ((("cpu",), 0), (("merge-profiles",), 1)):
        made = mocker.Mock(settings=Settings(contents=contents), rundir=RunDir(run))
        ending.window_passed(made)
        for thread in threading.enumerate():
            if thread.name == "autoprof-after":
                thread.join(10)
        assert done.call_count == times


def test_a_merge_that_is_going_on_holds_no_run_up(run: Path) -> None:
    folder = RunDir(run).step(2)
    (folder / ".merge-x.part").mkdir()
    (folder / "actor.x.rank0.h.pid1.pt.trace.json.part").touch()
    assert [path.name for path in RunDir(run).parts()] == ["actor.x.rank0.h.pid1.pt.trace.json.part"]
    assert {capture.name for capture in listing.read(run).steps[0].merged} == set()


# What torch itself writes.


def test_traces_that_torch_wrote(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    paths = []
    for rank in range(2):
        x = torch.randn(4, 4, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
            (x @ x).tanh().sum().backward()
        paths.append(tmp_path / f"{rank}.json{'.gz' * rank}")
        profile.export_chrome_trace(str(paths[-1]))
    assert os.getpid() in {event["pid"] for event in json.loads(paths[0].read_bytes())["traceEvents"]}
    merge([Input(path=path, label=path.name) for path in paths], tmp_path / "out.gz")
    after = load(tmp_path / "out.gz")["traceEvents"]

    def kinds(content: bytes) -> Counter[tuple[Any, ...]]:
        """The events with their times to the nanosecond, which floats since Kineto's base don't hold."""
        whole = json.loads(content, parse_float=Decimal)
        return Counter(
            (
                *(event["ph"], event["name"], event.get("dur"), json.dumps(event.get("args"), default=str)),
                whole["baseTimeNanoseconds"] + event["ts"] * 1000 if "ts" in event else None,
            )
            for event in whole["traceEvents"]
            if event["name"] not in DESCRIBED
        )

    before = [paths[0].read_bytes(), gzip.decompress(paths[1].read_bytes())]
    assert kinds(gzip.decompress((tmp_path / "out.gz").read_bytes())) == kinds(before[0]) + kinds(before[1])
    flows = [[event for event in after if event["ph"] == phase] for phase in "sf"]
    assert len(flows[0]) == len(flows[1]) > 0
    assert len({event["id"] for event in flows[0]}) == len(flows[0])
    assert {event["id"]: event["pid"] for event in flows[0]} == {event["id"]: event["pid"] for event in flows[1]}
