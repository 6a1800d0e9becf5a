"""Steps of a trainer: the open step, and the behaviours that open and close steps.

A step is announced before its first stage, and the announcement says whether the step is captured. In the trainer's
process, a hooked call or the trainer's own counter shows where a step begins. Worker processes outside Ray receive the
announcement of the step in the arguments of the trainer's calls. When a step ends, captures of the whole step end in
this process and in the workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal
from weakref import ref

import msgspec

from autoprof import _boot
from autoprof.base import log, process, seam
from autoprof.base.identity import own_rank
from autoprof.base.originals import time
from autoprof.behaviours import rollout, stages
from autoprof.capture import whole_step
from autoprof.config.selection import Ranks
from autoprof.hooks import patching, registry
from autoprof.hooks.behaviour import CALL, Around, Behaviour, Call, CallPath, Parameter, Wait
from autoprof.hooks.dispatch import InThread, ask
from autoprof.hooks.wrapper import wrap
from autoprof.run import clocks, cluster, end, runtime
from autoprof.run.journal import Span
from autoprof.rundir.records import MAX_NUMBER, Id
from autoprof.windows.chooser import Chooser


def note_worker(run: runtime.Runtime, overrides: Mapping[str, Any], call: Call, paths: list[str]) -> None:
    """If whole steps are captured, register the Ray actors whose ranks the step's window selects.

    Args:
        run: Run of this process.
        overrides: Settings of the window.
        call: Call that begins the step.
        paths: Paths to lists of Ray actors. An actor's index in its list is its global rank.
    """
    settings = run.settings.overridden(overrides)
    if settings.mode != "continuous":
        return
    selections = [Ranks.parse(settings.for_role(role).ranks) for role in ("", *settings.role)]
    for path in paths:
        for rank, worker in enumerate(call.at(path, None) or ()):
            if any(rank in selection for selection in selections):
                state.workers[worker] = None


def step_ended(may_continue: bool) -> None:
    """End the captures of the whole step in this process and in the workers.

    Args:
        may_continue: True if the next step may belong to the same capture. The capture then continues.
    """
    whole_step.step_ended(may_continue)
    for worker in state.workers:
        with seam.guard("could not notify a worker of the step's end", log.error_once):
            # Don't wait for the answer: in the actor's queue, this call comes before the next call of the trainer.
            worker.__ray_call__.remote(whole_step.stop_in_worker, may_continue)
    if not may_continue:
        state.workers.clear()


class OpenStep(msgspec.Struct, eq=False):
    """A step in the trainer's process, from the announcement of the step to its end.

    Attributes:
        run: Run of this process.
        number: Number of the step.
        loop: Number of the step's loop, from 1.
        step_in_run: Number of steps that this process has begun, with this step.
        span: Span of the step, or None after its end.
        captured: True if the step is captured.
        off: True if autoprof is off in the step.
        overrides: Settings of the step's window.
        updated_ns: Time of the last update of an `inner` step.
        stages_before: If the step began with the end of the step before: number of stages that had begun by then.
            Otherwise None. If the loop ends before another stage begins, there was no such step.
    """

    run: runtime.Runtime
    number: int
    loop: int
    step_in_run: int
    span: Span | None
    captured: bool = False
    off: bool = False
    overrides: dict[str, Any] = {}
    updated_ns: int | None = None
    stages_before: int | None = None
    _over: bool = False

    def announce(self, first: Callable[[], Mapping[int, int]]) -> None:
        """Decide whether this step is captured, and announce it to the other processes.

        Args:
            first: Function that returns the first global rank of each replica, as in `Monitor.with_stragglers`.
        """
        run, chooser = self.run, state.chooser
        was_off = chooser.off
        # If torchrun has started several trainers, only rank 0 takes the requests of `autoprof trigger`.
        chooser.look(run.rundir, self.number, take_it=run.decides)
        chooser.step_began(run, self.number, self.step_in_run)
        overrides = chooser.choose(run.settings, self.number, self.step_in_run)
        self.off = chooser.off
        self.captured = overrides is not None
        self.overrides = {} if overrides is None else chooser.with_stragglers(overrides, first)
        if was_off and self.off:  # the workers know from an earlier announcement that autoprof is off
            return
        announcement = cluster.StepAnnouncement(
            step=self.number, loop=self.loop, captured=self.captured, overrides=self.overrides, off=self.off
        )
        cluster.announce_step(run.info.id, announcement)

    def close(self, error: BaseException | None) -> Generator[Wait, Any, None]:
        """End the step: abort its open stages, stop its engines, then withdraw its announcement.

        Args:
            error: Exception that ended the step, if any.
        """
        run = self.run
        state.current = None
        if self.off:
            return
        stages.abort_paired()
        if self.captured:
            yield from rollout.stop(run)
        step_ended(may_continue=_shares_capture_with_next(run, self))
        self._end_span(error)
        state.chooser.step_ended(self.number, self.step_in_run)
        yield from ask(cluster.announce_step, run.info.id, None)
        if self.captured:
            yield from ask(state.chooser.ended)
            if not state.chooser.any_after(run.settings, self.number, self.step_in_run):
                end.window_passed(run)
        self._over = True

    def drop(self) -> None:
        """End the step after an interruption of its begin or end. Don't wait for the engines to stop."""
        if self._over or runtime.current() is not self.run:
            return
        if state.current is self:
            state.current = None
        if not self.off:
            stages.abort_paired()
            rollout.send_stop()
            step_ended(may_continue=False)
            self._end_span(None)
            cluster.announce_step(self.run.info.id, None)
            if self.captured:
                state.chooser.ended()
        self._over = True

    def drop_unused(self) -> None:
        """Remove the span of a step that began with the end of the step before, if no stage has begun since."""
        if self.stages_before == stages.state.begun and self.span is not None:
            self.span.drop()
            self.span = None

    def leave_updated(self) -> None:
        """End the last step of an inner loop at the time of its last update, because no hooked call comes later."""
        if self.updated_ns is not None and not self.off:
            self._end_span(None, self.updated_ns)

    def _end_span(self, error: BaseException | None, at_ns: int | None = None) -> None:
        span, self.span = self.span, None
        if span is not None:
            span.end(error, at_ns=at_ns)


