"""Other users of CUPTI, through which torch.profiler sees the GPU: a process has one subscription.

Kineto says nothing when it gets none: the trace holds what the host did, and no kernels. Some CUDA images name libcupti
in `NVTX_INJECTION64_PATH`, so the first NVTX range of a process takes it (verl 0.9.1, trainer/constants_ppo.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence

from autoprof.base.originals import os

INJECTION = "NVTX_INJECTION64_PATH"
# It can't be loaded, so NVTX does nothing; and it is not empty, since start-up hooks of images fill it in where it is.
NOTHING = "/nonexistent/autoprof-no-nvtx-injection.so"
KEEP = "AUTOPROF_KEEP_NVTX_INJECTION"
# verl's own word for the same wish.
_KEEPING = (KEEP, "VERL_KEEP_NVTX_INJECTION")
_CUDA_INJECTION = "CUDA_INJECTION64_PATH"
_DYNOLOG = "KINETO_USE_DAEMON"


def names_cupti(environ: Mapping[str, str]) -> bool:
    """Return whether NVTX loads libcupti in a process with this environment."""
    return "cupti" in os.path.basename(environ.get(INJECTION, ""))


def kept(environ: Mapping[str, str]) -> bool:
    """Return whether the user wants the library that NVTX loads to stay as it is."""
    return any(environ.get(name) == "1" for name in _KEEPING)


def guard(tools: Sequence[str], environ: MutableMapping[str, str]) -> bool:
    """Keep NVTX from taking CUPTI in this process and in its children; returns whether it would have.

    Every process looks for itself, since nodes may have images of their own. Values that name something else, such as
    Nsight Systems' library, stay.
    """
    if "nsys" in tools or not names_cupti(environ) or kept(environ):
        return False
    environ[INJECTION] = NOTHING
    return True


def watched(contents: Sequence[str]) -> bool:
    """Return whether a recording of these contents is one of a process that uses a GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return "cuda" in contents and cuda is not None and bool(cuda.is_initialized())


def suspicion(environ: Mapping[str, str]) -> str:
    """Return why a recording of this process may hold nothing of the GPU, as far as that can be seen from here.

    It is none of a process under Nsight Systems, where torch does not record (`profilers.choose`).
    """
    if names_cupti(environ):
        return f"{INJECTION} names libcupti, which takes the only CUPTI subscription of the process; unset it"
    injected = os.path.basename(environ.get(_CUDA_INJECTION, ""))
    if injected:
        return f"{_CUDA_INJECTION} loads {injected}, which may have taken the only CUPTI subscription"
    if _DYNOLOG in environ:  # even as 0 it counts (pytorch/pytorch #112389)
        return f"{_DYNOLOG} is set: a recording that dynolog asked for may have taken CUPTI"
    return "the GPU had nothing to do, or other code in the process had taken CUPTI before"
