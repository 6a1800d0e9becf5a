"""Run over all nodes of a cluster, which prints its results as JSON: spread.py ADDRESS window|loss|asked

`window`: after the first captured step, it waits for a node `later`, and ends a worker, which Ray restarts.
`loss`: it waits in the captured step until the test has killed the node `later`.
`asked`: it continues until the test creates a file `enough`.
"""

import json
import sys
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from spread_lib import Trainer, Worker

from autoprof.run import clocks

LATER = "later"


def nodes():
    return {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


def worker(rank, node, marker=""):
    placed = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return Worker.options(scheduling_strategy=placed).remote(rank, marker)


def later(there):
    deadline = time.monotonic() + 90
    while (LATER in nodes()) != there:
        assert time.monotonic() < deadline, nodes()
        time.sleep(0.1)
    return nodes().get(LATER)


def clocks_measured():
    if clocks._state.thread is not None:
        clocks._state.thread.join(60)


def window():
    known = nodes()
    workers = {host: worker(rank, node) for rank, (host, node) in enumerate(sorted(known.items()))}
    trainer = Trainer(list(workers.values()))
    trainer.fit(2)
    clocks_measured()
    before = dict(zip(workers, trainer.pids, strict=True))
    Path("wants-later").touch()
    workers[LATER] = worker(len(workers), later(True))
    trainer.workers.append(workers[LATER])
    # Ray restarts this worker on the same node.
    restarted = workers["node-b"]
    try:
        ray.get(restarted.die.remote())
    except ray.exceptions.RayActorError:
        pass
    deadline = time.monotonic() + 60
    while True:
        try:
            ray.get(restarted.environment.remote(), timeout=60)
            break
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
    trainer.fit(1)
    clocks_measured()
    after = dict(zip(workers, trainer.pids, strict=True))
    shown = {host: ray.get(each.environment.remote()) for host, each in workers.items()}
    return {"before": before, "after": after, "environment": shown, "nodes": nodes()}


def loss():
    known = nodes()
    workers = {
        host: worker(rank, node, str(Path("inside").absolute()) if host == LATER else "")
        for rank, (host, node) in enumerate(sorted(known.items()))
    }
    trainer = Trainer(list(workers.values()))
    trainer.fit(2)
    later(False)
    return {"after": dict(zip(workers, trainer.pids, strict=True)), "nodes": known}


def asked():
    trainer = Trainer([worker(rank, node) for rank, (_, node) in enumerate(sorted(nodes().items()))])
    while not Path("enough").exists():
        trainer.fit(1)
        time.sleep(0.2)
    return {"steps": trainer.global_step}


address, phase = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
print("RESULT " + json.dumps({"window": window, "loss": loss, "asked": asked}[phase]()), flush=True)
