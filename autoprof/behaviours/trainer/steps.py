"""Behaviours of steps, which choose and announce the window before the first stage of a step.

In the trainer's process, a step is recognized by a call or by the trainer's own counter. Worker processes outside Ray
get the step with the trainer's calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Literal

from autoprof._boot import command
from autoprof.base import log, seam
from autoprof.base.originals import time
from autoprof.behaviours.rollout import replicas
from autoprof.behaviours.trainer import open_step, running
from autoprof.behaviours.trainer.open_step import OpenStep, drop, finish, state
from autoprof.capture import whole_step
from autoprof.hooks import patching
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Parameter, Wait
from autoprof.hooks.dispatch import InThread, ask
from autoprof.hooks.wrapper import wrap
from autoprof.run import clocks, cluster, end, runtime, step_announcement

# Layers: a step's hook goes around the hooks of its stages, and a loop's hook around the hook of its last step.
STEP, LOOP = 1, 2


class StepBehaviour(Behaviour):
    """Common part of the behaviours that open a step.

    Attributes:
        number: Path from a parameter of the call to the step's number. Without it, steps are counted from 1, or from
            the last number that a `step.finished` hook reported.
        resumed: Path to the step from which the run was resumed, 0 for none. Counted steps continue from there.
        offset: Number to add if the value at `number` belongs to the finished step, for example 1.
        replicas: Tables that say where the trainer keeps its rollout replicas.
        workers: Paths to lists of the Ray actors that work on the step. With `AUTOPROF_MODE=continuous`, their captures
            of whole steps end with the step. A missing list is empty.
        engines: `step` to capture engines from the beginning of the step; `around` if a `rollout.around` hook
            captures them.
        inner: True for the steps of an engine, or of a loop without a trainer. They count as steps only if no trainer
            above them announces steps. Without `number`, the next step begins with the first call after a
            `step.update`.
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
                seam.pass_on(error)
                raise ValueError(f"number = {self.number!r} is {number!r:.60}, which is not a step number") from None
        if state.finished is not None:
            return state.finished + 1
        if self.inner and state.current is not None and state.current.updated_ns is None:
            return state.current.number
        return (int(call.at(self.resumed)) if self.resumed else 0) + state.executed + 1

    def begin(self, call: Call, number: int | None = None) -> Generator[Wait, Any, None]:
        """Open the step, and its window if the step is to be captured."""
        run = runtime.current()
        if run is None or not self._opens_steps(call):
            return
        number = self.number_of(call) if number is None else number
        if state.current is not None:
            if state.current.number == number:
                return
            yield from finish(call)
        state.executed += 1
        step = OpenStep(run, number, state.executed)
        before, call.on_interrupt = call.on_interrupt, step.drop
        state.current = step
        yield from ask(step.announce, run, lambda: replicas.first_ranks(call, self.replicas))
        if step.captured:
            log.info(f"step {number} is captured")
            clocks.measure(run.rundir, run.hooks)
            replicas.open_window(number, step.overrides, call, self.replicas)
            open_step.note_worker(run, step.overrides, call, self.workers)
            if self.engines == "step" or run.settings.mode == "continuous":
                yield from replicas.start(run)
        call.on_interrupt = before

    def _opens_steps(self, call: Call) -> bool:
        """Return whether the hook opens steps in this process. An inner hook does so only if no other target does."""
        target = call.key.partition("/")[0]
        if not self.inner:
            state.owner = target
        elif not state.owner and not (step_announcement.own()[0] or cluster.is_up()):
            state.owner = target
            state.end_first()
        return state.owner == target


class StepBegin(StepBehaviour):
    """The call opens the step. A `step.end` hook, or the next step, closes it.

    If the step with this number is already open, the call does nothing. So several hooks may be the first of a step.
    """

    def around(self, call: Call) -> Around:
        yield from self.begin(call)
        yield CALL
        return None


class Tick(StepBehaviour):
    """The call is made once per step. It closes the previous step and opens the next one.

    Attributes:
        at: Position of the call in a step. With `end`, the first stage or span in this process opens the first step;
            its call gives the number if it has the parameter with which `number` begins. Ray workers don't open this
            first step, since they may import the trainer without making steps.
    """

    at: Literal["begin", "end"] = "begin"

    def install(self, owner: Any) -> bool:
        if self.at == "end" and not command.THIS.ray_worker:
            state.open_first = self._first
        return False

    def around(self, call: Call) -> Around:
        state.open_first = None
        yield from finish(call)
        outcome = yield CALL
        if not outcome.over:
            yield from self.begin(call)
        return None

    def _first(self, call: Call) -> Generator[Wait, Any, None]:
        """Open the first step before the call of a stage, unless a step was opened before."""
        if not state.executed:
            try:
                number = self.number_of(call)
            except (LookupError, TypeError, ValueError) as error:  # this call does not have the number
                seam.pass_on(error)
                number = 1
            yield from self.begin(call, number)


class Wrap(StepBehaviour):
    """One call is one step."""

    def around(self, call: Call) -> Around:
        call.on_interrupt = drop
        yield from self.begin(call)
        outcome = yield CALL
        yield from finish(call, outcome.error)
        return None


