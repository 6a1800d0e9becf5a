"""Captures of a vLLM engine's front end: the server process's work on requests and on the engine's outputs.

vLLM's own profiler of the front end starts and stops in any free thread of a pool (async_llm.py, 0.10 to 0.32), which
crashes torch (2.13), and records from start to stop. This capture begins and ends in the event loop's thread. It ends
after as many outputs as the workers record passes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from autoprof.base import seam
from autoprof.base.originals import threading
from autoprof.behaviours.vllm.worker import annotation
from autoprof.capture.artifacts import Subject
from autoprof.capture.pass_capture import PassCapture
from autoprof.capture.profilers.torch import FLAGS, TorchTool
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import follow
from autoprof.run import runtime

# Attribute of an engine while its front end is recorded: the `FrontEnd`.
_FRONT_END = "_autoprof_front_end"
# Estimated bytes of a recording at which it ends. The event loop is blocked while a recording is stopped and written:
# about one second for this size (vLLM 0.27.1, torch 2.13). It holds 200,000 outputs, or with stacks the tokens of 16
# requests in 100 passes.
MAX_BYTES = 60_000_000
# Bytes of one annotation in a trace.
ANNOTATION_BYTES = 300
# Bytes of the Python calls in a trace for one token of a request (vLLM 0.27.1).
STACK_BYTES_PER_TOKEN = 35_000
# Bytes of the Python calls in a trace for the arrival of one request (vLLM 0.27.1).
STACK_BYTES_PER_REQUEST = 200_000


class FrontEnd:
    """A recording of the front end, from `open` to `close`.

    An event loop's thread runs hardly any operator. So without `stack` in the contents, the trace holds only the
    annotations `add_request` and `process_outputs`, which this class adds.
    """

    def __init__(self, engine: Any, run: runtime.Runtime, subject: Subject, settings: Settings) -> None:
        """Prepare the recording.

        Args:
            engine: The `AsyncLLM`.
            run: Run of this process.
            subject: Subject of the capture.
            settings: Settings of rollouts in this window.
        """
        contents = ("cpu", *(word for word in settings.contents if word in FLAGS))
        self._stacks = "stack" in contents
        self._max_bytes = min(MAX_BYTES, settings.max_trace_mb * 1e6)
        first, stop_before = parse_iterations(settings.rollout_iterations)
        # Each data-parallel engine behind the front end produces one output per pass.
        engines = int(follow(engine, "vllm_config.parallel_config.data_parallel_size", 1))
        part = first * engines, stop_before and stop_before * engines
        own = msgspec.structs.replace(settings, contents=contents)
        self._capture = PassCapture(run, subject, own, TorchTool(), part)
        self._capture.left_out = [word for word in settings.contents if word not in contents]
        self._processor = engine.output_processor
        self._watched: list[str] = []
        self._last: float | None = None
        self._bytes = 0

    def open(self) -> None:
        """Wrap the methods for requests and outputs. Begin at once if the first pass is to be recorded."""
        self._watch("process_outputs", self._before_outputs)
        self._watch("add_request", self._before_request)
        self._capture.reach()

    def close(self, cut: str = "") -> None:
        """End the recording, if it has not ended yet. `cut` is the reason why it ends early, if it does."""
        for name in self._watched:
            vars(self._processor).pop(name, None)
        if cut:
            self._capture.abort(cut)
        else:
            self._capture.stop("" if self._capture.passed else "the engine produced no output")

    def _watch(self, name: str, around: Callable[..., contextlib.AbstractContextManager[Any]]) -> None:
        # If the instance itself has the attribute, another library has patched it. That patch could not be restored.
        if name in vars(self._processor):
            return
        method = getattr(self._processor, name)

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            annotated: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            with _guard():
                annotated = around(*args, **kwargs)
            with annotated:
                return method(*args, **kwargs)

        setattr(self._processor, name, watched)
        self._watched.append(name)

    def _before_request(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[Any]:
        self._grow(STACK_BYTES_PER_REQUEST)
        return self._annotated("add_request")

    def _before_outputs(
        self, engine_core_outputs: Any, engine_core_timestamp: float | None = None, *_: Any, **__: Any
    ) -> contextlib.AbstractContextManager[Any]:
        tokens = len(engine_core_outputs)
        # Outputs for more than 128 requests come in several pieces with the same timestamp (async_llm.py, 0.9 to 0.33).
        if tokens and (engine_core_timestamp is None or engine_core_timestamp != self._last):
            self._last = engine_core_timestamp
            self._capture.before_pass()
        self._grow(STACK_BYTES_PER_TOKEN * tokens)
        return self._annotated("process_outputs")

    def _grow(self, stacks_bytes: int) -> None:
        """Add the estimated bytes of the next call, or end the recording if it is already too large."""
        if self._bytes > self._max_bytes:
            self._capture.abort(f"a recording of the front end is limited to {self._max_bytes / 1e6:g} MB")
        elif self._capture.recording:
            self._bytes += ANNOTATION_BYTES + self._stacks * stacks_bytes

    def _annotated(self, name: str) -> contextlib.AbstractContextManager[Any]:
        if not self._capture.recording or self._capture.thread != threading.get_ident():
            return contextlib.nullcontext()
        return annotation(name)  # type: ignore[no-any-return]


def begin(engine: Any, run: runtime.Runtime, subject: Subject, settings: Settings) -> None:
    """Record the front end of an `AsyncLLM`, unless `AUTOPROF_DISABLE` names `vllm/front-end`. Never raises."""
    if run.settings.disabled("vllm", "front-end"):
        return
    with _guard():
        front_end = FrontEnd(engine, run, subject, settings)
        setattr(engine, _FRONT_END, front_end)
        front_end.open()


def end(engine: Any, cut: str) -> None:
    """End the recording that `begin` started, if any. Never raises."""
    with _guard():
        front_end = vars(engine).pop(_FRONT_END, None)
        if front_end is not None:
            front_end.close(cut)


def _guard() -> seam.guard:
    return seam.guard("vllm/front-end", runtime.report)
