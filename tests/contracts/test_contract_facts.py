"""Facts about vLLM, vllm-ascend, SGLang and verl that autoprof's code relies on, checked in the stored signatures.

Each row of a table is valid from its release on, up to the release of the next row.
"""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from tests.contracts import stored
from tests.contracts.signatures import Facts
from tests.contracts.stored import Contract, contract, parameters

Table = dict[str, Any]

ASYNC_LLM = "vllm.v1.engine.async_llm"
WRAPPER = "vllm.profiler.wrapper"
MANAGERS = "sglang.srt.managers"
SERVERS = {
    "vLLMHttpServer": "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "SGLangHttpServer": "verl.workers.rollout.sglang_rollout.async_sglang_server",
}


def since(table: Table, version: str) -> Any:
    """Return the row of a table that is valid for a release."""
    lines = [value for first, value in table.items() if Version(first) <= Version(version)]
    return lines[-1] if lines else None


def together(table: Table, version: str) -> set[str]:
    """Return all names that the rows of a table add up to a release."""
    return {name for first, names in table.items() if Version(first) <= Version(version) for name in names.split()}


def before(version: str, release: str) -> bool:
    return Version(version) < Version(release)


def taken(function: Facts) -> list[str]:
    """Return the names of the parameters without `self`, including `*`."""
    return [name for name in parameters(function) if name != "self"]


def required(function: Facts) -> set[str]:
    return {name for name, text in parameters(function).items() if "=" not in text} - {"self", "*", "**"}


@pytest.fixture(params=stored.versions("vllm"))
def vllm(request: pytest.FixtureRequest) -> Contract:
    return contract("vllm", request.param)


@pytest.fixture(params=stored.versions("sglang"))
def sglang(request: pytest.FixtureRequest) -> Contract:
    return contract("sglang", request.param)


@pytest.fixture(params=stored.versions("verl"))
def verl(request: pytest.FixtureRequest) -> Contract:
    return contract("verl", request.param)


# vLLM

VLLM_SESSION: Table = {
    "0.9": "",
    "0.17": "profile_prefix",
    "0.32": "profile_prefix * delay_iterations max_iterations",
    "0.33": "profile_prefix * delay_iterations max_iterations profiler_kwargs",
}


def test_vllm_engines_start_and_stop(vllm: Contract) -> None:
    start = vllm.find(ASYNC_LLM, "AsyncLLM.start_profile")
    stop = vllm.find(ASYNC_LLM, "AsyncLLM.stop_profile")
    assert start["async"]
    assert stop["async"]
    assert taken(start) == since(VLLM_SESSION, vllm.version).split()
    assert not required(start), "autoprof calls start_profile without arguments"
    assert taken(stop) == []


def test_vllm_calls_methods_of_its_workers(vllm: Contract) -> None:
    rpc = vllm.find(ASYNC_LLM, "AsyncLLM.collective_rpc")
    assert rpc["async"]
    assert taken(rpc) == ["method", "timeout", "args", "kwargs"]
    assert required(rpc) == {"method"}


def test_vllm_front_ends_count_the_engines_outputs(vllm: Contract) -> None:
    outputs = vllm.find("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs")
    assert taken(outputs)[:2] == ["engine_core_outputs", "engine_core_timestamp"]
    assert not outputs["async"]


def test_vllm_has_a_profiler_in_its_front_end(vllm: Contract) -> None:
    assert vllm.sets(ASYNC_LLM, "AsyncLLM", "profiler") == (not before(vllm.version, "0.10.2"))


def test_vllm_workers_know_their_rank_and_keep_a_profiler(vllm: Contract) -> None:
    gpu = ("vllm.v1.worker.gpu_worker", "Worker")
    for name in ("rank", "local_rank", "profiler"):
        assert vllm.sets(*gpu, name), name
    assert vllm.sets(*gpu, "profiler_config") == (not before(vllm.version, "0.17"))
    assert any("WorkerBase" in base for kind in vllm.lineage(*gpu) for base in kind.get("bases", []))


def test_vllm_workers_accept_the_arguments_of_the_engine(vllm: Contract) -> None:
    sent = ["is_start", *since(VLLM_SESSION, vllm.version).split()]
    assert taken(vllm.find("vllm.v1.worker.gpu_worker", "Worker.profile")) == sent
    assert taken(vllm.find("vllm.v1.executor.abstract", "Executor.profile")) == sent
    engine_core = vllm.find("vllm.v1.engine.core", "EngineCore.profile")
    assert taken(engine_core) == [name for name in sent if name != "*"]


@pytest.mark.parametrize(
    ("kind", "first", "last"), [("cpu_worker.CPUWorker", "0.11.2", "0.30"), ("xpu_worker.XPUWorker", "0.22", "0.30")]
)
def test_vllm_workers_of_other_devices_have_their_own_profile(vllm: Contract, kind: str, first: str, last: str) -> None:
    module, _, name = kind.partition(".")
    own = "profile" in vllm.find(f"vllm.v1.worker.{module}", name).get("methods", {})
    assert own == (Version(first) <= Version(vllm.version) < Version(f"{last}.99"))


