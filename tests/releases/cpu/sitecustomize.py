"""Patches that let releases of verl before 0.9, which has a registry of platforms, run on a CPU.

The folder is on PYTHONPATH only for these runs. Each patch waits until the process itself imports its module.
"""

import concurrent.futures
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
import types

from wrapt import when_imported


@when_imported("verl.utils.device")
def _device(module):
    """Replace the functions of the device before other modules of verl import them by name."""
    if hasattr(module, "get_platform"):
        return
    import verl_cpu_device as cpu

    module.get_device_name = lambda: cpu.DEVICE
    module.get_torch_device = lambda: cpu.device_module
    module.get_device_id = cpu.CpuDeviceId
    module.get_nccl_backend = lambda: "gloo"
    module.get_resource_name = lambda: "GPU"
    module.get_visible_devices_keyword = lambda: "CUDA_VISIBLE_DEVICES"


@when_imported("verl.workers.engine.base")
def _engines(module):
    """Register engines for the CPU too; verl registers them only for accelerators."""
    register = module.EngineRegistry.register.__func__

    def with_cpu(cls, model_type, backend, device="cuda"):
        devices = device if isinstance(device, list) else [device]
        return register(cls, model_type, backend, [*devices, "cpu"])

    module.EngineRegistry.register = classmethod(with_cpu)


@when_imported("vllm.model_executor.layers.fused_moe.layer")
def _fused_moe(module):
    """Add a class that verl 0.7.1 and 0.8 import for quantized models and that vLLM 0.27 lacks."""
    if not hasattr(module, "FusedMoE"):
        module.FusedMoE = type("FusedMoE", (), {})


@when_imported("verl.utils.attention_utils")
def _padding(module):
    """Use verl's functions for NPUs in plain torch (0.8 and 0.9.0) instead of flash-attn, which needs a GPU."""
    try:
        from verl.utils import npu_flash_attn_utils as plain
    except ImportError:
        return
    functions = (plain.index_first_axis, plain.pad_input, plain.rearrange, plain.unpad_input)
    module._get_attention_functions = lambda: functions


@when_imported("transformers.utils.import_utils")
def _transformers(module):
    """Add a name of transformers 4 that verl up to 0.7.0 imports to recognise vision models."""
    module._LazyModule.AutoModelForVision2Seq = type("AutoModelForVision2Seq", (), {"_model_mapping": {}})


@when_imported("transformers.tokenization_utils_base")
def _chat_template(module):
    """Return a list of tokens, which verl up to 0.7 expects; transformers 5 returns a dictionary."""
    original = module.PreTrainedTokenizerBase.apply_chat_template

    @functools.wraps(original)
    def apply_chat_template(*args, **kwargs):
        return original(*args, **{"return_dict": False} | kwargs)

    module.PreTrainedTokenizerBase.apply_chat_template = apply_chat_template


@when_imported("verl.workers.fsdp_workers")
def _attention(module):
    """Replace flash attention, which verl 0.5 and 0.6.0 always request, regardless of the configuration."""
    from transformers import AutoConfig

    original = AutoConfig.from_pretrained

    def from_pretrained(*args, **kwargs):
        if kwargs.get("attn_implementation") == "flash_attention_2":
            kwargs["attn_implementation"] = "sdpa"
        return original(*args, **kwargs)

    AutoConfig.from_pretrained = from_pretrained


# Modules of older releases of vLLM, which verl 0.5 to 0.7.0 import -> their modules in vLLM 0.27.
MOVED = {
    "vllm.lora.models": "vllm.lora.lora_model",
    "vllm.worker": "vllm.v1.worker",
    "vllm.worker.worker_base": "vllm.v1.worker.worker_base",
    "vllm.model_executor.sampling_metadata": "vllm.v1.sample.metadata",
}

# Names for chat completions over HTTP, which verl 0.5 imports and these runs don't use.
UNUSED = {
    "vllm.entrypoints.logger": ["RequestLogger"],
    "vllm.entrypoints.openai.protocol": ["ChatCompletionRequest", "ChatCompletionResponse", "ErrorResponse"],
    "vllm.entrypoints.openai.serving_chat": ["OpenAIServingChat"],
    "vllm.entrypoints.openai.serving_models": ["BaseModelPath", "OpenAIServingModels"],
}


class _Unused:
    def __init__(self, *args, **kwargs):
        pass


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED or name in UNUSED else None

    def create_module(self, spec):
        if spec.name in MOVED:
            return importlib.import_module(MOVED[spec.name])
        module = types.ModuleType(spec.name)
        vars(module).update(dict.fromkeys(UNUSED[spec.name], _Unused))
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Moved())
# The same as in import_probe: imports take most of a run.
gc.set_threshold(50_000, 20, 100)


