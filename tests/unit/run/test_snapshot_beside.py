"""Parts of a snapshot other than stacks: memory, torch's flight record, the state of an engine."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autoprof.base import identity
from autoprof.behaviours import sglang
from autoprof.behaviours import vllm_worker as vllm
from autoprof.hooks.behaviour import CALL, Outcome
from autoprof.run import snapshot
from autoprof.rundir import memory_state
from autoprof.rundir.records import MAX_STACKS_BYTES, MemoryState, ProcessStacks

TAKEN = ProcessStacks(host="h", pid=1, unix_ns=1, left_out=["native stacks"])


def test_the_memory_of_this_process_is_known() -> None:
    sizes = snapshot.with_process_state(TAKEN, "/nonexistent").memory
    assert 0 < sizes["resident"] <= sizes["peak_resident"]
    assert 0 < sizes["used"] < sizes["limit"]


def test_devices_are_asked_for_where_they_are_in_use_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(initialised: bool) -> Any:
        held = {0: 0, 1: 300, 2: 200}
        return SimpleNamespace(
            is_initialized=lambda: initialised,
            device_count=lambda: len(held) if initialised else pytest.fail("asked"),
            memory_reserved=held.__getitem__,
            get_device_properties=lambda number: SimpleNamespace(total_memory=1000),
        )

    monkeypatch.setattr(memory_state, "state", MemoryState)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=backend(False), npu=backend(True)))  # type: ignore[arg-type]
    assert snapshot.with_process_state(TAKEN, "/nonexistent").memory == {"device_used": 500, "device_total": 2000}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=backend(False)))  # type: ignore[arg-type]
    assert snapshot.with_process_state(TAKEN, "/nonexistent").memory == {}
    monkeypatch.delitem(sys.modules, "torch")
    assert snapshot.with_process_state(TAKEN, "/nonexistent").memory == {}


class Distributed:
    """Imitate the used parts of torch.distributed, with these records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **records: Any) -> None:
        self.calls: list[dict[str, bool]] = []

        def dump(record: Any) -> Any:
            return lambda **given: self.calls.append(given) or pickle.dumps(record)

        group = SimpleNamespace(group_desc="default_pg")
        world = SimpleNamespace(pg_group_ranks={id(group): {1: 1, 0: 0}}, pg_names={id(group): "0"})
        torch = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_rank=lambda: 3,
            distributed_c10d=SimpleNamespace(_world=world),
        )
        module = ModuleType("c10d")
        for name, record in records.items():
            setattr(module, name, dump(record))
        monkeypatch.setitem(sys.modules, "torch.distributed", torch)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)


def entry(number: int, pad: str = "") -> dict[str, Any]:
    return {"record_id": number, "time_created_ns": number, "profiling_name": f"all_reduce{pad}"}


def record(*entries: dict[str, Any], **groups: Any) -> dict[str, Any]:
    return {"version": "2.10", "pg_config": groups, "entries": list(entries)}


def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.iterdir()
    assert path.name == f"{identity.HOST}-{os.getpid()}-rank_3"
    assert path.stat().st_size <= MAX_STACKS_BYTES
    return pickle.loads(path.read_bytes())


def test_the_record_of_nccl_and_that_of_other_backends_are_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nccl, gloo = record(entry(1), entry(3), **{"7": {"name": "7"}}), record(entry(2), **{"": {"name": ""}})
    fake = Distributed(monkeypatch, _dump_nccl_trace=nccl, _dump_fr_trace=gloo)
    assert snapshot.write_flight_record(str(tmp_path)).endswith("-rank_3")
    found = written(tmp_path)
    assert [each["record_id"] for each in found["entries"]] == [1, 2, 3]
    # Gloo's groups have no names in torch's own record (2.13).
    assert found["pg_config"] == {"0": {"name": "0", "desc": "", "ranks": "[0, 1]"}, "7": {"name": "7"}}
    assert all(call["includeStackTraces"] is False for call in fake.calls)


