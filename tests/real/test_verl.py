"""Real GRPO runs: verl 0.9.1, Ray, vLLM on the CPU, started by verl's own command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.perfetto import FLOWS, FLOWS_BETWEEN_PROCESSES, PROCESSES, SLICES, query
from tests.support.verl_runs import VerlRun, metas, operators, window

STAGES = {
    "actor.compute_log_prob",
    "actor.update_actor",
    "actor.update_weights",
    "ref.compute_ref_log_prob",
    "trainer.compute_advantage",
    "trainer.validate",
}
# Additional stage of step 4, in which the runs save a checkpoint.
SAVED = {"actor.save_checkpoint"}


def stages(step: int) -> set[str]:
    return STAGES | SAVED if step == 4 else STAGES


def test_only_the_chosen_steps_have_folders(profiled: VerlRun) -> None:
    folders = sorted(path.name for path in profiled.directory.glob("global_step_*"))
    assert folders == ["global_step_000002", "global_step_000004"]


def test_all_four_steps_are_on_the_timeline(profiled: VerlRun) -> None:
    assert [span["step"] for span in profiled.of("step")] == [1, 2, 3, 4]


@pytest.mark.parametrize("step", [2, 4])
def test_every_stage_and_the_rollout_are_captured_once(profiled: VerlRun, step: int) -> None:
    names = [path.name for path in profiled.step_folder(step).glob("*.pt.trace.json.gz")]
    kinds = sorted(re.sub(r"(\.rank0|(?<=\.frontend))\..*", "", name) for name in names)
    assert kinds == sorted([*stages(step), "rollout.replica0", "rollout.replica0.frontend"])


@pytest.mark.parametrize("step", [2, 4])
def test_every_capture_is_complete_and_described_in_its_meta_file(profiled: VerlRun, step: int) -> None:
    found = metas(profiled, step)
    assert len(found) == len(stages(step)) + 2
    for meta in found:
        assert meta["state"] == "complete", meta
        assert meta["step"] == step
        assert meta["rank"] == 0
        assert meta["tool"] == "torch"
        assert meta["contents"] == ["cpu"]
        assert meta["bytes"] > 0
        assert meta["versions"]["torch"].startswith("2.13.0")
        assert meta["clock"]["start"]["unix_ns"] < meta["clock"]["stop"]["unix_ns"]
        assert meta["replica"] == (0 if meta["role"] == "rollout" else None)


@pytest.mark.parametrize("step", [2, 4])
def test_every_trace_parses_and_is_within_its_step(profiled: VerlRun, step: int) -> None:
    begin, end = profiled.step_window(step)
    for path in profiled.step_folder(step).glob("*.pt.trace.json.gz"):
        first, last = window(profiled.trace(step, path.name.removesuffix(".pt.trace.json.gz")))
        assert begin <= first < last <= end, path.name


@pytest.mark.parametrize("step", [2, 4])
def test_the_trace_of_the_actors_update_has_the_backward_pass(profiled: VerlRun, step: int) -> None:
    names = {event["name"] for event in operators(profiled.trace(step, "actor.update_actor"))}
    assert any(name.startswith("autograd::engine::evaluate_function") for name in names)
    assert {"aten::mm", "MmBackward0"} <= names


@pytest.mark.parametrize("step", [2, 4])
def test_the_rollout_trace_has_the_forward_passes_of_vllms_worker(profiled: VerlRun, step: int) -> None:
    trace = profiled.trace(step, "rollout.replica0.rank0")
    names = [event["name"] for event in operators(trace)]
    assert "aten::linear" in names or "aten::mm" in names
    # vLLM annotates each forward pass. The run answers 4 prompts one after the other, with up to 32 tokens each: 128
    # passes. AUTOPROF_ROLLOUT_ITERATIONS selects the first 100.
    passes = [name for name in names if name.startswith("execute_")]
    assert len(passes) == 100
    assert any("context_1" in name and "generation_0(0)" in name for name in passes)
    assert "execute_context_0(0)_generation_1(1)" in passes
    (pid,) = {meta["pid"] for meta in metas(profiled, step) if meta["part"] == "rank0"}
    (worker,) = [process for process in profiled.processes if process["pid"] == pid]
    assert worker["process"].startswith("VllmWorker")


@pytest.mark.parametrize("step", [2, 4])
def test_engines_that_share_devices_stop_before_the_first_stage(profiled: VerlRun, step: int) -> None:
    _, rollout_ends = window(profiled.trace(step, "rollout.replica0.rank0"))
    stages = profiled.of("stage", step)
    first = min(span["start_ns"] for span in stages if span["role"] in ("actor", "ref"))
    assert rollout_ends < first


@pytest.mark.parametrize("step", [2, 4])
def test_the_front_ends_trace_has_the_outputs_of_the_same_passes(profiled: VerlRun, step: int) -> None:
    names = [event["name"] for event in operators(profiled.trace(step, "rollout.replica0.frontend"))]
    assert names.count("process_outputs") == 100
    assert 1 <= names.count("add_request") <= 4
    (pid,) = {meta["pid"] for meta in metas(profiled, step) if meta["part"] == "frontend"}
    (server,) = [process for process in profiled.processes if process["pid"] == pid]
    assert "vLLMHttpServer" in server["process"]


def test_validation_does_not_count_as_rollout_of_the_step(legacy: VerlRun) -> None:
    assert "val-core" in legacy.finished.output or "val-aux" in legacy.finished.output
    assert len(list(legacy.step_folder(2).glob("rollout.*.rank0.*.gz"))) == 1


def test_run_json_is_complete(profiled: VerlRun) -> None:
    info = json.loads((profiled.directory / "run.json").read_text())
    assert info["state"] == "ended"
    assert info["id"] == profiled.directory.name
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", info["id"])
    assert "verl.trainer.main_ppo" in info["command"]
    assert info["settings"]["steps"] == "2,4"
    assert info["versions"]["verl"] == "0.9.1"
    assert info["versions"]["ray"] == "2.60.0"
    assert info["versions"]["vllm"].startswith("0.27.1")
    recipes = {name.partition(".")[0] for name in info["recipes"]}
    assert recipes == {"accelerate", "codetiming", "ray", "transformers", "verl", "vllm"}
    assert len(info["hosts"]) == 1


def test_every_kind_of_process_has_a_timeline(profiled: VerlRun, request: pytest.FixtureRequest) -> None:
    titles = [process["process"] for process in profiled.processes]
    for kind in ("main_ppo", "ray::TaskRunner", "ray::WorkerDict", "ray::AgentLoopWorker", "ray::vLLMHttpServer"):
        assert any(kind in title for title in titles), kind
    assert any("EngineCore" in title for title in titles)
    assert any(title.startswith("VllmWorker") for title in titles)


def test_no_hook_failed_and_no_incomplete_files_or_processes_remain(profiled: VerlRun) -> None:
    profiled.assert_sound()


def test_a_run_without_autoprof_has_no_files_of_autoprof(unprofiled: VerlRun) -> None:
    assert not (unprofiled.folder / "autoprof_runs").exists()
    assert [path for path in unprofiled.folder.rglob("*") if "autoprof" in path.name] == []


def test_no_process_imports_autoprof_if_it_is_off(unprofiled: VerlRun) -> None:
    starts = unprofiled.probed()
    kinds = {"verl": 0, "vllm": 0, "ray": 0}
    for modules in starts.values():
        for kind in kinds:
            kinds[kind] += kind in modules
        assert [module for module in modules if module.split(".")[0] == "autoprof"] == []
    # The probe was loaded in all processes.
    assert kinds["verl"] >= 5
    assert kinds["vllm"] >= 3


def test_the_probe_sees_autoprof_if_it_is_on(profiled: VerlRun) -> None:
    importing = [start for start, modules in profiled.probed().items() if "autoprof.hooks.patching" in modules]
    assert len(importing) >= 6


def test_rays_own_processes_import_nothing_beyond_boot(profiled: VerlRun) -> None:
    for start, modules in profiled.probed().items():
        if "/ray/dashboard/" in start or "log_monitor.py" in start or "/ray/_private/runtime_env/" in start:
            assert [
                module
                for module in modules
                if module.startswith("autoprof.") and not module.startswith("autoprof._boot")
            ] == []


@pytest.mark.parametrize("trainer", ["v1", "legacy"])
def test_training_is_the_same_with_autoprof(trainer: str, request: pytest.FixtureRequest) -> None:
    on: VerlRun = request.getfixturevalue(trainer)
    off: VerlRun = request.getfixturevalue(f"{trainer}_off")
    assert sorted(on.metrics) == sorted(off.metrics)[:4] == [1, 2, 3, 4]
    for step in on.metrics:
        assert len(on.metrics[step]) > 40
        assert on.metrics[step] == off.metrics[step]


def test_the_run_can_be_listed_and_examined(profiled: VerlRun, python: Any) -> None:
    listed = python(["-m", "autoprof", "ls", str(profiled.directory)]).stdout
    assert listed.count(" complete ") == sum(len(stages(step)) + 2 for step in (2, 4))
    examined = python(["-m", "autoprof", "doctor", str(profiled.directory)])
    assert "no problems found" in examined.stdout
    assert "verl/update-actor" in examined.stdout


def test_perfettos_own_engine_reads_the_merged_step(v1: VerlRun, python: Any, tmp_path: Path) -> None:
    made = tmp_path / "merged.json.gz"
    output = python(["-m", "autoprof", "merge", str(v1.directory), "--step", "2", "-o", str(made)]).stdout
    parts = sorted(v1.step_folder(2).glob("*.pt.trace.json.gz"))
    assert f": {len(parts)} traces, " in output
    alone = [query(part, SLICES, FLOWS) for part in parts]
    ours = "select count(*) from slice where category in ('step', 'stage', 'timer', 'sample', 'turn', 'tool', 'reward',"
    slices, spans, flows, astray, processes = query(
        made, SLICES, f"{ours} 'request', 'window', 'profiling')", FLOWS, FLOWS_BETWEEN_PROCESSES, PROCESSES
    )
    assert slices[0][0] == sum(found[0][0][0] for found in alone) + spans[0][0]
    assert flows[0][0] == sum(found[1][0][0] for found in alone) > 0
    assert astray == [[0]]
    assert spans[0][0] >= len(STAGES)
    full = {name for name, count in processes if count}
    assert {"trainer rank0", "actor+ref rank0"} <= full


def test_only_the_user_can_read_the_files(profiled: VerlRun) -> None:
    for path in [profiled.directory / "run.json", *Path(profiled.directory, "journal").iterdir()]:
        assert path.stat().st_mode & 0o077 == 0


def test_torchs_annotations_show_fsdp2(v1: VerlRun) -> None:
    names = {event["name"] for event in operators(v1.trace(2, "actor.update_actor"))}
    assert [name for name in names if "FSDP::" in name]


def test_verls_own_profiler_takes_precedence(verls_own: VerlRun) -> None:
    theirs = [path.name for path in (verls_own.folder / "own").rglob("*.json.gz")]
    for stage in ("actor-compute-log-prob", "ref-compute-log-prob", "actor-update", "rank-0."):
        assert len([name for name in theirs if stage in name]) == 1, stage
    yielded = {meta["stage"]: meta for meta in metas(verls_own, 2) if meta["state"] != "complete"}
    assert set(yielded) == {"compute_log_prob", "compute_ref_log_prob", "update_actor", "rollout"}
    assert yielded["update_actor"]["reason"] == "verl's own profiler is on in this step, so autoprof records nothing"
    assert yielded["update_actor"]["state"] == "failed"
    assert "another caller started the engine's profiler" in yielded["rollout"]["reason"]


def test_autoprof_captures_the_step_after_verls_own_profiler(verls_own: VerlRun) -> None:
    found = metas(verls_own, 3)
    assert len(found) == len(STAGES - {"trainer.validate"}) + 2
    assert {meta["state"] for meta in found} == {"complete"}
