"""Variables of the environment that only some releases of a target read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autoprof import recipe

# vllm/envs.py of 0.9.2 to 0.33.0; from 0.13 on there is `profiler_config` as well, from 0.16 on nothing else.
VLLM = {
    "<0.16": ("VLLM_TORCH_PROFILER_DIR",),
    ">=0.10,<0.16": (
        "VLLM_TORCH_PROFILER_RECORD_SHAPES",
        "VLLM_TORCH_PROFILER_WITH_FLOPS",
        "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY",
        "VLLM_TORCH_PROFILER_WITH_STACK",
    ),
    ">=0.11,<0.16": ("VLLM_TORCH_CUDA_PROFILE",),
    ">=0.12,<0.16": (
        "VLLM_PROFILER_DELAY_ITERS",
        "VLLM_PROFILER_MAX_ITERS",
        "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM",
        "VLLM_TORCH_PROFILER_DUMP_CUDA_TIME_TOTAL",
        "VLLM_TORCH_PROFILER_USE_GZIP",
    ),
}


def unread(names: Iterable[str], version: str) -> Iterator[str]:
    """What there is to say of the variables `names`, where `version` of vLLM does not read them."""
    there = set(names)
    for versions, read in VLLM.items():
        if version and not recipe.fits(version, versions):
            for name in sorted(there.intersection(read)):
                yield f"{name} is set, but vLLM {version} does not read it ({versions} do); autoprof does not need it"
