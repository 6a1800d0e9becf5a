"""Table of the programs of the truth suite: healthy loops, and loops with a planted cause of lost time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

COLLECT = [["collect", "rollout", 0.3], ["update_actor", "actor", 0.2]]
SYNC = [["generate", "rollout", 0.2], ["update_actor", "actor", 0.2], ["update_weights", "actor", 0.05]]
ALL = "cpu,stack,shapes,memory,module"
# Kinds of findings about the whole run.
OF_RUN = ("growth",)
# Reason of the rows that wait for the names of causes outside of stages.


@dataclass(frozen=True, kw_only=True)
class Program:
    """Run of a program, and the finding that its report must begin with.

    Attributes:
        name: Name of the row.
        program: Name of the program in `programs/`.
        options: The program's options.
        ranks: Number of ranks that torchrun starts. With 1, there is no torchrun.
        settings: Settings of autoprof.
        kind: Kind of the expected first finding. Empty: there is no finding.
        step: Step of that finding. None: the finding is about the run.
        words: Words in the sentence or the evidence of that finding: its stage, rank, sample or place.
        known: Reason why the row fails. Empty: the row must not fail.
        quick: True if `make test` includes the row.
    """

    name: str
    program: str = "loop"
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    step: int | None = None
    words: tuple[str, ...] = ()
    known: str = ""
    quick: bool = False


def healthy(name: str, program: str = "loop", *, known: str = "", quick: bool = False, **fields: Any) -> Program:
    """Return a row without a planted cause. Fields in capitals are settings, except `ranks` the others are options."""
    settings = {f"AUTOPROF_{key}": value for key, value in fields.items() if key.isupper()}
    ranks = fields.pop("ranks", 1)
    options = {key: value for key, value in fields.items() if not key.isupper()}
    return Program(
        name=name, program=program, options=options, ranks=ranks, settings=settings, known=known, quick=quick
    )


HEALTHY = [
    healthy("plain", quick=True),
    healthy("a capture of whole steps", MODE="continuous", quick=True),
    healthy("stacks and shapes", CONTENTS="cpu,shapes,stack", quick=True),
    healthy("all contents", CONTENTS=ALL),
    healthy("all contents of whole steps", CONTENTS=ALL, MODE="continuous"),
    healthy("several captured steps", STEPS="2,4:7"),
    healthy("no captured step", STEPS=""),
    healthy("three steps", steps=3),
    healthy("steps of 15 ms", steps=60, stages=[["generate", "rollout", 0.01], ["update_actor", "actor", 0.005]]),
    healthy("steps from 100 on, after a validation", first=100, validated_before=True),
    healthy("300 steps", steps=300, stages=[["generate", "rollout", 0.006], ["update_actor", "actor", 0.004]]),
    healthy("steps of 3 s", steps=5, stages=[["generate", "rollout", 2], ["update_actor", "actor", 1]]),
    healthy("a validation every 3 steps", validate=3, steps=10),
    healthy("a checkpoint every 4 steps", save=4, steps=10),
    healthy("validation and checkpoint", validate=2, save=3, steps=10),
    healthy("four micro-batches", micro=4),
    healthy("compilation in step 1", first_s=3),
    healthy("lengths that vary", spread=0.1, steps=16),
    healthy("real work", work=20),
    healthy("real work with stacks and shapes", work=20, CONTENTS="cpu,shapes,stack"),
    healthy("real work in whole steps", work=20, MODE="continuous"),
    healthy(
        "much work with stacks and shapes in two steps",
        work=200,
        STEPS="2,5",
        CONTENTS="cpu,shapes,stack",
    ),
    healthy("work between stages", between_s=0.03),
    healthy("generation one step ahead", ahead=True, quick=True),
    healthy("generation one step ahead, whole steps", ahead=True, MODE="continuous"),
    healthy("stages inside a stage", nested=True),
    healthy("one stage", stages=[["update_actor", "actor", 0.3]]),
    healthy("steps without stages", stages=[], between_s=0.3),
    healthy("two ranks", ranks=2, stages=COLLECT, quick=True),
    healthy("four ranks, lengths that vary", ranks=4, stages=COLLECT, spread=0.1),
    healthy("eight ranks", ranks=8, stages=COLLECT),
    healthy("compilation in step 1 of four ranks", ranks=4, stages=COLLECT, first_s=3),
    healthy(
        "data that rank 0 prepares in step 1",
        ranks=2,
        stages=COLLECT,
        plant={"cause": "sleep", "step": 1, "stage": "collect", "rank": 0, "seconds": 3.0},
    ),
    healthy("four ranks, all captured", ranks=4, stages=COLLECT, RANKS="all"),
    healthy("two ranks, whole steps", ranks=2, stages=COLLECT, RANKS="all", MODE="continuous"),
    healthy("two ranks with stacks and shapes", ranks=2, stages=COLLECT, RANKS="all", CONTENTS="cpu,shapes,stack"),
    healthy("samples", "rollouts", quick=True),
    healthy("samples with tools", "rollouts", tool=True),
    healthy("samples, whole steps", "rollouts", MODE="continuous"),
    healthy("samples with stacks and shapes", "rollouts", tool=True, CONTENTS="cpu,shapes,stack"),
    healthy("workers of multiprocessing", "pool"),
    healthy("workers of multiprocessing, all captured", "pool", RANKS="all"),
]


def planted(
    name: str,
    kind: str,
    *words: str,
    cause: str = "sleep",
    step: int = 6,
    seconds: float = 2.0,
    program: str = "loop",
    at: str = "",
    rank: int = 0,
    ranks: int = 1,
    known: str = "",
    quick: bool = False,
    **fields: Any,
) -> Program:
    """Return a row with a planted cause: `cause` in stage `at` of a step and rank. Other fields are as in `healthy`."""
    plant = {"cause": cause, "step": step, "stage": at, "rank": rank, "seconds": seconds}
    row = healthy(name, program, plant=plant, ranks=ranks, **fields)
    found_in = None if kind in OF_RUN else step
    return replace(row, kind=kind, step=found_in, words=words, known=known, quick=quick)


PLANTED = [
    # Outside of stages: the place is the planted function.
    planted("data", "no_stage", "between generate and reward", "load_batch", cause="data", quick=True),
    planted("import in step 1", "no_stage", "before generate", "slow_module", cause="import", step=1),
    planted("garbage collection", "no_stage", "collect_garbage", cause="gc"),
    planted("lock", "no_stage", "wait_for_lock", cause="lock"),
    planted("disk", "no_stage", "write_results", cause="disk"),
    planted("slow logging", "no_stage", "log_metrics", cause="http"),
    planted("sleeping driver", "no_stage", "sleeping_driver", cause="sleep"),
    # In a stage.
    planted("weight sync", "weight_sync", stages=SYNC, at="update_weights"),
    planted("checkpoint", "checkpoint", "save_checkpoint", save=3, extra_s=0.1, at="save_checkpoint"),
    planted("validation", "validation", "validate", validate=3, extra_s=0.1, at="validate"),
    planted("reward of a step", "slow_reward", at="reward"),
    planted("slow update", "slow_step", "update_actor", at="update_actor"),
    # Of twelve steps, the last nine or ten are regular: five steps lie between the middles of both halves.
    planted(
        "growing steps",
        "growth",
        "update_actor",
        **{"cause": "", "at": "no stage", "seconds": 1.25, "steps": 12, "grow_s": 0.25},
    ),
    planted("memory", "death", "in update_actor of step 6", "can't allocate memory", cause="oom", at="update_actor"),
    # Ranks.
    planted("slow rank", "slow_rank", "rank 2", "collect", ranks=4, rank=2, at="collect", stages=COLLECT, quick=True),
    planted(
        "slow rank in a collective",
        "slow_rank",
        "rank 1",
        "update_actor",
        **{"ranks": 2, "rank": 1, "at": "update_actor", "stages": COLLECT, "STEPS": "6", "RANKS": "all"},
    ),
    planted(
        "stopped rank",
        "slow_rank",
        "rank 1",
        "collect",
        **{"cause": "stopped", "seconds": 3.0, "ranks": 2, "rank": 1, "at": "collect", "stages": COLLECT},
    ),
    planted(
        "slow first step of a rank",
        "slow_rank",
        "rank 1",
        "collect",
        **{"step": 1, "seconds": 3.0, "ranks": 2, "rank": 1, "at": "collect", "stages": COLLECT},
    ),
    planted("slow driver's rank", "slow_rank", "rank 0", "collect", ranks=2, at="collect", stages=COLLECT),
    planted("slow worker", "slow_rank", "rank 2", "generate", program="pool", rank=2),
    # Samples.
    planted("long sample", "sample_tail", "prompt 2, rollout 1", program="rollouts", cause="long"),
    planted("tool", "slow_tool", "prompt 2, rollout 1", "search", program="rollouts", cause="tool", quick=True),
    planted("reward of a sample", "slow_reward", "prompt 2, rollout 1", program="rollouts", cause="reward"),
    planted("exception in a sample", "failed_samples", "no score", program="rollouts", cause="raise"),
    planted("slow replica", "slow_replica", "replica 1", program="rollouts", cause="replica"),
    planted("weight sync of an agent trainer", "weight_sync", program="rollouts", cause="sync"),
]
