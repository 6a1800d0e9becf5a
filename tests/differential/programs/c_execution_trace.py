#: captures: yes
#: slow:
#: needs: torch
#: ignore: (En|Dis)abling Execution Trace Observer
"""User's execution trace observer and memory snapshots of torch around captured steps."""

import json

import torch
from tinyrl import Trainer
from torch.profiler import ExecutionTraceObserver

observer = ExecutionTraceObserver().register_callback("trace.json")
observer.start()
print(Trainer().fit(2, lambda: torch.ones(3).add(1).sum().item()))
observer.stop()
observer.unregister_callback()
print(sum(node["name"] == "aten::add" for node in json.load(open("trace.json"))["nodes"]))
__import__("os").remove("trace.json")