class Loops:
    """Loops of this process: each belongs to one trainer, which runs steps with rising numbers.

    A `step.loop` hook shows which object is the trainer, and when its loop ends. Without such a hook, a step with a
    lower number than the step before begins a new loop. A step that has the same number as the step before is the same
    step again. If another object of the same class continues with the next number, its steps belong to the same loop.

    Attributes:
        number: Number of the current loop, from 1.
        loop_began: True if the current step begins a loop after another loop.
        trainer: Name of the trainer's class, or an empty string if it is unknown.
        executed_before: Number of steps that this process had begun before the current loop.
        finished: Number of the last finished step when the last `step.loop` call ended, or None if it was unknown.
    """

    def __init__(self) -> None:
        self.number = 1
        self.loop_began = False
        self.trainer = ""
        self.executed_before = 0
        self.finished: int | None = None
        # Number of the last step of the current loop.
        self._last: int | None = None
        # Number of `step.loop` calls that are running.
        self._running = 0
        # True if a `step.loop` call has ended after the last step.
        self._has_ended = False
        # True if the next step belongs to another trainer than the last step, and if both trainers have the same class.
        self._has_new_trainer = self._has_same_class = False
        self._trainer_ref: Callable[[], Any] = lambda: None
        # Start of the `step.loop` call that is running or was running last, by the monotonic clock; 0 if none.
        self._entered_ns = 0

    def enter(self, trainer: Any, executed: int) -> bool:
        """Note that a `step.loop` call of `trainer` begins. Return True if the next step begins a new loop.

        Args:
            trainer: Object that runs the steps, or None if the call has no such object.
            executed: Number of steps that this process has begun.
        """
        self._running += 1
        if self._running > 1 or trainer is None:
            return False
        try:
            trainer_ref = ref(trainer)
        except TypeError as error:  # the class has no weak references
            seam.pass_on(error)
            return False
        self._entered_ns = time.monotonic_ns()
        if self._last is not None and self._trainer_ref() is not trainer:
            self._has_new_trainer = True
            self._has_same_class = self.trainer == seam.name_of(type(trainer))
            self.executed_before = executed
        self._trainer_ref, self.trainer = trainer_ref, seam.name_of(type(trainer))
        return self._has_new_trainer

    def leave(self, finished: int | None) -> None:
        """Note that a `step.loop` call has ended. `finished` is the number of the last finished step, if known."""
        self._running = max(0, self._running - 1)
        self._has_ended |= not self._running
        self.finished = finished

    def begin_step(self, number: int) -> dict[str, Id]:
        """Note that a step begins. Return the ids of the step on the timeline.

        `loop_began` is True after this call if the step begins a new loop after another loop.
        """
        last, self._last = self._last, number
        falls = last is not None and (number < last or (self._has_ended and number == last))
        # A new object of the same class may resume the training from a checkpoint.
        continues = self._has_same_class and last is not None and number == last + 1
        begins = (self._has_new_trainer and not continues) or (falls and (self._has_ended or not self._running))
        self._has_new_trainer = self._has_same_class = self._has_ended = False
        self.loop_began = begins
        self.number += begins
        # A run with one loop has no ids of loops.
        ids: dict[str, Id] = {"loop": self.number} if self.number > 1 else {}
        if begins and self._running and self._entered_ns:
            ids["before_s"] = (time.monotonic_ns() - self._entered_ns) / 1e9
        return ids | {"trainer": self.trainer} if self.trainer else ids


