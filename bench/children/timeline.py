"""Prints the time of a span or of a step of samples, and their bytes on disk: `timeline.py CASE`.

It runs in the environment of any peer, so it imports only the modules of its case.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

import samples

# Numbers of rounds, of spans in a round, and of samples in a step. The result is the median of the rounds.
_ROUNDS, _SPANS, _SAMPLES = 21, 2000, 512
_IDS = {"sample": 12345, "rollout": 7, "agent": "tool_agent", "request": "0123456789abcdef0123456789abcdef"}
_COUNTS = {"prompt_tokens": 1024, "response_tokens": 4096}
_WHAT = {"kind": "turn", "name": "generate", "step": 412, "role": "agent_loop", "rank": None}

Size = Callable[[], float]


def by_hand(flush: bool) -> tuple[Callable[[], None], Size]:
    """Write one line of JSON per span to an open file."""
    file = tempfile.NamedTemporaryFile("w")  # noqa: SIM115
    count = 0

    def span() -> None:
        nonlocal count
        start = time.time_ns()
        line = _WHAT | {"start_ns": start, "end_ns": time.time_ns(), "ids": _IDS, "counts": _COUNTS}
        file.write(json.dumps(line) + "\n")
        count += 1
        if flush:
            file.flush()

    return span, lambda: os.path.getsize(file.name) / count


def opentelemetry() -> tuple[Callable[[], None], Size]:
    """Record as OpenTelemetry's documentation advises for production: a thread exports spans in batches."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    file = tempfile.NamedTemporaryFile("w")  # noqa: SIM115
    provider = TracerProvider()
    exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")  # type: ignore[arg-type]
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=1 << 20))
    tracer = provider.get_tracer("bench")
    attributes = {**_IDS, **_COUNTS, "step": 412, "role": "agent_loop"}
    count = 0

    def span() -> None:
        nonlocal count
        with tracer.start_as_current_span("generate", attributes=attributes):
            count += 1

    def size() -> float:
        provider.shutdown()
        return os.path.getsize(file.name) / count

    return span, size


def autoprof(kind: str) -> tuple[Callable[[], None], Size]:
    """Record a span of autoprof. While a sample is open, spans of turns are not written one by one."""
    from autoprof.run import runtime
    from autoprof.run.journal import Span

    run = runtime.current()
    assert run is not None
    going_on = Span(run.timeline, "sample", "agent_loop", step=412, role="agent_loop", rank=None)
    count = 0

    def stage() -> None:
        nonlocal count
        count += 1
        Span(run.timeline, "stage", "update_actor", step=412, role="actor", rank=0).end()

    def turn() -> None:
        nonlocal count
        count += 1
        Span(run.timeline, "turn", "generate", step=412, role="agent_loop", rank=None, ids=_IDS).end(None, _COUNTS)

    def size() -> float:
        going_on.drop()
        return written() / count

    return {"stage": stage, "turn": turn}[kind], size


def hangs() -> tuple[Callable[[], None], Size]:
    """Check for a hang, as autoprof's thread does every ten seconds."""
    from autoprof.run import runtime
    from autoprof.run.journal import Span
    from autoprof.run.watcher import HangWatch

    run = runtime.current()
    assert run is not None
    timeline, watch = run.timeline, HangWatch(run)
    timeline.durations_ns["step", "step"] = deque(range(100))
    Span(timeline, "step", "step", step=412, role="trainer", rank=0)
    return watch.look, lambda: 0.0


# Seconds for which the CPU time is measured, the depth of the stack, and the number of further threads.
_IDLE_S, _DEPTH, _THREADS = 10.0, 40, 20


def idle(case: str) -> float:
    """Return the microseconds of CPU time in a second of a step in which the program does nothing.

    The program's threads wait in deep stacks. With `autoprof-gap`, no stage is open, so autoprof samples the stack.
    """

    def deep(depth: int, then: Callable[[], float | bool]) -> float | bool:
        return deep(depth - 1, then) if depth else then()

    def measure() -> float:
        time.sleep(0.5)  # the watcher starts
        started = time.process_time()
        time.sleep(_IDLE_S)
        return (time.process_time() - started) / _IDLE_S * 1e6

    for _ in range(_THREADS):
        threading.Thread(target=deep, args=(_DEPTH, threading.Event().wait), daemon=True).start()
    if case == "bare-idle":
        return deep(_DEPTH, measure)
    import autoprof

    with autoprof.step(1):
        with autoprof.stage("rollout"):
            pass
        with autoprof.stage("update") if case == "autoprof-open" else nullcontext():
            return deep(_DEPTH, measure)


def written() -> int:
    """Flush the timeline of this process, and return the bytes of its file."""
    from autoprof.run import runtime

    run = runtime.current()
    assert run is not None
    run.timeline.flush()
    return os.path.getsize(run.rundir.process_file("journal", ".jsonl"))


def microseconds(span: Callable[[], None]) -> float:
    """Return the microseconds of one span, with the loop around it."""

    def taken() -> float:
        started = time.perf_counter_ns()
        for _ in range(_SPANS):
            span()
        return (time.perf_counter_ns() - started) / _SPANS / 1e3

    taken()
    return sorted(taken() for _ in range(_ROUNDS))[_ROUNDS // 2]


async def call() -> float:
    """Return the microseconds of the whole call of a turn."""
    worker = samples.Worker()
    assert hasattr(worker.generate, "__wrapped__"), "autoprof did not apply the recipe"
    keep, _ = autoprof("turn")

    async def taken() -> float:
        started = time.perf_counter_ns()
        for _ in range(_SPANS):
            await worker.generate("0123456789abcdef0123456789abcdef", prompt_ids=samples.PROMPT)
        return (time.perf_counter_ns() - started) / _SPANS / 1e3

    keep()
    return sorted([await taken() for _ in range(_ROUNDS)])[_ROUNDS // 2]


async def step() -> float:
    """Return the milliseconds of a step of samples."""
    worker = samples.Worker()

    async def taken(number: int) -> float:
        started = time.perf_counter_ns()
        trajectories = (
            {"step": number, "sample_index": 12345 + n // 8, "rollout_n": 0, "validate": False} for n in range(_SAMPLES)
        )
        each = (worker.sample(made, agent_name="tool_agent", session_id=n % 8) for n, made in enumerate(trajectories))
        await asyncio.gather(*each)
        return (time.perf_counter_ns() - started) / 1e6

    return sorted([await taken(400 + number) for number in range(_ROUNDS)])[_ROUNDS // 2]


def main(case: str) -> dict[str, float]:
    """Measure one case. Return the time of a span or step as `value`, and its bytes on disk."""
    if case == "step-bare":
        return {"value": asyncio.run(step()), "bytes": 0.0}
    if case.endswith(("-idle", "-open", "-gap")):
        return {"value": idle(case), "bytes": 0.0}
    if case == "autoprof-step":
        assert hasattr(samples.Worker.sample, "__wrapped__"), "autoprof did not apply the recipe"
        return {"value": asyncio.run(step()), "bytes": written() / _ROUNDS}
    if case == "autoprof-call":
        return {"value": asyncio.run(call()), "bytes": 0.0}
    ways: dict[str, Callable[[], tuple[Callable[[], None], Size]]] = {
        "json-flushed": lambda: by_hand(True),
        "json": lambda: by_hand(False),
        "opentelemetry": opentelemetry,
        "autoprof-kept": lambda: autoprof("turn"),
        "autoprof-stage": lambda: autoprof("stage"),
        "autoprof-hang-look": hangs,
    }
    span, size = ways[case]()
    value = microseconds(span)
    return {"value": value, "bytes": size()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
