"""The current step of the trainer's process: its announcement, its window and its end.

Captures of whole steps end with it, also in the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from autoprof.base import interrupts, log, process
from autoprof.base.identity import own_rank
from autoprof.behaviours.rollout import replicas
from autoprof.behaviours.trainer import pairs
from autoprof.capture import whole_step
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import Call, Wait
from autoprof.hooks.dispatch import ask
from autoprof.run import end, runtime, step_announcement
from autoprof.run.timeline import Span
from autoprof.windows.chooser import Chooser


class _WorkerState(process.State):
    """The workers of the step, in their order, and quickly found: a cluster has hundreds."""

    def begin(self) -> None:
        self.workers: dict[Any, None] = {}


_worker_state = _WorkerState()


def note_worker(run: runtime.Runtime, overrides: Mapping[str, Any], call: Call, paths: list[str]) -> None:
    """Note the Ray actors that a step's window is for. In a list of them the place is the global rank."""
    settings = run.settings.overridden(overrides)
    if settings.mode != "continuous":
        return
    ranks = [Ranks.parse(text) for text in _ranks(settings)]
    for path in paths:
        for rank, worker in enumerate(call.at(path, None) or ()):
            if any(rank in taken for taken in ranks):
                _worker_state.workers[worker] = None


def step_ended(together: bool) -> None:
    """End the captures of the step, here and in the workers. `together`: the next step may belong to the same."""
    whole_step.step_ended(together)
    for worker in _worker_state.workers:
        try:
            # Nobody waits for the answer: the call comes before the trainer's next one in the actor's queue.
            worker.__ray_call__.remote(whole_step.end_in_worker, together)
        except Exception as error:
            interrupts.pass_on(error)
            log.warning_once(f"a worker could not be told that the step has ended: {type(error).__name__}: {error}")
    if not together:
        _worker_state.workers.clear()


def _ranks(settings: Settings) -> set[str]:
    return {settings.ranks, *(settings.for_role(role).ranks for role in settings.role)}


class Step:
    """One step in this process, from its announcement to its end."""

    def __init__(self, run: runtime.Runtime, number: int, ordinal: int) -> None:
        self.number = number
        self.ordinal = ordinal
        self.captured = False
        self.off = False
        self.overrides: dict[str, Any] = {}
        self.updated_ns: int | None = None
        self._run = run
        self._over = self._span_ended = False
        whole_step.step_began()
        self._span = Span(run.timeline, "step", "step", step=number, role="trainer", rank=own_rank())

    def announce(self, run: runtime.Runtime, first: Callable[[], Mapping[int, int]]) -> None:
        """Decide whether this step is captured, and tell the other processes. `first` as in
        `Monitor.with_stragglers`."""
        chooser = state.chooser
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
        announcement = step_announcement.StepAnnouncement(
            step=self.number, captured=self.captured, overrides=self.overrides, off=self.off
        )
        step_announcement.post(run.info.id, announcement)

    def close(self, error: BaseException | None) -> Generator[Wait, Any, None]:
        """End what is open of the step: its stages and its engines first, then its announcement."""
        run = self._run
        state.current = None
        if self.off:
            return
        pairs.end_all()
        if self.captured:
            yield from replicas.stop(run)
            replicas.close_window()
        step_ended(together=_next_belongs_to_it(run, self))
        self._end_span(error)
        state.chooser.step_ended(self.number, self.ordinal)
        yield from ask(step_announcement.post, run.info.id, None)
        if self.captured:
            yield from ask(state.chooser.ended)
            if not state.chooser.any_after(run.settings, self.number, self.ordinal):
                end.window_passed(run)
        self._over = True

    def drop(self) -> None:
        """End what is left of a step whose begin or end was interrupted. Waits for nobody."""
        if self._over or runtime.current() is not self._run:
            return
        if state.current is self:
            state.current = None
        if not self.off:
            pairs.end_all()
            replicas.drop()
            step_ended(together=False)
            self._end_span(None)
            step_announcement.post(self._run.info.id, None)
            if self.captured:
                state.chooser.ended()
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
        self.current: Step | None = None
        self.chooser = Chooser()
        self.executed = 0
        self.owner = ""
        self.finished: int | None = None

    def at_exit(self) -> None:
        step, self.current = self.current, None
        if step is not None:
            step.leave_updated()


state = _State()


def executed() -> int:
    """Return how many steps this process has begun."""
    return state.executed


def finish(error: BaseException | None = None) -> Generator[Wait, Any, None]:
    """Close the step that is going on, if any: its open stages and its engines first, then its announcement."""
    run, step = runtime.current(), state.current
    if run is None or step is None:
        return
    try:
        yield from step.close(error)
    except BaseException as interrupt:
        interrupts.undo(interrupt, step.drop)
        raise


def drop() -> None:
    """End what is left of a step whose begin or end was interrupted."""
    if state.current is not None:
        state.current.drop()


def _next_belongs_to_it(run: runtime.Runtime, step: Step) -> bool:
    """Return whether the next step is captured too, and in one capture with this one."""
    if not step.captured or run.settings.consecutive != whole_step.TOGETHER:
        return False
    return state.chooser.likely(run.settings, step.number + 1, step.ordinal + 1)
