"""torch's CPU as verl's accelerator: the device module that verl asks, and four small corrections to torch.

Importing this module applies the corrections; they are described at their functions. It does
not import verl, so it works for releases with a registry of platforms (``verl_cpu_platform.py``) and
without one.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy
from torch.distributed.fsdp import _init_utils as fsdp_init_utils

DEVICE = "cpu"


class CpuDeviceId(str):
    """The "index" of the CPU, for the two ways in which verl uses a device index.

    As an argument to torch (``device_id=get_device_id()``) it must be ``"cpu"``, for torch reads a
    plain 0 as ``cuda:0``. In names (``f"{get_device_name()}:{get_device_id()}"``) and arithmetic it
    must be a number.
    """

    def __new__(cls) -> CpuDeviceId:
        return super().__new__(cls, DEVICE)

    def __format__(self, format_spec: str) -> str:
        return format(0, format_spec)

    def __index__(self) -> int:
        return 0

    def __int__(self) -> int:
        return 0


class CpuDeviceModule(types.ModuleType):
    """``torch.cpu``, plus the functions of ``torch.cuda`` that verl calls on its device module."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torch.cpu (streams, events, synchronize, ...), unless it is defined here."""
        return getattr(torch.cpu, name)

    def current_device(self) -> CpuDeviceId:
        return CpuDeviceId()

    def get_device_name(self, device: object = None) -> str:
        return DEVICE

    # Memory: the CPU has no allocator to ask, so the counters stay at zero.

    def memory_allocated(self, device: object = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def ipc_collect(self) -> None:
        pass

    def set_per_process_memory_fraction(self, fraction: float, device: object = None) -> None:
        pass

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Return the free and total bytes of the machine's memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    # Random numbers: the CPU generator is torch's default one.

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


device_module = CpuDeviceModule("torch.cpu")


def _accept_repeated_backends(init: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``init_process_group`` take ``"cpu:gloo,cpu:gloo"``.

    verl 0.9.1 builds the name from "cpu:gloo" and the accelerator's device and backend
    (``verl/utils/distributed.py``); on CPU the two are the same and torch refuses the repetition.
    """

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str):
            backend = ",".join(dict.fromkeys(backend.split(",")))
        return init(backend, *args, **kwargs)

    return init_process_group


def _allow_any_device(*args: object, **kwargs: object) -> None:
    """Replace a check of FSDP1 that refuses to broadcast parameters that are on the CPU.

    verl passes ``sync_module_states=True`` (``verl/workers/engine/fsdp/transformer_impl.py``) and
    torch 2.13 then insists on accelerator parameters, although gloo broadcasts CPU ones well.
    Only ``actor_rollout_ref.actor.strategy=fsdp`` needs this; ``fsdp2`` does not.
    """


def _without(init: Callable[..., None], option: str) -> Callable[..., None]:
    """Make the constructor ``init`` of a dataclass set its only field, ``option``, to False."""

    @functools.wraps(init)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        init(self, **{option: False})

    return __init__


torch.distributed.init_process_group = _accept_repeated_backends(torch.distributed.init_process_group)

# verl keeps the reference model's parameters off the accelerator
# (verl/workers/engine/fsdp/transformer_impl.py, _build_fsdp_module), for which torch pins memory.
# Pinning needs an accelerator: under FSDP2 the parameters stay unpinned, under FSDP1, which has no
# such option, they are not moved at all - they are on the CPU anyway.
CPUOffloadPolicy.__init__ = _without(CPUOffloadPolicy.__init__, "pin_memory")  # type: ignore[method-assign]
CPUOffload.__init__ = _without(CPUOffload.__init__, "offload_params")  # type: ignore[method-assign]
fsdp_init_utils._check_module_states_for_sync_module_states = _allow_any_device
