"""Steps, in the process of the trainer: the window is decided here and posted before a stage begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, Literal

from autoprof._boot import command
from autoprof.base import interrupts, log, process
from autoprof.base.identity import own_rank
from autoprof.behaviours.rollout import replicas
from autoprof.behaviours.trainer import stage_pairs, stages, worker_steps
from autoprof.capture import whole_step
from autoprof.hooks.attribute_path import CallPath
from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.call import CALL, Around, Call, Wait
from autoprof.hooks.waits import InThread, ask
from autoprof.run import end, runtime
from autoprof.run.cluster import clocks, current_step, kv
from autoprof.run.timeline import Span
from autoprof.windows.chooser import Chooser

# A step goes around its stages, and the loop around the last step.
STEP, LOOP = 1, 2


class _Step:
    """The step that is going on in this process."""

    def __init__(self, run: runtime.Runtime, number: int, ordinal: int) -> None:
        self.number = number
        self.ordinal = ordinal
        self.captured = False
        self.off = False
        self.overrides: dict[str, Any] = {}
        self.updated_ns: int | None = None
        self._run = run
        self._over = self._span_ended = False
        self._span = Span(run.timeline, "step", "step", step=number, role="trainer", rank=own_rank())

    def announce(self, run: runtime.Runtime, first: Callable[[], Mapping[int, int]]) -> None:
        """Decide whether this step is captured, and tell the other processes. `first` as in
        `Monitor.with_stragglers`."""
        chooser = _state.chooser
        was_off = chooser.off
        # Where torchrun has started several trainers, rank 0 takes what is asked for.
        chooser.look(run.rundir, self.ordinal - 1, take_it=run.decides)
        chooser.step_began(run, self.number, self.ordinal)
        overrides = chooser.choose(run.settings, self.number, self.ordinal)
        self.off = chooser.off
        self.captured = overrides is not None
        self.overrides = {} if overrides is None else chooser.with_stragglers(overrides, first)
        if was_off and self.off:  # all know it
            return
        announcement = current_step.StepAnnouncement(
            step=self.number, captured=self.captured, overrides=self.overrides, off=self.off
        )
        current_step.post(run.info.id, announcement)

    def close(self, error: BaseException | None) -> Generator[Wait, Any, None]:
        """End what is open of the step: its stages and its engines first, then its announcement."""
        run = self._run
        _state.current = None
        if self.off:
            return
        stage_pairs.end_all()
        if self.captured:
            yield from replicas.stop(run)
            replicas.close_window()
        worker_steps.step_ended(together=_next_belongs_to_it(run, self))
        self._end_span(error)
        _state.chooser.step_ended(self.number, self.ordinal)
        yield from ask(current_step.post, run.info.id, None)
        if self.captured:
            yield from ask(_state.chooser.ended)
            if not _state.chooser.any_after(run.settings, self.number, self.ordinal):
                end.window_passed(run)
        self._over = True

    def drop(self) -> None:
        """End what is left of a step whose begin or end was interrupted. Waits for nobody."""
        if self._over or runtime.current() is not self._run:
            return
        if _state.current is self:
            _state.current = None
        if not self.off:
            stage_pairs.end_all()
            replicas.drop()
            worker_steps.step_ended(together=False)
            self._end_span(None)
            current_step.post(self._run.info.id, None)
            if self.captured:
                _state.chooser.ended()
        self._over = True

    def leave_updated(self) -> None:
        """End the step of a loop without a trainer, which makes no call after its last update."""
        if self.updated_ns is not None and not self.off:
            self._end_span(None, self.updated_ns)

    def _end_span(self, error: BaseException | None, at_ns: int | None = None) -> None:
        if not self._span_ended:
            self._span_ended = True
            self._span.end(error, at_ns=at_ns)


class _State(process.State):
    """The step that is going on, the target whose hooks open steps, the choice of captured ones, the count of all.

    Attributes:
        finished: The last finished step, where a `step.finished` hook has told it.
    """

    ends = process.LAST_STEP

    def begin(self) -> None:
        self.current: _Step | None = None
        self.chooser = Chooser()
        self.executed = 0
        self.owner = ""
        self.finished: int | None = None

    def at_exit(self) -> None:
        step, self.current = self.current, None
        if step is not None:
            step.leave_updated()


_state = _State()


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
            return int(call.at(self.number)) + self.offset
        if _state.finished is not None:
            return _state.finished + 1
        if self.inner and _state.current is not None and _state.current.updated_ns is None:
            return _state.current.number
        return (int(call.at(self.resumed)) if self.resumed else 0) + _state.executed + 1

    def begin(self, call: Call, number: int | None = None) -> Generator[Wait, Any, None]:
        """Open the step, and the window if it is one of those asked for."""
        run = runtime.current()
        if run is None or not self._owns(call):
            return
        number = self.number_of(call) if number is None else number
        if _state.current is not None:
            if _state.current.number == number:
                return
            yield from finish()
        _state.executed += 1
        step = _Step(run, number, _state.executed)
        try:
            _state.current = step
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
            _state.owner = target
        elif not _state.owner and not (current_step.own()[0] or kv.up()):
            _state.owner = target
            _state.end_first()
        return _state.owner == target


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
        if not _state.executed:
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
            interrupts.undo(error, _drop)
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
            interrupts.undo(error, _drop)
            raise
        return None


class Update(Behaviour):
    """The call is the last work of a step that is `inner`: what comes before the next step begins belongs to it."""

    layer: ClassVar[int] = STEP

    def around(self, call: Call) -> Around:
        yield CALL
        if _state.current is not None:
            _state.current.updated_ns = time.monotonic_ns()
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
            _state.finished = int(number)
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
            interrupts.undo(error, _drop)
            raise
        run = runtime.current()
        if run is not None:
            worker_steps.step_ended(together=False)
            yield from replicas.settle()
            yield InThread(end.let_workers_write, run)
        return None


def executed() -> int:
    """Return how many steps this process has begun."""
    return _state.executed


def finish(error: BaseException | None = None) -> Generator[Wait, Any, None]:
    """Close the step that is going on, if any: its open stages and its engines first, then its announcement."""
    run, step = runtime.current(), _state.current
    if run is None or step is None:
        return
    try:
        yield from step.close(error)
    except BaseException as interrupt:
        interrupts.undo(interrupt, step.drop)
        raise


def _drop() -> None:
    if _state.current is not None:
        _state.current.drop()


def _next_belongs_to_it(run: runtime.Runtime, step: _Step) -> bool:
    """Return whether the next step is captured too, and in one capture with this one."""
    if not step.captured or run.settings.consecutive != whole_step.TOGETHER:
        return False
    return _state.chooser.likely(run.settings, step.number + 1, step.ordinal + 1)
