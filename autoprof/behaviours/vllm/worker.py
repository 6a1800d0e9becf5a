"""Captures in vLLM's workers: for each a worker has an object of autoprof's where it keeps its profiler.

The engine starts and stops it as it would its own. It records in the worker's process with the tool that the settings
name, counts forward passes, and writes into the step's folder. vllm-ascend's workers are driven alike.
"""

from __future__ import annotations

from typing import Any

from autoprof.base import interrupts
from autoprof.base.originals import threading
from autoprof.behaviours.rollout.request import ROLE, Request
from autoprof.behaviours.vllm.passes import Passes
from autoprof.behaviours.vllm.worker_profiler import Place, Recorder
from autoprof.capture import lifecycle, profilers
from autoprof.capture.pass_capture import PassCapture
from autoprof.config.kinds import GENERATE
from autoprof.config.selection import parse_iterations
from autoprof.hooks.attribute_path import follow
from autoprof.hooks.behaviour import Behaviour
from autoprof.run import runtime

# On a worker: the session, and the place that is to be given back.
_SESSION = "_autoprof_session"
_PLACE = "_autoprof_place"


class Worker(Behaviour):
    """Gives vLLM's worker class the methods that `collective_rpc` calls."""

    def install(self, owner: Any) -> bool:
        owner.autoprof_prepare = _prepare
        owner.autoprof_cut = _cut
        owner.autoprof_release = _release
        return True


class _Session(PassCapture, Recorder):
    """A capture in one worker, from prepare to release. Passes count while the engine's profiler is on."""

    def __init__(self, worker: Any, run: runtime.Runtime, request: Request) -> None:
        subject = request.subject(_rank_part(worker), request.rank + _rank_in_replica(worker))
        settings = request.settings(run)
        part = parse_iterations(settings.rollout_iterations)
        super().__init__(run, subject, settings, profilers.choose(settings), part)
        self.cut = ""
        self._worker = worker
        self._armed = False

    def put_in(self) -> None:
        """Make the step's folder and count the worker's passes.

        Raises:
            OSError: The folder can't be made.
        """
        self.open()
        self._passes = Passes(self._worker, self._before_pass)

    def switch_on(self) -> None:
        if not self._armed:
            self._armed = True
            self.reach()

    def switch_off(self, state: str = "complete", reason: str = "") -> None:
        if not self.recording:
            return
        if self.thread == threading.get_ident():
            self.end("truncated" if self.cut else state, self.cut or reason)
        elif lifecycle.release(self):
            self.abandon("the engine stopped it in another thread than it began in")

    def finish(self, state: str, reason: str) -> None:
        super().finish(state, reason or ("" if self.passed else "the engine ran no forward pass"))

    def take_out(self) -> str:
        """Take the session out of the worker; return a problem that was not told before, or an empty text."""
        self._passes.close()
        self._armed = False
        self.switch_off("truncated", "the engine's own stop did not reach the worker")
        lifecycle.release(self)
        # The engine may be ended once it is stopped: the trace has to be written by then.
        told = self.told
        problem = self.close("" if self._first else "the engine recorded nothing")
        return self.artifacts.problem if told else problem

    def _before_pass(self) -> bool:
        return self._armed and self.before_pass()


def _prepare(worker: Any, asked: dict[str, Any]) -> dict[str, str]:
    """Put an object of autoprof's where a vLLM worker keeps its profiler (`autoprof_prepare`)."""
    _release(worker)  # of a capture whose trainer went away
    session: Recorder = Recorder()
    try:
        session, problem = _session(worker, Request.read(asked))
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("vllm/worker", error)
        problem = f"{type(error).__name__}: {error}"
    setattr(worker, _PLACE, Place(worker, session))
    return {"problem": problem}


def _session(worker: Any, request: Request) -> tuple[Recorder, str]:
    run = runtime.start()
    if run is None:
        return Recorder(), "autoprof is off in the worker's process"
    session = _Session(worker, run, request)
    rank = session.subject.rank
    if not request.settings(run).takes(ROLE, range(rank, rank + 1), GENERATE):
        return Recorder(), ""
    if not lifecycle.claim(session, session.tool):
        return Recorder(), "another profiler is recording in the worker's process"
    try:
        session.put_in()
    except BaseException:
        lifecycle.release(session)
        raise
    setattr(worker, _SESSION, session)
    return session, ""


def _cut(worker: Any, reason: str) -> dict[str, str]:
    """End the recording of a vLLM worker early (`autoprof_cut`)."""
    session = vars(worker).get(_SESSION)
    if session is not None:
        session.cut = reason
    return {"problem": ""}


def _release(worker: Any) -> dict[str, str]:
    """Give a vLLM worker back the profiler that it had (`autoprof_release`)."""
    try:
        place = vars(worker).pop(_PLACE, None)
        if place is not None:
            place.give_back()
        session = vars(worker).pop(_SESSION, None)
        return {"problem": session.take_out() if session is not None else ""}
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("vllm/worker", error)
        return {"problem": f"{type(error).__name__}: {error}"}


def _rank_in_replica(worker: Any) -> int:
    """Return the rank among all of the replica: `rank` counts anew in each data-parallel engine (0.27.1, core.py).

    With an external launcher it is the global one, of as many replicas as there are (0.27.1, uniproc_executor.py).
    """
    if follow(worker, "parallel_config.distributed_executor_backend", None) == "external_launcher":
        return int(worker.rank) % int(follow(worker, "parallel_config.world_size", 1))
    return _data_parallel_rank(worker) * int(follow(worker, "parallel_config.world_size", 1)) + int(worker.rank)


def _rank_part(worker: Any) -> str:
    """Return the part that tells workers of a replica apart in file names, as vLLM itself names them from 0.17 on."""
    part = f"rank{worker.rank}"
    with interrupts.suppress(ImportError):
        from vllm.distributed.utils import get_worker_rank_suffix

        part = str(get_worker_rank_suffix(global_rank=worker.rank))
    engine = _data_parallel_rank(worker)
    return f"dp{engine}_{part}" if engine and "dp" not in part else part


def _data_parallel_rank(worker: Any) -> int:
    return int(follow(worker, "parallel_config.data_parallel_rank", 0))
