"""Patch that lets vLLM's Ray executors run on a CPU: they need a Ray resource key for each worker, which CPUs lack."""

import wrapt


def _patch(module):
    module.CpuPlatform.ray_device_key = "GPU"


wrapt.register_post_import_hook(_patch, "vllm.platforms.cpu")
