"""Stand-in for a vLLM worker's profiler during a capture of autoprof's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from autoprof.base import interrupts
from autoprof.run import runtime


class Recorder:
    """Recorder behind a stand-in; this one records nothing.

    A worker that does not take part in a capture needs it, too: the engine starts the profilers of all workers, and one
    that the user configured must not start with autoprof's.
    """

    recording = False

    def switch_on(self) -> None:
        """Start to record: the engine starts its profiler."""

    def switch_off(self, state: str = "complete", reason: str = "") -> None:
        """End the recording: the engine stops its profiler, or shuts down. May be called without a start, and again."""


class StandIn:
    """An object of autoprof's in `worker.profiler`, with all that any vLLM does with what it keeps there.

    Until 0.11 that is a `torch.profiler.profile` (`start`, `stop`, `key_averages().table()`: gpu_worker.py; in 0.12
    still cpu_worker.py), after that a `WorkerProfiler` (vllm/profiler/gpu_profiler.py in 0.12, wrapper.py since):
    `step` and `annotate_context_manager` in each forward pass, `is_running` before that in 0.28 to 0.30 and
    `should_annotate` since 0.31, `set_output_name` and arguments of `start` from 0.32. One of vLLM's own classes would
    need a module, a configuration and a way to count for each of them, and would write tables to disk. What a later
    vLLM may ask for beside these is answered by `_Nothing`, not by an error in a forward pass.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def start(self, *_: Any, **__: Any) -> None:
        _safely(self._recorder.switch_on)

    def stop(self) -> None:
        _safely(self._recorder.switch_off)

    def shutdown(self) -> None:
        _safely(lambda: self._recorder.switch_off("truncated", "the engine was shut down"))

    def step(self) -> None:
        """Do nothing: autoprof counts forward passes itself (passes.py)."""

    @property
    def is_running(self) -> bool:
        return self._recorder.recording

    should_annotate = is_running

    def annotate_context_manager(self, name: str) -> Any:
        return annotation(name) if self._recorder.recording else contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Nothing:
    """Can be called, entered, and asked for anything, and is false."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return ""


class Configured:
    """A worker's profiler configuration, but with a profiler: from 0.17 on `Worker.profile` refuses without one
    (gpu_worker.py), and asks for it again at stop."""

    profiler = "torch"

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_own"), name)


class Place:
    """`worker.profiler` and `worker.profiler_config` with a stand-in, until they are given back."""

    def __init__(self, worker: Any, recorder: Recorder) -> None:
        self._worker = worker
        self._before = {name: vars(worker)[name] for name in ("profiler", "profiler_config") if name in vars(worker)}
        worker.profiler = StandIn(recorder)
        worker.profiler_config = Configured(self._before.get("profiler_config"))

    def give_back(self) -> None:
        for name in ("profiler", "profiler_config"):
            vars(self._worker).pop(name, None)
        vars(self._worker).update(self._before)


def annotation(name: str) -> Any:
    """Return a context manager that shows in the trace."""
    import torch.profiler

    return torch.profiler.record_function(name)


def _safely(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("vllm/worker", error)
