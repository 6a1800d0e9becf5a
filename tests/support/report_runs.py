"""Generator of a realistic run directory, in which causes of slowness can be planted.

The run has verl's driver, eight actor ranks and four replicas on two hosts, agent loops with tools, twelve steps, and
captures of one step.

    python -m tests.support.report_runs FOLDER [--steps 12] [--plant slow_tool=5] [--plant slow_rank=7] ...
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.traces import Event, kineto, save

START_NS = 1795200000_000_000_000
# Kineto's base for START_NS (see autoprof/traces/clocks.py).
BASE_NS = START_NS // (7_889_238 * 10**9) * (7_889_238 * 10**9)
RANKS, REPLICAS, PROMPTS, ANSWERS = 8, 4, 16, 4
HOSTS = ("n1", "n2")
TOOLS = ("search", "python")
DRIVER = ("n1", 100)
# Causes that can be planted, each in one step.
PLANTS = (
    "slow_tool",
    "long_answer",
    "slow_sample_reward",
    "slow_replica",
    "slow_rank",
    "long_weight_sync",
    "slow_step",
    "gap",
    "slow_reward",
    "checkpoint",
    "validation",
)
SLOW_SAMPLE = (9, 2)
SLOW_RANK = 5
SLOW_REPLICA = 2


def actor(rank: int) -> tuple[str, int]:
    return HOSTS[rank * len(HOSTS) // RANKS], 200 + rank


def server(replica: int) -> tuple[str, int]:
    return HOSTS[replica * len(HOSTS) // REPLICAS], 300 + replica


def worker(prompt: int) -> tuple[str, int]:
    return HOSTS[prompt % 2], 400 + prompt % 2


class Script:
    """Generator of the spans of one run, step by step. `plants` maps a cause to its step."""

    def __init__(self, plants: dict[str, int], seed: int = 7, weight_sync_s: float = 2.0) -> None:
        self.lines: dict[tuple[str, int], list[tuple[float, dict[str, Any]]]] = defaultdict(list)
        self.steps: dict[int, tuple[float, float]] = {}
        self.stages: dict[tuple[int, str], tuple[float, float]] = {}
        self._plants = plants
        self._weight_sync_s = weight_sync_s
        self._random = random.Random(seed)
        self._now = 0.0
        self._step = 0

    def span(
        self,
        where: tuple[str, int],
        kind: str,
        name: str,
        role: str,
        start: float,
        end: float,
        rank: int | None = None,
        **more: Any,
    ) -> None:
        """Add a span; its times are in seconds since the run's start."""
        ns = {"start_ns": START_NS + int(start * 1e9), "end_ns": START_NS + int(end * 1e9)}
        line = {"kind": kind, "name": name, "step": self._step, "role": role, "rank": rank, **ns, **more}
        self.lines[where].append((end, line))

    def planted(self, cause: str) -> bool:
        return self._plants.get(cause) == self._step

    def about(self, seconds: float, spread: float = 0.02) -> float:
        return seconds * self._random.uniform(1 - spread, 1 + spread)

    def step(self) -> None:
        """Add the next step: generation, scores, training, weight sync."""
        self._step += 1
        begin = self._now
        self._now += 0.05
        self._timer("gen", self._generate)
        self._now += 9.0 if self.planted("gap") else 0.1
        self._timer("reward", lambda: self._pass(12.0 if self.planted("slow_reward") else 0.2))
        self._timer("old_log_prob", lambda: self._stage("compute_log_prob", "actor", 3.0))
        self._timer("ref", lambda: self._stage("compute_ref_log_prob", "ref", 3.0))
        self._timer("adv", lambda: self._pass(0.2))
        self._timer(
            "update_actor", lambda: self._stage("update_actor", "actor", 30.0 if self.planted("slow_step") else 12.0)
        )
        if self.planted("checkpoint"):
            self._timer("save_checkpoint", lambda: self._stage("save_checkpoint", "actor", 45.0))
        self._timer(
            "update_weights",
            lambda: self._stage(
                "update_weights", "actor", 17.0 if self.planted("long_weight_sync") else self._weight_sync_s
            ),
        )
        if self.planted("validation"):
            self._timer("testing", self._validate)
        self.span(DRIVER, "timer", "step", "trainer", begin - 0.01, self._now)
        self._now += 0.15
        self.span(DRIVER, "step", "step", "trainer", begin, self._now, rank=0)
        self.steps[self._step] = (begin, self._now)
        self._now += 0.02

    def _timer(self, name: str, work: Any) -> None:
        begin = self._now
        work()
        self._now += 0.02
        self.span(DRIVER, "timer", name, "trainer", begin, self._now)

    def _pass(self, seconds: float) -> None:
        self._now += self.about(seconds)

    def _stage(self, name: str, role: str, seconds: float) -> None:
        begin = self._now + 0.01
        ends = []
        for rank in range(RANKS):
            end = begin + self.about(seconds)
            if name == "update_actor" and rank == SLOW_RANK and self.planted("slow_rank"):
                end += 10.0
            ends.append(end)
            self.span(actor(rank), "stage", name, role, begin, end, rank=rank)
        self._now = max(ends)
        self.stages[self._step, name] = (begin, ends[0])

    def _generate(self) -> None:
        begin = self._now
        ends = []
        for number in range(PROMPTS * ANSWERS):
            ends.append(self._sample(begin + 0.02, *divmod(number, ANSWERS)))
        self.stages[self._step, "rollout"] = (begin + 0.1, begin + 15.0)
        self._now = max(ends) + 0.05

    def _validate(self) -> None:
        begin = self._now
        for prompt in range(PROMPTS):
            self._sample(begin, prompt, 0, validate=True)
        self._now += 30.0
        self.span(DRIVER, "stage", "validate", "trainer", begin, self._now)

    def _sample(self, begin: float, prompt: int, answer: int, **more: Any) -> float:
        """Add an agent loop: a turn, a tool, a turn, the score. Return its end in seconds since the run's start."""
        where = worker(prompt)
        slow = (prompt, answer) == SLOW_SAMPLE
        ids = {"sample": str(prompt), "rollout": answer, "agent": "tool_agent"} | more
        now = begin + self.about(0.05)
        # Like a load balancer, put each answer of a prompt on another replica.
        replica = (prompt + answer) % REPLICAS
        for turn in range(2):
            seconds = self._random.uniform(5.0, 8.0)
            if turn and slow and self.planted("long_answer"):
                seconds += 14.0
            tokens = int(seconds * 50)
            if replica == SLOW_REPLICA and self.planted("slow_replica"):
                seconds *= 1.9
            request = f"{self._step}-{prompt}-{answer}-{turn}"
            counts = {"prompt_tokens": 100 + 500 * turn, "response_tokens": tokens}
            of = {"replica": replica, "request": request}
            self.span(
                *(server(replica), "request", "generate", "rollout", now + 0.005, now + seconds - 0.005),
                ids=of,
                counts=counts,
            )
            turn_ids = ids | {"request": request}
            self.span(where, "turn", "generate", "agent_loop", now, now + seconds, ids=turn_ids, counts=counts)
            now += seconds
            if not turn:
                took = 15.0 if slow and self.planted("slow_tool") else self.about(0.8, 0.3)
                self.span(where, "tool", TOOLS[prompt % 2], "agent_loop", now, now + took, ids=ids)
                now += took
        took = 16.0 if slow and self.planted("slow_sample_reward") else self.about(0.1)
        self.span(where, "reward", "compute_score", "agent_loop", now, now + took, ids=ids)
        now += took + 0.01
        self.span(where, "sample", "tool_agent", "agent_loop", begin, now, ids=ids)
        return now


