"""Lets vLLM's Ray executors take the CPU: they ask for a resource of Ray's that a worker has, which CPUs are not."""

import wrapt


def _patch(module):
    module.CpuPlatform.ray_device_key = "GPU"


wrapt.register_post_import_hook(_patch, "vllm.platforms.cpu")