@pytest.mark.parametrize("records", [{}, {"_dump_fr_trace": record()}, {"_dump_nccl_trace": {}}])
def test_where_torch_has_recorded_nothing_there_is_no_file(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Distributed(monkeypatch, **records)
    assert snapshot.write_flight_record(str(tmp_path)) == ""
    assert list(tmp_path.iterdir()) == []


def test_of_a_record_that_is_too_large_the_end_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entries = [entry(number, f"{number} {'x' * 1000}") for number in range(3000)]
    Distributed(monkeypatch, _dump_fr_trace=record(*entries))
    snapshot.write_flight_record(str(tmp_path))
    kept = [each["record_id"] for each in written(tmp_path)["entries"]]
    assert kept == list(range(3000 - len(kept), 3000))
    assert len(kept) > 250


@pytest.mark.parametrize(
    ("version", "given", "size"),
    [
        ("2.4.1", {}, "2000"),
        ("2.10.0+cu128", {}, "2000"),
        ("2.11.0", {}, None),
        ("2.13.0+cpu", {}, None),
        ("3.0", {}, None),
        ("2.9.1", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, "0"),
        ("2.9.1", {"TORCH_FR_BUFFER_SIZE": "50"}, None),
        ("unknown", {}, None),
    ],
)
def test_torch_records_where_it_does_not_by_default_and_nobody_has_said_otherwise(
    version: str, given: dict[str, str], size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    environ = dict(given)
    snapshot.enable_flight_record(environ)
    assert environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") == size


class Scheduler(SimpleNamespace):
    """A fake scheduler."""


def request(name: str, ago_s: float) -> Any:
    stats = SimpleNamespace(wait_queue_entry_time=time.perf_counter() - ago_s)
    return SimpleNamespace(request_id=name, rid=name, arrival_time=time.time() - ago_s, time_stats=stats)


def of_vllm(**more: Any) -> Scheduler:
    pool = SimpleNamespace(get_num_free_blocks=lambda: 5, num_gpu_blocks=64)
    values = {"kv_cache_manager": SimpleNamespace(block_pool=pool), "kv_holding_waiting": deque([request("c", 1)])}
    return Scheduler(**{"running": [request("a", 100)], "waiting": deque([request("b", 500)])} | values | more)


def of_sglang(**more: Any) -> Scheduler:
    values = {
        "waiting_queue": [request("b", 500)],
        "running_batch": SimpleNamespace(reqs=[request("a", 100)]),
        "cur_batch": SimpleNamespace(reqs=[request("a", 100), request("c", 1)]),
        "token_to_kv_pool_allocator": SimpleNamespace(page_size=4, size=256, available_size=lambda: 12),
        "tree_cache": SimpleNamespace(evictable_size=lambda: 8),
    }
    return Scheduler(**values | more)


@pytest.mark.parametrize(("made", "read", "counts"), [(of_vllm, vllm.read, (1, 2)), (of_sglang, sglang.read, (2, 1))])
def test_the_state_of_an_engine_is_told(made: Any, read: Any, counts: tuple[int, int]) -> None:
    scheduler = made()
    snapshot.register_scheduler(scheduler, read)
    found = snapshot.with_process_state(TAKEN, "/nonexistent")
    assert (found.engine["running"], found.engine["waiting"]) == counts
    assert (found.engine["free_blocks"], found.engine["total_blocks"], found.engine["longest"]) == (5, 64, "b")
    assert 500 <= float(found.engine["longest_s"]) < 900
    assert found.left_out == TAKEN.left_out
    del scheduler
    gc.collect()
    assert snapshot.with_process_state(TAKEN, "/nonexistent").engine == {}


@pytest.mark.parametrize(
    ("scheduler", "read", "left_out"),
    [
        (of_vllm(kv_cache_manager=None), vllm.read, ["engine.free_blocks: Attr", "engine.total_blocks: Attr"]),
        (of_vllm(running=None), vllm.read, ["engine: TypeError"]),
        (of_sglang(tree_cache=None), sglang.read, ["engine.free_blocks: Attr"]),
        (of_sglang(waiting_queue=[SimpleNamespace(rid="x")]), sglang.read, ["engine.longest_s: Attr"]),
    ],
)
def test_what_another_release_lacks_is_named(scheduler: Scheduler, read: Any, left_out: list[str]) -> None:
    snapshot.register_scheduler(scheduler, read)
    found = snapshot.with_process_state(TAKEN, "/nonexistent").left_out[1:]
    assert [said[: len(begin)] for said, begin in zip(found, left_out, strict=True)] == left_out


def test_what_fails_leaves_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Distributed(monkeypatch, _dump_fr_trace=record(entry(1)))
    found = snapshot.with_process_state(TAKEN, str(tmp_path / "nonexistent"))
    assert found.flight_record == ""
    assert found.left_out[1].startswith("flight_record: FileNotFoundError: ")
    assert found.memory["resident"] > 0


def test_the_scheduler_of_an_engine_core_is_known_once_it_is_made() -> None:
    core = SimpleNamespace()
    calls = vllm.ProcessStart().around(SimpleNamespace(instance=core))  # type: ignore[arg-type]
    assert next(calls) is CALL
    core.scheduler = of_vllm()
    with pytest.raises(StopIteration):
        calls.send(Outcome(None, None))
    assert snapshot.with_process_state(TAKEN, "/nonexistent").engine["running"] == 1


def test_the_exception_that_ends_an_engine_core_is_recorded(made: Any, mocker: Any) -> None:
    run, sent = made(), []
    mocker.patch.object(vllm.runtime, "current", return_value=run)
    send = vllm._with_exception(lambda: sent.append(True))
    try:
        raise KeyError("lost block")
    except KeyError:
        send()
    send()
    journals = [path.read_text() for path in run.rundir.lines("journal")]
    lines = [json.loads(line) for text in journals for line in text.splitlines()]
    found = [(line["span"], line["exception"]["message"]) for line in lines if line["kind"] == "raised"]
    assert (sent, found) == ([True, True], [("engine", "'lost block'")])


def test_a_killed_worker_of_an_engine_core_is_recorded(made: Any, mocker: Any) -> None:
    run = made()
    mocker.patch.object(vllm.runtime, "current", return_value=run)
    processes = [SimpleNamespace(name=f"VllmWorker-{n}", pid=70 + n, exitcode=None, join=lambda _: 0) for n in range(2)]
    workers = [SimpleNamespace(proc=each) for each in processes]
    executor = type("Executor", (), {"shutdown": lambda self: "theirs", "workers": workers})()
    core = SimpleNamespace(scheduler=of_vllm(), model_executor=executor)
    calls = vllm.ProcessStart().around(SimpleNamespace(instance=core))  # type: ignore[arg-type]
    next(calls)
    with pytest.raises(StopIteration):
        calls.send(Outcome(None, None))
    processes[1].exitcode = -9
    assert executor.shutdown() == "theirs"
    journals = [path.read_text() for path in run.rundir.lines("journal")]
    (line,) = [json.loads(line) for text in journals for line in text.splitlines() if '"raised"' in line]
    assert line["exception"]["named"] == [{"pid": 71, "name": "vLLM's VllmWorker-1", "signal": "SIGKILL"}]


def test_an_engine_core_that_failed_to_start_is_not_known() -> None:
    calls = vllm.ProcessStart().around(SimpleNamespace(instance=SimpleNamespace()))  # type: ignore[arg-type]
    next(calls)
    with pytest.raises(StopIteration):
        calls.send(Outcome(None, ValueError()))
    assert snapshot.with_process_state(TAKEN, "/nonexistent").engine == {}
