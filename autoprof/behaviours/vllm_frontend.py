"""The front end of a vLLM engine: what the server's process does with requests and with each of the engine's outputs.

vLLM's own profiler of its front end starts and stops in whichever thread of a pool is free (async_llm.py, 0.10 to
0.32), which torch does not survive (2.13), and runs from start to stop. This one begins and ends in the event loop's
thread, and ends after as many outputs as the workers record passes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from autoprof import capture, interrupts, runtime
from autoprof.behaviours.vllm_profiler import annotation
from autoprof.capture import Capture
from autoprof.naming import Subject
from autoprof.paths import follow
from autoprof.settings import Settings
from autoprof.tools.torch import FLAGS, TorchTool
from autoprof.window import parse_iterations

# On an engine while its front end is recorded.
_FRONT_END = "_autoprof_front_end"
# The event loop stands still while a recording is stopped and written: about a second for this many bytes (vLLM 0.27.1,
# torch 2.13), which are 200,000 outputs, or with stacks the tokens of 16 requests in 100 passes.
MAX_BYTES = 60_000_000
# An annotation in a trace, and the Python calls for one token of a request and for taking one (0.27.1).
_ANNOTATION_BYTES = 300
_TOKEN_BYTES = 35_000
_REQUEST_BYTES = 200_000


class FrontEnd:
    """A recording of the front end, from `open` to `close`.

    An event loop's thread runs hardly any operator: without `stack` among the contents the trace holds the annotations
    `add_request` and `process_outputs` made here and nothing else.
    """

    def __init__(self, engine: Any, run: runtime.Runtime, subject: Subject, settings: Settings) -> None:
        """Args:
        engine: The `AsyncLLM`.
        run: The run.
        subject: What is recorded.
        settings: Those of rollouts in this window.
        """
        self._run = run
        self._subject = subject
        contents = ("cpu", *(word for word in settings.contents if word in FLAGS))
        self._settings = msgspec.structs.replace(settings, contents=contents)
        self._left_out = [word for word in settings.contents if word not in contents]
        self._max_bytes = min(MAX_BYTES, settings.max_trace_mb * 1e6)
        first, stop_before = parse_iterations(settings.rollout_iterations)
        # Each of the engines behind one front end puts out one output a pass.
        engines = int(follow(engine, "vllm_config.parallel_config.data_parallel_size", 1))
        self._first, self._stop_before = first * engines, stop_before and stop_before * engines
        self._processor = engine.output_processor
        self._watched: list[str] = []
        self._recording: Capture | None = None
        self._outputs = 0
        self._last: float | None = None
        self._bytes = 0

    def open(self) -> None:
        """Watch the engine's outputs, and begin with the first if that is asked for."""
        self._watch("process_outputs", self._before_outputs)
        self._watch("add_request", self._before_request)
        if self._first == 0:
            self._record()

    def close(self, cut: str = "") -> None:
        """End the recording, if it has not ended by itself. `cut` says why it ends early, if it does."""
        for name in self._watched:
            vars(self._processor).pop(name, None)
        if cut:
            self._end("truncated", cut)
        else:
            self._end("complete", "" if self._outputs else "the engine put nothing out")

    def _watch(self, name: str, around: Callable[..., contextlib.AbstractContextManager[Any]]) -> None:
        # One that has it as an attribute of its own is somebody else's patch, which could not be given back.
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
        self._grow(_REQUEST_BYTES)
        return self._annotated("add_request")

    def _before_outputs(
        self, engine_core_outputs: Any, engine_core_timestamp: float | None = None, *_: Any, **__: Any
    ) -> contextlib.AbstractContextManager[Any]:
        tokens = len(engine_core_outputs)
        # An output for more than 128 requests comes in pieces, with one timestamp (async_llm.py, 0.9 to 0.33).
        if tokens and (engine_core_timestamp is None or engine_core_timestamp != self._last):
            self._last = engine_core_timestamp
            passed, self._outputs = self._outputs, self._outputs + 1
            if passed == self._stop_before:
                self._end("complete", "")
            elif passed == self._first and passed:
                self._record()
        self._grow(_TOKEN_BYTES * tokens)
        return self._annotated("process_outputs")

    def _grow(self, stacks_bytes: int) -> None:
        """Count what comes next, and end the recording if there is too much before it."""
        if self._bytes > self._max_bytes:
            self._end("truncated", f"what the front end records is limited to {self._max_bytes / 1e6:g} MB")
        elif self._recording is not None:
            self._bytes += _ANNOTATION_BYTES + ("stack" in self._settings.contents) * stacks_bytes

    def _annotated(self, name: str) -> contextlib.AbstractContextManager[Any]:
        recording = self._recording
        if recording is None or recording.thread != threading.get_ident() or recording.ended.is_set():
            return contextlib.nullcontext()
        return annotation(name)  # type: ignore[no-any-return]

    def _record(self) -> None:
        recording = Capture(self._run, self._subject, self._settings, TorchTool())
        recording.left_out = self._left_out
        if not capture.claim(recording, recording.tool):
            return
        try:
            recording.start()
        except BaseException:
            capture.release(recording)
            raise
        self._recording = recording

    def _end(self, state: str, reason: str) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            capture.finish(recording, state, reason)


def begin(engine: Any, run: runtime.Runtime, subject: Subject, settings: Settings) -> None:
    """Record the front end of an `AsyncLLM`, unless `AUTOPROF_DISABLE` names `vllm/front-end`. Raises nothing."""
    if run.settings.disabled("vllm", "front-end"):
        return
    with _guard():
        front_end = FrontEnd(engine, run, subject, settings)
        setattr(engine, _FRONT_END, front_end)
        front_end.open()


def end(engine: Any, cut: str) -> None:
    """End what `begin` began, if it did. Raises nothing."""
    with _guard():
        front_end = vars(engine).pop(_FRONT_END, None)
        if front_end is not None:
            front_end.close(cut)


@contextlib.contextmanager
def _guard() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        interrupts.pass_on(error)
        runtime.report("vllm/front-end", error)
