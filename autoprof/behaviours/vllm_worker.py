"""vLLM's workers: for one capture each has an object of autoprof's where it keeps its profiler.

The engine starts and stops it as it would its own. It records in the worker's process with the tool that the settings
name, counts forward passes, and writes into the step's folder. vllm-ascend's workers are driven alike.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import msgspec

from autoprof import capture, interrupts, log, runtime, tools
from autoprof.behaviours import Behaviour
from autoprof.behaviours.engine import ROLE, Request
from autoprof.behaviours.stage import takes
from autoprof.behaviours.vllm_passes import Passes
from autoprof.behaviours.vllm_profiler import Place, Recorder
from autoprof.budget import OverBudget
from autoprof.capture import Recording
from autoprof.naming import Subject
from autoprof.paths import follow
from autoprof.placement import Placement, why_not
from autoprof.window import parse_iterations

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


class _Session(Recording, Recorder):
    """A capture in one worker, from prepare to release."""

    def __init__(self, worker: Any, run: runtime.Runtime, request: Request) -> None:
        super().__init__(
            Subject(
                step=request.step,
                role=ROLE,
                stage="rollout",
                rank=request.rank + _rank_in_replica(worker),
                replica=request.replica,
                part=_rank_part(worker),
            )
        )
        self.recording = False
        # Whether there is a meta file, and so nothing more to say, or that it could not be written.
        self.told = False
        self.problem = ""
        self.cut = ""
        self._worker = worker
        self._run = run
        self._settings = request.settings(run)
        self._first, self._stop_before = parse_iterations(self._settings.rollout_iterations)
        self.tool = tools.choose(self._settings)
        self._armed = False
        self._passed = 0

    def open(self) -> None:
        """Make the step's folder and count the worker's passes.

        Raises:
            OSError: The folder can't be made.
        """
        self.placement = Placement(self._run, self.subject, self._settings, self.tool.name)
        self._passes = Passes(self._worker, self._before_pass)

    def begin(self) -> None:
        if self._armed or self.told:
            return
        self._armed = True
        if self._first == 0:
            self._record()

    def end(self, state: str = "complete", reason: str = "") -> None:
        if not self.recording:
            return
        if self.thread != threading.get_ident():
            if capture.release(self):
                self.abandon("the engine stopped it in another thread than it began in")
            return
        if capture.release(self):
            self.finish("truncated" if self.cut else state, self.cut or reason)

    def close(self) -> str:
        """Take the session out of the worker; returns what went wrong, or an empty text."""
        self._passes.close()
        self._armed = False
        self.end("truncated", "the engine's own stop did not reach the worker")
        capture.release(self)
        # Whoever stopped the engine may end it now.
        self.placement.wait()
        if self.told:
            return self.problem or self.placement.problem
        if self._first and self._passed <= self._first:
            reason = f"the engine ran {self._passed} forward passes; recording was to begin after {self._first}"
        else:
            reason = "the engine recorded nothing"
        self._fail(reason)
        return reason

    def finish(self, state: str, reason: str) -> None:
        try:
            if not self.recording:
                self._fail(f"{reason}, before the first forward pass that was to be recorded")
                return
            self.recording = False
            self.placement.stop(self.tool)
            self.told = True
            if not reason and self._passed == 0:
                reason = "the engine ran no forward pass"
            self.placement.keep(self.tool, state, reason)
        except OSError as error:
            self.problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.ended.set()

    def abandon(self, reason: str) -> None:
        if self.recording:
            self.recording = False
            self.placement.stop(self.tool)
        self._fail(reason)
        self.ended.set()

    def _before_pass(self) -> bool:
        if not self._armed:
            return False
        passed, self._passed = self._passed, self._passed + 1
        if passed == self._stop_before and self.thread == threading.get_ident():
            # In another thread (Ray's executor) it goes on until the engine stops it, in the thread that it began in.
            self.end()
        elif self.recording and self.thread == threading.get_ident() and (cut := self.placement.exceeded(self.tool)):
            log.warning(f"step {self.subject.step}, {ROLE}: the capture ends early, {cut}")
            self.end("truncated", cut)
        elif passed == self._first and not self.recording and not self.told:
            self._record()
        return self.recording

    def _record(self) -> None:
        self.thread = threading.get_ident()
        try:
            self.placement.start(self.tool)
        except Exception as error:
            capture.release(self)
            self._fail(why_not(error))
            if isinstance(error, OverBudget):
                return
            raise
        self.recording = True

    def _fail(self, reason: str) -> None:
        self.told = True
        self.placement.fail(reason)


def _prepare(worker: Any, asked: dict[str, Any]) -> dict[str, str]:
    """`autoprof_prepare` of a vLLM worker: put an object of autoprof's where the worker keeps its profiler."""
    _release(worker)  # of a capture whose trainer went away
    session: Recorder = Recorder()
    try:
        session, problem = _session(worker, msgspec.convert(asked, Request))
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
    if not takes(request.settings(run), ROLE, range(session.subject.rank, session.subject.rank + 1)):
        return Recorder(), ""
    if not capture.claim(session, session.tool):
        return Recorder(), "another profiler is recording in the worker's process"
    try:
        session.open()
    except BaseException:
        capture.release(session)
        raise
    setattr(worker, _SESSION, session)
    return session, ""


def _cut(worker: Any, reason: str) -> dict[str, str]:
    """`autoprof_cut` of a vLLM worker: what is recorded ends early."""
    session = vars(worker).get(_SESSION)
    if session is not None:
        session.cut = reason
    return {"problem": ""}


def _release(worker: Any) -> dict[str, str]:
    """`autoprof_release` of a vLLM worker: give it back the profiler that it had."""
    try:
        place = vars(worker).pop(_PLACE, None)
        if place is not None:
            place.give_back()
        session = vars(worker).pop(_SESSION, None)
        return {"problem": session.close() if session is not None else ""}
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("vllm/worker", error)
        return {"problem": f"{type(error).__name__}: {error}"}


def _rank_in_replica(worker: Any) -> int:
    """The worker's rank among all of its replica: `rank` counts anew in each data-parallel engine (0.27.1, core.py).

    With an external launcher it is the global one, of as many replicas as there are (0.27.1, uniproc_executor.py).
    """
    if follow(worker, "parallel_config.distributed_executor_backend", None) == "external_launcher":
        return int(worker.rank) % int(follow(worker, "parallel_config.world_size", 1))
    return _data_parallel_rank(worker) * int(follow(worker, "parallel_config.world_size", 1)) + int(worker.rank)


def _rank_part(worker: Any) -> str:
    """What tells the workers of a replica apart in file names, as vLLM itself names them from 0.17 on."""
    part = f"rank{worker.rank}"
    with contextlib.suppress(ImportError):
        from vllm.distributed.utils import get_worker_rank_suffix

        part = str(get_worker_rank_suffix(global_rank=worker.rank))
    engine = _data_parallel_rank(worker)
    return f"dp{engine}_{part}" if engine and "dp" not in part else part


def _data_parallel_rank(worker: Any) -> int:
    return int(follow(worker, "parallel_config.data_parallel_rank", 0))
