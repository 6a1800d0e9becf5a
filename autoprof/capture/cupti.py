"""Other users of CUPTI, the library with which torch.profiler records the GPU. A process has only one subscription.

If Kineto gets no CUPTI subscription, it reports no error: the trace contains the events of the host and no kernels.
Some CUDA images set `NVTX_INJECTION64_PATH` to libcupti. In such an image, the first NVTX range of a process takes the
subscription (verl 0.9.1, trainer/constants_ppo.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence

from autoprof.base.originals import os

INJECTION = "NVTX_INJECTION64_PATH"
# Value for `INJECTION` that NVTX can't load, so that NVTX takes no subscription. The value must not be empty, because
# start-up hooks of images replace an empty value.
NOTHING = "/nonexistent/autoprof-no-nvtx-injection.so"
KEEP = "AUTOPROF_KEEP_NVTX_INJECTION"
# Variables by which the user keeps the library that NVTX loads. The second variable is verl's.
_KEEPING = (KEEP, "VERL_KEEP_NVTX_INJECTION")
_CUDA_INJECTION = "CUDA_INJECTION64_PATH"
_DYNOLOG = "KINETO_USE_DAEMON"


def names_cupti(environ: Mapping[str, str]) -> bool:
    """Return True if NVTX loads libcupti in a process with this environment."""
    return "cupti" in os.path.basename(environ.get(INJECTION, ""))


def kept(environ: Mapping[str, str]) -> bool:
    """Return True if the user has set a variable to keep the library that NVTX loads."""
    return any(environ.get(name) == "1" for name in _KEEPING)


def guard(tools: Sequence[str], environ: MutableMapping[str, str]) -> bool:
    """Change the environment so that NVTX can't take CUPTI in this process and its children, if it would.

    Every process calls this, because nodes may have different images. If NVTX loads another library than libcupti, such
    as the library of Nsight Systems, the environment is not changed.

    Args:
        tools: The value of `AUTOPROF_TOOL`.
        environ: The environment to change.

    Returns:
        True if the environment was changed.
    """
    if "nsys" in tools or not names_cupti(environ) or kept(environ):
        return False
    environ[INJECTION] = NOTHING
    return True


def watched(contents: Sequence[str]) -> bool:
    """Return True if the contents of a recording include the GPU, and this process uses CUDA."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return "cuda" in contents and cuda is not None and bool(cuda.is_initialized())


def suspicion(environ: Mapping[str, str]) -> str:
    """Return the probable reason why a recording of torch in this process has no GPU events.

    Nsight Systems is never the reason: in a process under nsys, autoprof does not record with torch
    (`profilers.choose`).
    """
    if names_cupti(environ):
        return f"{INJECTION} names libcupti, which takes the only CUPTI subscription of the process; unset it"
    injected_library = os.path.basename(environ.get(_CUDA_INJECTION, ""))
    if injected_library:
        return f"{_CUDA_INJECTION} loads {injected_library}, which may have taken the only CUPTI subscription"
    if _DYNOLOG in environ:  # any value counts, even 0 (pytorch/pytorch #112389)
        return f"{_DYNOLOG} is set: a recording that dynolog asked for may have taken CUPTI"
    return "the GPU had nothing to do, or other code in the process had taken CUPTI before"
