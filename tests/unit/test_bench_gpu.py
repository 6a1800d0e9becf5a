"""`make gpu`: its runner, its wheels, and its reader of traces; tests/real/test_gpu.py runs it on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import pkgutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bench.gpu
from autoprof.traces.summary import summarize
from bench.gpu import __main__ as gpu
from bench.gpu import page, public, wheels
from bench.gpu.captures import Trace, captures
from bench.gpu.facts import FAIL, PASS, SKIPPED, Fact, Row, Skipped
from bench.gpu.rows import ROWS, causes, memory
from bench.gpu.runner import PAGE, RESULTS, Runner
from bench.gpu.workbench import Ran, Workbench
from tests.support import traces

MODULES = [found.name for found in pkgutil.walk_packages(bench.gpu.__path__, "bench.gpu.")]
MACHINE = {
    **{"device": "A made-up GPU", "devices": 1, "memory_gb": 80.0, "driver": "570.1", "cuda": "12.8", "hip": ""},
    **{"cores": 16, "python": "3.12.1", "root": False, "versions": {"torch": "2.13.0"}},
}
Results = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Return a function that runs invented rows, and returns the exit status and the written results."""

    def run(
        *rows: Row, device: str = "cuda", named: bool = False, described: bool = True, **machine: Any
    ) -> tuple[int, dict[str, Any]]:
        runner = Runner(device, tmp_path, [], named, lambda line: None)
        runner.machine |= MACHINE | machine if described else {}
        status = runner.run(rows)
        written: dict[str, Any] = json.loads((tmp_path / RESULTS).read_text())
        assert (tmp_path / PAGE).read_text() == page.render(written)
        return status, written

    return run


def good(bench: Workbench) -> Iterator[Fact]:
    yield bench.fact("it holds", True, 7)


def made(work: Callable[[Workbench], Iterator[Fact]], limit_s: float = 60, **needs: Any) -> Row:
    return Row(work.__name__, "a made-up row", work, limit_s, **needs)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    # Modules that are programs do nothing on import.
    assert importlib.import_module(name).__doc__


def test_every_row_has_a_description_and_a_unique_name() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.about for row in ROWS)
    assert ROWS[0].name == "machine"


def test_a_failed_row_keeps_its_log_and_the_others_run(results: Results, tmp_path: Path) -> None:
    def bad(bench: Workbench) -> Iterator[Fact]:
        yield bench.fact("it holds", True)
        bench.run([sys.executable, "-c", "print('the end'); raise SystemExit(3)"], label="child")

    status, written = results(made(bad), made(good))
    assert status == 1
    assert [row["state"] for row in written["rows"]] == [FAIL, PASS]
    assert written["rows"][0]["reason"] == "child: exit status 3: the end"
    (log,) = written["rows"][0]["logs"]
    assert (tmp_path / log).read_text() == "the end\n"
    assert log in (tmp_path / PAGE).read_text()


def test_a_false_fact_is_a_failure(results: Results) -> None:
    def wrong(bench: Workbench) -> Iterator[Fact]:
        yield bench.fact("it holds", [], "nothing")
        yield bench.fact("so does this", [1])

    status, written = results(made(wrong))
    assert status == 1
    assert [(fact["state"], fact["figure"]) for fact in written["rows"][0]["facts"]] == [(FAIL, "nothing"), (PASS, "")]


def test_a_program_is_ended_at_the_time_limit_of_its_row(results: Results) -> None:
    def endless(bench: Workbench) -> Iterator[Fact]:
        bench.run(["sleep", "600"], label="sleep")
        yield bench.fact("it comes to an end", True)

    status, written = results(made(endless, limit_s=1))
    assert status == 1
    assert written["rows"][0]["reason"] == "sleep: it was ended, since the row's time was over"


def test_the_results_of_an_interrupted_run_are_written(results: Results, tmp_path: Path) -> None:
    def cut_off(bench: Workbench) -> Iterator[Fact]:
        yield bench.fact("it holds", True)
        os.kill(os.getpid(), signal.SIGTERM)
        yield bench.fact("it goes on", True)

    status, written = results(made(good), made(cut_off), made(good))
    assert status == 130
    assert not written["finished"]
    assert [(row["state"], len(row["facts"])) for row in written["rows"]] == [(PASS, 1), (FAIL, 1)]
    assert "KeyboardInterrupt" in written["rows"][1]["reason"]
    assert "The run was cut off" in (tmp_path / PAGE).read_text()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_skipped_rows_have_a_reason(results: Results) -> None:
    def left_out(bench: Workbench) -> Iterator[Fact]:
        raise Skipped("there is no such thing")
        yield

    rows = [
        made(good, modules=("json", "no_such_module")),
        made(good, programs=("sh", "no-such-program")),
        made(good, devices=2),
        made(good, rocm="ROCm has none"),
        made(left_out),
    ]
    status, written = results(*rows, devices=1, hip="6.2")
    assert status == 0
    assert {row["state"] for row in written["rows"]} == {SKIPPED}
    assert [row["reason"] for row in written["rows"]] == [
        "not installed: no_such_module",
        "not on the PATH: no-such-program",
        "it needs 2 GPUs; there is 1",
        "ROCm has none",
        "there is no such thing",
    ]


