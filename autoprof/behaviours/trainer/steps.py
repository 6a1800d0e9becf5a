"""Steps, in the process of the trainer: the window is decided here and posted before a stage begins."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, Literal

from autoprof._boot import command
from autoprof.base import interrupts, log
from autoprof.base.originals import time
from autoprof.behaviours.rollout import replicas
from autoprof.behaviours.trainer import stages, worker_steps
from autoprof.behaviours.trainer.open_step import Step, drop, finish, state
from autoprof.hooks.attribute_path import CallPath
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call, Wait
from autoprof.hooks.waits import InThread, ask
from autoprof.run import end, runtime
from autoprof.run.cluster import clocks, current_step, kv

# A step goes around its stages, and the loop around the last step.
STEP, LOOP = 1, 2


class StepBehaviour(Behaviour):
    """Common part of the behaviours that open a step.

    Attributes:
        number: Path from a parameter of the call to the step's number; without it, steps are counted from 1, or go on
            after the one that a `step.finished` hook told last.
        resumed: Path to the number of the step that the run was resumed from, 0 for none; counted steps go on there.
        offset: Added to the number, where the counter is that of the finished step.
        replicas: Where the trainer keeps its rollout replicas.
        workers: Paths to lists of the Ray actors that work on the step. The captures of whole steps in them are ended
            with the step (`AUTOPROF_MODE=continuous`). A list that is not there has none.
        engines: `step` where engines are captured from the begin of the step, `around` where a `rollout.around` hook
            does it.
        inner: Whether it is a step only where no trainer above says which step it is: of an engine, or a loop without a
            trainer. Without `number`, the next step begins with the first call after a `step.update`.
    """

    layer: ClassVar[int] = STEP
    number: CallPath = ""
    resumed: CallPath = ""
    offset: int = 0
    replicas: list[replicas.Replicas] = []
    workers: list[CallPath] = []
    engines: Literal["step", "around"] = "step"
    inner: bool = False

    def number_of(self, call: Call) -> int:
        """Return the number of the step that the call opens."""
        if self.number:
            number = call.at(self.number)
            try:
                return int(number) + self.offset
            except (TypeError, ValueError, OverflowError) as error:
                interrupts.pass_on(error)
                raise ValueError(f"number = {self.number!r} is {number!r:.60}, which is no number of a step") from None
        if state.finished is not None:
            return state.finished + 1
        if self.inner and state.current is not None and state.current.updated_ns is None:
            return state.current.number
        return (int(call.at(self.resumed)) if self.resumed else 0) + state.executed + 1

    def begin(self, call: Call, number: int | None = None) -> Generator[Wait, Any, None]:
        """Open the step, and the window if it is one of those asked for."""
        run = runtime.current()
        if run is None or not self._owns(call):
            return
        number = self.number_of(call) if number is None else number
        if state.current is not None:
            if state.current.number == number:
                return
            yield from finish()
        state.executed += 1
        step = Step(run, number, state.executed)
        try:
            state.current = step
            yield from ask(step.announce, run, lambda: replicas.first_ranks(call, self.replicas))
            if step.captured:
                log.info(f"step {number} is captured")
                clocks.measure(run.rundir, run.hooks)
                replicas.open_window(number, step.overrides, call, self.replicas)
                worker_steps.note(run, step.overrides, call, self.workers)
                if self.engines == "step" or run.settings.mode == "continuous":
                    yield from replicas.start(run)
        except BaseException as error:
            interrupts.undo(error, step.drop)
            raise

    def _owns(self, call: Call) -> bool:
        """Return whether the hook opens steps in this process: an inner one leaves that to any other target's."""
        target = call.key.partition("/")[0]
        if not self.inner:
            state.owner = target
        elif not state.owner and not (current_step.own()[0] or kv.up()):
            state.owner = target
            state.end_first()
        return state.owner == target


class Begin(StepBehaviour):
    """The call opens the step; a `step.end` hook, or the next begin, closes it.

    Nothing happens where the step with this number is open already, so that several calls may be a step's first.
    """

    def around(self, call: Call) -> Around:
        yield from self.begin(call)
        yield CALL
        return None


class Tick(StepBehaviour):
    """One call a step: it closes the step before and opens the next.

    Attributes:
        at: Where in a step the call is. At its `end`, the first step begins with the first stage or span in this
            process, which says its number where it has the parameter that `number` begins with. Not in workers of Ray:
            they may import the trainer without making steps.
    """

    at: Literal["begin", "end"] = "begin"

    def install(self, owner: Any) -> bool:
        if self.at == "end" and not command.THIS.ray_worker:
            stages.open_first_step_by(self._first)
        return False

    def around(self, call: Call) -> Around:
        stages.open_first_step_by(None)
        yield from finish()
        outcome = yield CALL
        if not outcome.over:
            yield from self.begin(call)
        return None

    def _first(self, call: Call) -> Generator[Wait, Any, None]:
        """Open the first step before the call of a stage, unless there was one."""
        if not state.executed:
            try:
                number = self.number_of(call)
            except (LookupError, TypeError, ValueError) as error:  # it is not this call's
                interrupts.pass_on(error)
                number = 1
            yield from self.begin(call, number)


class Wrap(StepBehaviour):
    """One call is one step."""

    def around(self, call: Call) -> Around:
        try:
            yield from self.begin(call)
            outcome = yield CALL
            yield from finish(outcome.error)
        except BaseException as error:
            interrupts.undo(error, drop)
            raise
        return None


class End(Behaviour):
    """The step ends when the call has returned."""

    layer: ClassVar[int] = STEP

    def around(self, call: Call) -> Around:
        try:
            outcome = yield CALL
            yield from finish(outcome.error)
        except BaseException as error:
            interrupts.undo(error, drop)
            raise
        return None


class Update(Behaviour):
    """The call is the last work of a step that is `inner`: what comes before the next step begins belongs to it."""

    layer: ClassVar[int] = STEP

    def around(self, call: Call) -> Around:
        yield CALL
        if state.current is not None:
            state.current.updated_ns = time.monotonic_ns()
        return None


class Finished(Behaviour):
    """The call says which step is finished, or which one a run was resumed from: hooks without `number` go on there.

    Attributes:
        number: Path from a parameter of the call to the step's number; what is not there is passed over.
    """

    number: CallPath

    def around(self, call: Call) -> Around:
        number = call.at(self.number, None)
        yield CALL
        if number is not None:
            state.finished = int(number)
        return None


class Loop(Behaviour):
    """The call makes all steps: when it has returned, the last one ends, and no step follows.

    Under Ray the workers may be ended right after, so what they are writing is waited for.
    """

    layer: ClassVar[int] = LOOP

    def around(self, call: Call) -> Around:
        try:
            outcome = yield CALL
            yield from finish(outcome.error)
        except BaseException as error:
            interrupts.undo(error, drop)
            raise
        run = runtime.current()
        if run is not None:
            worker_steps.step_ended(together=False)
            yield from replicas.settle()
            yield InThread(end.let_workers_write, run)
        return None
