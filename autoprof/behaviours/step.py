"""Steps, in the process of the trainer: the window is decided here and posted before a stage begins."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, Literal

from autoprof import board, clocks, continuous, ending, log, runtime
from autoprof.behaviours import Behaviour, rollout, stage_pair, step_workers
from autoprof.behaviours.stage import own_rank
from autoprof.choosing import Chooser
from autoprof.paths import CallPath
from autoprof.timeline import Span
from autoprof.waits import InThread, ask
from autoprof.wrapping import CALL, Around, Call, Wait

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
        self.span = Span(run, "step", "step", step=number, role="trainer", rank=own_rank())

    def announce(self, run: runtime.Runtime, first: Callable[[], Mapping[int, int]]) -> None:
        """Decide whether this step is captured, and tell the other processes. `first` as in `Watch.found`."""
        was_off = _chooser.off
        # Where torchrun has started several trainers, rank 0 takes what is asked for.
        _chooser.look(run.rundir, self.ordinal - 1, take_it=own_rank() == 0 or run.started_here)
        _chooser.watch(run, self.number, self.ordinal)
        overrides = _chooser.choose(run.settings, self.number, self.ordinal)
        self.off = _chooser.off
        self.captured = overrides is not None
        self.overrides = {} if overrides is None else _chooser.found(overrides, first)
        if was_off and self.off:  # all know it
            return
        posting = board.Posting(step=self.number, captured=self.captured, overrides=self.overrides, off=self.off)
        board.post(run.info.id, posting)


_current: _Step | None = None
_chooser = Chooser()
_executed = 0


class StepBehaviour(Behaviour):
    """What is common to the behaviours that open a step.

    Attributes:
        number: Path from a parameter of the call to the step's number; without it, steps are counted from 1.
        resumed: Path to the number of the step that the run was resumed from, 0 for none; counted steps go on there.
        offset: Added to the number, where the counter is that of the finished step.
        replicas: Where the trainer keeps its rollout replicas.
        workers: Paths to lists of the Ray actors that work on the step. The captures of whole steps in them are ended
            with the step (`AUTOPROF_MODE=continuous`). A list that is not there has none.
        engines: `step` where engines are captured from the begin of the step, `around` where a `rollout.around` hook
            does it.
    """

    layer: ClassVar[int] = STEP
    number: CallPath = ""
    resumed: CallPath = ""
    offset: int = 0
    replicas: list[rollout.Replicas] = []
    workers: list[CallPath] = []
    engines: Literal["step", "around"] = "step"

    def number_of(self, call: Call) -> int:
        """The number of the step that the call opens."""
        if self.number:
            return int(call.at(self.number)) + self.offset
        return (int(call.at(self.resumed)) if self.resumed else 0) + _executed + 1

    def begin(self, call: Call) -> Generator[Wait, Any, None]:
        """Open the step, and the window if it is one of those asked for."""
        global _current, _executed
        run = runtime.current()
        if run is None:
            return
        number = self.number_of(call)
        if _current is not None:
            if _current.number == number:
                return
            yield from finish()
        _executed += 1
        step = _current = _Step(run, number, _executed)
        yield from ask(step.announce, run, lambda: rollout.first_ranks(call, self.replicas))
        if step.captured:
            log.info(f"step {number} is captured")
            clocks.measure(run)
            rollout.open_window(number, step.overrides, call, self.replicas)
            step_workers.note(run, step.overrides, call, self.workers)
            if self.engines == "step" or run.settings.mode == "continuous":
                yield from rollout.start(run)


class Begin(StepBehaviour):
    """The call opens the step; a `step.end` hook, or the next begin, closes it.

    Nothing happens where the step with this number is open already, so that several calls may be a step's first.
    """

    def around(self, call: Call) -> Around:
        yield from self.begin(call)
        yield CALL
        return None


class Tick(StepBehaviour):
    """One call a step: it closes the step before and opens the next."""

    def around(self, call: Call) -> Around:
        yield from finish()
        yield CALL
        yield from self.begin(call)
        return None


class Wrap(StepBehaviour):
    """One call is one step."""

    def around(self, call: Call) -> Around:
        yield from self.begin(call)
        outcome = yield CALL
        yield from finish(outcome.error)
        return None


class End(Behaviour):
    """The step ends when the call has returned."""

    layer: ClassVar[int] = STEP

    def around(self, call: Call) -> Around:
        outcome = yield CALL
        yield from finish(outcome.error)
        return None


class Loop(Behaviour):
    """The call makes all steps: when it has returned, the last one ends, and no step follows.

    Under Ray the workers may be ended right after, so what they are writing is waited for.
    """

    layer: ClassVar[int] = LOOP

    def around(self, call: Call) -> Around:
        outcome = yield CALL
        yield from finish(outcome.error)
        run = runtime.current()
        if run is not None:
            step_workers.step_ended(together=False)
            yield from rollout.settle()
            yield InThread(ending.let_workers_write, run)
        return None


class Trainer(Behaviour):
    """The call makes a trainer in this process: engines beside it leave it to the trainer to say which step it is."""

    def around(self, call: Call) -> Around:
        board.trainer_here()
        yield CALL
        return None


def finish(error: BaseException | None = None) -> Generator[Wait, Any, None]:
    """Close the step that is going on, if any: its open stages and its engines first, then the board."""
    global _current
    run, step = runtime.current(), _current
    if run is None or step is None:
        return
    _current = None
    if step.off:
        return
    stage_pair.end_all()
    if step.captured:
        yield from rollout.stop(run)
        rollout.close_window()
    step_workers.step_ended(together=_next_belongs_to_it(run, step))
    step.span.end(error)
    _chooser.judge(step.number, step.ordinal)
    yield from ask(board.post, run.info.id, None)
    if step.captured:
        yield from ask(_chooser.ended)
        if not _chooser.any_after(run.settings, step.number, step.ordinal):
            ending.window_passed(run)


def _next_belongs_to_it(run: runtime.Runtime, step: _Step) -> bool:
    """Whether the next step is captured too, and in one capture with this one."""
    if not step.captured or run.settings.consecutive != continuous.TOGETHER:
        return False
    return _chooser.likely(run.settings, step.number + 1, step.ordinal + 1)
