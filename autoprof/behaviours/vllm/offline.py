"""vLLM's synchronous `LLM` in a script of the user's: a step is a generation batch, as in `serving/server.py`.

A batch lasts from the first request that an idle engine gets to the engine's step after which it has none left. That
is one call of `generate`, `chat`, or whatever else generates; a beam search, which makes such a call for each token, is
one batch too. The engine below `LLM` is driven as an `AsyncLLM` is.

In the process of a trainer (TRL's colocated mode, where each rank has an `LLM`) nothing is counted: a batch is recorded
where the trainer's step is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

from autoprof._boot import command
from autoprof.base.identity import own_rank
from autoprof.behaviours.rollout.engine import ROLE, Request
from autoprof.behaviours.serving import server
from autoprof.behaviours.trainer.running import in_whole
from autoprof.behaviours.vllm import engine
from autoprof.capture import lifecycle
from autoprof.config.kinds import GENERATE
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, follow
from autoprof.run import runtime, step_announcement

# Set on an LLMEngine.
_OFFLINE = "_autoprof_offline"


class AddRequest(Behaviour):
    """A request reaches the engine: if it was idle, a generation batch begins."""

    def around(self, call: Call) -> Around:
        offline = _offline(call.instance)
        offline.request()
        outcome = yield CALL
        if outcome.error is not None:
            offline.look()
        return None


class Step(Behaviour):
    """The engine has made a step: if no request is left, the batch has ended."""

    def around(self, call: Call) -> Around:
        yield CALL
        _offline(call.instance).look()
        return None


class Whole(Behaviour):
    """A method of `LLM` in which the engine falls idle again and again: its call is one batch.

    Attributes:
        engine: Path from a parameter of the call to the `LLMEngine`.
    """

    engine: CallPath = "self.llm_engine"

    def around(self, call: Call) -> Around:
        offline = _offline(call.at(self.engine))
        offline.inside += 1
        yield CALL
        offline.inside -= 1
        offline.look()
        return None


class Profile(Behaviour):
    """`LLMEngine.start_profile` and `stop_profile`, as somebody else calls them: their profiling goes first.

    Attributes:
        action: Which of the two the hook is on.
    """

    action: Literal["start", "stop"]

    def around(self, call: Call) -> Around:
        if engine.own_call.get():
            yield CALL
            return None
        offline = _offline(call.instance)
        if self.action == "start":
            offline.stop("somebody else started the engine's profiler")
        outcome = yield CALL
        vars(offline.driven).pop(engine.TAKEN, None)
        if self.action == "start" and outcome.error is None:
            setattr(offline.driven, engine.TAKEN, True)
        return None


class _Driven:
    """An `LLMEngine` as `vllm.start` and `vllm.stop` see an `AsyncLLM`: what they await is done when it is called."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_engine"], name)

    async def start_profile(self) -> None:
        self._engine.start_profile()

    async def stop_profile(self) -> None:
        self._engine.stop_profile()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return self._engine.collective_rpc(method, args=args)


class _Offline:
    """One `LLMEngine`, its batches, and the recording of them."""

    def __init__(self, engine: Any) -> None:
        self.inside = 0
        self.driven = _Driven(engine)
        self._engine = engine
        self._batches = server.Batches()
        self._captured = False

    def request(self) -> None:
        """Note a request that reaches the engine."""
        if self._going_on and (self.inside or self._unfinished()):
            return
        run = runtime.current()
        if run is None:
            return
        trainer_here, posting = step_announcement.own()
        if trainer_here:
            self.stop()
            if posting is not None and posting.captured:
                self._start(self._asked(run, posting))
        elif not _trainers(run):
            self._end()
            self._batches.look(run)
            self._start(self._batches.begin(run))

    def look(self) -> None:
        """See whether the batch has ended."""
        if self._going_on and not self.inside and not self._unfinished():
            self._end()

    def stop(self, cut: str = "") -> None:
        """End the recording that is going on, if any. `cut` says why it ends early, if it does."""
        captured, self._captured = self._captured, False
        if captured:
            server.said(_now(engine.stop(self.driven, cut)))

    @property
    def _going_on(self) -> bool:
        return self._captured or self._batches.going_on

    def _asked(self, run: runtime.Runtime, posting: step_announcement.StepAnnouncement) -> Request | None:
        """Return the request to the engine in a step of the trainer in this process, if its ranks are chosen.

        Every rank of the trainer has an engine (vLLM's `external_launcher`): as many as it says are one replica.
        """
        if lifecycle.taken() or in_whole():  # the stage that is running holds the rollout, or it is none of the step's
            return None
        size = int(follow(self._engine, "vllm_config.parallel_config.world_size", 1))
        replica = own_rank() // size
        request = Request(
            action="start", step=posting.step, replica=replica, rank=replica * size, overrides=posting.overrides
        )
        ranks = range(own_rank(), own_rank() + 1)
        return request if request.settings(run).takes(ROLE, ranks, GENERATE) else None

    def _start(self, asked: Request | None) -> None:
        if asked is not None:
            self._captured = not server.said(_now(engine.start(self.driven, asked)))

    def _end(self) -> None:
        try:
            self.stop()
        finally:
            self._batches.end()

    def _unfinished(self) -> bool:
        # Not the engine's own method: with several data-parallel ranks that asks the others, who would have to answer.
        return bool(self._engine.output_processor.has_unfinished_requests())


def _offline(engine: Any) -> _Offline:
    offline: _Offline | None = getattr(engine, _OFFLINE, None)
    if offline is None:
        offline = _Offline(engine)
        setattr(engine, _OFFLINE, offline)
    return offline


def _trainers(run: runtime.Runtime) -> bool:
    """Return whether a trainer says which step it is: engines in its workers are left to its recipe."""
    return command.THIS.ray_worker or step_announcement.read(run.info.id) is not None


def _now(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run a coroutine to its end in this thread: an engine in this process must be recorded in the thread it works in.

    Raises:
        RuntimeError: An event loop runs in this thread.
    """
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        work.close()
        loop.close()