class StepEnd(Behaviour):
    """The return of the call ends the step."""

    layer: ClassVar[int] = STEP

    def around(self, call: Call) -> Around:
        call.on_interrupt = drop
        outcome = yield CALL
        yield from finish(call, outcome.error)
        return None


class Update(Behaviour):
    """The call is the last work of an `inner` step. Work before the next step still belongs to this step."""

    layer: ClassVar[int] = STEP

    def around(self, call: Call) -> Around:
        yield CALL
        if state.current is not None:
            state.current.updated_ns = time.monotonic_ns()
        return None


class Finished(Behaviour):
    """The call has the number of the finished step, or of the step from which the run was resumed.

    Step hooks without `number` continue from it.

    Attributes:
        number: Path from a parameter of the call to the step's number. A missing value is ignored.
    """

    number: CallPath

    def around(self, call: Call) -> Around:
        number = call.at(self.number, None)
        yield CALL
        if number is not None:
            state.finished = int(number)
        return None


class Loop(Behaviour):
    """The call makes all steps: its return ends the last step.

    Under Ray, the workers may be killed right after, so autoprof waits until they have written their traces.
    """

    layer: ClassVar[int] = LOOP

    def around(self, call: Call) -> Around:
        call.on_interrupt = drop
        outcome = yield CALL
        yield from finish(call, outcome.error)
        run = runtime.current()
        if run is not None:
            open_step.step_ended(together=False)
            yield from replicas.settle()
            yield InThread(end.let_workers_write, run)
        return None


class Counter(StepBehaviour):
    """An attribute of the trainer that grows by one with each step. A step lasts from one increase to the next.

    Other assignments, such as 0 at the start or the number of a checkpoint, begin no step. The hooked function is the
    assignment; its parameters are `self` and `value`.

    Attributes:
        last: Path to the number of the last step. An increase beyond it, before the trainer ends, begins no step.
    """

    last: CallPath = ""

    def around(self, call: Call) -> Around:
        name, instance, value = call.function.__name__, call.args[0], call.args[1]
        before = vars(instance).get(name)
        yield CALL
        if before is not None and value == before + 1:
            if self.last and self.number_of(call) > int(call.at(self.last)):
                yield from finish(call)
            else:
                yield from self.begin(call)
        return None

    def supply(self, owner: type, name: str, key: str) -> bool:
        def get(self: Any) -> Any:
            try:
                return vars(self)[name]
            except KeyError as error:
                seam.pass_on(error)
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

        def assign(self: Any, value: Any) -> None:
            vars(self)[name] = value

        def delete(self: Any) -> None:
            vars(self).pop(name, None)

        assign.__name__ = name
        setattr(owner, name, property(get, wrap(assign, key), delete))
        return True


class Main(Behaviour):
    """A function that the main module calls before it creates its trainer.

    The main module runs as `__main__`. When the call begins, the hooks that name this module are applied to `__main__`.
    """

    def around(self, call: Call) -> Around:
        patching.patch_main()
        yield CALL
        return None


class Replaced(Behaviour):
    """The call replaces functions and classes of other targets. After it, their hooks are applied again.

    Attributes:
        targets: Import names of the other targets.
    """

    targets: list[str]

    def around(self, call: Call) -> Around:
        yield CALL
        patching.patch_again(self.targets)
        return None


class Trainer(Behaviour):
    """The call creates a trainer in this process. From then on, the trainer announces steps; its engines do not."""

    def around(self, call: Call) -> Around:
        step_announcement.trainer_here()
        yield CALL
        return None


# Key of the step in the dictionary that the call carries.
_KEY = "autoprof"


class Send(Behaviour):
    """The trainer calls a worker process outside Ray. autoprof adds the step to a dictionary that the call carries.

    Such a dictionary is, for example, the headers of a request. A `step.receive` hook reads it in the worker.

    Attributes:
        carrier: Keyword parameter that takes the dictionary. A call without a dictionary gets one. The target must
            accept unknown keys in it.
    """

    carrier: Parameter

    def around(self, call: Call) -> Around:
        if runtime.current() is not None and _takes_keyword(call, self.carrier):
            dictionary = call.argument(self.carrier)
            if dictionary is None or type(dictionary) is dict:
                call.kwargs[self.carrier] = {**(dictionary or {}), _KEY: step_announcement.parcel()}
        yield CALL
        return None


class Receive(Behaviour):
    """The call handles one call of the trainer in a worker. It reads the step that a `step.send` hook added.

    The hooked call must come before the worker's stages.

    Attributes:
        carrier: Path from a parameter of the call to the dictionary.
    """

    carrier: CallPath

    def around(self, call: Call) -> Around:
        run, dictionary = runtime.current(), call.at(self.carrier, None)
        if (
            run is not None
            and isinstance(dictionary, Mapping)
            and _KEY in dictionary
            and step_announcement.receive(dictionary[_KEY])
        ):
            running.abort_paired()
            now = step_announcement.here()
            next_too = now is not None and now.captured and run.settings.consecutive == whole_step.TOGETHER
            whole_step.step_ended(together=next_too)
        yield CALL
        return None


def _takes_keyword(call: Call, name: str) -> bool:
    """Return whether the argument can be passed by keyword: it is one already, or the parameter is keyword-only."""
    if name in call.kwargs:
        return True
    parameter = inspect.signature(call.function).parameters.get(name)
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY
