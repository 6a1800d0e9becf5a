"""Traces are merged: every event once, nothing shared that was not, one clock."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.rundir import layout
from autoprof.rundir.records import CaptureMeta
from autoprof.traces.clocks import corrections_ns
from autoprof.traces.reader import TraceError
from tests.support.merges import described, merged, meta
from tests.support.traces import BASE_NS, Event, dumped, kineto, load, process


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


def test_events_whose_fields_are_in_their_name_are_left_out(tmp_path: Path) -> None:
    # torch 2.11 with CUDA writes `"name": "Record Window End\\", \\"ph\\": ...`. Perfetto refuses events without `ph`.
    damaged = {"name": 'Record Window End", "ph": "i", "s": "g', "pid": "", "tid": "", "ts": 9.0}
    events, summary = merged(tmp_path, kineto([*process(1, "python"), damaged]))
    assert summary.traces == 1
    assert all("ph" in event for event in events)


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
    assert "1.json.gz: the base of its times is missing" in summary.left_out["1.json.gz"]
    with pytest.raises(TraceError, match="is not a number"):
        merged(tmp_path, kineto(op(1.0)).replace(str(BASE_NS).encode(), b'"x"'))


def test_microseconds_since_the_epoch_keep_their_nanoseconds(tmp_path: Path) -> None:
    absolute = f"{BASE_NS // 1000 + 2500}.123"
    events, _ = merged(tmp_path, kineto(op(1)), kineto([op(0)[0] | {"ts": absolute}], base_ns=None))
    assert events[-1 - 3]["ts"] == 2500.123


def test_a_wall_clock_that_was_set_in_the_step_is_set_right(tmp_path: Path) -> None:
    second = 10**9
    said = [
        meta("a", 1000 * second, 10 * second),
        meta("a", 1003 * second, 11 * second),  # set forward by 2 s
        meta("b", 5000 * second, 20 * second),  # another host has another monotonic clock
        meta("b", 5001 * second + 1000, 21 * second),  # a microsecond between two readings is no step
        {},
    ]
    metas = [layout.record(each, CaptureMeta) for each in said]
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
        assert re.search(r"1\.json\.gz: (it|an event|not a Chrome trace)", summary.left_out["1.json.gz"])
    events, summary = merged(tmp_path, content, content + b"}", jobs=jobs)
    assert (len(events), summary.left_out) == (2 * whole, {})
    assert "the text after the events is not valid JSON" in summary.cut["1.json.gz"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trace_that_is_cut_off_is_merged_up_to_there(tmp_path: Path, jobs: int) -> None:
    whole = kineto(process(1, "a", count=500))
    events, summary = merged(tmp_path, whole, whole[: len(whole) // 2], jobs=jobs)
    assert summary.cut == {"1.json.gz": "it ends in the middle of its events"}
    assert (summary.traces, summary.left_out) == (2, {})
    assert len(merged(tmp_path, whole)[0]) * 1.4 < len(events) < len(merged(tmp_path, whole)[0]) * 1.6


def test_where_nothing_can_be_merged_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "out.json.gz").write_bytes(b"what was there before")
    with pytest.raises(TraceError, match=r"0\.json\.gz: not a Chrome trace"):
        merged(tmp_path, b"hello", b"you")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json.gz", "1.json.gz", "out.json.gz"]
    assert (tmp_path / "out.json.gz").read_bytes() == b"what was there before"
