"""Replacement of CUDA's device by the CPU, for trainers that support only CUDA; their code runs unchanged."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Modules to import before `enter`, while torch reports neither CUDA nor triton.
EARLIER = ("torch._dynamo", "functorch.compile", "torch._inductor.codecache")


class _Missing(types.ModuleType):
    """Stand-in for a package whose functions are used only as decorators, or never called."""

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


class _Stream:
    """Stand-in for a stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _cpu(value: Any) -> Any:
    named = value if isinstance(value, str) else value.type if isinstance(value, torch.device) else ""
    return "cpu" if named.partition(":")[0] == "cuda" else value


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = tuple(map(_cpu, args))
        elif function is torch.Tensor.type and len(args) == 1:
            return str(function(*args)).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


def _returns(value: Any) -> Any:
    return lambda *_, **__: value


def without(*names: str) -> None:
    """Install stand-ins for packages that are imported but not used."""
    for name in names:
        made = sys.modules[name] = _Missing(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(made)["__path__"] = []


def uncompiled() -> None:
    """Disable torch's compiler, and install a stand-in for triton, which torch for CPUs lacks."""
    for name in EARLIER:
        importlib.import_module(name)
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)
    without("triton", "triton.language")


def enter() -> None:
    """Let the CPU do the work of CUDA's device, in this thread, until the process ends."""
    cuda = torch.cuda
    device = types.SimpleNamespace(major=9, minor=0, name="CPU", multi_processor_count=1, total_memory=1 << 34)
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": "cpu",
        "get_device_name": "CPU",
        "get_device_capability": (9, 0),
        "get_device_properties": device,
        "mem_get_info": (1 << 34, 1 << 34),
        "memory_stats": {},
    }
    memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    answers.update(dict.fromkeys((*memory, "device_memory_used"), 0))
    nothing = ("empty_cache", "set_device", "synchronize", "manual_seed", "manual_seed_all", "set_rng_state")
    answers.update(dict.fromkeys((*nothing, "reset_peak_memory_stats")))
    for name, answer in answers.items():
        setattr(cuda, name, _returns(answer))
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = cuda.stream = _Stream
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.nn.Module.cuda = lambda module, device=None: module
    _OnCpu().__enter__()
