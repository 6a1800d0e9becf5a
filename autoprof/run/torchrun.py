"""Agreement of torchrun's agents, one on each node, on one common run: the run of the first agent.

When an agent starts, it cannot know which other agents belong to the same job: the next job may have the same address
and port, and users seldom give an id. So each agent first makes an id for its own run. Later the agents meet in the
store with which torch assigns the ranks. Before any rank starts, the first agent writes the id of its run to this
store, and all other agents read the id.
"""

from __future__ import annotations

import functools
from typing import Any

from autoprof import _boot
from autoprof._boot import launch
from autoprof.base import log, seam
from autoprof.base.originals import os, time
from autoprof.config.values import MAX_NAME_BYTES
from autoprof.run import runtime
from autoprof.run.runtime import Runtime

# The module with the class LocalElasticAgent in torch 1.9 to 2.13.
_MODULE = "torch.distributed.elastic.agent.server.local_elastic_agent"
_KEY = "autoprof/run"
# Timeout for the id of the first agent's run. The node of the first agent may not have autoprof.
_FIRST_S = 10.0
_PAUSE_S = 0.02


def watch() -> None:
    """Make the torchrun agent in this process agree with the agents of other nodes before it starts ranks."""
    _boot.when_imported(_MODULE, _wrap)


def _wrap(module: Any) -> None:
    agent: Any = getattr(module, "LocalElasticAgent", None)
    agreement = _Agreement()
    start = getattr(agent, "_start_workers", None)
    if start is None:
        return

    @functools.wraps(start)
    def start_workers(self: Any, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
        agreement.reach(worker_group)
        return start(self, worker_group, *args, **kwargs)

    agent._start_workers = start_workers


class _Agreement:
    """The agreement of this process's torchrun agent with the agents of other nodes.

    Attributes:
        agreed: The id of the common run and the name of the launch, separated by a newline; empty before the agreement.
        started: True if this agent has started ranks.
    """

    def __init__(self) -> None:
        self.agreed = ""
        self.started = False

    def reach(self, group: Any) -> None:
        """Move this process to the run of the first agent. An agent that has already started ranks keeps its run."""
        with seam.guard("the ranks of this node form a separate run", log.error_once):
            run = runtime.current()
            # If `srun` or `mpirun` started the agents, they are already in one common run.
            if run is not None and (self.agreed or run.seat is None) and (group.group_world_size or 1) > 1:
                self._take_part(group, run)
        self.started = True

    def _take_part(self, group: Any, run: Runtime) -> None:
        if group.group_rank == 0:
            agreement = self.agreed or f"{run.info.id}\n{os.urandom(8).hex()}"
            # Write the agreement in each round, because each round of torchrun has a new store.
            group.store.set(_KEY, agreement)
        else:
            agreement = "" if self.started else _wait_for_agreement(group.store)
        if not agreement or self.agreed:
            return
        self.agreed = agreement
        run_id, _, name = agreement.partition("\n")
        if (
            run_id != os.path.basename(run_id)
            or not 0 < len(os.fsencode(run_id)) <= MAX_NAME_BYTES
            or not name.isalnum()
        ):
            raise ValueError(f"the name of the first node's run is not valid: {agreement[:60]!r}")
        os.environ[launch.LAUNCH_RANK] = f"{group.group_rank}/{group.group_world_size}"
        runtime.move(run_id, f"torchrun-{name}", group.group_rank)


def _wait_for_agreement(store: Any) -> str:
    """Wait until the first node has named its run. Return an empty text if it does not do so in time."""
    deadline = time.monotonic() + _FIRST_S
    # Poll instead of `store.wait`: a timeout there may close the store's connection.
    while not store.check([_KEY]):
        if time.monotonic() > deadline:
            log.warning(
                "the first node of torchrun did not name a run, so the ranks of this node form a separate run; "
                "set AUTOPROF=1 on all nodes"
            )
            return ""
        time.sleep(_PAUSE_S)
    return str(store.get(_KEY).decode())
