"""Measurement of the clocks of a cluster of three nodes on this machine, with the result printed as JSON."""

import json
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from autoprof.base import identity
from autoprof.run import clocks, runtime

cluster = Cluster(head_node_args={"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False})
others = [cluster.add_node(num_cpus=1, object_store_memory=100_000_000) for _ in range(2)]
# A package `autoprof` that raises on import, as on a node without autoprof.
ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[1]}})
run = runtime.start()
assert run is not None

nodes = [node.node_id for node in others]
begun = time.time_ns()
found = clocks.offsets(ray, nodes, lambda node, name: f"{name}-{nodes.index(node)}")
clocks.write(run.rundir, found)
same_host = clocks.offsets(ray, nodes)

gone = others.pop()
cluster.remove_node(gone)
one_gone = clocks.offsets(ray, nodes, lambda node, name: f"{name}-{nodes.index(node)}")

# Measure in the background, as a step does. A node on the driver's own host needs no line.
clocks.measure(run.rundir, run.hooks)
first = clocks._state.thread
clocks.measure(run.rundir, run.hooks)
assert clocks._state.thread is first
first.join(60)

# Let Ray end while the measurement waits for a node.
clocks._state.asked_at.clear()
clocks.cluster.shipped = lambda ray, module: ray.remote(lambda function: time.sleep(60))
clocks.measure(run.rundir, run.hooks)
time.sleep(1)
clocks.stop()
alive = [thread.name for thread in threading.enumerate() if thread.name == "autoprof-clocks"]
ray.shutdown()
cluster.shutdown()
print(
    "RESULT",
    json.dumps(
        {
            "host": identity.HOST,
            "begun": begun,
            "ended": time.time_ns(),
            "same_host": [offset.host for offset in same_host],
            "one_gone": [offset.host for offset in one_gone],
            "alive": alive,
            "files": [str(path) for path in Path(run.rundir.path, "clocks").iterdir()],
            "errors": [error.last for error in run.hooks.errors.values()],
        }
    ),
)
