"""Groups of equal stacks over all processes of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autoprof.base import units
from autoprof.rundir.records import Frame, OpenSpan, ProcessStacks, Task, Thread

# Kinds of spans of a whole process; other kinds belong to single samples.
_WORK = ("step", "stage", "timer", "window")
# Files of Python's standard library, and of functions in C.
_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!(site|dist)-packages/)|^<frozen |\.so(\.[0-9.]+)?$|/python3?(\.\d+)?$")
_MAX_LABEL = 50


class Member(NamedTuple):
    """A thread or task of a process, and the spans that it works on, outermost first."""

    process: ProcessStacks
    stack: Thread | Task
    spans: list[OpenSpan]

    @property
    def work(self) -> OpenSpan | None:
        """Return its latest stage, timer or window, or else its step."""
        work = [span for span in self.spans if span.kind in _WORK]
        return max(work, key=lambda span: (span.kind != "step", span.start_ns), default=None)

    @property
    def innermost(self) -> OpenSpan | None:
        """Return its latest span of a sample, or else `work`."""
        samples = [span for span in self.spans if span.kind not in _WORK]
        return max(samples, key=lambda span: span.start_ns, default=self.work)

    @property
    def label(self) -> str:
        """Return its name: a role and rank if it is in a stage with a rank, else the process."""
        work = self.work
        if work is not None and work.rank is not None and work.kind == "stage":
            return f"{work.role} rank {work.rank}"
        return f"{units.short(self.process.process or 'process', _MAX_LABEL)} ({self.process.host}-{self.process.pid})"


class Group(NamedTuple):
    """Threads or tasks with the same stack, in spans of the same kind and name."""

    members: list[Member]

    @property
    def frames(self) -> list[Frame]:
        return self.members[0].stack.frames

    @property
    def place(self) -> Frame | None:
        """Return the innermost Python function outside the standard library, or else the innermost function."""
        frames = [frame for frame in self.frames if frame.file and not _LIBRARY.search(frame.file)]
        return (frames or self.frames or [None])[-1]  # type: ignore[list-item]

    @property
    def age_s(self) -> float | None:
        """Return the age of the oldest of the members' innermost spans, in seconds; None if they have no span."""
        ages = [age(member.process, span) for member in self.members if (span := member.innermost) is not None]
        return max(ages, default=None)

    @property
    def who(self) -> str:
        """Return the members' names: `actor ranks 0-16,18-63`, or the processes."""
        ranks: dict[str, set[int]] = {}
        others = []
        for member in self.members:
            work = member.work
            if work is not None and work.rank is not None and work.kind == "stage":
                ranks.setdefault(work.role, set()).add(work.rank)
            else:
                others.append(member.label)
        names = [
            f"{role} rank{'s' if len(numbers) > 1 else ''} {units.ranges(sorted(numbers))}"
            for role, numbers in sorted(ranks.items())
        ]
        return ", ".join(names + several(others, 3))


def age(process: ProcessStacks, span: OpenSpan) -> float:
    """Return the seconds since a span began, by its own process's clock."""
    return max(0.0, (process.unix_ns - span.start_ns) / 1e9)


def several(names: Iterable[str], limit: int) -> list[str]:
    """Return the distinct names; if there are more than `limit` + 1, the first `limit` and the number of the others."""
    distinct = list(dict.fromkeys(names))
    return distinct if len(distinct) <= limit + 1 else [*distinct[:limit], f"{len(distinct) - limit} more"]


def at_work(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return groups of threads that work on a span, then of other main threads; large groups first."""
    grouped = _grouped(
        Member(process, thread, _spans(process, thread))
        for process in processes
        for thread in process.threads
        if thread.main or thread.spans
    )
    return sorted(grouped, key=lambda group: not group.members[0].spans)


def beside(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return groups of the threads that are not main threads and work on no span."""
    return _grouped(
        Member(process, thread, [])
        for process in processes
        for thread in process.threads
        if not thread.main and not thread.spans
    )


def tasks(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return groups of asyncio's tasks; tasks that work on a span come first."""
    grouped = _grouped(Member(process, task, _spans(process, task)) for process in processes for task in process.tasks)
    return sorted(grouped, key=lambda group: not group.members[0].spans)


def _spans(process: ProcessStacks, stack: Thread | Task) -> list[OpenSpan]:
    spans = [process.spans[index] for index in stack.spans if index < len(process.spans)]
    if not spans and isinstance(stack, Thread) and stack.main:
        # py-spy does not assign spans to threads; then the main thread gets the process's spans.
        owned = any(thread.spans for thread in process.threads) or any(task.spans for task in process.tasks)
        spans = [] if owned else [span for span in process.spans if span.kind in _WORK]
    return sorted(spans, key=lambda span: span.start_ns)


def _grouped(members: Iterable[Member]) -> list[Group]:
    groups: dict[object, Group] = {}
    for member in members:
        span = member.innermost
        name = (span.kind, span.name) if span is not None else None
        waits_on = member.stack.waits_on if isinstance(member.stack, Task) else ""
        kind = waits_on if waits_on in ("", "its turn") else "waits"
        # Compare function names without classes, which py-spy does not give.
        stack = tuple((frame.function.rpartition(".")[2], frame.file, frame.line) for frame in member.stack.frames)
        groups.setdefault((stack, name, kind), Group([])).members.append(member)
    return sorted(groups.values(), key=lambda group: (-len(group.members), -(group.age_s or 0)))
