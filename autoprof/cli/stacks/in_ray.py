"""Question to all nodes of a run through its Ray cluster."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from autoprof.base.identity import host_name
from autoprof.cli.stacks import node
from autoprof.cli.stacks.answer import Answer
from autoprof.cli.trigger import in_ray
from autoprof.run.cluster import connect, nodes, tasks
from autoprof.rundir.stacks import STACKS

# How much longer than for the processes a node is waited for: Ray may have to start a worker there.
_STARTS_S = 60.0


class Question(NamedTuple):
    """Request to a node: the name of the folder, its `why.json`, how long to wait, and whether for native stacks."""

    name: str
    why: bytes
    wait_s: float
    native: bool


def ask(ray: Any, run: str, question: Question) -> tuple[str, list[Answer]]:
    """Ask the nodes of a run, and return its id and their answers.

    Raises:
        NotFound: There is no such run in the cluster, or several.
        Gone: None of its nodes is there.
    """
    found = in_ray.find(ray, run).run
    alive = {each["NodeID"]: each["NodeManagerHostname"] for each in ray.nodes() if each["Alive"]}
    places = {found.node: found.directory}
    dead = []
    seen = set()
    for each in nodes.of_run(found.id):
        # Several nodes may be on one machine and have one folder.
        disk = each.disk or each.id
        if disk in seen and each.id != found.node:
            continue
        seen.add(disk)
        if each.id in alive:
            places[each.id] = each.directory
        else:
            dead.append(each)
    function = ray.remote(node.asker())
    calls = {
        each: tasks.on_node(function, each, "autoprof_stacks").remote(
            directory, question.name, question.why, question.wait_s, question.native, False
        )
        for each, directory in places.items()
        if each in alive
    }
    if not calls:
        raise connect.Gone(f"none of the nodes of run {found.id} is there any more")
    done, late = ray.wait(list(calls.values()), num_returns=len(calls), timeout=question.wait_s + _STARTS_S)
    for call in late:
        ray.cancel(call)
    answers = []
    for place, call in calls.items():
        host, folder = host_name(alive[place]), f"{places[place]}/{STACKS}/{question.name}"
        try:
            if call not in done:
                raise TimeoutError(f"no answer within {question.wait_s + _STARTS_S:g} s")
            answers.append(msgspec.convert(ray.get(call), Answer))
        except Exception as error:  # the node has gone meanwhile
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            answers.append(_none(host, folder, f"the node did not answer: {first[:200]}"))
    answers += [_none(each.host, each.directory, "the node has died") for each in dead]
    return found.id, answers


def _none(host: str, folder: str, problem: str) -> Answer:
    return Answer(host=host, folder=folder, files={}, absent=[], py_spy="", problem=problem)