class _StepState(process.State):
    """Steps of this process.

    Attributes:
        current: Open step, if any.
        loops: Loops of this process.
        chooser: Object that decides which steps are captured.
        executed: Number of steps begun.
        owner: Target whose hooks open steps, or an empty string before the first step.
        finished: Number of the last finished step, or None if no `step.finished` hook has reported a number.
        workers: Ray actors whose captures end with the current step. The dict is used as an ordered set, because a
            cluster has hundreds of actors.
    """

    ends = process.LAST_STEP

    def reset(self) -> None:
        self.current: OpenStep | None = None
        self.chooser = Chooser(of_trainer=True)
        self.loops = Loops()
        self.executed = 0
        self.owner = ""
        self.finished: int | None = None
        self.workers: dict[Any, None] = {}

    def at_exit(self) -> None:
        step, self.current = self.current, None
        if step is not None:
            step.drop_unused()
            step.leave_updated()


state = _StepState()


def finish(call: Call, error: BaseException | None = None) -> Generator[Wait, Any, None]:
    """Close the open step, if any, as `OpenStep.close` does. If a signal interrupts this, the step ends early."""
    step = state.current
    if step is not None:
        earlier_handler, call.on_interrupt = call.on_interrupt, step.drop
        yield from step.close(error)
        call.on_interrupt = earlier_handler


def drop() -> None:
    """End the open step, if any, after an interruption of the step's begin or end."""
    if state.current is not None:
        state.current.drop()


def _shares_capture_with_next(run: runtime.Runtime, step: OpenStep) -> bool:
    """Return True if this step and the next step will probably belong to one capture."""
    if not step.captured or run.settings.consecutive != whole_step.TOGETHER:
        return False
    return state.chooser.likely(run.settings, step.number + 1, step.step_in_run + 1)


# Layers of hooks on one function. The hook of a step surrounds the hooks of the step's stages. The hook of a loop
# surrounds the hooks of the steps.
STEP, LOOP = 1, 2