def test_vllm_profiler_takes_the_arguments_that_autoprof_passes(vllm: Contract) -> None:
    table: Table = {
        "0.13": "profiler_config worker_name local_rank activities",
        "0.15.1": "profiler_config worker_name local_rank activities on_trace_ready",
        "0.33": "profiler_config worker_name local_rank activities on_trace_ready profiler_kwargs",
    }
    expected = since(table, vllm.version)
    if expected is None:
        assert not vllm.has(WRAPPER, "TorchProfilerWrapper")
        assert vllm.has("vllm.profiler.gpu_profiler", "TorchProfilerWrapper") == (vllm.version == "0.12.0")
        return
    made = vllm.find(WRAPPER, "TorchProfilerWrapper.__init__")
    assert taken(made) == expected.split()
    assert required(made) == {"profiler_config", "worker_name", "local_rank", "activities"}
    for name in ("profiler", "profiler_config", "dump_cpu_time_total"):
        assert vllm.sets(WRAPPER, "TorchProfilerWrapper", name), name
    assert taken(vllm.find(WRAPPER, "TorchProfilerWrapper.stop")) == []
    assert not required(vllm.find(WRAPPER, "TorchProfilerWrapper.start"))


def test_vllm_profiler_configuration_has_these_fields(vllm: Contract) -> None:
    table: Table = {
        "0.13": (
            "profiler torch_profiler_dir torch_profiler_with_stack torch_profiler_with_flops torch_profiler_use_gzip "
            "torch_profiler_dump_cuda_time_total torch_profiler_record_shapes torch_profiler_with_memory "
            "ignore_frontend delay_iterations max_iterations"
        ),
        "0.18": "warmup_iterations active_iterations wait_iterations",
        "0.26": "capture_torch_profiler detailed_trace_annotation",
        "0.28": (
            "proton_profiler_dir proton_context proton_data proton_backend proton_mode proton_hook proton_output_format"
        ),
        "0.30": "proton_graph_attribution",
        "0.31": "torch_profiler_activities",
    }
    if before(vllm.version, "0.13"):
        assert not vllm.has("vllm.config", "ProfilerConfig")
        return
    assert set(vllm.find("vllm.config", "ProfilerConfig")["fields"]) == together(table, vllm.version)


def test_vllm_has_a_function_for_the_suffix_of_a_workers_rank(vllm: Contract) -> None:
    there = vllm.has("vllm.distributed.utils", "get_worker_rank_suffix")
    assert there == (not before(vllm.version, "0.17"))
    if there:
        assert taken(vllm.find("vllm.distributed.utils", "get_worker_rank_suffix")) == ["global_rank"]


def test_vllm_offline_engines_have_no_coroutines(vllm: Contract) -> None:
    for name in ("add_request", "step", "start_profile", "stop_profile"):
        found = vllm.find("vllm.v1.engine.llm_engine", f"LLMEngine.{name}")
        assert not found["async"], name
        assert required(found) <= {"request_id", "prompt", "params"}


def test_vllm_passes_outputs_on_in_plain_functions(vllm: Contract) -> None:
    for name in ("process_outputs", "abort_requests"):
        assert not vllm.find("vllm.v1.engine.output_processor", f"OutputProcessor.{name}")["async"]


# SGLang

SGLANG_START: Table = {
    "0.4.6": "output_dir num_steps activities with_stack record_shapes",
    "0.4.7": "output_dir num_steps activities with_stack record_shapes profile_by_stage",
    "0.4.9.post2": "output_dir start_step num_steps activities with_stack record_shapes profile_by_stage",
    "0.5.4": "output_dir start_step num_steps activities with_stack record_shapes profile_by_stage merge_profiles",
    "0.5.6": (
        "output_dir start_step num_steps activities with_stack record_shapes profile_by_stage merge_profiles "
        "profile_prefix profile_stages"
    ),
    "0.5.15": "req",
}
SGLANG_REQUEST: Table = {
    "0.4.6": "output_dir num_steps activities with_stack record_shapes profile_id",
    "0.4.7": "profile_by_stage",
    "0.4.9.post2": "start_step",
    "0.5.4": "merge_profiles",
    "0.5.6": "profile_prefix profile_stages",
    "0.5.19": "detailed_annotations",
}


def test_sglang_engines_start_and_stop(sglang: Contract) -> None:
    start = sglang.find(f"{MANAGERS}.tokenizer_manager", "TokenizerManager.start_profile")
    stop = sglang.find(f"{MANAGERS}.tokenizer_manager", "TokenizerManager.stop_profile")
    assert start["async"]
    assert stop["async"]
    assert taken(start) == since(SGLANG_START, sglang.version).split()
    assert not required(start)
    assert taken(stop) == []


