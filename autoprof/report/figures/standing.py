"""Sentences on a step that takes too long: one function for each kind of evidence, the most certain first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from autoprof.base.units import seconds
from autoprof.report.figures import hangs, places
from autoprof.report.figures.collectives import BY_TORCH, Record, Stuck
from autoprof.report.figures.hangs import Process
from autoprof.report.figures.open_now import where
from autoprof.report.figures.words import listed, several

# A sample or a request is long that is older than this, or than half of a step that stands.
OLD_S = 60.0
# Kinds of spans of which a step has thousands.
OF_SAMPLES = ("sample", "turn", "tool", "reward", "request")


class Said(msgspec.Struct, frozen=True):
    """A statement, its evidence, and the file that has it."""

    text: str
    evidence: list[str] = []
    file: str = ""


def by_itself(processes: Sequence[Process], over: bool) -> Iterator[Said]:
    """Name processes that wait for themselves: deadlocks of two locks, and actors that ask themselves.

    Args:
        processes: The processes.
        over: Whether the step has ended; a deadlock does not end, so none is named then.
    """
    for process in processes:
        if process.deadlock and not over:
            yield Said(process.deadlock.replace("{process}", process.name), _stack(process), process.file)
        elif process.itself:
            text = (
                f"{process.name} waits for itself: ray.get in {process.itself} asks for what the actor itself is to do"
            )
            yield Said(text, _stack(process), process.file)


def held_up(processes: Sequence[Process], age_s: float) -> Iterator[Said]:
    """Name tasks that block their event loop, so that its other tasks can't run."""
    for process in processes:
        if process.held_up is None:
            continue
        work, waiting = process.held_up
        span = next((span for span in reversed(work.spans) if span.kind in OF_SAMPLES), None)
        long = span is not None and (process.unix_ns - span.start_ns) / 1e9 >= min(OLD_S, age_s / 2)
        if span is None or not long:
            continue
        who = where(msgspec.structs.replace(span, role=""))
        doing = f"{span.kind} {span.name} of {who}" if who else f"{span.kind} {span.name}"
        text = f"{doing} holds up the event loop of {process.name}, where {several(waiting, 'task')} wait"
        yield Said(f"{text}; it is in {work.place}", _stack(process), process.file)


def records(processes: Sequence[Process]) -> list[Record]:
    """Return the flight records, without those of processes that share a title and a rank: they can't be told apart."""
    ranks = Counter((process.world, process.joined_as) for process in processes if process.flight_record)
    return [
        Record(process.flight_record, process.joined_as, process.world)
        for process in processes
        if process.flight_record and process.joined_as is not None and ranks[process.world, process.joined_as] == 1
    ]


def collective(stuck: Stuck, processes: Sequence[Process]) -> Said:
    """Name the ranks that did not join a collective, or called another one."""
    of = {process.joined_as: process for process in processes if process.world == stuck.world}
    role = hangs.roles(processes).get(next(iter(of.values())).label, "") if of else ""
    stages = Counter(
        process.stage.name
        for rank in stuck.waiting
        if (process := of.get(rank)) is not None and process.stage is not None
    )
    stage = f" in {stages.most_common(1)[0][0]}" if stages else ""
    call = f"{stuck.name} #{stuck.number}"
    group = (
        f"process group {stuck.group}; {'torch' if stuck.by == BY_TORCH else 'autoprof'} compared the flight records"
    )
    evidence = [f"{ranks(stuck.waiting, '')} {plural(stuck.waiting, 'waits', 'wait')} in it", group]
    if caller := places.told(stuck.frames):
        evidence[0] += f", called in {places.text(caller)}"
    if stuck.unknown:
        evidence.append(f"of {ranks(stuck.unknown, role)} there is no record")
    if stuck.late:
        found = [process for rank in stuck.late if (process := of.get(rank)) is not None]
        at = list(dict.fromkeys(process.place for process in found if process.place))
        here = f"; {plural(stuck.late, 'it is', 'they are')} in {at[0]}" if len(at) == 1 else ""
        text = f"{ranks(stuck.late, role)} {plural(stuck.late, 'has', 'have')} not joined {call}{stage}{here}"
        evidence += [line for process in found[:1] for line in _stack(process)]
        return Said(text, evidence, found[0].file if found else "")
    others = list(stuck.other.items())
    rank, what = others[0]
    alike = [each for each, other in others if other == what]
    called = f"{ranks(alike, role)} called {what} as #{stuck.number}{stage}, {_rest(stuck, alike)} {stuck.called}"
    more = [f"rank {each} called {other}" for each, other in others if other != what]
    return Said(called, [*more[:5], *evidence], of[rank].file if rank in of else "")


