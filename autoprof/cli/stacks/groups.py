"""Groups of equal stacks over all processes of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autoprof.base import units
from autoprof.rundir.records import Frame, OpenSpan, ProcessStacks, Task, Thread

# Spans of a process's work; the others are of single samples.
_WORK = ("step", "stage", "timer", "window")
# Python's own library, and functions in C.
_NOT_THEIRS = re.compile(r"/lib/python3\.\d+/(?!(site|dist)-packages/)|^<frozen |\.so(\.[0-9.]+)?$|/python3?(\.\d+)?$")
_LONGEST = 50


class Member(NamedTuple):
    """A thread or a task of a process, and the spans that it works on, the outermost first."""

    process: ProcessStacks
    stack: Thread | Task
    spans: list[OpenSpan]

    @property
    def work(self) -> OpenSpan | None:
        """Return the stage that it is in, or else the step."""
        work = [span for span in self.spans if span.kind in _WORK]
        return max(work, key=lambda span: (span.kind != "step", span.start_ns), default=None)

    @property
    def innermost(self) -> OpenSpan | None:
        """Return the innermost span of a sample, or else its stage."""
        samples = [span for span in self.spans if span.kind not in _WORK]
        return max(samples, key=lambda span: span.start_ns, default=self.work)

    @property
    def label(self) -> str:
        """Return who it is: a rank of a role where a stage says so, else the process."""
        work = self.work
        if work is not None and work.rank is not None and work.kind == "stage":
            return f"{work.role} rank {work.rank}"
        return f"{units.short(self.process.process or 'process', _LONGEST)} ({self.process.host}-{self.process.pid})"


class Group(NamedTuple):
    """Threads or tasks with one stack, in one kind of span."""

    members: list[Member]

    @property
    def frames(self) -> list[Frame]:
        return self.members[0].stack.frames

    @property
    def place(self) -> Frame | None:
        """Return the innermost function of Python's that is none of its own library."""
        theirs = [frame for frame in self.frames if frame.file and not _NOT_THEIRS.search(frame.file)]
        return (theirs or self.frames or [None])[-1]  # type: ignore[list-item]

    @property
    def since_s(self) -> float | None:
        """Return how long the oldest of their innermost spans has been open."""
        ages = [age(member.process, span) for member in self.members if (span := member.innermost) is not None]
        return max(ages, default=None)

    @property
    def who(self) -> str:
        """Return who they are: `actor ranks 0-16,18-63`, or the processes."""
        ranks: dict[str, set[int]] = {}
        others = []
        for member in self.members:
            work = member.work
            if work is not None and work.rank is not None and work.kind == "stage":
                ranks.setdefault(work.role, set()).add(work.rank)
            else:
                others.append(member.label)
        said = [
            f"{role} rank{'s' if len(found) > 1 else ''} {units.ranges(sorted(found))}"
            for role, found in sorted(ranks.items())
        ]
        return ", ".join(said + several(others, 3))


def age(process: ProcessStacks, span: OpenSpan) -> float:
    """Return how long a span has been open, in s, by its own process's clock."""
    return max(0.0, (process.unix_ns - span.start_ns) / 1e9)


def several(names: Iterable[str], most: int) -> list[str]:
    """Return names once each, and of many how many more there are."""
    each = list(dict.fromkeys(names))
    return each if len(each) <= most + 1 else [*each[:most], f"{len(each) - most} more"]


def at_work(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the threads that work on a span, then other main threads, most of a kind first."""
    found = _grouped(
        Member(process, thread, _spans(process, thread))
        for process in processes
        for thread in process.threads
        if thread.main or thread.spans
    )
    return sorted(found, key=lambda group: not group.members[0].spans)


def beside(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the other threads."""
    return _grouped(
        Member(process, thread, [])
        for process in processes
        for thread in process.threads
        if not thread.main and not thread.spans
    )


def tasks(processes: Sequence[ProcessStacks]) -> list[Group]:
    """Return the tasks of asyncio, those that work on a span first."""
    found = _grouped(Member(process, task, _spans(process, task)) for process in processes for task in process.tasks)
    return sorted(found, key=lambda group: not group.members[0].spans)


def _spans(process: ProcessStacks, stack: Thread | Task) -> list[OpenSpan]:
    spans = [process.spans[place] for place in stack.spans if place < len(process.spans)]
    if not spans and isinstance(stack, Thread) and stack.main:
        # py-spy does not know whose they are.
        owned = any(each.spans for each in process.threads) or any(each.spans for each in process.tasks)
        spans = [] if owned else [span for span in process.spans if span.kind in _WORK]
    return sorted(spans, key=lambda span: span.start_ns)


def _grouped(members: Iterable[Member]) -> list[Group]:
    groups: dict[object, Group] = {}
    for member in members:
        span = member.innermost
        name = (span.kind, span.name) if span is not None else None
        waits_on = member.stack.waits_on if isinstance(member.stack, Task) else ""
        kind = waits_on if waits_on in ("", "its turn") else "waits"
        # py-spy does not name the classes of methods.
        stack = tuple((each.function.rpartition(".")[2], each.file, each.line) for each in member.stack.frames)
        groups.setdefault((stack, name, kind), Group([])).members.append(member)
    return sorted(groups.values(), key=lambda group: (-len(group.members), -(group.since_s or 0)))
