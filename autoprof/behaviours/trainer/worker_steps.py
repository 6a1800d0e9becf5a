"""Captures of whole steps, ended with the step in the processes that work on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprof.base import interrupts, log, process
from autoprof.capture import whole_step
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.hooks.call import Call
from autoprof.run import runtime


class _State(process.State):
    """The workers of the step, in their order, and quickly found: a cluster has hundreds."""

    def begin(self) -> None:
        self.workers: dict[Any, None] = {}


_state = _State()


def note(run: runtime.Runtime, overrides: Mapping[str, Any], call: Call, paths: list[str]) -> None:
    """Note the Ray actors that a step's window is for. In a list of them the place is the global rank."""
    settings = run.settings.overridden(overrides)
    if settings.mode != "continuous":
        return
    ranks = [Ranks.parse(text) for text in _ranks(settings)]
    for path in paths:
        for rank, worker in enumerate(call.at(path, None) or ()):
            if any(rank in taken for taken in ranks):
                _state.workers[worker] = None


def step_ended(together: bool) -> None:
    """End the captures of the step, here and in the workers. `together`: the next step may belong to the same."""
    whole_step.step_ended(together)
    for worker in _state.workers:
        try:
            # Nobody waits for the answer: the call comes before the trainer's next one in the actor's queue.
            worker.__ray_call__.remote(whole_step.end_in_worker, together)
        except Exception as error:
            interrupts.pass_on(error)
            log.warning_once(f"a worker could not be told that the step has ended: {type(error).__name__}: {error}")
    if not together:
        _state.workers.clear()


def _ranks(settings: Settings) -> set[str]:
    return {settings.ranks, *(settings.for_role(role).ranks for role in settings.role)}