def write(
    folder: Path,
    steps: int = 12,
    captured: int | None = 5,
    torn: bool = False,
    seed: int = 7,
    weight_sync_s: float = 2.0,
    **plants: int,
) -> Script:
    """Write a run directory.

    Args:
        folder: The run directory; its name is the run's id.
        steps: Number of steps.
        captured: Number of the captured step, or None.
        torn: If true, timelines contain truncated and unknown lines.
        seed: Seed of the random variation.
        weight_sync_s: Seconds of weight sync in each step.
        plants: Step of each planted cause; the causes are `PLANTS`.
    """
    assert not plants.keys() - set(PLANTS), plants
    script = Script(plants, seed, weight_sync_s)
    for _ in range(steps):
        script.step()
    folder.mkdir(parents=True)
    info = {
        "id": folder.name,
        "command": "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.n_gpus_per_node=4",
        "host": "n1",
        "pid": 99,
        "started": START_NS / 1e9 - 60,
        "state": "ended",
        "ended": START_NS / 1e9 + 600,
        "hosts": list(HOSTS),
        "python": "3.12.3",
        "versions": {"verl": "0.9.1", "ray": "2.60.0", "vllm": "0.27.1"},
    }
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "journal").mkdir()
    for (host, pid), lines in script.lines.items():
        clock = {"unix_ns": START_NS, "monotonic_ns": 10**12}
        first = {"kind": "process", "host": host, "pid": pid, "clock": clock, "version": "0.1.0"}
        text = "".join(
            json.dumps(line, separators=(",", ":")) + "\n"
            for line in [first, *(line for _, line in sorted(lines, key=_end))]
        )
        if torn:
            text += '{"kind":"of another world","x":[1]}\nno json\n[1,2]\n' + text.splitlines()[-1][:40]
        (folder / "journal" / f"{host}-{pid}.jsonl").write_text(text)
    measured = {"host": "n2", "offset_ns": 0, "error_ns": 200_000, "unix_ns": START_NS}
    (folder / "clocks").mkdir()
    (folder / "clocks" / "{}-{}.jsonl".format(*DRIVER)).write_text(json.dumps(measured) + "\n")
    if captured is not None:
        _captures(folder, script, captured)
    return script


def _end(line: tuple[float, dict[str, Any]]) -> float:
    return line[0]


