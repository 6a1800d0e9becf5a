"""The forward passes of a vLLM worker, counted by autoprof itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from autoprof.base import interrupts
from autoprof.behaviours.vllm.worker_profiler import annotation
from autoprof.run import runtime


class Passes:
    """Calls `before` ahead of each forward pass of a worker, until `close`.

    vLLM counts only from 0.12 on, and not alike: a delay of 0 and one of 1 are both none, `max_iterations` left
    a profiler that could not be started again until 0.29, and 0.31 and 0.32 take them in other places
    (vllm/profiler/wrapper.py). One count of autoprof's own means the same in all of them.

    A pass is a call of `execute_model`, as in vLLM's own count and its annotations; asynchronous scheduling makes some
    that compute no token. It is counted where the worker's begins, ahead of vLLM's annotation of it, so that a trace
    holds whole passes. Ray's executor calls the model runner without the worker (vllm/v1/executor/ray_utils.py in 0.12
    to 0.32, vllm/executor/ray_utils.py before), so that is watched as well.
    """

    def __init__(self, worker: Any, before: Callable[[], bool]) -> None:
        """Args:
        worker: The worker.
        before: Called ahead of each pass; it returns whether the pass is recorded.
        """
        self._before = before
        self._inside = False
        self._watched: list[Any] = []
        # From 0.11.1 on the worker annotates its passes (gpu_worker.py, annotate_profile).
        self._watch(worker, annotate=not hasattr(worker, "annotate_profile"))
        self._watch(getattr(worker, "model_runner", None), annotate=True)

    def close(self) -> None:
        """Give back what is watched."""
        for owner in self._watched:
            vars(owner).pop("execute_model", None)
        self._watched.clear()

    def _watch(self, owner: Any, annotate: bool) -> None:
        # One that has it as an attribute of its own is somebody else's patch, which could not be given back.
        if not hasattr(owner, "execute_model") or "execute_model" in vars(owner):
            return
        execute = owner.execute_model

        @functools.wraps(execute)
        def execute_model(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return execute(*args, **kwargs)
            recorded = self._counted()
            self._inside = True
            try:
                with annotation("execute_model") if recorded and annotate else contextlib.nullcontext():
                    return execute(*args, **kwargs)
            finally:
                self._inside = False

        owner.execute_model = execute_model
        self._watched.append(owner)

    def _counted(self) -> bool:
        try:
            return self._before()
        except Exception as error:
            interrupts.pass_on(error)
            runtime.report("vllm/worker", error)
            return False
