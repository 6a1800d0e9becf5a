"""Prints the nanoseconds of a call of a function and of a coroutine function: `calls.py CASE [COUNT]`.

With COUNT, it only calls the function COUNT times.

It runs in the environment of any peer, so it imports only the modules of its case. The called method returns its
argument.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import toy

# Seconds of one measurement, and the number of measurements. The smallest result counts, because it is disturbed least.
_SECONDS, _TIMES = 0.03, 9


def closure(function: Any) -> Any:
    """Wrap with the smallest possible decorator."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def closure_async(function: Any) -> Any:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


def function_wrapper(function: Any) -> Any:
    import wrapt

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(function, wrapper)


def function_wrapper_async(function: Any) -> Any:
    import wrapt

    async def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return await wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(function, wrapper)


def opentelemetry(function: Any) -> Any:
    """Wrap with a span of a provider without a processor: the span begins and ends, and is not exported."""
    from opentelemetry.sdk.trace import TracerProvider

    return TracerProvider().get_tracer("bench").start_as_current_span("forward")(function)


def opentelemetry_api(function: Any) -> Any:
    """Wrap without an SDK: the span is only a context manager."""
    from opentelemetry import trace

    return trace.get_tracer("bench").start_as_current_span("forward")(function)


def ddtrace_span(function: Any) -> Any:
    """Wrap with a span that a filter drops before it is sent."""
    from ddtrace.trace import TraceFilter, tracer

    class Drop(TraceFilter):
        def process_trace(self, trace: Any) -> None:
            return None

    tracer.configure(trace_processors=[Drop()])
    return tracer.wrap("forward")(function)


def ddtrace_wrapper(function: Any) -> Any:
    """Wrap like ddtrace's integrations, which replace the code of the function itself."""
    from ddtrace.internal.wrapping import wrap

    return wrap(function, lambda wrapped, args, kwargs: wrapped(*args, **kwargs))


def ddtrace_wrapper_async(function: Any) -> Any:
    from ddtrace.internal.wrapping import wrap

    async def wrapper(wrapped: Any, args: Any, kwargs: Any) -> Any:
        return await wrapped(*args, **kwargs)

    return wrap(function, wrapper)


# dict from case to the decorators for the function and for the coroutine function.
DECORATORS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "closure": (closure, closure_async),
    "wrapt": (function_wrapper, function_wrapper_async),
    "opentelemetry": (opentelemetry, opentelemetry),
    "opentelemetry-api": (opentelemetry_api, opentelemetry_api),
    "ddtrace": (ddtrace_wrapper, ddtrace_wrapper_async),
    "ddtrace-span": (ddtrace_span, ddtrace_span),
}


class Called(Protocol):
    """Object whose methods are called. Each call looks the method up, because wrappers bind at the lookup."""

    def forward(self, x: int) -> int: ...

    async def forward_async(self, x: int) -> int: ...


def nanoseconds(called: Called) -> float:
    """Return the nanoseconds of one call, with the loop around it."""

    def taken(calls: int) -> float:
        started = time.perf_counter_ns()
        for _ in range(calls):
            called.forward(1)
        return (time.perf_counter_ns() - started) / calls

    calls = _calls(taken(100))
    return min(taken(calls) for _ in range(_TIMES))


async def nanoseconds_async(called: Called) -> float:
    """Return the nanoseconds of one awaited call, with the loop around it."""

    async def taken(calls: int) -> float:
        started = time.perf_counter_ns()
        for _ in range(calls):
            await called.forward_async(1)
        return (time.perf_counter_ns() - started) / calls

    calls = _calls(await taken(100))
    return min([await taken(calls) for _ in range(_TIMES)])


def _calls(nanoseconds: float) -> int:
    return max(100, int(_SECONDS * 1e9 / nanoseconds))


def both(called: Called) -> dict[str, float]:
    """Return the nanoseconds of a call: `sync` for the function, and `async` for the coroutine function."""
    return {"sync": nanoseconds(called), "async": asyncio.run(nanoseconds_async(called))}


def repeated(called: Called, calls: int) -> dict[str, float]:
    """Call the function `calls` times, without a measurement. Garbage collections would make the counts differ."""
    gc.disable()
    for _ in range(calls):
        called.forward(1)
    return {}


def main(case: str, calls: int = 0) -> dict[str, float]:
    """Measure one case: `bare`, a decorator, or one of autoprof's hooks, which a recipe applies.

    If `calls` is not 0, call the function `calls` times instead.
    """
    work = functools.partial(repeated, calls=calls) if calls else both
    if case in DECORATORS:
        plain, coroutine = DECORATORS[case]
        toy.Model.forward = plain(toy.Model.forward)  # type: ignore[method-assign]
        toy.Model.forward_async = coroutine(toy.Model.forward_async)  # type: ignore[method-assign]
    model, trainer = toy.Model(), toy.Trainer()
    if not case.startswith("autoprof"):
        return work(model)
    for function in (model.forward, model.forward_async, toy.Stage.forward, trainer.generate, trainer.step):
        assert hasattr(function, "__wrapped__"), "autoprof did not apply the recipe"
    inside: dict[str, Callable[[], dict[str, float]]] = {
        "autoprof-pass": lambda: work(model),
        "autoprof-pass-counted": lambda: trainer.generate(lambda: work(model)),
        "autoprof-stage": lambda: work(toy.Stage()),
    }
    return trainer.step(inside[case])


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