def _captures(folder: Path, script: Script, step: int) -> None:
    for stage, role in (("compute_log_prob", "actor"), ("compute_ref_log_prob", "ref"), ("update_actor", "actor")):
        who = {"role": role, "stage": stage, "rank": 0}
        events = training(script.stages[step, stage])
        capture(folder, step, f"{role}.{stage}.rank0", who, actor(0), script.stages[step, stage], events)
    who = {"role": "rollout", "stage": "rollout", "rank": 0, "replica": 0, "part": "rank0"}
    when = script.stages[step, "rollout"]
    capture(folder, step, "rollout.replica0.rank0", who, server(0), when, generation(when))


def capture(
    folder: Path,
    step: int,
    name: str,
    who: dict[str, Any],
    where: tuple[str, int],
    when: tuple[float, float],
    events: list[Event],
    state: str = "complete",
) -> Path:
    """Write a capture and its meta file, and return the trace's path. `when` is in seconds since the run's start."""
    host, pid = where
    base = folder / f"global_step_{step:06d}" / f"{name}.{host}.pid{pid}"
    path = save(Path(f"{base}.pt.trace.json.gz"), kineto(events, BASE_NS))
    clock = {
        side: {"unix_ns": START_NS + int(at * 1e9), "monotonic_ns": 10**12 + int(at * 1e9)}
        for side, at in zip(("start", "stop"), when, strict=True)
    }
    meta = {
        **{"step": step, "replica": None, "part": "", **who, "tool": "torch", "contents": ["cpu", "cuda"]},
        **{"left_out": [], "host": host, "pid": pid, "clock": clock, "versions": {"torch": "2.13.0"}},
        **{"bytes": path.stat().st_size, "state": state, "reason": ""},
    }
    Path(f"{base}.meta.json").write_text(json.dumps(meta))
    return path


def training(when: tuple[float, float], busy: float = 0.9, overlapped: float = 0.8) -> list[Event]:
    """Return the events of a stage on a GPU: operators, the kernels that they launch, all-reduces, and copies.

    Args:
        when: Start and end, in seconds since the run's start.
        busy: Share of the time in which kernels run.
        overlapped: Share of the communication during which compute kernels run.
    """
    first = (START_NS - BASE_NS) / 1e3 + when[0] * 1e6
    period = (when[1] - when[0]) * 1e6 / 50
    events = _named(1, "python") + _named(0, "GPU 0")
    for number in range(50):
        at = first + number * period
        linear = {"pid": 1, "tid": 1, "args": {"External id": number}}
        matmul = "aten::mm" if number % 5 else "aten::bmm"
        run = busy * period
        comm = run * 0.2
        events += [
            {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": at, "dur": period * 0.05, **linear},
            {"ph": "X", "cat": "cpu_op", "name": matmul, "ts": at + period * 0.01, "dur": period * 0.03, **linear},
            _launch("cudaLaunchKernel", at + period * 0.02, period * 0.01, number),
            _kernel("sm90_xmma_gemm_bf16bf16_bf16f32", at + period * 0.03, run, number, 7),
            _kernel(
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
                at + period * 0.03 + run - comm * overlapped,
                comm,
                1000 + number,
                20,
            ),
            {
                **{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7},
                **{"ts": at + period * 0.005, "dur": period * 0.02, "args": {"device": 0, "stream": 7}},
            },
        ]
    return events


def generation(when: tuple[float, float]) -> list[Event]:
    """Return the events of an engine's forward passes: 2 of prefill and 20 of decode."""
    first = (START_NS - BASE_NS) / 1e3 + when[0] * 1e6
    period = (when[1] - when[0]) * 1e6 / 22
    events = _named(1, "VLLM::Worker") + _named(0, "GPU 0")
    for number in range(22):
        at = first + number * period
        name = "execute_context_1(512)_generation_0(0)" if number < 2 else "execute_context_0(0)_generation_16(16)"
        events += [
            {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": at, "dur": period * 0.9},
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": "vllm::attention",
                "pid": 1,
                "tid": 1,
                "ts": at + 1,
                "dur": period / 2,
            },
            _launch("cudaGraphLaunch", at + period * 0.1, period * 0.05, number),
            _kernel("flash_fwd_splitkv_kernel", at + period * 0.2, period * 0.6, number, 7),
        ]
    return events


def _named(pid: int, name: str) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": "GPU 0" if not pid else "CPU"}},
    ]


def _launch(name: str, at: float, took: float, correlation: int) -> Event:
    where = {"pid": 1, "tid": 1, "ts": at, "dur": took}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "args": {"correlation": correlation}, **where}


def _kernel(name: str, at: float, took: float, correlation: int, stream: int) -> Event:
    args = {"device": 0, "stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": at, "dur": took, "args": args}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plant", action="append", default=[], metavar="CAUSE=STEP", help=", ".join(PLANTS))
    options = parser.parse_args()
    plants = dict(plant.split("=") for plant in options.plant)
    write(options.folder, options.steps, **{cause: int(step) for cause, step in plants.items()})
    print(options.folder)
