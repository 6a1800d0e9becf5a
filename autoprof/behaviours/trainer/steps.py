"""Steps in the trainer's process: the window is chosen and announced before a stage begins.

A step is known from a call, from the trainer's own counter, or from the calls that it sends to plain worker processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Literal

from autoprof._boot import command
from autoprof.base import interrupts, log
from autoprof.base.originals import time
from autoprof.behaviours.rollout import replicas
from autoprof.behaviours.trainer import open_step, pairs, stages
from autoprof.behaviours.trainer.open_step import Step, drop, finish, state
from autoprof.capture import whole_step
from autoprof.hooks import patching
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Parameter, Wait
from autoprof.hooks.dispatch import InThread, ask
from autoprof.hooks.wrapper import wrap
from autoprof.run import clocks, cluster, end, runtime, step_announcement

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
                open_step.note_worker(run, step.overrides, call, self.workers)
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
        elif not state.owner and not (step_announcement.own()[0] or cluster.is_up()):
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
            open_step.step_ended(together=False)
            yield from replicas.settle()
            yield InThread(end.let_workers_write, run)
        return None


class Counter(StepBehaviour):
    """An attribute of the trainer that is one higher in each step: a step is open from one increase to the next.

    Setting it to anything else, such as 0 at first or the number of a checkpoint, begins no step. The hook's function
    is the assignment, whose parameters are `self` and `value`.

    Attributes:
        last: Path to the number of the last step, beyond which a trainer may count once more before it ends.
    """

    last: CallPath = ""

    def around(self, call: Call) -> Around:
        name, instance, value = call.function.__name__, call.args[0], call.args[1]
        before = vars(instance).get(name)
        yield CALL
        if before is not None and value == before + 1:
            if self.last and self.number_of(call) > int(call.at(self.last)):
                yield from finish()
            else:
                yield from self.begin(call)
        return None

    def supply(self, owner: type, name: str, key: str) -> bool:
        def get(self: Any) -> Any:
            try:
                return vars(self)[name]
            except KeyError as error:
                interrupts.pass_on(error)
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

        def assign(self: Any, value: Any) -> None:
            vars(self)[name] = value

        def delete(self: Any) -> None:
            vars(self).pop(name, None)

        assign.__name__ = name
        setattr(owner, name, property(get, wrap(assign, key), delete))
        return True


class Main(Behaviour):
    """A function that the module which this process was started with calls before it makes its trainer.

    That module runs as `__main__`: hooks that name it are applied to that when the call begins.
    """

    def around(self, call: Call) -> Around:
        patching.patch_main()
        yield CALL
        return None


class Replaced(Behaviour):
    """The call replaces functions and classes of other targets: their hooks are applied again, to what is there then.

    Attributes:
        targets: These targets, by their import names.
    """

    targets: list[str]

    def around(self, call: Call) -> Around:
        yield CALL
        patching.patch_again(self.targets)
        return None


class Trainer(Behaviour):
    """The call makes a trainer in this process: engines beside it leave it to the trainer to say which step it is."""

    def around(self, call: Call) -> Around:
        step_announcement.trainer_here()
        yield CALL
        return None


# The key in the dictionary that the call carries.
_KEY = "autoprof"


class Send(Behaviour):
    """The trainer calls a worker that is a plain process: the step travels in a dictionary that the call carries, such
    as the headers of a request. A `step.receive` hook takes it out in the worker.

    Attributes:
        carrier: The keyword parameter that takes the dictionary, or nothing. The target must let keys pass that it does
            not know.
    """

    carrier: Parameter

    def around(self, call: Call) -> Around:
        if runtime.current() is not None and _takes_keyword(call, self.carrier):
            carried = call.argument(self.carrier)
            if carried is None or type(carried) is dict:
                call.kwargs[self.carrier] = {**(carried or {}), _KEY: step_announcement.parcel()}
        yield CALL
        return None


class Receive(Behaviour):
    """Made in a worker for each call of the trainer's, before its work: the step that a `step.send` hook sent arrives.

    Attributes:
        carrier: Path from a parameter of the call to the dictionary.
    """

    carrier: CallPath

    def around(self, call: Call) -> Around:
        run, carried = runtime.current(), call.at(self.carrier, None)
        if (
            run is not None
            and isinstance(carried, Mapping)
            and _KEY in carried
            and step_announcement.receive(carried[_KEY])
        ):
            pairs.end_all()
            now = step_announcement.here()
            next_too = now is not None and now.captured and run.settings.consecutive == whole_step.TOGETHER
            whole_step.step_ended(together=next_too)
        yield CALL
        return None


def _takes_keyword(call: Call, name: str) -> bool:
    """Return whether the call may get the argument by its name: it was not given by position."""
    if name in call.kwargs:
        return True
    found = inspect.signature(call.function).parameters.get(name)
    return found is not None and found.kind is inspect.Parameter.KEYWORD_ONLY
