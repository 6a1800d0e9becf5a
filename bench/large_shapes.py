"""The shapes of large runs: the numbers of ranks, hosts and steps, the attempts, and the stages of a step."""

from __future__ import annotations

from typing import NamedTuple

SECOND = 10**9
# Larger than the largest pid of Linux (4,194,304), so that no process of this machine has the pid of a simulated one.
FIRST_PID = 5_000_000
# Time from the start of an attempt to its first step. The imports and the loading of the model take it.
LOADING_NS = 120 * SECOND
STEP_NS = 30 * SECOND


class Stage(NamedTuple):
    """A stage of a worker, and the trainer's timer around it. `begin` and `end` are seconds since the step began."""

    name: str
    role: str
    timer: str
    begin: float
    end: float


STAGES = (
    Stage("generate_sequences", "rollout", "gen", 0.1, 10),
    Stage("compute_log_prob", "actor", "old_log_prob", 10.5, 14),
    Stage("compute_ref_log_prob", "ref", "ref", 14.5, 18),
    Stage("update_actor", "actor", "update_actor", 18.5, 27),
    Stage("update_weights", "actor", "update_weights", 27.5, 29),
)


class Shape(NamedTuple):
    """The size of a run. `gpus` is the number of ranks on each host."""

    ranks: int
    steps: int = 300
    gpus: int = 8

    @property
    def hosts(self) -> list[str]:
        return [f"node{number:04d}" for number in range(self.ranks // self.gpus)]

    @property
    def missing(self) -> str:
        """Return the host whose files were never collected; an empty text if there is only one host."""
        return self.hosts[-1] if len(self.hosts) > 1 else ""

    @property
    def collected(self) -> int:
        """Return the number of ranks whose files were collected."""
        return self.ranks - (self.gpus if self.missing else 0)

    @property
    def captured(self) -> tuple[int, int]:
        """Return the captured steps: one step of each attempt."""
        return self.steps // 3, 2 * self.steps // 3 + 1

    @property
    def attempts(self) -> tuple[Attempt, Attempt]:
        """Return the attempts. The first is killed in its last step. The second starts at the last checkpoint."""
        killed = self.steps // 2
        resumed = killed - max(1, self.steps // 30)
        first = Attempt(0, 0, range(1, killed + 1))
        gap = LOADING_NS + len(first.steps) * STEP_NS + 600 * SECOND
        return first, Attempt(1, gap, range(resumed, self.steps + 1))


class Attempt(NamedTuple):
    """An attempt at the run. `start_ns` is its start, in nanoseconds since the start of the first attempt."""

    number: int
    start_ns: int
    steps: range

    @property
    def killed(self) -> bool:
        """Return True if the attempt is killed in its last step."""
        return self.number == 0

    def pid(self, number: int) -> int:
        """Return the pid of a process of the attempt.

        Number 0 is the process that starts the run, 1 is the process that counts the steps, and 2 + N is rank N.
        """
        return FIRST_PID + 100_000 * self.number + number

    def begin_ns(self, step: int) -> int:
        """Return the start of a step, in nanoseconds since the start of the first attempt."""
        return self.start_ns + LOADING_NS + (step - self.steps[0]) * STEP_NS