class StepBehaviour(Behaviour):
    """Common part of the behaviours that open a step.

    Attributes:
        number: Path from a parameter of the call to the number of the step. Without this path, steps are counted from
            1, or from the last number that a `step.finished` hook reported.
        resumed: Path to the number of the step from which the run was resumed, or to 0 if the run was not resumed.
            Steps without `number` are counted from this step.
        offset: Number that is added to the value at `number`. Use 1 if the value is the number of the finished step.
        replicas: Tables with the paths to the trainer's rollout replicas.
        workers: Paths to lists of the Ray actors that work on the step. If `AUTOPROF_MODE=continuous` is set, the
            actors' captures of the whole step end when the step ends. A missing list counts as an empty list.
        engines: `step`: captures of engines begin when the step begins. `around`: a `rollout.around` hook captures the
            engines.
        inner: True if the steps belong to an engine, or to a loop without a trainer. The hook opens steps only if no
            trainer announces steps. Without `number`, the next step begins with the first call after a `step.update`.
    """

    layer: ClassVar[int] = STEP
    number: CallPath = ""
    resumed: CallPath = ""
    offset: int = 0
    replicas: list[rollout.Replicas] = []
    workers: list[CallPath] = []
    engines: Literal["step", "around"] = "step"
    inner: bool = False

    def number_of(self, call: Call) -> int:
        """Return the number of the step that the call opens."""
        if self.number:
            number = call.at(self.number)
            try:
                step = int(number) + self.offset
                if abs(step) <= MAX_NUMBER:
                    return step
            except (TypeError, ValueError, OverflowError) as error:
                seam.pass_on(error)
            raise ValueError(f"number = {self.number!r} is {number!r:.60}, which is not a step number")
        if state.finished is not None:
            return state.finished + 1
        if self.inner and state.current is not None and state.current.updated_ns is None:
            return state.current.number
        return (int(call.at(self.resumed)) if self.resumed else 0) + state.executed - state.loops.executed_before + 1

    def begin(self, call: Call, number: int | None = None) -> Generator[Wait, Any, None]:
        """Open a step and, if the step is to be captured, its window. Without `number`, use `number_of`."""
        run = call.run
        if not self._opens_steps(call):
            return
        number = self.number_of(call) if number is None else number
        if state.current is not None:
            if state.current.number == number:
                return
            yield from finish(call)
        state.executed += 1
        whole_step.step_began()
        loops = state.loops
        ids = loops.begin_step(number)
        if loops.loop_began:
            state.chooser.loop_began()
        span = Span(run.timeline, "step", "step", step=number, role="trainer", rank=own_rank(), ids=ids)
        step = OpenStep(run, number, loops.number, state.executed, span)
        earlier_handler, call.on_interrupt = call.on_interrupt, step.drop
        state.current = step
        yield from ask(step.announce, lambda: rollout.first_ranks(call, self.replicas))
        if step.captured:
            log.info(f"step {number} is captured")
            clocks.measure(run.rundir, run.hooks)
            rollout.open_window(number, loops.number, step.overrides, call, self.replicas)
            note_worker(run, step.overrides, call, self.workers)
            if self.engines == "step" or run.settings.mode == "continuous":
                yield from rollout.start(run)
        call.on_interrupt = earlier_handler

    def _opens_steps(self, call: Call) -> bool:
        """Return True if the hook opens steps in this process.

        An inner hook opens steps only if no other target opens steps.
        """
        target = call.key.partition("/")[0]
        if not self.inner:
            state.owner = target
        elif not state.owner and not (cluster.own_announcement()[0] or cluster.is_up()):
            state.owner = target
            state.register_at_exit()
        return state.owner == target


class StepBegin(StepBehaviour):
    """The call opens a step. A `step.end` hook, or the start of the next step, closes the step.

    If the step with the same number is already open, the call opens no step. So a recipe may have several `step.begin`
    hooks, and the first call opens the step.
    """

    def around(self, call: Call) -> Around:
        yield from self.begin(call)
        yield CALL