def test_the_table_names_device_driver_and_torch(results: Results, tmp_path: Path) -> None:
    results(made(good))
    text = (tmp_path / PAGE).read_text()
    assert (
        "A made-up GPU, 1 x 80.0 GB, driver 570.1, CUDA 12.8, 16 cores, Python 3.12.1, not root, torch 2.13.0." in text
    )
    assert "| good | pass | 0 | a made-up row |" in text
    assert "| it holds | pass | 7 |" in text
    results(made(good), hip="6.2")
    assert "driver 570.1, ROCm 6.2," in (tmp_path / PAGE).read_text()


def test_no_row_runs_if_torch_sees_no_gpu(results: Results) -> None:
    def machine(bench: Workbench) -> Iterator[Fact]:
        bench.run([sys.executable, "-c", "raise SystemExit('torch sees no GPU here')"], label="machine")
        yield bench.fact("there is a GPU", True)

    status, written = results(made(machine), made(good), described=False)
    assert status == 1
    assert [row["reason"] for row in written["rows"]] == [
        "machine: exit status 1: torch sees no GPU here",
        "machine failed: torch can't use a GPU here",
    ]


def test_rows_for_a_gpu_run_on_the_cpu_if_they_are_named(results: Results) -> None:
    _, written = results(made(good, gpu=True), device="cpu")
    assert written["rows"][0]["reason"] == "it needs a GPU"
    _, written = results(made(good, gpu=True), device="cpu", named=True)
    assert written["rows"][0]["state"] == PASS


def test_a_wrong_name_is_reported_with_the_right_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["trainr"])
    assert "there is no row trainr; there are machine, trainer," in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--wheels", str(tmp_path / "none")])
    assert "make gpu-wheels makes one" in capsys.readouterr().err


def launched(name: str, thread: int, at: float, number: int) -> list[traces.Event]:
    """Return a kernel of 4 µs and the call that launched it."""
    host = {"ph": "X", "pid": 1, "tid": thread, "ts": at, "dur": 1.0, "args": {"correlation": number}}
    device = {"ph": "X", "pid": 0, "tid": 7, "ts": at + 2, "dur": 4.0, "args": {"correlation": number}}
    return [{"cat": "cuda_runtime", "name": "cudaLaunchKernel", **host}, {"cat": "kernel", "name": name, **device}]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Write a trace with two kernels of the forward pass, one of the backward pass, communication and a copy."""
    backward = {"name": "autograd::engine::evaluate_function: MmBackward0", "ts": 100.0, "dur": 50.0}
    copy = {"name": "Memcpy HtoD", "pid": 0, "tid": 8, "ts": 200.0, "dur": 3.0}
    events = [
        *launched("gemm", 1, 10.0, 1),
        *launched("gelu", 1, 20.0, 2),
        {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 2, **backward},
        *launched("gemm", 2, 120.0, 3),
        *launched("ncclDevKernel_AllReduce", 1, 120.0, 4),
        {"ph": "X", "cat": "gpu_memcpy", **copy},
    ]
    return traces.save(tmp_path / "trace.json.gz", traces.kineto(events))


def test_kernels_belong_to_the_pass_that_launched_them(recorded: Path) -> None:
    # The fourth kernel is launched during the backward pass, but in another thread.
    assert Trace(recorded).backward_and_forward() == (1, 3)


def test_two_ways_to_sum_a_trace_are_compared(recorded: Path) -> None:
    trace = Trace(recorded)
    assert public.by_device(trace) == {0: public.Sums(5, 15.0, 12.0, 4.0, 3.0)}
    assert public.same(summarize(recorded), trace)
    (line,) = public.lines(recorded)
    assert line.endswith("| same |")
    del trace.__dict__["events"]
    trace.raw = [event for event in trace.raw if event.get("name") != "gelu"]
    assert not public.same(summarize(recorded), trace)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run with a trace, its memory history, traces of a replica and of a merge, and a snapshot."""
    run = tmp_path / "autoprof_runs" / "20261123-000000-aaaaaa"
    step = run / "global_step_000002"
    step.mkdir(parents=True)
    for name in ("actor.update_actor.rank0.n1.pid5", "rollout.generate.replica0.n1.pid6", "merged"):
        (step / f"{name}.meta.json").write_text('{"state": "complete"}')
    history = "actor.update_actor.rank0.n1.pid5.memory"
    (step / f"{history}.meta.json").write_text('{"state": "complete"}')
    trace = [{"action": "alloc", "frames": [{"name": "f"}]}, {"action": "free", "frames": []}]
    snapshot = {"device_traces": [trace, []], "segments": [], "autoprof": {"global_step": 2}}
    (step / f"{history}.pickle").write_bytes(pickle.dumps(snapshot))
    (run / "oom").mkdir()
    full = {"asked_bytes": 160_000_000_000, "total_bytes": 80_000_000_000}
    (run / "oom" / "n1.pid5.meta.json").write_text(json.dumps(full))
    return run


