"""State of a Ray cluster for `autoprof doctor`: requests that Ray can't grant, actors that restart, failed tasks.

The control store of the cluster is asked in a separate process, which imports Ray and may be ended: python -m
autoprof.cli.ray_state ADDRESS. It needs neither Ray's dashboard nor a job in the cluster. The functions are Ray's
own, in Ray 2.9 to 2.60; if a release lacks them, nothing is reported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

import autoprof
from autoprof.base import seam, units
from autoprof.base.redact import writable
from autoprof.run import raised

_TIMEOUT_S = 15.0
# Number of restarts from which an actor is reported.
_MANY_RESTARTS = 3
_MAX_TEXTS = 8
_MAX_FAILED, _MAX_ERROR_CHARS = 64, 1 << 13


class RayActor(msgspec.Struct, frozen=True, kw_only=True):
    """An actor in the actor table of a Ray cluster.

    Attributes:
        state: The state in Ray's table, such as `ALIVE` or `PENDING_CREATION`.
        kind: The name of the class.
        restarts: The number of restarts so far.
        pid: The id of the process; 0 if the actor has none.
        needs: Dict from resource to amount, for an actor that waits for a node.
    """

    state: str
    kind: str
    restarts: int = 0
    pid: int = 0
    needs: dict[str, float] = {}


class FailedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task or a call of an actor's method that failed, and that Ray does not repeat.

    Attributes:
        name: The name of the function or method.
        driver: The id of the process that connected the task's job to the cluster; 0 if it is unknown.
        error: The text of the error. It contains the traceback of an exception.
    """

    name: str
    driver: int = 0
    error: str = ""


class RayState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a Ray cluster.

    Attributes:
        actors: The actors.
        failed: The last failed tasks, the newest first.
        infeasible: The resources of each kind of request that no node of the cluster can ever grant.
        total: Dict from resource to the sum over all nodes.
    """

    actors: list[RayActor] = []
    failed: list[FailedTask] = []
    infeasible: list[dict[str, float]] = []
    total: dict[str, float] = {}


def read(address: str) -> RayState:
    """Return the state of the Ray cluster at an address. It is empty if the cluster can't be asked. Never raises."""
    command = [sys.executable, "-m", __name__, address]
    environment = os.environ | {"AUTOPROF": "0"}
    folder = Path(autoprof.__file__).parent.parent
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
        # Ray may print lines before the last one.
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=RayState)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        seam.pass_on(error)
        return RayState()


def sentences(state: RayState) -> list[str]:
    """Return a sentence for each kind of request that Ray can't grant, and for each actor that restarts often."""
    texts = []
    for needs in state.infeasible:
        missing = {name: amount for name, amount in needs.items() if amount > state.total.get(name, 0.0)}
        waiting = [actor.kind for actor in state.actors if actor.needs == needs]
        who = f"actor {waiting[0]}" if waiting else "a task or actor"
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in (missing or needs).items())
        has = ", ".join(f"{state.total.get(name, 0.0):g} {name}" for name in (missing or needs))
        texts.append(f"Ray can't place {who}: it needs {wanted}, and the nodes of the cluster have {has} in total")
    texts += [
        f"Ray has restarted actor {actor.kind} {units.count(actor.restarts, 'time')}, and it is {actor.state.lower()}"
        for actor in state.actors
        if actor.restarts >= _MANY_RESTARTS
    ]
    return texts[:_MAX_TEXTS]


def failures(tasks: Iterable[FailedTask]) -> list[str]:
    """Return a sentence for each failed task, without repetitions."""
    texts = []
    for task in tasks:
        first_line = task.error.partition("\n")[0]
        texts.append(f"Ray task {task.name} ended with {raised.description_of_traceback(task.error) or first_line}")
    return list(dict.fromkeys(map(writable, texts)))[:_MAX_TEXTS]


def _failed(events: Iterable[bytes], jobs: Iterable[bytes]) -> list[FailedTask]:
    """Return the tasks that failed in their last attempt, the newest first."""
    from ray.core.generated import gcs_pb2

    drivers = {job.job_id: job.driver_pid for job in map(gcs_pb2.JobTableData.FromString, jobs)}
    last: dict[bytes, Any] = {}
    for event in map(gcs_pb2.TaskEvents.FromString, events):
        if event.attempt_number >= getattr(last.get(event.task_id), "attempt_number", 0):
            last[event.task_id] = event
    failed = [event for event in last.values() if event.state_updates.error_info.error_message]
    failed.sort(key=lambda event: -max(event.state_updates.state_ts_ns.values(), default=0))
    return [
        FailedTask(
            name=event.task_info.name,
            driver=drivers.get(event.job_id, 0),
            error=event.state_updates.error_info.error_message[:_MAX_ERROR_CHARS],
        )
        for event in failed[:_MAX_FAILED]
    ]


def _ask(address: str) -> RayState:
    """Ask the control store. This runs in a separate process."""
    from ray import _raylet
    from ray._private.state import GlobalStateAccessor
    from ray.core.generated import gcs_pb2

    client_options: Any = getattr(_raylet, "GcsClientOptions", None)
    options = client_options.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    accessor: Any = GlobalStateAccessor(options)
    if not accessor.connect():
        return RayState()
    table: Any = gcs_pb2.ActorTableData
    actors = [
        RayActor(
            state=table.ActorState.Name(actor.state),
            kind=actor.class_name,
            restarts=actor.num_restarts,
            pid=actor.pid,
            needs=dict(actor.required_resources),
        )
        for actor in map(table.FromString, accessor.get_actor_table(None, None))
        if table.ActorState.Name(actor.state) != "DEAD"
    ]
    usage: Any = gcs_pb2.ResourceUsageBatchData.FromString(accessor.get_all_resource_usage())
    total: dict[str, float] = {}
    for node in usage.batch:
        for name, amount in node.resources_total.items():
            total[name] = total.get(name, 0.0) + amount
    infeasible = [
        dict(demand.shape)
        for demand in usage.resource_load_by_shape.resource_demands
        if demand.num_infeasible_requests_queued
    ]
    # A release may have no task events, or other fields.
    failed, _ = seam.attempt(lambda: _failed(accessor.get_task_events(), accessor.get_job_table()))
    return RayState(actors=actors, failed=failed or [], infeasible=infeasible, total=total)


if __name__ == "__main__":
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(_ask(sys.argv[1])))