@when_imported("vllm.config")
def _compilation(module):
    if not hasattr(module, "CompilationLevel"):
        module.CompilationLevel = module.CompilationMode


@when_imported("vllm.utils")
def _utils(module):
    def __getattr__(name):
        places = {"FlexibleArgumentParser": "argparse_utils", "get_tcp_uri": "network_utils"}
        if name not in places:
            raise AttributeError(name)
        return getattr(importlib.import_module(f"vllm.utils.{places[name]}"), name)

    module.__getattr__ = __getattr__


@when_imported("vllm.platforms.cpu")
def _platform(module):
    """Add two methods of the platform.

    verl 0.7.1 and 0.8 name a socket after the device. verl up to 0.7.0 sends weights when it wakes up the engine; vLLM
    on the CPU accepts that call and does nothing.
    """
    module.CpuPlatform.is_sleep_mode_available = lambda self: True
    module.CpuPlatform.get_device_uuid = classmethod(lambda cls, device_id=None: "CPU")


@when_imported("ray")
def _resources(module):
    """Give Ray a GPU; verl 0.5 passes only the number of CPUs."""
    original = module.init

    @functools.wraps(original)
    def init(*args, **kwargs):
        if "num_cpus" in kwargs:
            kwargs.setdefault("num_gpus", 1)
        return original(*args, **kwargs)

    module.init = init


# verl up to 0.7.0 makes vLLM's worker itself, in the process of the trainer's worker, and calls it through ZeroMQ from
# its own executor. The following patches add what vLLM 0.27 also needs from these two.


@when_imported("vllm.v1.worker.worker_base")
def _wrapper(module):
    """Let the worker's wrapper get its configuration in init_worker, and call methods by name."""
    original = module.WorkerWrapperBase.__init__

    def __init__(self, vllm_config=None, rpc_rank=0, global_rank=None):
        original(self, rpc_rank, global_rank)

    def execute_method(self, method, *args, **kwargs):
        from vllm.v1.outputs import AsyncModelRunnerOutput
        from vllm.v1.serial_utils import run_method

        result = run_method(self, method, args, kwargs)
        return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result

    module.WorkerWrapperBase.__init__ = __init__
    module.WorkerWrapperBase.execute_method = execute_method


@when_imported("vllm.v1.engine.async_llm")
def _engine(module):
    """Accept an option of verl 0.6 that was renamed, and limit the memory of the KV cache, which verl 0.5 can't."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    make = AsyncEngineArgs.__init__

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        make(self, *args, **{"kv_cache_memory_bytes": 1 << 25} | kwargs)

    AsyncEngineArgs.__init__ = __init__

    original = module.AsyncLLM.from_vllm_config

    @functools.wraps(original)
    def from_vllm_config(*args, disable_log_requests=True, **kwargs):
        return original(*args, **kwargs)

    module.AsyncLLM.from_vllm_config = from_vllm_config
    AsyncEngineArgs.disable_log_requests = True


@when_imported("vllm.entrypoints.openai.api_server")
def _app(module):
    """Ignore the configuration, which verl 0.6 passes too."""
    original = module.init_app_state

    @functools.wraps(original)
    async def init_app_state(engine, *args):
        without = [argument for argument in args if type(argument).__name__ != "VllmConfig"]
        return await original(engine, *without)

    module.init_app_state = init_app_state


@when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server")
def _executor(module):
    """Let the executor set the size of blocks after the model is loaded, and return futures."""
    executor = getattr(module, "ExternalZeroMQDistributedExecutor", None)
    if executor is None:
        return
    original = executor.collective_rpc

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, **others):
        outputs = original(self, method, timeout, args, kwargs)
        for output in outputs:
            if isinstance(output, Exception):
                raise output
        if method == "load_model":
            from vllm.platforms import current_platform

            current_platform.update_block_size_for_backend(self.vllm_config)
        return [_future(output) for output in outputs] if non_block else outputs

    executor.collective_rpc = collective_rpc


def _future(value):
    future = concurrent.futures.Future()
    future.set_result(value)
    return future


@when_imported("verl.workers.rollout.vllm_rollout.vllm_rollout_spmd")
def _logits(module):
    """Disable the mask of tokens beyond the tokenizer in verl 0.5: the function has another signature now.

    The tokenizer of these runs has all tokens of the model.
    """
    module._monkey_patch_compute_logits = lambda model, vocab_size: None