def _rest(stuck: Stuck, alike: Sequence[int]) -> str:
    rest = [rank for rank in stuck.waiting if rank not in alike]
    return f"rank {rest[0]}" if len(rest) == 1 else "the others"


def engines(processes: Sequence[Process], age_s: float) -> Iterator[Said]:
    """Name engines whose requests wait although none runs, no block is free, or one runs for long."""
    for process in processes:
        running, waiting, free, longest = (
            value if isinstance(value := process.engine.get(name), (int, float)) else None
            for name in ("running", "waiting", "free_blocks", "longest_s")
        )
        who = f"replica {process.replica}" if process.replica is not None else process.name
        here = f"; it is in {process.place}" if process.place and not process.waits else ""
        state = [", ".join(f"{name} {value}" for name, value in sorted(process.engine.items()))]
        requests = several(int(waiting or 0), "request")
        if waiting and free == 0:
            yield Said(f"{who} has {requests} waiting and no free block", state, process.file)
        elif waiting and not running:
            yield Said(f"{who} has {requests} waiting and none running{here}", state, process.file)
        elif (running or waiting) and longest is not None and longest >= min(OLD_S, age_s / 2):
            text = f"{who} has {several(int(running or 0), 'request')} running and {int(waiting or 0)} waiting"
            yield Said(f"{text}, the longest since {seconds(longest)}{here}", state, process.file)


def stacks(processes: Sequence[Process]) -> Iterator[Said]:
    """Name processes that are not in the collective, or not at the place, of the others with the same title."""
    by_label: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        if process.stack:
            by_label[process.label].append(process)
    for alike in by_label.values():
        waiting = [process for process in alike if process.waits == places.COLLECTIVE]
        others = [process for process in alike if process.waits not in (places.COLLECTIVE, places.IDLE)]
        what = places.COLLECTIVE
        if not waiting:
            place, count = Counter(process.place for process in others).most_common(1)[0] if others else ("", 0)
            if count < 2:
                continue
            waiting, what = [each for each in others if each.place == place], f"in {place}"
            others = [process for process in others if process.place != place]
        if not others or len(others) > len(waiting):
            continue
        late = others[0]
        names = late.name if len(others) == 1 else f"{late.name} and {several(len(others) - 1, 'other')}"
        text = f"{names} {plural(others, 'is', 'are')} in {late.place}, {several(len(waiting), 'other')} {what}"
        yield Said(text, _stack(late), late.file)


def busy(processes: Sequence[Process]) -> Iterator[Said]:
    """Name the places of processes that have an open stage or step and wait for no other process."""
    found = [
        (process, work)
        for process in processes
        for work in process.working[:1]
        if (process.spans or work.own) and (process.waits not in (places.COLLECTIVE, places.RAY) or not work.main)
    ]
    found.sort(
        key=lambda each: (not each[1].own, each[0].stage is None, not each[1].main, each[0].waits == places.IDLE)
    )
    for process, work in found[:3]:
        stage = f" in {process.stage.name}" if process.stage is not None else ""
        doing = f"waits for {work.who}" if work.awaited else "is"
        yield Said(f"{process.name} {doing} in {work.place}{stage}", _stack(process), process.file)


def waiting(processes: Sequence[Process]) -> Iterator[Said]:
    """Name the places where processes wait; for steps in which all of them do."""
    found = [process for process in processes if process.spans and process.place]
    # Who waits for Ray waits for one of the others.
    for process in sorted(found, key=lambda each: (each.waits == places.RAY, each.stage is None))[:3]:
        what = f" ({process.waits})" if process.waits in (places.COLLECTIVE, places.RAY) else ""
        stage = f" of {process.stage.name}" if process.stage is not None else ""
        yield Said(f"{process.name} waits in {process.place}{stage}{what}", _stack(process), process.file)


def elsewhere(processes: Sequence[Process]) -> str:
    """Name the only process without open spans that is in the user's code; others may be waiting for it."""
    found = {
        work.place: process
        for process in processes
        for work in process.working
        if work.own and not process.spans and (process.waits == places.IDLE or work.main)
    }
    return "; ".join(f"{process.name} is in {place}" for place, process in found.items()) if len(found) == 1 else ""


def _stack(process: Process) -> list[str]:
    inner = [places.text(frame) for frame in process.stack[-4:]]
    return [f"{process.name}, {process.thread}: {' > '.join(inner)}"] if inner else []


def ranks(numbers: Sequence[int], role: str) -> str:
    """Name ranks: `ranks 3, 5 of actor`."""
    of = f" of {role}" if role else ""
    return f"{plural(numbers, 'rank', 'ranks')} {listed(map(str, numbers), 8)}{of}"


def plural(things: Sequence[object], one: str, many: str) -> str:
    """Return the word for one thing, or for many."""
    return one if len(things) == 1 else many
