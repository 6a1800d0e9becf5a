"""The open step of the trainer's process: the announcement, the window and the end of the step.

When a step ends, captures of the whole step end in this process and in the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from autoprof.base import log, process, seam
from autoprof.base.identity import own_rank
from autoprof.behaviours.rollout import replicas
from autoprof.behaviours.trainer import running
from autoprof.capture import whole_step
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import Call, Wait
from autoprof.hooks.dispatch import ask
from autoprof.run import end, runtime, step_announcement
from autoprof.run.timeline import Span
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
    selections = [Ranks.parse(text) for text in _rank_settings(settings)]
    for path in paths:
        for rank, worker in enumerate(call.at(path, None) or ()):
            if any(rank in selection for selection in selections):
                state.workers[worker] = None


def step_ended(together: bool) -> None:
    """End the captures of the whole step in this process and in the workers.

    Args:
        together: True if the next step may belong to the same capture. The capture then continues.
    """
    whole_step.step_ended(together)
    for worker in state.workers:
        with seam.guard("could not notify a worker of the step's end", log.error_once):
            # Don't wait for the answer: in the actor's queue, this call comes before the next call of the trainer.
            worker.__ray_call__.remote(whole_step.stop_in_worker, together)
    if not together:
        state.workers.clear()


def _rank_settings(settings: Settings) -> set[str]:
    return {settings.ranks, *(settings.for_role(role).ranks for role in settings.role)}


class OpenStep:
    """A step in the trainer's process, from the announcement of the step to its end."""

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
        """Decide whether this step is captured, and announce it to the other processes.

        Args:
            run: Run of this process.
            first: Function that returns the first global rank of each replica, as in `Monitor.with_stragglers`.
        """
        chooser = state.chooser
        was_off = chooser.off
        # If torchrun has started several trainers, only rank 0 takes the requests of `autoprof trigger`.
        chooser.look(run.rundir, self.number, take_it=run.decides)
        chooser.step_began(run, self.number, self.ordinal)
        overrides = chooser.choose(run.settings, self.number, self.ordinal)
        self.off = chooser.off
        self.captured = overrides is not None
        self.overrides = {} if overrides is None else chooser.with_stragglers(overrides, first)
        if was_off and self.off:  # the workers know from an earlier announcement that autoprof is off
            return
        announcement = step_announcement.StepAnnouncement(
            step=self.number, captured=self.captured, overrides=self.overrides, off=self.off
        )
        step_announcement.post(run.info.id, announcement)

    def close(self, error: BaseException | None) -> Generator[Wait, Any, None]:
        """End the step: abort its open stages, stop its engines, then withdraw its announcement.

        Args:
            error: Exception that ended the step, if any.
        """
        run = self._run
        state.current = None
        if self.off:
            return
        running.abort_paired()
        if self.captured:
            yield from replicas.stop(run)
            replicas.close_window()
        step_ended(together=_shares_capture_with_next(run, self))
        self._end_span(error)
        state.chooser.step_ended(self.number, self.ordinal)
        yield from ask(step_announcement.post, run.info.id, None)
        if self.captured:
            yield from ask(state.chooser.ended)
            if not state.chooser.any_after(run.settings, self.number, self.ordinal):
                end.window_passed(run)
        self._over = True

    def drop(self) -> None:
        """End the step after an interruption of its begin or end. Don't wait for the engines to stop."""
        if self._over or runtime.current() is not self._run:
            return
        if state.current is self:
            state.current = None
        if not self.off:
            running.abort_paired()
            replicas.drop()
            step_ended(together=False)
            self._end_span(None)
            step_announcement.post(self._run.info.id, None)
            if self.captured:
                state.chooser.ended()
        self._over = True

    def leave_updated(self) -> None:
        """End the last step of an inner loop at the time of its last update, because no hooked call comes later."""
        if self.updated_ns is not None and not self.off:
            self._end_span(None, self.updated_ns)

    def _end_span(self, error: BaseException | None, at_ns: int | None = None) -> None:
        if not self._span_ended:
            self._span_ended = True
            self._span.end(error, at_ns=at_ns)


class _StepState(process.State):
    """Steps of this process.

    Attributes:
        current: Open step, if any.
        chooser: Object that decides which steps are captured.
        executed: Number of steps begun.
        owner: Target whose hooks open steps, or an empty string before the first step.
        finished: Number of the last finished step, or None if no `step.finished` hook has reported a number.
        workers: Ray actors whose captures end with the current step. The dict is used as an ordered set, because a
            cluster has hundreds of actors.
        open_first: Function that opens the first step before the first stage or span of this process. Only a
            `step.tick` hook with `at = "end"` sets this function.
    """

    ends = process.LAST_STEP

    def begin(self) -> None:
        self.current: OpenStep | None = None
        self.chooser = Chooser(of_trainer=True)
        self.executed = 0
        self.owner = ""
        self.finished: int | None = None
        self.workers: dict[Any, None] = {}
        self.open_first: Callable[[Call], Generator[Wait, Any, None]] | None = None

    def in_child(self) -> None:
        super().in_child()
        self.open_first = None

    def at_exit(self) -> None:
        step, self.current = self.current, None
        if step is not None:
            step.leave_updated()


state = _StepState()


def executed() -> int:
    """Return the number of steps that this process has begun."""
    return state.executed


def finish(call: Call, error: BaseException | None = None) -> Generator[Wait, Any, None]:
    """Close the open step, if any, as `OpenStep.close` does. If a signal interrupts this, the step ends early."""
    run, step = runtime.current(), state.current
    if run is not None and step is not None:
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
    return state.chooser.likely(run.settings, step.number + 1, step.ordinal + 1)