class Tick(StepBehaviour):
    """The trainer makes the call once per step. The call closes the previous step and opens the next step.

    Attributes:
        at: Position of the call in a step. With `begin`, the step that the call opens contains the call. If the hook
            surrounds the items of an iterator, the step begins after the item. With `end`, the step that the call
            closes contains the call. The first step then begins with the first stage or span in this process, or with
            the first call. The number of the first step is read from the call that opens it, if that call has the
            parameter with which `number` begins. Otherwise, the number is 1. Ray workers don't open a first step,
            because they may import the trainer without running steps.
    """

    at: Literal["begin", "end"] = "begin"

    def install(self, owner: Any) -> bool:
        if self.at == "end" and not _boot.COMMAND.ray_worker:
            stages.state.opener = stages.state.open_first = self._first
        return False

    def around(self, call: Call) -> Around:
        opens_first, stages.state.open_first = stages.state.open_first is not None, None
        if self.at == "end":
            if opens_first:
                yield from self._first(call)
            outcome = yield CALL
            yield from finish(call, outcome.error)
        else:
            yield from finish(call)
            if not _takes_items(call):
                yield from self.begin(call)
                yield CALL
                return
            outcome = yield CALL
        if not outcome.over:
            yield from self.begin(call)
            if self.at == "end" and state.current is not None:
                state.current.stages_before = stages.state.begun

    def _first(self, call: Call) -> Generator[Wait, Any, None]:
        """Open the first step of a loop before the call, if no step is open."""
        if state.current is None:
            try:
                number = self.number_of(call)
            except (LookupError, TypeError, ValueError) as error:  # this call does not have the number
                seam.pass_on(error)
                number = 1
            yield from self.begin(call, number)


def _takes_items(call: Call) -> bool:
    """Return True if the hook surrounds the items of an iterator. The end of an iterator is known after the call."""
    hook = registry.bound.get(call.key)
    return hook is not None and hook.hook.around == "next"


class Wrap(StepBehaviour):
    """One call is one step."""

    def around(self, call: Call) -> Around:
        call.on_interrupt = drop
        yield from self.begin(call)
        outcome = yield CALL
        yield from finish(call, outcome.error)


class StepEnd(Behaviour):
    """The open step ends when the call returns."""

    layer: ClassVar[int] = STEP

    def around(self, call: Call) -> Around:
        call.on_interrupt = drop
        outcome = yield CALL
        yield from finish(call, outcome.error)


class Update(Behaviour):
    """The call does the last work of an `inner` step. Later work, before the next step, belongs to the same step."""

    layer: ClassVar[int] = STEP

    def around(self, call: Call) -> Around:
        yield CALL
        if state.current is not None:
            state.current.updated_ns = time.monotonic_ns()


class Finished(Behaviour):
    """The arguments contain the number of the finished step, or of the step from which the run was resumed.

    Step hooks without `number` count the next steps from this number.

    Attributes:
        number: Path from a parameter of the call to the number of the step. If the value is missing, the hook ignores
            the call.
    """

    number: CallPath

    def around(self, call: Call) -> Around:
        finished_step = call.at(self.number, None)
        yield CALL
        if finished_step is not None:
            state.finished = int(finished_step)


class Loop(Behaviour):
    """The call runs all steps. When the call returns, the last step ends.

    Under Ray, the workers may be killed right after the call. So autoprof waits until the workers have written their
    traces.
    """

    layer: ClassVar[int] = LOOP

    def around(self, call: Call) -> Around:
        loops = state.loops
        call.on_interrupt = partial(self._drop, loops)
        if loops.enter(_trainer_of(call), state.executed) and state.finished == loops.finished:
            state.finished = None
        stages.state.open_first = stages.state.opener
        outcome = yield CALL
        loops.leave(state.finished)
        call.on_interrupt = drop
        stages.state.open_first = None
        if state.current is not None:
            state.current.drop_unused()
        yield from finish(call, outcome.error)
        step_ended(may_continue=False)
        yield from rollout.collect_late_answers()
        yield InThread(end.let_workers_write, call.run)

    def _drop(self, loops: Loops) -> None:
        """End the open step and the loop after an interruption."""
        loops.leave(state.finished)
        drop()


