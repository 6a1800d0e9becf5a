"""Replay buffer for verl's V1 trainer (0.9.1) that polls often and returns answers in a fixed order.

Plugged in through verl's own option ``trainer.v1.sampler.custom_sampler``. It differs from the
built-in ``ReplayBuffer`` (``verl/trainer/ppo/v1/replay_buffer.py``) in two ways:

* The built-in buffer looks for finished answers every 2 s, most of a step of this toy model. This one
  looks every 0.05 s.
* The built-in buffer returns answers in the order in which they finish, and sums over a batch differ in
  their last digits with the order. This one returns them in the order of the data.
"""

from __future__ import annotations

from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_SECONDS = 0.05


class OrderedReplayBuffer(ReplayBuffer):
    """Replay buffer with a short poll interval and a fixed order of answers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_SECONDS)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        """Choose prompts as the built-in buffer does, but in the order of their registration.

        ``prompt_global_steps`` lists a partition's prompts as the queue does, oldest first.
        """
        steps = dict(self.prompt_global_steps[partition_id])
        ordered = [uid for uid in steps if uid in sampleable_keys]
        return ordered[:batch_size], dict(self.partitions[partition_id]), steps

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        """Return the answers sorted by prompt, then session, then position within the session."""
        rank = {uid: position for position, uid in enumerate(selected_prompt_uids)}

        def position_of(key: str) -> tuple[int, int, int]:
            uid, session, index = key.rsplit("_", 2)
            return rank.get(uid, len(rank)), int(session), int(index)

        in_order = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=position_of)}
        return super()._materialize_batch(partition_id, selected_prompt_uids, in_order)
