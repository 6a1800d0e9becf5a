"""Generator of timelines of the largest documented size: spans of a driver, and samples of agent loops.

python -m tests.support.large_timelines FOLDER [--steps 10000] [--samples 512] [--workers 8]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.support.report_runs import START_NS

SECOND = 10**9
# Length of a step, and the driver's timers in it; each contains one stage of the actor.
STEP_S = 60
PARTS = ("gen", "reward", "old_log_prob", "ref", "adv", "update_critic", "update_actor", "update_weights")


def write(folder: Path, steps: int, samples: int, workers: int = 8) -> Path:
    """Write a run directory with a timeline and no captures.

    Args:
        folder: The run directory; its name is the run's id.
        steps: Number of steps.
        samples: Number of samples in each step; each has a sample, a turn and a reward span.
        workers: Number of processes with samples. If 0, the driver has all samples.
    """
    (folder / "journal").mkdir(parents=True)
    info = {"id": folder.name, "host": "n1", "pid": 99, "started": START_NS / 1e9, "state": "ended"}
    (folder / "run.json").write_text(json.dumps(info))
    driver = (folder / "journal" / "n1-100.jsonl").open("wb")
    others = [(folder / "journal" / f"n1-{200 + number}.jsonl").open("wb") for number in range(workers)]
    for pid, file in zip((100, *range(200, 200 + workers)), (driver, *others), strict=True):
        clock = {"unix_ns": START_NS, "monotonic_ns": 10**12}
        first = {"kind": "process", "host": "n1", "pid": pid, "clock": clock, "version": "0.1.0"}
        file.write(json.dumps(first, separators=(",", ":")).encode() + b"\n")
    for step in range(1, steps + 1):
        begin = START_NS + step * STEP_S * SECOND
        for number, file in enumerate(others or [driver]):
            file.write(_samples(step, begin, range(number, samples, max(workers, 1))))
        driver.write(_driver(step, begin))
    for file in (driver, *others):
        file.close()
    return folder


def _samples(step: int, begin: int, numbers: range) -> bytes:
    lines = []
    for number in numbers:
        start = begin + (number + 1) * 10_000_000
        end = start + (5 + number * 7919 % 13) * SECOND
        scored = end - 2_000_000
        ids = f'"ids":{{"sample":"{step}-{number // 8}","rollout":{number % 8},"agent":"tool_agent"'
        request = f',"request":"{step:08d}{number:08d}"}},"counts":{{"prompt_tokens":512,"response_tokens":1024}}}}'
        for kind, name, first, last, rest in (
            ("turn", "generate", start + 1000, scored, request),
            ("reward", "compute_score", scored, end - 1000, "}}"),
            ("sample", "tool_agent", start, end, "}}"),
        ):
            of = f'"kind":"{kind}","name":"{name}","step":{step},"role":"agent_loop","rank":null'
            lines.append(f'{{{of},"start_ns":{first},"end_ns":{last},{ids}{rest}\n')
    return "".join(lines).encode()


def _driver(step: int, begin: int) -> bytes:
    lines = []
    each = STEP_S * SECOND // len(PARTS)
    for place, name in enumerate(PARTS):
        start, end = begin + place * each, begin + (place + 1) * each
        lines.append(_span("stage", name, step, "actor", start + 1000, end - 2000))
        lines.append(_span("timer", name, step, "trainer", start, end - 1000))
    lines.append(_span("step", "step", step, "trainer", begin, begin + STEP_S * SECOND - 1000, '"rank":0'))
    return "".join(lines).encode()


def _span(kind: str, name: str, step: int, role: str, start: int, end: int, rank: str = '"rank":null') -> str:
    of = f'"step":{step},"role":"{role}",{rank}'
    return f'{{"kind":"{kind}","name":"{name}",{of},"start_ns":{start},"end_ns":{end}}}\n'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    print(write(options.folder, options.steps, options.samples, options.workers))
