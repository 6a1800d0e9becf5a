"""Prints the seconds of a stage in each way, turn by turn: `inside.py TURNS ROUNDS`.

autoprof must be on in this process, with the recipe of the toy trainer, and capture one step per turn.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import toy
from work import work

from autoprof.run import end, runtime
from bench.inside import AUTOPROF, BARE, BY_HAND, NOTHING_LEFT, STAGE
from bench.paired import Case, in_turns


def main(turns: int, rounds: int) -> dict[str, Any]:
    """Measure the same stage in each way, in turns. Return the seconds."""
    trainer = toy.Trainer()

    def stage(count: int) -> None:
        work(torch, count)

    def bare(count: int) -> dict[str, float]:
        return {STAGE: timed(lambda: stage(count))}

    def by_hand(count: int, folder: str | None = None) -> dict[str, float]:
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            on_trace_ready=torch.profiler.tensorboard_trace_handler(folder) if folder else None,
        )

        def recorded() -> None:
            profile.start()
            stage(count)
            profile.stop()

        seconds = timed(recorded)
        profile.profiler = None
        return {STAGE: seconds}

    def with_trace(count: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            said = by_hand(count, folder)
            assert os.listdir(folder), "torch left no trace"
        return said

    def autoprof(count: int) -> dict[str, float]:
        trainer.global_step += 1
        seconds = trainer.step(lambda: timed(lambda: trainer.update(lambda: stage(count))))
        run = runtime.current()
        assert run is not None
        end.wait_for_files(run)
        folder = run.rundir.step(trainer.global_step)
        assert list(folder.glob("actor.update_actor.*.pt.trace.json.gz")), "the stage was not captured"
        return {STAGE: seconds}

    def fresh(way: Callable[[int], dict[str, float]], count: int) -> Case:
        def measure() -> dict[str, float]:
            # A recording is in a reference cycle. Free it here, so that it takes no memory during the next recording.
            gc.collect()
            return way(count)

        return measure

    ways = {BARE: bare, BY_HAND: with_trace, NOTHING_LEFT: by_hand, AUTOPROF: autoprof}
    in_turns({name: fresh(way, 100) for name, way in ways.items()}, 1, warm=0)  # the first call sets Kineto up
    return in_turns({name: fresh(way, rounds) for name, way in ways.items()}, turns, warm=0)


def timed(do: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
