"""Other users of CUPTI, by which torch.profiler records the GPU. A process has only one CUPTI subscription.

If Kineto gets none, it reports no error: the trace has the host's events and no kernels. Some CUDA images name libcupti
in `NVTX_INJECTION64_PATH`. Then the first NVTX range of a process takes the subscription (verl 0.9.1,
trainer/constants_ppo.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence

from autoprof.base.originals import os

INJECTION = "NVTX_INJECTION64_PATH"
# Value that NVTX can't load, so it does nothing. It is not empty, since start-up hooks of images replace an empty one.
NOTHING = "/nonexistent/autoprof-no-nvtx-injection.so"
KEEP = "AUTOPROF_KEEP_NVTX_INJECTION"
# The second variable is verl's, with the same meaning.
_KEEPING = (KEEP, "VERL_KEEP_NVTX_INJECTION")
_CUDA_INJECTION = "CUDA_INJECTION64_PATH"
_DYNOLOG = "KINETO_USE_DAEMON"


def names_cupti(environ: Mapping[str, str]) -> bool:
    """Return True if NVTX loads libcupti in a process with this environment."""
    return "cupti" in os.path.basename(environ.get(INJECTION, ""))


def kept(environ: Mapping[str, str]) -> bool:
    """Return True if the user wants to keep the library that NVTX loads."""
    return any(environ.get(name) == "1" for name in _KEEPING)


def guard(tools: Sequence[str], environ: MutableMapping[str, str]) -> bool:
    """Prevent NVTX from taking CUPTI in this process and its children. Return True if the environment was changed.

    Every process checks this, since nodes may have different images. Other values, such as the library of Nsight
    Systems, are kept.
    """
    if "nsys" in tools or not names_cupti(environ) or kept(environ):
        return False
    environ[INJECTION] = NOTHING
    return True


def watched(contents: Sequence[str]) -> bool:
    """Return True if the contents include the GPU and this process uses one."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return "cuda" in contents and cuda is not None and bool(cuda.is_initialized())


def suspicion(environ: Mapping[str, str]) -> str:
    """Return the probable reason why a recording of this process has no GPU events.

    Nsight Systems is not one of the reasons: torch does not record in a process under it (`profilers.choose`).
    """
    if names_cupti(environ):
        return f"{INJECTION} names libcupti, which takes the only CUPTI subscription of the process; unset it"
    injected = os.path.basename(environ.get(_CUDA_INJECTION, ""))
    if injected:
        return f"{_CUDA_INJECTION} loads {injected}, which may have taken the only CUPTI subscription"
    if _DYNOLOG in environ:  # any value counts, even 0 (pytorch/pytorch #112389)
        return f"{_DYNOLOG} is set: a recording that dynolog asked for may have taken CUPTI"
    return "the GPU had nothing to do, or other code in the process had taken CUPTI before"
