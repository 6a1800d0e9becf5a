"""FSDP2 in one process. `--offload 1` keeps the parameters on the host; otherwise each step moves the model to the host
and back, as verl does between stages."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import autoprof
from bench.gpu.programs.common import arguments, say, synchronize


def main() -> None:
    parsed = arguments(offload=0, steps=6)
    device = parsed.device
    try:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    except ImportError:
        say(absent="this torch has no fully_shard (2.6 has)")
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device != "cpu" else "gloo",
            init_method=f"file://{Path(folder) / 'store'}",
            rank=0,
            world_size=1,
        )
        mesh = torch.distributed.init_device_mesh(device, (1,))
        torch.manual_seed(0)
        width = 256 if device != "cpu" else 16
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
        policy = CPUOffloadPolicy() if parsed.offload else OffloadPolicy()
        for layer in model:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for number in range(1, parsed.steps + 1):
            with autoprof.step(number), autoprof.stage("update_actor", role="actor"):
                loss = model(torch.ones(8, width, device=device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.item()))
                if not parsed.offload and device != "cpu":
                    model.to("cpu")
                    model.to(device)
                elif not parsed.offload:
                    model.to(torch.float32)
                synchronize(device)
        say(losses=losses, absent="")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
