"""CPU platform for verl 0.9.x.

verl picks its accelerator from a registry (``verl/plugin/platform``, new in 0.9.0) that knows CUDA,
ROCm and NPU but no CPU, and without a match falls back to CUDA calls. Importing this module
registers ``cpu`` there. Two variables make every verl process do so::

    VERL_USE_EXTERNAL_MODULES=verl_cpu_platform    # imported at the end of ``import verl``
    VERL_PLATFORM=cpu                              # skip the detection, take the platform by name

``verl_cpu_device.py``, which this imports, also applies four small corrections to torch.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl_cpu_device import DEVICE, CpuDeviceId, device_module


@PlatformRegistry.register(platform=DEVICE)
class PlatformCPU(PlatformBase):
    """Platform with one CPU per process, which Ray counts as a GPU."""

    @property
    def device_name(self) -> str:
        return DEVICE

    @property
    def vendor_name(self) -> str:
        return DEVICE

    @property
    def device_module(self) -> types.ModuleType:
        return device_module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return CpuDeviceId()  # type: ignore[return-value]

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        """Return ``GPU``, for which verl's placement groups ask; ``ray.init(num_gpus=1)`` provides one on paper."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """Return False: verl then sends new weights to vLLM through shared memory, not CUDA IPC handles."""
        return False

    def cudart(self) -> Any:
        return None
