"""Page of text about where a run stands: groups of equal stacks, what waits, and who did not answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoprof.base import units
from autoprof.cli.stacks import groups
from autoprof.cli.stacks.answer import Absent
from autoprof.cli.stacks.groups import Group
from autoprof.rundir.stacks import Frame, OpenSpan, ProcessStacks, Task

# So much of each is shown; JSON and the files have all.
_GROUPS, _TASK_GROUPS, _OTHERS, _ABSENT, _WAITS = 24, 12, 10, 20, 5
_DEEP = 12


def lines(processes: Sequence[ProcessStacks], absent: Sequence[Absent]) -> Iterator[str]:
    """Yield the lines of the page."""
    working = groups.at_work(processes)
    yield from _shown("", working, _GROUPS, "process", "processes")
    waiting = groups.tasks(processes)
    yield from _shown("tasks of asyncio", waiting, _TASK_GROUPS, "task", "tasks")
    yield from _waits(processes)
    yield from _others(groups.beside(processes))
    yield from _absent(absent)


def _shown(title: str, found: Sequence[Group], most: int, thing: str, things: str) -> Iterator[str]:
    if title and found:
        yield from ("", f"{title}:")
    for group in found[:most]:
        yield ""
        yield heading(group, thing, things)
        frames = group.frames
        if len(frames) > _DEEP:
            yield f"    ... {units.count(len(frames) - _DEEP, 'outer function')}"
        yield from (f"    {place(frame)}" for frame in frames[-_DEEP:])
    if len(found) > most:
        rest = sum(len(group.members) for group in found[most:])
        yield from ("", f"... {units.count(rest, thing, things)} more, with {len(found) - most} other stacks")


def heading(group: Group, thing: str, things: str) -> str:
    """Return what a group does in a line: `62 processes in all_reduce (...) of update_actor, step 41, since 12 min`."""
    parts = [units.count(len(group.members), thing, things)]
    if (frame := group.place) is not None:
        parts.append(f"in {frame.function} ({_file(frame)})")
    span = group.members[0].innermost
    if span is not None and span.kind != "step":
        parts.append(f"of {span.name}")
    said = " ".join(parts)
    steps = sorted({span.step for member in group.members for span in member.spans if span.step is not None})
    if steps:
        said += f", step {units.ranges(steps)}"
    if group.since_s is not None:
        said += f", since {units.seconds(group.since_s)}"
    waits = {member.stack.waits_on for member in group.members if isinstance(member.stack, Task)}
    if waits - {""}:
        said += f", waits on {', '.join(groups.several(sorted(waits - {''}), 3))}"
    return f"{said}: {group.who}"


def place(frame: Frame) -> str:
    """Return a function as a line of a stack has it."""
    return f"{_file(frame)} {frame.function}" if frame.file else frame.function


def _file(frame: Frame) -> str:
    """Return a file's last two names, and the line."""
    return f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line}"


def _waits(processes: Sequence[ProcessStacks]) -> Iterator[str]:
    """Yield which samples, turns and tools are open, by their names, the oldest first."""
    found: dict[tuple[str, str], list[tuple[float, OpenSpan, ProcessStacks]]] = {}
    for process in processes:
        for span in process.spans:
            if span.kind not in ("step", "stage", "timer", "window"):
                told = groups.age(process, span), span, process
                found.setdefault((span.kind, span.name), []).append(told)
    if found:
        yield from ("", "open:")
    for (kind, name), spans in sorted(found.items(), key=lambda each: -max(told[0] for told in each[1])):
        spans.sort(key=lambda told: -told[0])
        what = f"{kind} {name}" if name != kind else kind
        yield f"    {what}: {len(spans)}, the oldest since {units.seconds(spans[0][0])}"
        for seconds, span, process in spans[:_WAITS]:
            ids = " ".join(f"{key}={value}" for key, value in span.ids.items())
            step = f"step {span.step}" if span.step is not None else ""
            said = ", ".join(filter(None, [ids, step, f"since {units.seconds(seconds)}"]))
            yield f"        {said} ({process.host}-{process.pid})"


def _others(found: Sequence[Group]) -> Iterator[str]:
    """Yield a line for each stack of threads that work on nothing that autoprof knows."""
    if found:
        yield from ("", "other threads:")
    for group in found[:_OTHERS]:
        frame = group.place
        names = ", ".join(groups.several([member.stack.name or "without a name" for member in group.members], 2))
        yield f"    {len(group.members)} in {place(frame) if frame is not None else 'nothing'}: {names}"
    if len(found) > _OTHERS:
        rest = sum(len(group.members) for group in found[_OTHERS:])
        yield f"    ... {units.count(rest, 'thread')} more, with {len(found) - _OTHERS} other stacks"


def _absent(absent: Sequence[Absent]) -> Iterator[str]:
    for each in absent[:_ABSENT]:
        name = f"{each.process} ({each.host}-{each.pid})" if each.process else f"{each.host}-{each.pid}"
        if each.state == "gone":
            inner = max(each.spans, key=lambda span: span.start_ns, default=None)
            step = f" of step {inner.step}" if inner is not None and inner.step is not None else ""
            was = f"; it was in {inner.name}{step}" if inner is not None else ""
            text = f"gone: {name}{was}"
        elif each.state == "elsewhere":
            where = "on another host or in another container"
            text = f"no answer: {name}, which is {where}; --ray reaches other hosts if the run is in a Ray cluster"
        else:
            text = f"no answer: {name}: {each.reason}"
        yield from (("", text) if each is absent[0] else (text,))
    if len(absent) > _ABSENT:
        yield f"... {units.count(len(absent) - _ABSENT, 'process', 'processes')} more without an answer"
