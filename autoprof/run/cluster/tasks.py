"""Small Ray tasks on chosen nodes, which take no CPU from the run."""

from __future__ import annotations

from typing import Any


def on_node(task: Any, node: str, name: str) -> Any:
    """Return a remote function that runs on the node with this id, or nowhere, and that Ray shows as `name`."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return task.options(num_cpus=0, max_retries=0, name=name, scheduling_strategy=strategy)
