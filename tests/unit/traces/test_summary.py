"""Sums of traces: own times, devices, an engine's passes, memory; in any order of events, also truncated."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.base.intervals import Union
from autoprof.traces import event_rows as trace_sums
from autoprof.traces import flame
from autoprof.traces.event_rows import Rows
from autoprof.traces.flame import FUNCTION, OWN_FRAME, tidy
from autoprof.traces.reader import TraceError
from autoprof.traces.summary import Operator, Phase, TraceSums, summarize
from tests.support.traces import BASE_NS, Event, dumped, kineto, process, save


def op(name: str, ts: float, dur: float, cat: str = "cpu_op", pid: Any = 7, tid: Any = 7, **more: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more}


def sums(folder: Path, events: list[Event], name: str = "x.json", **layout: Any) -> TraceSums:
    return summarize(save(folder / name, kineto(events, **layout)))


def own(found: TraceSums) -> dict[str, tuple[int, float, float]]:
    return {
        each.name: (each.calls, round(each.total_us, 3), round(each.self_us, 3))
        for each in (*found.operators, *found.kernels)
    }


def busy_us(path: Path) -> float:
    """Return the time in which an operator ran in a thread, in microseconds, summed over the threads of the host."""
    threads: dict[Any, Union] = defaultdict(Union)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "Trace":
            start_ns = round(event["ts"] * 1000)
            threads[event["pid"], event["tid"]].add(start_ns, start_ns + round(event["dur"] * 1000))
    return sum(union.length() for union in threads.values()) / 1000


# As deep as they come: a in it b in it c, then d, and another thread meanwhile.
NESTED = [
    op("a", 100.0, 10.0),
    op("b", 101.0, 5.0),
    op("c", 101.5, 0.25),
    op("c", 102.0, 0.004),
    op("d", 107.0, 3.0),
    op("a", 110.0, 1.0),
    op("z", 100.0, 100.0, tid=8),
]
OWN = {"a": (2, 11.0, 3.0), "b": (1, 5.0, 4.746), "c": (2, 0.254, 0.254), "d": (1, 3.0, 3.0), "z": (1, 100.0, 100.0)}


@pytest.mark.parametrize("seed", range(4))
def test_own_times_whatever_the_order(tmp_path: Path, seed: int) -> None:
    events = list(NESTED)
    if seed:
        random.Random(seed).shuffle(events)
    found = sums(tmp_path, events)
    assert own(found) == OWN
    assert found.first_ns == BASE_NS + 100_000
    assert (found.events, found.span_us, found.cut, found.bound) == (7, 100.0, "", None)


def test_flame_graphs_sum_calls_with_the_same_callers(tmp_path: Path) -> None:
    main, other = sums(tmp_path, [*NESTED, op("late", 112.0, 4.0), op("longer", 114.0, 9.0)]).flame
    assert (main.name, main.us) == ("thread 7", 15.0)
    paths: list[str] = []
    for node in main.nodes:
        paths.append(f"{paths[node.parent]}/{node.name}" if node.parent >= 0 else node.name)
    times = {path: node.us for path, node in zip(paths, main.nodes, strict=True)}
    # Both calls of a are one; a call that outlives its caller ends with it.
    assert times == {"a": 11, "late": 4, "late/longer": 2, "a/b": 5, "a/d": 3, "a/b/c": 0.3}
    assert [node.name for node in other.nodes] == ["z"]


def test_flame_graphs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [op(f"op{number}", 10.0 * number, 9.0 + number) for number in range(400)]
    threads = [op("t", 0.0, 5.0, tid=number) for number in range(100, 110)]
    (main, *others) = sums(tmp_path, [*many, *threads]).flame
    assert len(main.nodes) <= 250
    assert len(others) == 3
    monkeypatch.setattr(flame, "MAX_NODES", 30)
    (main, *_) = sums(tmp_path, [op(f"op{number}", 10.0 * number, 9.0) for number in range(400)], "y.json").flame
    assert len(main.nodes) == 29


def test_the_same_at_the_times_that_kineto_writes(tmp_path: Path) -> None:
    """Microseconds since Kineto's base, of which a float holds the nanosecond just so."""
    late = [event | {"ts": event["ts"] + 4_454_377_510_513.073} for event in NESTED]
    assert own(sums(tmp_path, late)) == OWN


