"""Scheduler of vLLM's engine: its requests and its blocks, told where somebody asks where the process stands."""

from __future__ import annotations

from typing import Any

from autoprof.base.originals import time
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call
from autoprof.run.watch import engine_state
from autoprof.run.watch.engine_state import State, part

# Where requests wait, in some releases in several queues.
_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


class Start(Behaviour):
    """`EngineCore.__init__` and `WorkerBase.__init__`: from then on the process tells where it stands, and an engine
    core what its scheduler has to do. Nothing else is called there, where workers have processes of their own.
    """

    def around(self, call: Call) -> Around:
        yield CALL
        scheduler = getattr(call.instance, "scheduler", None)
        if scheduler is not None:
            engine_state.register(scheduler, read)
        return None


def read(scheduler: Any, left_out: list[str]) -> State:
    """Return the state of a `Scheduler` of vLLM 0.9 to 0.33."""
    found: State = {}
    running = list(scheduler.running)
    waiting = [request for name in _QUEUES for request in tuple(getattr(scheduler, name, ()))]
    found["running"], found["waiting"] = len(running), len(waiting)
    part(found, left_out, "free_blocks", lambda: scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
    part(found, left_out, "total_blocks", lambda: scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
    if running or waiting:
        oldest = min((*running, *waiting), key=lambda request: request.arrival_time)
        found["longest"] = str(oldest.request_id)
        found["longest_s"] = round(time.time() - oldest.arrival_time, 3)
    return found
