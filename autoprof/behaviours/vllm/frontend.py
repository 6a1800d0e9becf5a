"""Front end of a vLLM engine: the work of the server's process on requests and on each of the engine's outputs.

vLLM's own profiler of its front end starts and stops in whichever thread of a pool is free (async_llm.py, 0.10 to
0.32), which torch does not survive (2.13), and runs from start to stop. This one begins and ends in the event loop's
thread, and ends after as many outputs as the workers record passes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from autoprof.base import interrupts
from autoprof.base.originals import threading
from autoprof.behaviours.vllm.worker import annotation
from autoprof.capture.pass_capture import PassCapture
from autoprof.capture.profilers.torch import FLAGS, TorchTool
from autoprof.capture.subject import Subject
from autoprof.config.selection import parse_iterations
from autoprof.config.settings import Settings
from autoprof.hooks.behaviour import follow
from autoprof.run import runtime

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
        contents = ("cpu", *(word for word in settings.contents if word in FLAGS))
        self._stacks = "stack" in contents
        self._max_bytes = min(MAX_BYTES, settings.max_trace_mb * 1e6)
        first, stop_before = parse_iterations(settings.rollout_iterations)
        # Each of the engines behind one front end puts out one output a pass.
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
        """Watch the engine's outputs, and begin with the first if that is asked for."""
        self._watch("process_outputs", self._before_outputs)
        self._watch("add_request", self._before_request)
        self._capture.reach()

    def close(self, cut: str = "") -> None:
        """End the recording, if it has not ended by itself. `cut` says why it ends early, if it does."""
        for name in self._watched:
            vars(self._processor).pop(name, None)
        if cut:
            self._capture.end("truncated", cut)
        else:
            self._capture.end(reason="" if self._capture.passed else "the engine put nothing out")

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
            self._capture.before_pass()
        self._grow(_TOKEN_BYTES * tokens)
        return self._annotated("process_outputs")

    def _grow(self, stacks_bytes: int) -> None:
        """Count what comes next, and end the recording if there is too much before it."""
        if self._bytes > self._max_bytes:
            self._capture.end("truncated", f"what the front end records is limited to {self._max_bytes / 1e6:g} MB")
        elif self._capture.recording:
            self._bytes += _ANNOTATION_BYTES + self._stacks * stacks_bytes

    def _annotated(self, name: str) -> contextlib.AbstractContextManager[Any]:
        if not self._capture.recording or self._capture.thread != threading.get_ident():
            return contextlib.nullcontext()
        return annotation(name)  # type: ignore[no-any-return]


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