def test_one_that_outlives_the_one_it_began_in(tmp_path: Path) -> None:
    assert own(sums(tmp_path, [op("a", 0, 10), op("b", 8, 5)])) == {"a": (1, 10, 8), "b": (1, 5, 5)}


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.sampled_from("abc")), max_size=30)


@given(intervals, st.randoms(use_true_random=False), st.integers(1, 7))
def test_own_times_are_what_counting_by_hand_gives(tmp_path: Path, spans: Any, shuffle: Any, size: int) -> None:
    """Each unit of time belongs to the event that began last, of two at once the shorter one."""
    of_length = {(start, -length): name for start, length, name in spans if length}
    found_spans = [(start, -minus, name) for (start, minus), name in sorted(of_length.items())]
    expected: dict[str, float] = {}
    for unit in range(120):
        holding = [name for start, length, name in found_spans if start <= unit < start + length]
        if holding:
            expected[holding[-1]] = expected.get(holding[-1], 0) + 1
    events = [op(name, start, length) for start, length, name in found_spans]
    shuffle.shuffle(events)
    path = save(tmp_path / "x.json", dumped(events))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_sums, "RUN_ROWS", size)
        patch.setattr(trace_sums, "RUNS_IN_MEMORY", 1)
        found = summarize(path)
    assert {each.name: each.self_us for each in found.operators if each.self_us} == expected


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 0), st.integers(0, 9)), max_size=9), max_size=9))
def test_rows_come_in_order_from_memory_and_from_the_file(chunks: list[list[tuple[float, float, int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_sums, "RUN_ROWS", 4)
        patch.setattr(trace_sums, "RUNS_IN_MEMORY", 1)
        patch.setattr(trace_sums, "_BLOCK_ROWS", 3)
        with Rows() as rows:
            for chunk in chunks:
                rows.extend(list(chunk))
            found = list(rows)
    assert sorted(found) == sorted(row for chunk in chunks for row in chunk)
    assert [row[:2] for row in found] == sorted(row[:2] for row in found)


def test_names_without_end_are_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprof.traces.event_rows.MAX_NAMES", 3)
    found = sums(tmp_path, [op(f"op{number}", number, 1) for number in range(10)])
    assert own(found) == {f"op{n}": (1, 1, 1) for n in range(3)} | {"(other names)": (7, 7, 7)}


# Devices.


def kernel(name: str, ts: float, dur: float, stream: int = 7, cat: str = "kernel", pid: Any = 0) -> Event:
    return op(name, ts, dur, cat, pid, stream)


GPU: list[Event] = [
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    op("aten::mm", 0, 100),
    op("cudaLaunchKernel", 10, 5, "cuda_runtime"),
    kernel("gemm", 20, 30),
    kernel("gemm", 40, 20, stream=8),  # beside the first
    kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50, 20, stream=9),
    kernel("Memcpy HtoD (Pinned -> Device)", 75, 5, cat="gpu_memcpy"),
    kernel("Stream Wait Event", 0, 100, cat="cuda_sync"),
    kernel("update_actor", 0, 100, cat="gpu_user_annotation"),
]


def test_device_times_are_unions(tmp_path: Path) -> None:
    found = sums(tmp_path, GPU)
    (device,) = found.devices
    assert (device.device, device.name, device.events, device.span_us) == (0, "GPU 0", 4, 100)
    assert (device.compute_us, device.communication_us, device.copy_us) == (40, 20, 5)
    assert (device.overlap_us, device.busy_us, device.idle_us) == (10, 55, 45)
    assert found.bound is None
    assert found.reason == "GPU 0 was busy 55% of the time: neither device nor host clearly waits for the other"
    assert own(found)["aten::mm"] == (1, 100, 95)
    assert {each.name for each in found.operators} == {"aten::mm", "cudaLaunchKernel"}
    assert {each.category for each in found.kernels} == {"kernel", "gpu_memcpy"}
    assert own(found)["gemm"] == (2, 50, 50)


def test_events_whose_fields_are_in_their_name_are_no_damage(tmp_path: Path) -> None:
    # From a trace of torch 2.11 with CUDA 13 on an H100.
    begin = {"name": 'Iteration Start: PyTorch Profiler", "ph": "i", "s": "g', "pid": "Traces", "tid": "t", "ts": 1.5}
    found = sums(tmp_path, [*GPU, begin, {**begin, "name": 'Record Window End", "ph": "i", "s": "g'}])
    assert (found.events, found.bound) == (len(GPU) + 2, None)
    assert own(found)["gemm"] == (2, 50, 50)


@pytest.mark.parametrize(("dur", "bound"), [(85, "device"), (10, "cpu")])
def test_what_the_capture_waited_for(tmp_path: Path, dur: float, bound: str) -> None:
    found = sums(tmp_path, [op("aten::mm", 0, 100), kernel("gemm", 2, dur)])
    assert found.bound == bound
    assert f"device 0 was busy {dur}% of the time" in found.reason


def test_times_as_text_and_without_categories_as_torch_npu_writes_them(tmp_path: Path) -> None:
    named = [
        {"ph": "M", "name": "process_name", "pid": 5, "args": {"name": "Ascend Hardware"}},
        {"ph": "M", "name": "process_name", "pid": 6, "args": {"name": "Python"}},
    ]
    events = [
        {"ph": "X", "name": "aten::mm", "pid": 6, "tid": 1, "ts": "1718176000000010.120", "dur": 0.5},
        {"ph": "X", "name": "aten::empty", "pid": 6, "tid": 1, "ts": "1718176000000010.370", "dur": "0.125"},
        {"ph": "X", "name": "MatMulV3", "pid": 5, "tid": 2, "ts": "1718176000000020.500", "dur": 4},
        {"ph": "X", "name": "hcom_allReduce__1_0_1", "pid": 5, "tid": 3, "ts": "1718176000000022.500", "dur": 4},
    ]
    found = sums(tmp_path, named + events, base_ns=None)
    assert own(found)["aten::mm"] == (1, 0.5, 0.375)
    assert found.first_ns == 1718176000000010120
    (device,) = found.devices
    assert (device.name, device.compute_us, device.communication_us, device.overlap_us) == ("Ascend Hardware", 4, 4, 2)


# Engines and memory.


def test_passes_of_engines(tmp_path: Path) -> None:
    def note(name: str, ts: float, dur: float, cat: str = "user_annotation") -> Event:
        return op(name, ts, dur, cat)

    vllm = sums(
        tmp_path,
        [
            note("execute_context_2(512)_generation_0(0)", 0, 10),
            note("execute_context_0(0)_generation_3(3)", 10, 1),
            note("execute_context_0(0)_generation_3(3)", 20, 2),
            note("execute_259_context_1(sq256sk256sqsq65536sqsk65536)_generation_3(sq3sk99sqsq3sqsk99)", 30, 4),
            note("execute_context_0(0)_generation_3(3)", 11, 0.5, "gpu_user_annotation"),
            note("update_actor", 50, 4),
        ],
    ).engine
    assert vllm is not None
    assert vllm.engine == "vllm"
    assert vllm.passes == 4
    assert vllm.prefill == Phase(passes=1, seconds=10e-6, tokens=512)
    assert vllm.decode == Phase(passes=2, seconds=0.5e-6, tokens=6)
    assert vllm.mixed == Phase(passes=1, seconds=4e-6, tokens=259)
    assert vllm.other == Phase(passes=0, seconds=0)
    old = sums(tmp_path, [note("execute_new_1_cached_0", 0, 1), note("execute_new_0_cached_2", 1, 1)]).engine
    assert old is not None
    assert (old.prefill.passes, old.decode.passes, old.decode.tokens) == (1, 1, None)
    names = ("step[EXTEND bs=2 toks=512]", "step[DECODE bs=8]", "step[TARGET_VERIFY bs=8 forward_id=3]", "step[x")
    sglang = sums(tmp_path, [note(name, 10 * place, 5) for place, name in enumerate(names)]).engine
    assert sglang is not None
    assert sglang.engine == "sglang"
    assert (sglang.prefill.tokens, sglang.decode, sglang.other.passes) == (
        512,
        Phase(passes=1, seconds=5e-6, tokens=8),
        1,
    )


def test_peaks_of_memory_are_by_device(tmp_path: Path) -> None:
    def memory(kind: int, number: int, allocated: int, reserved: int) -> Event:
        said = {"Device Type": kind, "Device Id": number, "Total Allocated": allocated, "Total Reserved": reserved}
        return {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": 1, "pid": 7, "tid": 7, "args": said}

    events = [memory(0, -1, 5, 0), memory(1, 1, 100, 300), memory(1, 1, 200, 250), memory(0, -1, 3, 0)]
    found = [(each.device, each.allocated_bytes, each.reserved_bytes) for each in sums(tmp_path, events).memory]
    assert found == [("cpu", 5, 0), ("cuda:1", 200, 300)]


# Any file as input.


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_what_a_cut_trace_holds(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, kineto(process(7, "p", count=2000)))
    whole = summarize(path)
    assert (whole.cut, own(whole)["aten::op7"]) == ("", (1, 0.5, 0.5))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    found = summarize(path)
    assert ("ends early" if path.suffix == ".gz" else "in the middle of its events") in found.cut
    assert whole.events / 2 < found.events < whole.events
    assert own(found)["aten::op7"] == (1, 0.5, 0.5)


def test_a_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    listed = dumped(NESTED).removeprefix(b'{"traceEvents":').rpartition(b',"baseTime')[0]
    for content in (listed, listed[:-1], listed[:-1] + b",\n"):  # the closing bracket may be missing, says the format
        found = summarize(save(tmp_path / "x.json", content))
        assert (own(found), found.cut, found.first_ns) == (OWN, "", None)
    assert "in the middle" in summarize(save(tmp_path / "x.json", listed[:-9])).cut


@pytest.mark.parametrize("content", [b"", b"hello", b"[7]", b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}'])
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TraceError, match=r"x\.json: "):
        summarize(save(tmp_path / "x.json", content))


@pytest.mark.parametrize("base", ['"soon"', "null", "1.5", "[1]", "true"])
def test_a_base_that_is_no_number_is_not_known(tmp_path: Path, base: str) -> None:
    content = kineto(NESTED, None).replace(b'"schemaVersion": 1', b'"baseTimeNanoseconds": ' + base.encode())
    found = summarize(save(tmp_path / "x.json", content))
    assert (own(found), found.first_ns) == (OWN, None)


@pytest.mark.parametrize(
    "damaged",
    [{"ts": 1e306}, {"dur": 1e306}, {"dur": "inf"}, {"dur": "nan"}, {"ts": "1" + "0" * 400}, {"ts": "9" * 5000}],
)
def test_times_that_are_none_are_said(tmp_path: Path, damaged: Event) -> None:
    with pytest.raises(TraceError, match=r"x\.json: an event can't be read"):
        sums(tmp_path, [op("a", "1718176000000010.5", 1), op("b", 2, 1) | damaged])  # type: ignore[arg-type]


def test_what_runs_backwards_takes_no_time(tmp_path: Path) -> None:
    """Kineto has written such durations of events that had no end."""
    found = sums(tmp_path, [op("a", 10, 10), op("b", 12, -5), op("c", 13, 1)])
    assert own(found) == {"a": (1, 10, 9), "b": (1, 0, 0), "c": (1, 1, 1)}


def test_devices_of_any_id(tmp_path: Path) -> None:
    ids: list[Any] = ["Ascend", 1, None, 0.5, 0]
    found = sums(tmp_path, [kernel("gemm", place, 1, pid=pid) for place, pid in enumerate(ids)])
    assert [each.device for each in found.devices] == [0, 0.5, 1, None, "Ascend"]


# Traces written by torch, compared with torch's own sums.


@pytest.mark.parametrize("stack", [False, True])
def test_torchs_own_sums(tmp_path: Path, stack: bool) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=stack, profile_memory=True
    ) as profile:
        for _ in range(5):
            with torch.profiler.record_function("update_actor"):
                model(torch.randn(2, 8, 16)).sum().backward()
    path = tmp_path / "x.json"
    profile.export_chrome_trace(str(path))
    # torch distinguishes functions by the addresses of their objects, and lists its profiler's own frames.
    theirs = defaultdict(list)
    for each in profile.key_averages():
        theirs[tidy(FUNCTION if ".py(" in each.key or each.key[0] == "<" else "", each.key)].append(each)
    theirs.pop(OWN_FRAME, None)
    found = summarize(path)
    ours: dict[str, Operator] = {each.name: each for each in found.operators}
    assert len(ours) > 20
    assert set(ours) == {name for name in theirs if name != "[memory]"}
    for name, each in ours.items():
        torchs = theirs[name][0]
        if not stack:  # with stacks torch's own come out below zero
            assert each.self_us == pytest.approx(torchs.self_cpu_time_total, abs=0.01 * each.calls), name
        # torch drops a call of a name that is all that a call of the same name makes (EventList._remove_dup_nodes).
        if each.calls == torchs.count:
            assert each.total_us == pytest.approx(torchs.cpu_time_total, abs=0.01 * each.calls), name
    same_calls = [each.calls == sum(torchs.count for torchs in theirs[name]) for name, each in ours.items()]
    assert sum(same_calls) > len(ours) * 0.8
    assert any(0 < each.total_us / each.calls < 1 for each in ours.values())
    whole = sum(each.self_us for each in found.operators)
    assert whole == pytest.approx(busy_us(path), rel=0.1 if stack else 1e-3)
    (peak,) = found.memory
    assert peak.device == "cpu"
    assert peak.allocated_bytes > 0


def function(name: str, ts: float, dur: float, tid: int = 7) -> Event:
    return op(name, ts, dur, "python_function", tid=tid)


def test_functions_that_differ_by_an_address_are_one_operator(tmp_path: Path) -> None:
    names = [f"<built-in method get of _queue.SimpleQueue object at 0x7f26{number}ab0>" for number in (1, 2)]
    found = sums(tmp_path, [function(names[0], 0, 3), function(names[1], 5, 4), op("aten::mm", 9, 1)])
    (queue, _) = found.operators
    assert (queue.name, queue.calls, queue.self_us) == ("<built-in method get of _queue.SimpleQueue object>", 2, 7)
    assert (queue.waits, queue.remark) == (True, ", waits")


def test_threads_that_run_only_functions_come_last(tmp_path: Path) -> None:
    events = [
        op("actor.update", 0, 100, "user_annotation"),
        function("train.py(3): update", 1, 90),
        op("aten::mm", 2, 50),
        op("autograd", 2, 70, tid=8),
        function("train.py(9): backward", 3, 60, tid=8),
        function("ray/_private/worker.py(1069): main_loop", 0, 1000, tid=9),
        function("train.py(3): update", 0, 900, tid=10),
    ]
    path = save(tmp_path / "x.json", kineto(events))
    found = [(each.name, each.self_us, each.aside) for each in summarize(path, ["actor.update"]).operators]
    assert found == [
        *[("train.py(9): backward", 60, False), ("aten::mm", 50, False), ("train.py(3): update", 40, False)],
        *[("autograd", 10, False), ("rest of the stage", 10, False)],
        *[("ray/_private/worker.py(1069): main_loop", 1000, True), ("train.py(3): update", 900, True)],
    ]


@pytest.mark.parametrize(
    ("name", "hides_inner"),
    [
        ("autoprof/run/watcher.py(422): _watch", True),
        ("/opt/packages/autoprof/run/journal.py(264): add", True),
        ("autoprof/hooks/dispatch.py(293): _advance", False),
        ("autoprof/capture/profilers/torch.py(332): _end_ranges", False),
        ("torch/profiler/profiler.py(554): _get_distributed_info", False),
        ("<built-in method _record_function_with_args_enter of PyCapsule object at 0x7f0>", False),
        ("<built-in method _profiler_type of PyCapsule object at 0x7f0>", False),
    ],
)
def test_frames_of_profilers_are_left_out(tmp_path: Path, name: str, hides_inner: bool) -> None:
    events = [function("a.py(1): f", 0, 10), function(name, 1, 8), function("b.py(1): g", 2, 5), op("aten::mm", 20, 1)]
    found = own(sums(tmp_path, [*events, function("b.py(1): g", 30, 1)]))
    inner = {"b.py(1): g": (1, 1, 1) if hides_inner else (2, 6, 6)}
    assert found == {"a.py(1): f": (1, 10, 2), "aten::mm": (1, 1, 1), **inner}


@pytest.mark.parametrize("name", ["autoprof/train.py(1): f", "autoprof_x/run/a.py(1): f", "src/my/autoprof.py(1): run"])
def test_modules_of_the_program_with_a_similar_name_are_kept(tmp_path: Path, name: str) -> None:
    assert list(own(sums(tmp_path, [function(name, 0, 10)]))) == [name]
