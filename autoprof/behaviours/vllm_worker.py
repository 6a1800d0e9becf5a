"""Captures in vLLM's workers, and the state of vLLM's scheduler.

autoprof replaces a worker's profiler by an object of autoprof (`StandIn`). The engine starts and stops this object,
which records with the tool in the settings, counts forward passes, and writes into the step's folder. The workers of
vllm-ascend have the same interface.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

from autoprof.base import seam
from autoprof.base.originals import time
from autoprof.behaviours.rollout import ROLE, ObjectPatches, Request, problem_of, watch_processes
from autoprof.capture import profilers
from autoprof.capture.recorder import PassCapture
from autoprof.config.selection import parse_iterations
from autoprof.config.values import GENERATE
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, follow
from autoprof.run import raised, runtime, snapshot
from autoprof.run.snapshot import EngineState, read_part
from autoprof.rundir.records import ENGINE, RaisedLine


class StandIn:
    """Object that replaces `worker.profiler`, with the interface that all vLLM releases expect of a profiler.

    In a worker that is not captured, the object records nothing. The engine starts the profilers of all workers, and
    must not start a profiler that the user configured.

    Releases up to 0.11 expect a `torch.profiler.profile` (`start`, `stop`, `key_averages().table()`: gpu_worker.py; in
    0.12 still cpu_worker.py). Later releases expect a `WorkerProfiler` (vllm/profiler/gpu_profiler.py in 0.12,
    wrapper.py in later releases). They call `step` and `annotate_context_manager` in each forward pass. Before these
    calls, they read `is_running` (0.28 to 0.30) or `should_annotate` (since 0.31). Since 0.32, they call
    `set_output_name`, and `start` with arguments.

    A subclass of vLLM's own class would need another module, configuration and count in each release, and would write
    tables to disk. Later releases may use other attributes. The value of such an attribute is a `_NullObject`, so that
    no forward pass fails.
    """

    def __init__(self, capture: _WorkerCapture | None) -> None:
        self._capture = capture

    def start(self, *_: Any, **__: Any) -> None:
        if self._capture is not None:
            with _guard():
                self._capture.switch_on()

    def stop(self, cut: str = "") -> None:
        if self._capture is not None:
            with _guard():
                self._capture.switch_off(cut)

    def shutdown(self) -> None:
        self.stop("the engine was shut down")

    def step(self) -> None:
        """Do nothing: autoprof counts forward passes itself (`_WorkerCapture`)."""

    @property
    def is_running(self) -> bool:
        return self._capture is not None and self._capture.recording

    should_annotate = is_running

    def annotate_context_manager(self, name: str) -> Any:
        return annotation(name) if self.is_running else contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NullObject()


class _NullObject:
    """An object that can be called and used in a `with` statement, has every attribute, and is false."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return ""


class Configured:
    """A worker's own profiler configuration, except that its `profiler` is always set.

    Since 0.17, `Worker.profile` requires a configured profiler at start and at stop (gpu_worker.py). A proxy of wrapt
    would write attributes into the worker's own configuration.
    """

    profiler = "torch"

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_own"), name)


def annotation(name: str) -> Any:
    """Return a context manager whose `with` block is a range called `name` in the trace."""
    import torch.profiler

    return torch.profiler.record_function(name)


def _guard() -> seam.guard:
    return seam.guard("vllm/worker", runtime.report)


# Attributes of a worker: its `_WorkerCapture`, and a dict with the values of `_PROFILER` that autoprof has replaced.
_SESSION = "_autoprof_session"
_REPLACED = "_autoprof_replaced"
# Attributes of a worker that autoprof replaces during a capture.
_PROFILER = ("profiler", "profiler_config")


class Worker(Behaviour):
    """vLLM's worker class, to which autoprof adds the methods that autoprof calls by `collective_rpc`."""

    def install(self, owner: Any) -> bool:
        owner.autoprof_prepare = _prepare
        owner.autoprof_cut = _cut
        owner.autoprof_release = _release
        return True


