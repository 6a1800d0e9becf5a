"""Facts and rows: the vocabulary of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu.workbench import Workbench

# Causes that a program plants, one per stage.
CAUSES = ("compute", "memory", "copy", "launch", "idle")
PASS, FAIL, SKIPPED = "pass", "fail", "skipped"


@dataclass(frozen=True)
class Fact:
    """One line of the table: a statement, whether it holds, and its figure or the reason that it was skipped."""

    text: str
    state: str
    figure: str = ""


class Failed(Exception):
    """A row failed. The message has the error."""


class Skipped(Exception):
    """A row can't run here. The message has the reason."""


Work = Callable[["Workbench"], Iterator[Fact]]


@dataclass(frozen=True)
class Row:
    """Row of the table: its work and its requirements.

    Attributes:
        limit_s: Maximum duration in seconds.
        modules: Modules that it imports.
        programs: Programs that it starts.
        gpu: True if it needs a GPU.
        devices: Number of GPUs that it needs.
        rocm: Reason why it can't run on ROCm, or an empty text.
    """

    name: str
    about: str
    work: Work
    limit_s: float
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    gpu: bool = False
    devices: int = 1
    rocm: str = ""


@dataclass
class Outcome:
    """Result of a row."""

    name: str
    about: str
    state: str = SKIPPED
    reason: str = ""
    seconds: float = 0.0
    logs: list[str] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)

    def settle(self) -> None:
        """Set the state by the facts: the row fails if one of them fails."""
        states = {fact.state for fact in self.facts}
        self.state = next((state for state in (FAIL, PASS) if state in states), SKIPPED)
        if self.state == SKIPPED and not self.reason:
            self.reason = "; ".join(dict.fromkeys(fact.figure for fact in self.facts))


# All rows, in the order in which they run.
ROWS: list[Row] = []


def row(limit_s: float, **needs: Any) -> Callable[[Work], Work]:
    """Register a row under the name of its function. Its docstring is its title in the table."""

    def register(work: Work) -> Work:
        about = (work.__doc__ or "").strip().partition("\n")[0].removesuffix(".")
        ROWS.append(Row(work.__name__, about, work, limit_s, **needs))
        return work

    return register
