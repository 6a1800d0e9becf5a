"""Groups of a merged trace: all traces and spans of one process, under one name.

Viewers show a group as one process: first the tracks of the timeline, then the threads of all captures. A device has a
separate group. Traces outside of a run have no groups, because it is unknown which process wrote them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from autoprof.config.values import role_place
from autoprof.rundir.journal import Journal
from autoprof.rundir.records import Line
from autoprof.traces.rewrite import Input, ProcessGroup
from autoprof.traces.timeline import Timeline

# Host and pid of a process, and the words that tell apart several ranks that one process recorded, such as `rank0`.
_Key = tuple[str, int, str]


class _Members(Struct):
    """The data of one group while it is collected."""

    roles: list[str] = []
    words: str = ""
    replica: int | None = None
    rank: int | None = None

    def add_roles(self, roles: Iterable[str]) -> None:
        self.roles = sorted({*self.roles, *filter(None, roles)}, key=lambda role: (role_place(role), role))

    def add_spans(self, spans: Sequence[Line]) -> None:
        self.add_roles(span.role for span in spans)
        if self.words:
            return
        replicas = {replica for span in spans if isinstance(replica := span.ids.get("replica"), int)}
        ranks = {span.rank for span in spans if span.rank is not None}
        self.replica = replicas.pop() if len(replicas) == 1 else None
        self.rank = ranks.pop() if len(ranks) == 1 else None
        numbers = (("replica", self.replica), ("rank", self.rank))
        self.words = " ".join(f"{name}{number}" for name, number in numbers if number is not None)


def grouped(inputs: Sequence[Input], timeline: Timeline) -> tuple[list[Input], dict[Journal, ProcessGroup]]:
    """Return the traces with their groups, and the group of each journal of the timeline."""
    members: dict[_Key, _Members] = {}
    key_of_process: dict[tuple[str, int], _Key] = {}
    for each in inputs:
        if each.pid is not None:
            key = (each.meta.host, each.pid, each.words)
            found = members.setdefault(key, _Members([], each.words, each.meta.replica, each.meta.rank))
            found.add_roles(each.roles)
            key_of_process.setdefault(key[:2], key)
    for journal, spans in timeline.items():
        key = key_of_process.setdefault((journal.host, journal.pid), (journal.host, journal.pid, ""))
        members.setdefault(key, _Members()).add_spans(spans)
    groups = _groups(members)
    grouped_inputs = [
        each if each.pid is None else msgspec.structs.replace(each, group=groups[each.meta.host, each.pid, each.words])
        for each in inputs
    ]
    return grouped_inputs, {journal: groups[key_of_process[journal.host, journal.pid]] for journal in timeline}


def _groups(members: Mapping[_Key, _Members]) -> dict[_Key, ProcessGroup]:
    has_several_hosts = len({host for host, _, _ in members}) > 1

    def name(key: _Key, with_pid: bool = False) -> str:
        host, pid, _ = key
        words = ["+".join(members[key].roles) or "other", members[key].words]
        words += [host if has_several_hosts else "", f"pid {pid}" if with_pid else ""]
        return " ".join(filter(None, words))

    def order(key: _Key) -> tuple[int, str, int, int, _Key]:
        of = members[key]
        role = of.roles[0] if of.roles else ""
        return role_place(role), role, -1 if of.replica is None else of.replica, of.rank or 0, key

    name_counts = Counter(map(name, members))
    return {
        key: ProcessGroup(
            name=name(key, name_counts[name(key)] > 1),
            labels=", ".join(filter(None, [key[0] and f"on {key[0]}", f"pid {key[1]}"])),
            number=number,
            count=len(members),
        )
        for number, key in enumerate(sorted(members, key=order))
    }