class _WorkerCapture(PassCapture):
    """A capture in one worker, from `_prepare` to `_release`. Passes are counted from the profiler's start.

    autoprof counts passes itself, so that a count means the same in all releases. vLLM counts passes only since 0.12,
    and its counts differ between releases (vllm/profiler/wrapper.py). Delays of 0 and 1 both mean no delay. Until 0.29,
    a profiler with `max_iterations` could not be started again. 0.31 and 0.32 apply delays and `max_iterations`
    elsewhere.

    A pass is a call of `execute_model`, as in vLLM's own count and annotations. With asynchronous scheduling, some
    passes compute no token. A pass is counted at the start of the worker's method, before vLLM's annotation, so that a
    trace holds whole passes. Ray's executor calls the model runner, not the worker (vllm/v1/executor/ray_utils.py in
    0.12 to 0.32, vllm/executor/ray_utils.py in earlier releases). So the model runner's method is wrapped, too.
    """

    def __init__(self, worker: Any, run: runtime.Runtime, request: Request) -> None:
        subject = request.subject(_rank_part(worker), request.rank + _rank_in_replica(worker))
        settings = request.settings(run)
        passes = parse_iterations(settings.rollout_iterations)
        super().__init__(run, subject, settings, profilers.choose(settings), passes)
        self._worker = worker
        self._patches = ObjectPatches()
        self._armed = self._inside = False

    def install(self) -> None:
        """Create the step's folder, and wrap the methods that run a forward pass.

        Raises:
            OSError: The folder can't be created.
        """
        self.artifacts.open()
        # Since 0.11.1, the worker annotates its passes itself (gpu_worker.py, annotate_profile).
        annotate = not hasattr(self._worker, "annotate_profile")
        self._patches.replace(self._worker, "execute_model", functools.partial(self._with_count, annotate))
        model_runner = getattr(self._worker, "model_runner", None)
        self._patches.replace(model_runner, "execute_model", functools.partial(self._with_count, True))

    def switch_on(self) -> None:
        if not self._armed:
            self._armed = True
            self.reach()

    def switch_off(self, cut: str = "") -> None:
        if not self.recording:
            return
        if reason := self.cut or cut:
            self.abort(reason)
        else:
            self.stop("" if self.passed else "the engine ran no forward pass")

    def uninstall(self) -> str:
        """End the capture and restore the worker's methods. Return the problem, or an empty string."""
        self._patches.undo()
        self._armed = False
        self.switch_off(cut="the engine's own stop did not reach the worker")
        was_waiting = self.state == "waiting"
        # The engine may be ended after the stop, so the trace must be written before this function returns.
        problem = self.close("" if self._part.start else "the engine recorded nothing")
        return problem if was_waiting else self.artifacts.problem

    def _with_count(self, add_annotation: bool, execute: Any) -> Any:
        def execute_model(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return execute(*args, **kwargs)
            recorded = False
            with _guard():
                recorded = self._armed and self.before_pass()
            self._inside = True
            try:
                with annotation("execute_model") if recorded and add_annotation else contextlib.nullcontext():
                    return execute(*args, **kwargs)
            finally:
                self._inside = False

        return execute_model


def _prepare(worker: Any, content: dict[str, Any]) -> dict[str, str]:
    """Replace a vLLM worker's profiler by a `StandIn` (the worker's method `autoprof_prepare`)."""
    _release(worker)  # a capture may be left over from a trainer that has died
    problem = problem_of("vllm/worker", lambda: _capture(worker, Request.read(content)))
    replaced = {name: vars(worker)[name] for name in _PROFILER if name in vars(worker)}
    setattr(worker, _REPLACED, replaced)
    worker.profiler = StandIn(vars(worker).get(_SESSION))
    worker.profiler_config = Configured(replaced.get("profiler_config"))
    return {"problem": problem}


def _capture(worker: Any, request: Request) -> str:
    """Install a capture in the worker if the window selects the worker. Return the problem, or an empty string."""
    run = runtime.start()
    if run is None:
        return "autoprof is off in the worker's process"
    session = _WorkerCapture(worker, run, request)
    rank = session.subject.rank
    if not request.settings(run).takes(ROLE, range(rank, rank + 1), GENERATE):
        return ""
    if not session.claim():
        return "another profiler is recording in the worker's process"
    with contextlib.ExitStack() as undo:
        undo.callback(session.release)
        session.install()
        undo.pop_all()
    setattr(worker, _SESSION, session)
    return ""


def _cut(worker: Any, reason: str) -> dict[str, str]:
    """Store the reason why the recording of a vLLM worker ends early (the worker's method `autoprof_cut`)."""
    session = vars(worker).get(_SESSION)
    if session is not None:
        session.cut = reason
    return {"problem": ""}


def _release(worker: Any) -> dict[str, str]:
    """Restore a vLLM worker's own profiler and end its capture (the worker's method `autoprof_release`)."""
    return {"problem": problem_of("vllm/worker", _give_back, worker)}


def _give_back(worker: Any) -> str:
    replaced = vars(worker).pop(_REPLACED, None)
    if replaced is not None:
        for name in _PROFILER:
            vars(worker).pop(name, None)
        vars(worker).update(replaced)
    session = vars(worker).pop(_SESSION, None)
    return session.uninstall() if session is not None else ""


def _rank_in_replica(worker: Any) -> int:
    """Return the worker's rank in its replica.

    In each data-parallel engine of a replica, `worker.rank` begins at 0 (0.27.1, core.py). If an external launcher has
    started the workers, `worker.rank` is the global rank over all replicas (0.27.1, uniproc_executor.py).
    """
    if follow(worker, "parallel_config.distributed_executor_backend", None) == "external_launcher":
        return int(worker.rank) % int(follow(worker, "parallel_config.world_size", 1))
    return _data_parallel_rank(worker) * int(follow(worker, "parallel_config.world_size", 1)) + int(worker.rank)


def _rank_part(worker: Any) -> str:
    """Return the part of a file name that identifies a worker of a replica, such as `dp1_rank0`.

    vLLM's own file names contain the same part since 0.17.
    """
    part = f"rank{worker.rank}"
    with seam.suppress(ImportError):
        from vllm.distributed.utils import get_worker_rank_suffix

        part = str(get_worker_rank_suffix(global_rank=worker.rank))
    engine_rank = _data_parallel_rank(worker)
    return f"dp{engine_rank}_{part}" if engine_rank and "dp" not in part else part


def _data_parallel_rank(worker: Any) -> int:
    return int(follow(worker, "parallel_config.data_parallel_rank", 0))


# Attributes of the scheduler that hold waiting requests. Some releases have several of these queues.
_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


class ProcessStart(Behaviour):
    """`EngineCore.__init__` and `WorkerBase.__init__`. After the call, snapshots show the stacks of the process.

    Snapshots of an engine core also show the state of its scheduler. If the workers have separate processes, no other
    hook is called in the processes of the engine core and the workers. The exception that ends an engine core is
    recorded, because multiprocessing catches it.
    """

    def around(self, call: Call) -> Around:
        yield CALL
        scheduler = getattr(call.instance, "scheduler", None)
        if scheduler is not None:
            snapshot.register_scheduler(scheduler, read)
            ObjectPatches().replace(call.instance, "_send_engine_dead", _with_exception)
            executor = getattr(call.instance, "model_executor", None)
            # Workers in the process of the executor, or in Ray actors, have no `proc`.
            workers = [worker.proc for worker in getattr(executor, "workers", None) or () if hasattr(worker, "proc")]
            named = [(f"vLLM's {worker.name}", worker) for worker in workers]
            watch_processes(executor, named, "vLLM", lambda: "the engine core stops its workers")


def _with_exception(send: Any) -> Any:
    """Return the method with which an engine core reports that an exception ends it, and record the exception."""

    def record_and_send(*args: Any, **kwargs: Any) -> Any:
        error, run = sys.exc_info()[1], runtime.current()
        with _guard():
            if error is not None and run is not None:
                exception = raised.read_exception(error)
                line = RaisedLine(time.time_ns(), ENGINE, "vLLM's EngineCore", None, ROLE, None, exception)
                run.timeline.write(line)
        return send(*args, **kwargs)

    return record_and_send


def read(scheduler: Any, left_out: list[str]) -> EngineState:
    """Return the state of a `Scheduler` of vLLM 0.9 to 0.33. Add errors of single fields to `left_out`."""
    state: EngineState = {}
    running = list(scheduler.running)
    waiting = [request for name in _QUEUES for request in tuple(getattr(scheduler, name, ()))]
    state["running"], state["waiting"] = len(running), len(waiting)
    read_part(state, left_out, "free_blocks", lambda: scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
    read_part(state, left_out, "total_blocks", lambda: scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
    if running or waiting:
        oldest = min((*running, *waiting), key=lambda request: request.arrival_time)
        state["longest"] = str(oldest.request_id)
        state["longest_s"] = round(time.time() - oldest.arrival_time, 3)
    return state
