"""Open spans of a run that is running or was killed, with their ages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from autoprof.base import units
from autoprof.base.redact import writable
from autoprof.report.model.run import OpenSpanRow
from autoprof.rundir import open_spans
from autoprof.rundir.open_spans import ProcessState
from autoprof.rundir.runs import Run
from autoprof.rundir.stacks import OpenSpan

# So many are told, and so many of them are of samples, turns and tools.
MOST, _MOST_OF_SAMPLES = 200, 50
_FIRST = {"step": 0, "stage": 1, "timer": 1, "window": 1}


class OpenSpans(msgspec.Struct, frozen=True, kw_only=True):
    """Open spans of a run.

    Attributes:
        states: Its processes that have a timeline.
        ends_ns: The moment up to which the spans of each are known to be open, by the clock of its host.
        shifts_ns: Nanoseconds that bring the times of each host onto one clock.
        going_on: True if the run is running.
        now_ns: The time of reading, by the clock of this host.
        started_ns: The start of the run, or of its last attempt if it was resumed.
    """

    states: Sequence[ProcessState]
    ends_ns: Sequence[int]
    shifts_ns: Mapping[str, int]
    going_on: bool
    now_ns: int
    started_ns: int = 0

    def age_s(self, place: int, span: OpenSpan) -> float:
        """Return the age of a span of the process at a place."""
        # A clock may have been set.
        return max(0.0, (self.ends_ns[place] - span.start_ns) / 1e9)

    def shifted(self, state: ProcessState, moment_ns: int) -> int:
        """Return a moment by the clock of a process's host on the clock that all hosts share."""
        return moment_ns + self.shifts_ns.get(state.host, 0)

    def still_s(self) -> float:
        """Return the seconds since a span began or ended in any process, or since the run was resumed.

        Unlike `last_ns`, memory is no movement.
        """
        moved = max((self.shifted(state, state.moved_ns) for state in self.states), default=self.now_ns)
        moved = max(moved, self.started_ns)
        return max(0.0, (self.now_ns - moved) / 1e9)

    def rows(self) -> tuple[list[OpenSpanRow], int]:
        """Return the rows of the report, and how many spans have none."""
        found = [
            (_FIRST.get(span.kind, 2), self.age_s(place, span), state, span)
            for place, state in enumerate(self.states)
            for span in state.spans
        ]
        found.sort(key=lambda each: (each[0], -each[1]))
        kept = [each for each in found if each[0] < 2]
        kept += [each for each in found if each[0] == 2][:_MOST_OF_SAMPLES]
        rows = [_row(age, state, span) for _, age, state, span in kept[:MOST]]
        return rows, len(found) - len(rows)


def read(run: Run, now_ns: int, shifts_ns: Mapping[str, int]) -> OpenSpans:
    """Read the open spans of a run."""
    going_on, started_ns = run.state.startswith("running"), round(run.info.started * 1e9)
    states = open_spans.without_past(open_spans.read(run.path), started_ns, shifts_ns)
    ends = open_spans.ends(states, going_on, now_ns, shifts_ns)
    return OpenSpans(
        states=states, ends_ns=ends, shifts_ns=shifts_ns, going_on=going_on, now_ns=now_ns, started_ns=started_ns
    )


def open_for(row: OpenSpanRow, going_on: bool) -> str:
    """Return in words how long a span is or was open. A process that died was last seen when it last wrote a line."""
    if open_spans.open_until_now(row.state, going_on):
        return units.seconds(row.age_s)
    return f"at least {units.seconds(row.age_s)}" if row.age_s else "an unknown time"


def where(span: OpenSpan) -> str:
    """Return whose span it is: `actor rank 3`, `agent_loop sample 63, rollout 2`."""
    replica = span.ids.get("replica")
    number = f"rank {span.rank}" if span.rank is not None else f"replica {replica}" if replica is not None else ""
    ids = [f"{name} {value}" for name, value in span.ids.items() if name in _NAMED and value not in (None, "")]
    return writable(" ".join(filter(None, [span.role, number, ", ".join(ids)])))


_NAMED = ("sample", "rollout", "request", "validate")


def _row(age: float, state: ProcessState, span: OpenSpan) -> OpenSpanRow:
    return OpenSpanRow(
        process=writable(f"{state.host} {state.pid}"),
        state=state.state,
        kind=writable(span.kind),
        name=writable(span.name),
        where=where(span),
        start_ns=span.start_ns,
        age_s=age,
        step=span.step,
    )