def _trainer_of(call: Call) -> Any:
    """Return the object whose method was called. Return None for a function."""
    code = getattr(call.function, "__code__", None)
    return call.instance if code is not None and code.co_varnames[:1] == ("self",) else None


class Counter(StepBehaviour):
    """An attribute of the trainer that grows by 1 at the start of each step. The next increase ends the step.

    Other assignments, such as 0 at the start or the number of a checkpoint, begin no step. The hooked function assigns
    the attribute. Its parameters are `self`, the trainer, and `value`, the new value.

    Attributes:
        last: Path to the number of the last step. If the attribute grows beyond this number, the last step ends and no
            step begins.
    """

    last: CallPath = ""

    def around(self, call: Call) -> Around:
        name, instance, value = call.function.__name__, call.args[0], call.args[1]
        earlier_value = vars(instance).get(name)
        yield CALL
        if earlier_value is not None and value == earlier_value + 1:
            if self.last and self.number_of(call) > int(call.at(self.last)):
                yield from finish(call)
            else:
                yield from self.begin(call)

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
    """A function that the main module calls before the main module creates its trainer.

    Python runs the main module under the name `__main__`. When the call begins, autoprof applies the hooks that name
    the main module to `__main__`.
    """

    def around(self, call: Call) -> Around:
        patching.patch_main()
        yield CALL


class Replaced(Behaviour):
    """The call replaces functions and classes of other targets. Then autoprof applies the hooks of these targets again.

    Attributes:
        targets: Import names of the other targets.
    """

    targets: list[str]

    def around(self, call: Call) -> Around:
        yield CALL
        patching.patch_again(self.targets)


class Trainer(Behaviour):
    """The call creates a trainer in this process. From then on, only the trainer announces steps, not its engines."""

    def around(self, call: Call) -> Around:
        cluster.record_trainer()
        yield CALL


# Key in the dictionary of the call under which `Send` stores the announcement of the step.
_KEY = "autoprof"


class Send(Behaviour):
    """The trainer calls a worker process outside Ray. autoprof adds the step to a dictionary argument of the call.

    The dictionary may contain, for example, the headers of an HTTP request. In the worker, a `step.receive` hook reads
    the step from the dictionary.

    Attributes:
        carrier: Keyword parameter that takes the dictionary. If the call has no dictionary, autoprof adds one. The
            target must accept unknown keys in the dictionary.
    """

    carrier: Parameter

    def around(self, call: Call) -> Around:
        if _takes_keyword(call, self.carrier):
            carrier_dict = call.argument(self.carrier)
            if carrier_dict is None or type(carrier_dict) is dict:
                call.kwargs[self.carrier] = {**(carrier_dict or {}), _KEY: cluster.announcement_to_send()}
        yield CALL


class Receive(Behaviour):
    """The call handles a call of the trainer in a worker. autoprof reads the step that a `step.send` hook has added.

    The worker must make the hooked call before its stages.

    Attributes:
        carrier: Path from a parameter of the call to the dictionary that contains the step.
    """

    carrier: CallPath

    def around(self, call: Call) -> Around:
        carrier_dict = call.at(self.carrier, None)
        if (
            isinstance(carrier_dict, Mapping)
            and _KEY in carrier_dict
            and cluster.receive_announcement(carrier_dict[_KEY])
        ):
            stages.abort_paired()
            announcement = cluster.local_announcement()
            captured = announcement is not None and announcement.captured
            whole_step.step_ended(may_continue=captured and call.run.settings.consecutive == whole_step.TOGETHER)
        yield CALL


def _takes_keyword(call: Call, name: str) -> bool:
    """Return True if the call passes the argument by keyword, or if its parameter is keyword-only."""
    if name in call.kwargs:
        return True
    parameter = inspect.signature(call.function).parameters.get(name)
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY
