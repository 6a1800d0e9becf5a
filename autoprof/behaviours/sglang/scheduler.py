"""SGLang's scheduler, which receives autoprof's requests and runs forward passes.

Every scheduler of a replica, on every node, receives the same requests between the same two passes, so all of them
record the same passes.
"""

from __future__ import annotations

import contextlib
from typing import Any

from autoprof.base import interrupts, process
from autoprof.base.originals import time
from autoprof.behaviours.rollout.request import MARK, ROLE, Request
from autoprof.behaviours.sglang.recorder import DECODE, EXTEND, Session
from autoprof.capture import profilers
from autoprof.config.kinds import GENERATE
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call, Reply
from autoprof.run import runtime
from autoprof.run.watch import engine_state
from autoprof.run.watch.engine_state import State, part

# Clocks of the kernel are below, the time since the epoch is above.
_EPOCH_S = 1e9


class _State(process.State):
    """The recording that the scheduler has going on, and whether it is known to those who ask where it stands."""

    def begin(self) -> None:
        self.session: Session | None = None
        self.known = False

    def in_child(self) -> None:
        self.known = False


_state = _State()


class Scheduler(Behaviour):
    """The method that receives profiling requests, of SGLang's scheduler or of what profiles for it."""

    def around(self, call: Call) -> Around:
        text = str(getattr(call.argument("recv_req"), "output_dir", ""))
        if not text.startswith(MARK):
            yield CALL
            return None
        try:
            problem = _obey(call.instance, Request.read(text))
        except Exception as error:
            interrupts.pass_on(error)
            runtime.report("sglang/scheduler", error)
            problem = f"{type(error).__name__}: {error}"
        return Reply(_answer(MARK + problem))


class Pass(Behaviour):
    """The scheduler's method that runs one forward pass."""

    def around(self, call: Call) -> Around:
        session = _state.session
        if not _state.known:
            _state.known = True
            engine_state.register(call.instance, read)
        if session is None:
            yield CALL
            return None
        stage = _stage(call.argument("batch"))
        with session.passing(call.instance, stage) or contextlib.nullcontext():
            yield CALL
        return None


def _obey(holder: Any, request: Request) -> str:
    """Do what is asked; return what went wrong, or an empty text."""
    session, _state.session = _state.session, None
    if request.action == "stop":
        return session.close(request.reason) if session is not None else ""
    if session is not None:
        session.close("whoever started it went away")
    run = runtime.start()
    if run is None:
        return "autoprof is off in the scheduler's process"
    rank, part = _place(holder, request)
    settings = request.settings(run)
    if not settings.takes(ROLE, range(rank, rank + 1), GENERATE):
        return ""
    if why := profilers.choose(settings).busy():
        return why
    _state.session = Session(run, settings, request.subject(part, rank))
    return ""


def _place(holder: Any, request: Request) -> tuple[int, str]:
    """Return the scheduler's global rank, and its ranks as SGLang itself names its traces."""
    # On the scheduler up to 0.5.12, then in `ps` of what profiles for it, in 0.5.23 told by a function.
    known = holder if hasattr(holder, "tp_rank") else getattr(holder, "ps", None) or _parallel()

    def number(*names: str, default: int) -> int:
        return next((int(getattr(known, name)) for name in names if getattr(known, name, None) is not None), default)

    tensor, pipeline, data = (number(f"{kind}_rank", default=0) for kind in ("tp", "pp", "dp"))
    tensors, pipelines = number("tp_size", default=1), number("pp_size", default=1)
    part = [f"TP-{tensor}"]
    if number("dp_size", "num_dp_ranks", default=1) > 1:
        part.append(f"DP-{data}")
    if pipelines > 1:
        part.append(f"PP-{pipeline}")
    if number("moe_ep_size", default=1) > 1:
        part.append(f"EP-{number('moe_ep_rank', default=0)}")
    rank = request.rank + tensor + pipeline * tensors + (data * tensors * pipelines if request.replicas_in_one else 0)
    return rank, "-".join(part)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _stage(batch: Any) -> str:
    """Return the stage that a pass belongs to, or an empty text: idle ranks run passes of nothing."""
    mode = batch.forward_mode
    if mode.is_decode():
        return DECODE
    return EXTEND if mode.is_extend() else ""


def _answer(message: str) -> Any:
    from sglang.srt.managers.io_struct import ProfileReqOutput

    return ProfileReqOutput(success=True, message=message)


def read(scheduler: Any, left_out: list[str]) -> State:
    """Return the state of a `Scheduler`; a block is a page of its pool of tokens, free what its cache can give up."""
    found: State = {}
    waiting = list(scheduler.waiting_queue)
    batches = (scheduler.running_batch, getattr(scheduler, "cur_batch", None))
    # A request that is filled in is in the current batch alone.
    going = {request.rid: request for batch in batches if batch is not None for request in batch.reqs}
    running = list(going.values())
    found["running"], found["waiting"] = len(running), len(waiting)
    pool, cache = getattr(scheduler, "token_to_kv_pool_allocator", None), getattr(scheduler, "tree_cache", None)
    page = getattr(pool, "page_size", 1) or 1
    part(found, left_out, "free_blocks", lambda: int(pool.available_size() + cache.evictable_size()) // page)  # type: ignore[union-attr]
    part(found, left_out, "total_blocks", lambda: int(pool.size) // page)  # type: ignore[union-attr]
    if running or waiting:
        part(found, left_out, "longest_s", lambda: _longest(found, [*running, *waiting]))
    return found


def _longest(found: State, requests: list[Any]) -> float:
    """Return how long the oldest request has been there, and note its id."""
    since, oldest = min(((_since(request), request) for request in requests), key=lambda pair: pair[0])
    found["longest"] = str(oldest.rid)
    return round((time.time() if since > _EPOCH_S else time.perf_counter()) - since, 3)


def _since(request: Any) -> float:
    """Return when a request came to the queue."""
    stats = getattr(request, "time_stats", request)
    return float(getattr(stats, "wait_queue_entry_time", 0.0) or stats.queue_time_start)
