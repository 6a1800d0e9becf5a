"""Training loop with `autoprof.step` and `autoprof.stage`, in one process or under torchrun.

`--graph 1` replays a CUDA graph in a separate stage. `--holder 1` subscribes to CUPTI before any profiler.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

import autoprof
from bench.gpu.programs.common import arguments, say, synchronize, training


def graphed(device: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a CUDA graph of four products, its input, which the caller must keep, and its result."""
    values = torch.ones(256, 256, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        values @ values
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = values
        for _ in range(4):
            result = (result @ values) / 256
    return graph, values, result


def hold_cupti() -> str:
    """Subscribe to CUPTI, as another profiler would; return the result."""
    # torch has loaded one of these libraries, so its name is enough to find it.
    for name in ("libcupti.so.13", "libcupti.so.12", "libcupti.so.11.8", "libcupti.so"):
        try:
            cupti = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        return "there is no libcupti"
    subscriber = ctypes.c_void_p()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    hold_cupti.kept = callback(lambda *_: None)  # type: ignore[attr-defined]
    status = cupti.cuptiSubscribe(ctypes.byref(subscriber), hold_cupti.kept, None)  # type: ignore[attr-defined]
    return "held" if status == 0 else f"cuptiSubscribe returned {status}"


def main() -> None:
    parsed = arguments(steps=6, graph=0, holder=0)
    held = hold_cupti() if parsed.holder else ""
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        # Ranks may share a GPU, which NCCL refuses.
        spread = parsed.device != "cpu" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group("nccl" if spread else "gloo")
        if spread:
            torch.cuda.set_device(rank)
    step = training(parsed.device)
    graph, _values, result = graphed(parsed.device) if parsed.graph else (None, None, torch.zeros(1))
    losses = []
    for number in range(1, parsed.steps + 1):
        with autoprof.step(number):
            with autoprof.stage("update_actor", role="actor"):
                losses.append(step())
            if graph is not None:
                with autoprof.stage("replay", role="rollout"):
                    for _ in range(10):
                        graph.replay()
                    synchronize(parsed.device)
            if "RANK" in os.environ:
                with autoprof.stage("reduce", role="actor"):
                    total = torch.tensor([losses[-1]] * 1024)
                    if torch.distributed.get_backend() == "nccl":
                        total = total.to(parsed.device)
                    torch.distributed.all_reduce(total)
                    synchronize(parsed.device)
    if rank == 0:
        say(losses=losses, graph=float(result.flatten()[0]), held=held)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
