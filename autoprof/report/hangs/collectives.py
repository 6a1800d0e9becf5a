"""Collectives that do not end: which ranks did not come, or came with another one, by torch's flight records.

torch's own analyser says it where torch is installed; a comparison of sequence numbers says it elsewhere, and where the
analyser gives up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import interrupts
from autoprof.report.hangs import flight_script
from autoprof.rundir.records import Frame

# Importing torch takes seconds, on a busy machine many.
TIMEOUT_S = 120.0
# Of these all ranks give the same sizes.
_ALIKE = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "_all_gather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce",
)
BY_TORCH, BY_AUTOPROF = "torch", "autoprof"


class Record(msgspec.Struct, frozen=True):
    """A flight record: its file, whose it is, and the world of ranks that it belongs to."""

    path: str
    rank: int
    world: str


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that some ranks are in and others are not.

    Attributes:
        world: The world of ranks.
        name: Its name, such as `all_reduce`, without that of its backend.
        number: Its sequence number in its process group.
        group: The process group's description, or its name.
        since_ns: When the first rank called it.
        waiting: The ranks that are in it.
        late: The ranks that did not come.
        unknown: The ranks of which there is no record.
        other: What ranks called in its place, by rank.
        called: What most ranks called, where others called something else.
        frames: Where a rank called it, the innermost function last.
        by: `torch` where torch's analyser says the same, else `autoprof`.
    """

    world: str
    name: str
    number: int
    group: str
    since_ns: int
    waiting: list[int]
    late: list[int]
    unknown: list[int]
    other: dict[int, str]
    called: str
    frames: list[Frame]
    by: str = BY_AUTOPROF


class _Entry(msgspec.Struct, frozen=True):
    group: str
    description: str
    name: str
    collective_seq_id: int
    is_p2p: bool
    retired: bool
    time_created_ns: int
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    frames: list[Frame]

    @property
    def title(self) -> str:
        """Return its name without that of the backend."""
        return self.name.rpartition(":")[2]

    def said(self, with_sizes: bool) -> str:
        """Return what was called, with the sizes where names do not differ."""
        return (
            f"{self.title} of {_sizes(self.input_sizes)} {'/'.join(self.input_dtypes)}".strip()
            if with_sizes
            else self.title
        )


class _Process(msgspec.Struct, frozen=True):
    rank: int
    world: str
    groups: dict[str, list[int]]
    last: dict[str, int]
    entries: list[_Entry]


class _Facts(msgspec.Struct, frozen=True):
    processes: list[_Process]
    left_out: list[str]


def stuck(records: Sequence[Record]) -> tuple[list[Stuck], list[str]]:
    """Return the collectives that do not end, those first on which nothing else waits, and what could not be read.

    Raises nothing.
    """
    if not records:
        return [], []
    try:
        with tempfile.TemporaryDirectory(prefix="autoprof-flight-") as folder:
            notes = _run(records, folder)
            facts = msgspec.json.decode(Path(folder, "facts.json").read_bytes(), type=_Facts)
            path = Path(folder, "torch.json")
            said = msgspec.json.decode(path.read_bytes()) if path.exists() else []
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        interrupts.pass_on(error)
        return [], [f"the flight records can't be read: {error}"[:300]]
    found = _compared(facts.processes)
    return _confirmed(found, said), [*notes, *facts.left_out]


def _run(records: Sequence[Record], folder: str) -> list[str]:
    """Have the script read the records. Nothing of autoprof is on in it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AUTOPROF")}
    try:
        child = subprocess.run(
            [sys.executable, flight_script.__file__, folder],
            input=msgspec.json.encode(records),
            env=environment,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"the analysis of the flight records took more than {TIMEOUT_S:.0f} s"]
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return [f"the analysis of the flight records failed: {line[:200]}" for line in last] if child.returncode else []


def _compared(processes: Sequence[_Process]) -> list[Stuck]:
    """Compare what the ranks of each group are in, the lowest number first."""
    known: dict[tuple[str, str, tuple[int, ...]], dict[int, _Process]] = {}
    for process in processes:
        for group, ranks in process.groups.items():
            known.setdefault((process.world, group, tuple(ranks)), {})[process.rank] = process
    found = []
    for (world, group, of_group), members in known.items():
        calls: dict[int, dict[int, _Entry]] = {}
        for rank, process in members.items():
            for entry in process.entries:
                if entry.group == group and not entry.is_p2p:
                    calls.setdefault(entry.collective_seq_id, {})[rank] = entry
        # gloo says late that one has ended: one that all have joined does not count.
        for number in sorted(calls):
            if any(not entry.retired for entry in calls[number].values()):
                one = _one(world, of_group, group, members, number, calls[number])
                if one.late or one.other:
                    found.append(one)
                    break
    waiting = {(each.world, rank) for each in found for rank in each.waiting}
    # A rank that waits in another group is late for that one's sake.
    return sorted(
        found,
        key=lambda each: (any((each.world, rank) in waiting for rank in each.late), each.since_ns),
    )


def _one(
    world: str,
    ranks: tuple[int, ...],
    group: str,
    members: Mapping[int, _Process],
    number: int,
    calls: dict[int, _Entry],
) -> Stuck:
    waiting = [rank for rank, entry in calls.items() if not entry.retired]
    late = [
        rank for rank in ranks if rank in members and rank not in calls and members[rank].last.get(group, -1) < number
    ]
    names = Counter(entry.title for entry in calls.values())
    alike = names.most_common(1)[0][0]
    with_sizes = len(names) == 1 and alike in _ALIKE
    said = {rank: entry.said(with_sizes) for rank, entry in calls.items()}
    usual, count = Counter(said.values()).most_common(1)[0]
    first = calls[waiting[0]]
    return Stuck(
        world=world,
        name=alike,
        number=number,
        group=first.description or group,
        since_ns=min(calls[rank].time_created_ns for rank in waiting),
        waiting=sorted(waiting),
        late=sorted(late),
        unknown=sorted(set(ranks) - members.keys()),
        other={rank: what for rank, what in sorted(said.items()) if what != usual} if count < len(said) else {},
        called=usual if count < len(said) else "",
        frames=first.frames[::-1],
    )


def _confirmed(found: Sequence[Stuck], said: Any) -> list[Stuck]:
    """Return what was found, with whether torch's analyser says the same of it."""
    agreed = set()
    for each in said if isinstance(said, list) else ():
        if isinstance(each, dict) and "sequence" in each:
            agreed.add(
                (each.get("world"), each["sequence"], tuple(each.get("missing") or ()), bool(each.get("mismatched")))
            )
    return [
        msgspec.structs.replace(one, by=BY_TORCH)
        if {(one.world, one.number, tuple(one.late), bool(one.other))} & agreed
        else one
        for one in found
    ]


def _sizes(sizes: Sequence[Sequence[int]]) -> str:
    return ", ".join("[" + ", ".join(map(str, each)) + "]" for each in sizes[:4])
