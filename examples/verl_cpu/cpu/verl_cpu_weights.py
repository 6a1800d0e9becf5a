"""Transfer of new weights to rollout engines with separate devices, on a machine without accelerators.

verl 0.9.1 does this through a checkpoint engine (``verl/checkpoint_engine``). Its own engines need NCCL, RDMA or
similar. Its registry accepts other engines, from a module that the configuration names::

    actor_rollout_ref.rollout.checkpoint_engine.backend=socket
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu_weights

The first rank of the actor listens on loopback. Each rollout worker connects and receives all tensors, one by one.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("socket")
class SocketCheckpointEngine(CheckpointEngine):
    """Sender of whole tensors over a local socket, from rank 0 of the actor to every rollout worker."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.receivers = 0
        self.place: tuple[Any, bytes] | None = None
        self.listener: Listener | None = None

    def prepare(self) -> tuple[Any, bytes] | None:
        """Return the address and the key of the sender; None in all other processes."""
        if not self.is_master:
            return None
        key = os.urandom(16)
        self.listener = Listener(("127.0.0.1", 0), authkey=key, backlog=64)
        return self.listener.address, key

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for each actor and each rollout worker."""
        actor = {"place": [None] * actor_wg_world_size, "receivers": [rollout_world_size] * actor_wg_world_size}
        rollout = {"place": [metadata[0]] * rollout_world_size, "receivers": [0] * rollout_world_size}
        return actor, rollout

    def init_process_group(self, place: tuple[Any, bytes] | None, receivers: int) -> None:
        self.place, self.receivers = place, receivers

    def finalize(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Send each tensor to all; the other ranks only take part in gathering them."""
        connections = [self.listener.accept() for _ in range(self.receivers)] if self.listener else []
        for name, tensor in weights:
            payload = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for connection in connections:
                connection.send((name, tuple(tensor.shape), tensor.dtype))
                connection.send_bytes(payload)
        for connection in connections:
            connection.send(None)
            connection.close()
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the tensors as they arrive."""
        assert self.place is not None
        address, key = self.place
        with Client(address, authkey=key) as connection:
            while (described := connection.recv()) is not None:
                name, shape, dtype = described
                payload = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.uint8)
                yield name, payload.view(dtype).view(shape)
