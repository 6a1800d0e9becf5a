"""One run for all nodes of torchrun: the agents, one on each node, agree on it in torch's own store.

Each agent names a run when it starts. An address and a port are the same in the next job, and an id is seldom given, so
nothing says which agents belong together until they have met. Then the first one leaves its run's name in the store in
which it leaves the ranks, before any of them starts.
"""

from __future__ import annotations

import functools
from typing import Any

from autoprof import _boot
from autoprof._boot import command
from autoprof.base import interrupts, log, process
from autoprof.base.originals import os, time
from autoprof.config.parsers import LONGEST_NAME
from autoprof.run import runtime, seat
from autoprof.run.runtime import Runtime

# Of torch from 1.9 to 2.13.
_MODULE = "torch.distributed.elastic.agent.server.local_elastic_agent"
_KEY = "autoprof/run"
# How long an agent waits for the first one, which may be without autoprof.
_FIRST_S = 10.0
_PAUSE_S = 0.02


class _State(process.State):
    """The agreement of the agents.

    Attributes:
        agreed: The run and the launch; empty before.
        started: Whether this agent has started ranks.
    """

    def begin(self) -> None:
        self.agreed = ""
        self.started = False


_state = _State()


def watch() -> None:
    """Have the agent of this process agree with those of other nodes before it starts ranks."""
    _boot.when_imported(_MODULE, _wrap)


def _wrap(module: Any) -> None:
    agent: Any = getattr(module, "LocalElasticAgent", None)
    start = getattr(agent, "_start_workers", None)
    if start is None:
        return

    @functools.wraps(start)
    def start_workers(self: Any, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
        _agree(worker_group)
        return start(self, worker_group, *args, **kwargs)

    agent._start_workers = start_workers


def _agree(group: Any) -> None:
    """Take the run of the first agent. An agent that has started ranks stays in its run, whoever comes or goes."""
    try:
        run = runtime.current()
        # What `srun` or `mpirun` has started is in one run already.
        if run is not None and (_state.agreed or seat.own_seat() is None) and (group.group_world_size or 1) > 1:
            _take_part(group, run)
    except Exception as error:
        interrupts.pass_on(error)
        log.warning(f"this node's ranks are a run of their own: {type(error).__name__}: {error}")
    _state.started = True


def _take_part(group: Any, run: Runtime) -> None:
    if group.group_rank == 0:
        said = _state.agreed or f"{run.info.id}\n{os.urandom(8).hex()}"
        # In each round: a node that joins late has a store of that round.
        group.store.set(_KEY, said)
    else:
        said = "" if _state.started else _asked(group.store)
    if not said or _state.agreed:
        return
    _state.agreed = said
    run_id, _, name = said.partition("\n")
    if run_id != os.path.basename(run_id) or not 0 < len(os.fsencode(run_id)) <= LONGEST_NAME or not name.isalnum():
        raise ValueError(f"the first node's run is called {said[:60]!r}")
    os.environ[command.LAUNCH_RANK] = f"{group.group_rank}/{group.group_world_size}"
    runtime.move(run_id, f"torchrun-{name}", group.group_rank)


def _asked(store: Any) -> str:
    deadline = time.monotonic() + _FIRST_S
    # Not by a wait of the store's, which may end the store's connection with the time.
    while not store.check([_KEY]):
        if time.monotonic() > deadline:
            log.warning(
                "the first node of torchrun has named no run, so this node's ranks are a run of their own; "
                "set AUTOPROF=1 on all nodes"
            )
            return ""
        time.sleep(_PAUSE_S)
    return str(store.get(_KEY).decode())