def test_sglang_requests_have_these_fields(sglang: Contract) -> None:
    fields = set(sglang.find(f"{MANAGERS}.io_struct", "ProfileReq")["fields"])
    kind = "type" if before(sglang.version, "0.5.15") else "req_type"
    assert fields == together(SGLANG_REQUEST, sglang.version) | {kind}
    assert {"START_PROFILE", "STOP_PROFILE"} <= set(sglang.find(f"{MANAGERS}.io_struct", "ProfileReqType")["fields"])
    assert {"success", "message"} == set(sglang.find(f"{MANAGERS}.io_struct", "ProfileReqOutput")["fields"])
    assert sglang.has(f"{MANAGERS}.io_struct", "ProfileReqInput") == before(sglang.version, "0.5.15")


def test_sglang_schedulers_start_profiles_and_run_batches(sglang: Contract) -> None:
    in_the_scheduler = before(sglang.version, "0.5.13")
    assert sglang.has(f"{MANAGERS}.scheduler", "Scheduler.start_profile") == in_the_scheduler
    manager = (f"{MANAGERS}.scheduler_components.profiler_manager", "SchedulerProfilerManager._start_profile")
    assert sglang.has(*manager) == (not in_the_scheduler)
    assert taken(sglang.find(f"{MANAGERS}.scheduler", "Scheduler.run_batch"))[0] == "batch"


def test_sglang_servers_have_the_functions_that_autoprof_hooks(sglang: Contract) -> None:
    state = sglang.find("sglang.srt.entrypoints.http_server", "set_global_state")
    assert not state["async"]
    assert taken(state) == ["global_state"]
    for name in ("_tokenize_one_request", "_batch_tokenize_and_process"):
        found = sglang.find(f"{MANAGERS}.tokenizer_manager", f"TokenizerManager.{name}")
        assert found["async"], "autoprof lets a request wait there until the engine records"
        assert "obj" in taken(found)
    utils = "" if before(sglang.version, "0.5.4") else "utils."
    assert sglang.find(f"sglang.srt.{utils}aio_rwlock", "RWLock.release_reader")["async"]


# verl


def test_verl_rollout_servers_start_profiles_from_0_7_1_on(verl: Contract) -> None:
    for name, module in SERVERS.items():
        assert verl.has(module, f"{name}.start_profile") == (not before(verl.version, "0.7.1")), name
        if verl.has(module, f"{name}.start_profile"):
            start = verl.find(module, f"{name}.start_profile")
            assert start["async"]
            assert taken(start) == ["**"]
            assert "decorators" not in verl.find(module, name), (
                "a decorated class would be copied by Ray before autoprof adds its hooks"
            )


def test_verl_trainers_start_profiling_in_each_step(verl: Contract) -> None:
    legacy = ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer._start_profiling")
    assert verl.has(*legacy) == (not before(verl.version, "0.5"))
    if verl.has(*legacy):
        assert taken(verl.find(*legacy)) == ["do_profile"]
    assert verl.sets("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", "global_steps")
    later = ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._start_profiling")
    assert verl.has(*later) == (not before(verl.version, "0.9"))
    assert not verl.has(*later) or taken(verl.find(*later)) == []


def test_verl_generation_is_awaited_by_its_caller(verl: Contract) -> None:
    manager = ("verl.experimental.agent_loop.agent_loop", "AgentLoopManager.generate_sequences")
    if before(verl.version, "0.5"):
        assert not verl.has(*manager)
        return
    found = verl.find(*manager)
    by_caller = "verl.utils.ray_utils.auto_await" in found.get("decorators", [])
    assert found["async"] == by_caller == (not before(verl.version, "0.7.1"))
    assert "prompts" in taken(found)


def test_verl_workers_are_in_other_modules_from_0_7_on(verl: Contract) -> None:
    assert verl.has("verl.workers.engine_workers", "TrainingWorker.infer_batch") == (not before(verl.version, "0.7"))
    assert verl.has("verl.workers.fsdp_workers", "ActorRolloutRefWorker.update_actor") == before(verl.version, "0.8")
    updates = verl.has("verl.workers.engine_workers", "ActorRolloutRefWorker.update_weights")
    assert updates == (not before(verl.version, "0.7.1"))


@pytest.mark.parametrize("version", stored.versions("vllm_ascend"))
def test_workers_on_npus_have_a_profiler_like_vllms(version: str) -> None:
    ascend = contract("vllm_ascend", version)
    module = f"vllm_ascend.worker.{'worker_v1' if before(version, '0.13') else 'worker'}"
    assert "vllm.v1.worker.worker_base.WorkerBase" in ascend.find(module, "NPUWorker")["bases"]
    assert ascend.sets(module, "NPUWorker", "profiler")
    # From 0.18 on, `profile` raises if no profiler is configured.
    assert ascend.sets(module, "NPUWorker", "profiler_config") == (not before(version, "0.18"))
    profile = ["is_start"] if before(version, "0.18") else ["is_start", "profile_prefix"]
    assert taken(ascend.find(module, "NPUWorker.profile")) == profile
    assert taken(ascend.find(module, "NPUWorker.execute_model")) == ["scheduler_output"]