def test_captures_of_ranks_and_replicas_are_read_without_merged_ones(run: Path) -> None:
    assert [(capture.stage.partition(".n1")[0], capture.step) for capture in captures(run)] == [
        ("actor.update_actor", 2),
        ("actor.update_actor", 2),
        ("rollout.generate.replica0", 2),
    ]


def test_the_memory_history_is_read_back(run: Path, tmp_path: Path) -> None:
    bench = Workbench("memory", "cuda", tmp_path, tmp_path, [], 60)
    facts = [*memory._history(bench, captures(run)), *memory._snapshot(bench, Ran(tmp_path, ""))]
    assert [(fact.state, fact.figure) for fact in facts] == [
        (PASS, "1"),
        (PASS, "2, 1 with stacks"),
        (PASS, ""),
        (PASS, "asked for 160.0 GB of 80.0"),
    ]


def figures(compute: float, copy: float, idle: float) -> dict[str, Any]:
    return {"devices": [{"compute": compute, "copy": copy, "idle": idle}]}


@pytest.mark.parametrize(
    ("cause", "capture", "kinds", "fits"),
    [
        ("compute", figures(0.9, 0.0, 0.1), set(), True),
        ("compute", figures(0.9, 0.0, 0.1), {"cpu_bound"}, False),
        ("memory", figures(0.5, 0.0, 0.5), set(), False),
        ("copy", figures(0.0, 0.8, 0.2), set(), True),
        ("launch", figures(0.1, 0.0, 0.9), {"cpu_bound"}, True),
        ("launch", figures(0.1, 0.0, 0.9), set(), False),
        ("idle", figures(0.0, 0.0, 1.0), {"device_idle"}, True),
        ("idle", {}, {"device_idle"}, False),
    ],
)
def test_findings_are_compared_with_the_planted_cause(
    cause: str, capture: dict[str, Any], kinds: set[str], fits: bool
) -> None:
    assert causes._verdict(cause, capture, kinds)[0] is fits


def wheel(folder: Path, name: str, **content: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in content.items():
            archive.writestr(member, text)
    return path


def test_wheels_of_missing_packages_are_unpacked(tmp_path: Path) -> None:
    wheel(tmp_path, "msgspec", **{"msgspec/__init__.py": "older"})
    members = {"absent.py": "1", "absent-1.0.data/purelib/more.py": "2", "absent-1.0.data/scripts/x": "3"}
    wheel(tmp_path, "absent", **members)
    wheel(tmp_path, "escaping", **{"../outside.py": "4"})
    into = tmp_path / "site-packages"
    assert wheels.unpack(tmp_path, into) == ["absent 1.0", "escaping 1.0"]
    assert {path.name: path.read_text() for path in into.rglob("*.*")} == {"absent.py": "1", "more.py": "2"}
    assert not (tmp_path / "outside.py").exists()


def test_files_that_nothing_imports_are_removed_from_wheels(tmp_path: Path) -> None:
    kept = {"pyarrow/lib.so": "1", "pyarrow/libarrow.so.2600": "2", "pyarrow/dataset.py": "3"}
    lost = {"pyarrow/tests/test_x.py": "4", "pyarrow/libarrow_flight.so.2600": "5", "pyarrow/include/api.h": "6"}
    path = wheel(tmp_path, "pyarrow", **kept, **lost)
    wheels.slim(path)
    with zipfile.ZipFile(path) as archive:
        assert {name: archive.read(name).decode() for name in archive.namelist()} == kept


def test_an_unsupported_release_of_python_has_no_wheels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        wheels.main(["--python-version", "3.9", str(tmp_path)])
    assert "'3.9' is none of 3.10, 3.11, 3.12 and 3.13" in capsys.readouterr().err
