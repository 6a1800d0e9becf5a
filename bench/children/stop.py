"""Prints the seconds of the end of a capture, by table and case, turn by turn: `stop.py TURNS MEGABYTES FOLDER`.

autoprof must be on in this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from verl.utils.profiler.torch_profile import get_torch_profiler
from work import BYTES_A_ROUND, work

from autoprof.capture import recorder
from autoprof.capture.artifacts import Subject
from autoprof.run import end as run_end
from autoprof.run import runtime
from bench.paired import Case, in_turns
from bench.stop import AUTOPROF, MEANWHILE, PLAIN, STOP, UNDISTURBED, VERL

_OTHER_WORK = 4000


def main(turns: int, megabytes: int, folder: Path) -> dict[str, Any]:
    """Record the same work in each way. Return the seconds of each stop, and of other work while autoprof writes."""
    run = runtime.start()
    assert run is not None

    def autoprof() -> Callable[[], None]:
        recording = recorder.begin(run, Subject(step=1, role="actor", stage="update_actor", rank=0))
        assert recording is not None
        return lambda: recording.stop()

    def verl() -> Callable[[], None]:
        profile = get_torch_profiler(["cpu"], str(folder / "verl"), role="actor")
        # Without a GPU, torch would print a warning for every capture.
        profile.activities.discard(torch.profiler.ProfilerActivity.CUDA)
        profile.start()
        return profile.stop

    def plain() -> Callable[[], None]:
        def save(profile: Any) -> None:
            profile.export_chrome_trace(str(folder / "plain.json"))

        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], on_trace_ready=save)
        profile.start()
        return profile.stop

    def stopped(begin: Callable[[], Callable[[], None]], rounds: int) -> Case:
        def measure() -> dict[str, float]:
            end = begin()
            work(torch, rounds)
            found = {STOP: timed(end)}
            if begin is autoprof:
                found[MEANWHILE] = timed(lambda: work(torch, _OTHER_WORK))
                run_end.wait_for_files(run)
            return found

        return measure

    ways = {VERL: verl, PLAIN: plain, AUTOPROF: autoprof}
    in_turns({name: stopped(begin, 100) for name, begin in ways.items()}, 1, warm=0)  # the first call sets Kineto up
    rounds = megabytes * 1_000_000 // BYTES_A_ROUND
    cases = {name: stopped(begin, rounds) for name, begin in ways.items()}
    cases[UNDISTURBED] = lambda: {MEANWHILE: timed(lambda: work(torch, _OTHER_WORK))}
    return in_turns(cases, turns, warm=0)


def timed(do: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
