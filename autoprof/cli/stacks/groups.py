"""Groups of threads and tasks with equal stacks, over all processes of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autoprof.base import units
from autoprof.rundir.records import Frame, OpenSpan, ProcessStacks, Task, Thread

# Kinds of spans that are work of a whole process. Spans of other kinds belong to single samples.
_WORK = ("step", "stage", "timer", "window")
# Paths of the files of Python's standard library, and of compiled code.
_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!(site|dist)-packages/)|^<frozen |\.so(\.[0-9.]+)?$|/python3?(\.\d+)?$")
_MAX_LABEL = 50


class Member(NamedTuple):
    """A thread or task of a process, and the spans on which the thread or task works, outermost first."""

    process: ProcessStacks
    stack: Thread | Task
    spans: list[OpenSpan]

    @property
    def work(self) -> OpenSpan | None:
        """Return the member's stage, timer or window that began last, or else its step, if any."""
        work = [span for span in self.spans if span.kind in _WORK]
        return max(work, key=lambda span: (span.kind != "step", span.start_ns), default=None)

    @property
    def innermost(self) -> OpenSpan | None:
        """Return the span of a sample that began last, or else `work`."""
        samples = [span for span in self.spans if span.kind not in _WORK]
        return max(samples, key=lambda span: span.start_ns, default=self.work)

    @property
    def label(self) -> str:
        """Return the name of the member: its role and rank if it is in a stage with a rank, else its process."""
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
        """Return the innermost Python function outside the standard library, or else the innermost function, if any."""
        frames = [frame for frame in self.frames if frame.file and not _LIBRARY.search(frame.file)]
        return (frames or self.frames or [None])[-1]  # type: ignore[list-item]

    @property
    def age_s(self) -> float | None:
        """Return the age of the oldest of the members' innermost spans, in seconds; None if they have no span."""
        ages = [age(member.process, span) for member in self.members if (span := member.innermost) is not None]
        return max(ages, default=None)

    @property
    def who(self) -> str:
        """Return the names of all members in one text: their ranks, such as `actor ranks 0-16,18-63`, or processes."""
        ranks: dict[str, set[int]] = {}
        other_names = []
        for member in self.members:
            work = member.work
            if work is not None and work.rank is not None and work.kind == "stage":
                ranks.setdefault(work.role, set()).add(work.rank)
            else:
                other_names.append(member.label)
        names = [
            f"{role} rank{'s' if len(numbers) > 1 else ''} {units.ranges(sorted(numbers))}"
            for role, numbers in sorted(ranks.items())
        ]
        return ", ".join(names + several(other_names, 3))


def age(process: ProcessStacks, span: OpenSpan) -> float:
    """Return the seconds from the start of a span to the answer of its process, both on the clock of the process."""
    return max(0.0, (process.unix_ns - span.start_ns) / 1e9)


def several(names: Iterable[str], limit: int) -> list[str]:
    """Return the distinct names.

    If there are more than `limit` + 1 names, return the first `limit` names and a text with the number of other names.
    """
    distinct = list(dict.fromkeys(names))
    return distinct if len(distinct) <= limit + 1 else [*distinct[:limit], f"{len(distinct) - limit} more"]


def at_work(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the groups of threads that work on a span, followed by the groups of the other main threads.

    In both parts, large groups come first.
    """
    all_groups = _grouped(
        Member(process, thread, _spans(process, thread))
        for process in processes
        for thread in process.threads
        if thread.main or thread.spans
    )
    return sorted(all_groups, key=lambda group: not group.members[0].spans)


def beside(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the groups of the threads that are not main threads and work on no span. Large groups come first."""
    return _grouped(
        Member(process, thread, [])
        for process in processes
        for thread in process.threads
        if not thread.main and not thread.spans
    )


def tasks(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the groups of asyncio's tasks. The groups of tasks that work on a span come first."""
    all_groups = _grouped(
        Member(process, task, _spans(process, task)) for process in processes for task in process.tasks
    )
    return sorted(all_groups, key=lambda group: not group.members[0].spans)


def _spans(process: ProcessStacks, stack: Thread | Task) -> list[OpenSpan]:
    spans = [process.spans[index] for index in stack.spans if index < len(process.spans)]
    if not spans and isinstance(stack, Thread) and stack.main:
        # py-spy does not assign spans to threads. Without assigned spans, the main thread gets the process's spans.
        has_assigned_spans = any(thread.spans for thread in process.threads) or any(
            task.spans for task in process.tasks
        )
        spans = [] if has_assigned_spans else [span for span in process.spans if span.kind in _WORK]
    return sorted(spans, key=lambda span: span.start_ns)


def _grouped(members: Iterable[Member]) -> list[Group]:
    groups: dict[object, Group] = {}
    for member in members:
        span = member.innermost
        span_name = (span.kind, span.name) if span is not None else None
        waits_on = member.stack.waits_on if isinstance(member.stack, Task) else ""
        wait_kind = waits_on if waits_on in ("", "its turn") else "waits"
        # Compare the names of functions without their classes, because py-spy does not give the classes.
        stack = tuple((frame.function.rpartition(".")[2], frame.file, frame.line) for frame in member.stack.frames)
        groups.setdefault((stack, span_name, wait_kind), Group([])).members.append(member)
    return sorted(groups.values(), key=lambda group: (-len(group.members), -(group.age_s or 0)))
