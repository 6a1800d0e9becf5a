"""Captures of a vLLM engine's front end: the server process's work on requests and on the engine's outputs.

vLLM's own profiler of the front end starts and stops in any free thread of a pool (async_llm.py, 0.10 to 0.32), which
crashes torch (2.13). vLLM's profiler also records everything from start to stop. autoprof's capture begins and ends in
the thread of the event loop, and ends after as many outputs as the workers record passes.
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

# Attribute that an engine has while its front end is recorded. Its value is the `FrontEnd`.
_FRONT_END = "_autoprof_front_end"
# A recording ends when its estimated size reaches this number of bytes. The event loop is blocked while a recording is
# stopped and written: about one second for this size (vLLM 0.27.1, torch 2.13). This size is enough for 200,000
# outputs, or, if stacks are recorded, for the tokens of 16 requests in 100 passes.
MAX_BYTES = 60_000_000
# Size of one annotation in a trace, in bytes.
ANNOTATION_BYTES = 300
# Size in a trace of the Python calls for one token of a request, in bytes (vLLM 0.27.1).
STACK_BYTES_PER_TOKEN = 35_000
# Size in a trace of the Python calls for the arrival of one request, in bytes (vLLM 0.27.1).
STACK_BYTES_PER_REQUEST = 200_000


class FrontEnd:
    """A recording of the front end, from `open` to `close`.

    The event loop's thread runs hardly any operator. So if the contents do not include `stack`, the trace contains only
    the annotations `add_request` and `process_outputs`, which this class adds.
    """

    def __init__(self, engine: Any, run: runtime.Runtime, subject: Subject, settings: Settings) -> None:
        """Prepare the recording.

        Args:
            engine: The `AsyncLLM`.
            run: Run of this process.
            subject: Subject of the capture.
            settings: Settings of the window for the role rollout.
        """
        contents = ("cpu", *(word for word in settings.contents if word in FLAGS))
        self._stacks = "stack" in contents
        self._max_bytes = min(MAX_BYTES, settings.max_trace_mb * 1e6)
        first_pass, stop_before = parse_iterations(settings.rollout_iterations)
        # Each data-parallel engine behind the front end produces one output per pass.
        engine_count = int(follow(engine, "vllm_config.parallel_config.data_parallel_size", 1))
        outputs = first_pass * engine_count, stop_before and stop_before * engine_count
        capture_settings = msgspec.structs.replace(settings, contents=contents)
        self._capture = PassCapture(run, subject, capture_settings, TorchTool(), outputs)
        self._capture.left_out = [word for word in settings.contents if word not in contents]
        self._processor = engine.output_processor
        self._wrapped_methods: list[str] = []
        self._last_timestamp: float | None = None
        self._bytes = 0

    def open(self) -> None:
        """Wrap the methods that handle requests and outputs. If the first pass is selected, begin to record at once."""
        self._wrap_method("process_outputs", self._before_outputs)
        self._wrap_method("add_request", self._before_request)
        self._capture.reach()

    def close(self, cut: str = "") -> None:
        """Restore the methods, and end the recording, if the recording has not ended yet.

        Args:
            cut: Reason why the recording ends early. Empty if the recording ends normally.
        """
        for name in self._wrapped_methods:
            vars(self._processor).pop(name, None)
        if cut:
            self._capture.abort(cut)
        else:
            self._capture.stop("" if self._capture.passed else "the engine produced no output")

    def _wrap_method(self, name: str, around: Callable[..., contextlib.AbstractContextManager[Any]]) -> None:
        # If the instance itself has the attribute, another library has patched the method. `close` could not restore
        # the patch.
        if name in vars(self._processor):
            return
        method = getattr(self._processor, name)

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            annotation_block: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            with _guard():
                annotation_block = around(*args, **kwargs)
            with annotation_block:
                return method(*args, **kwargs)

        setattr(self._processor, name, wrapper)
        self._wrapped_methods.append(name)

    def _before_request(self, *_: Any, **__: Any) -> contextlib.AbstractContextManager[Any]:
        self._grow(STACK_BYTES_PER_REQUEST)
        return self._annotated("add_request")

    def _before_outputs(
        self, engine_core_outputs: Any, engine_core_timestamp: float | None = None, *_: Any, **__: Any
    ) -> contextlib.AbstractContextManager[Any]:
        token_count = len(engine_core_outputs)
        # Outputs for more than 128 requests come in several pieces with the same timestamp (async_llm.py, 0.9 to 0.33).
        if token_count and (engine_core_timestamp is None or engine_core_timestamp != self._last_timestamp):
            self._last_timestamp = engine_core_timestamp
            self._capture.before_pass()
        self._grow(STACK_BYTES_PER_TOKEN * token_count)
        return self._annotated("process_outputs")

    def _grow(self, stacks_bytes: int) -> None:
        """Add the size of the next call to the estimated size of the recording, or end a recording that is too large.

        Args:
            stacks_bytes: Estimated size of the call's stacks, in bytes. It counts only if stacks are recorded.
        """
        if self._bytes > self._max_bytes:
            self._capture.abort(f"a recording of the front end is limited to {self._max_bytes / 1e6:g} MB")
        elif self._capture.recording:
            self._bytes += ANNOTATION_BYTES + self._stacks * stacks_bytes

    def _annotated(self, name: str) -> contextlib.AbstractContextManager[Any]:
        if not self._capture.recording or self._capture.thread != threading.get_ident():
            return contextlib.nullcontext()
        return annotation(name)  # type: ignore[no-any-return]


def begin(engine: Any, run: runtime.Runtime, subject: Subject, settings: Settings) -> None:
    """Start to record the front end of an `AsyncLLM`. Never raise an exception.

    Do nothing if `AUTOPROF_DISABLE` contains `vllm/front-end`.
    """
    if run.settings.disabled("vllm", "front-end"):
        return
    with _guard():
        front_end = FrontEnd(engine, run, subject, settings)
        setattr(engine, _FRONT_END, front_end)
        front_end.open()


def end(engine: Any, cut: str) -> None:
    """End the recording that `begin` started, if any. Never raise an exception."""
    with _guard():
        front_end = vars(engine).pop(_FRONT_END, None)
        if front_end is not None:
            front_end.close(cut)


def _guard() -> seam.guard:
    return seam.guard("vllm/front-end", runtime.report)
