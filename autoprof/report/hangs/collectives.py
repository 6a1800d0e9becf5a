"""Stuck collectives, from torch's flight records: ranks that did not join, or that called another collective.

autoprof compares the sequence numbers of the ranks. If torch is installed, torch's own analyser is asked too, and
results on which both agree are marked as torch's.
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

# Importing torch takes several seconds, and longer on a busy machine.
TIMEOUT_S = 120.0
# Collectives that all ranks call with the same sizes.
_SAME_SIZES = (
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
    """A flight record: its file, the rank that wrote it, and the name of that rank's world."""

    path: str
    rank: int
    world: str


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that some ranks are in and others are not.

    Attributes:
        world: The world of ranks.
        name: The collective, such as `all_reduce`, without its backend.
        number: Its sequence number in its process group.
        group: The process group's description, or its name.
        since_ns: The time of the first rank's call.
        waiting: The ranks that are in it.
        late: The ranks that did not join.
        unknown: The ranks without a record.
        other: The calls of ranks that called something else, by rank.
        called: The call of most ranks, if others called something else.
        frames: The stack of one call, innermost function last.
        by: `torch` if torch's analyser agrees, else `autoprof`.
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
        """Return its name without the backend."""
        return self.name.rpartition(":")[2]

    def call(self, with_sizes: bool) -> str:
        """Return the words for the call, with its sizes and types if asked."""
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
    """Return the stuck collectives, and notes on unreadable records. Never raises.

    A collective comes last if one of its late ranks waits in another stuck collective.
    """
    if not records:
        return [], []
    try:
        with tempfile.TemporaryDirectory(prefix="autoprof-flight-") as folder:
            notes = _run(records, folder)
            facts = msgspec.json.decode(Path(folder, "facts.json").read_bytes(), type=_Facts)
            path = Path(folder, "torch.json")
            torch_results = msgspec.json.decode(path.read_bytes()) if path.exists() else []
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        interrupts.pass_on(error)
        return [], [f"the flight records can't be read: {error}"[:300]]
    return _confirmed(_compared(facts.processes), torch_results), [*notes, *facts.left_out]


def _run(records: Sequence[Record], folder: str) -> list[str]:
    """Run the script that reads the records, with autoprof off. Return notes on its failure."""
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
    """Compare the calls of the ranks of each group, and return the first stuck collective of each."""
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
        # gloo marks a collective as ended late, so one that all ranks have joined does not count.
        for number in sorted(calls):
            if any(not entry.retired for entry in calls[number].values()):
                one = _one(world, of_group, group, members, number, calls[number])
                if one.late or one.other:
                    found.append(one)
                    break
    waiting = {(each.world, rank) for each in found for rank in each.waiting}
    # A rank may be late because it waits in another group. That group's collective comes first.
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
    name = names.most_common(1)[0][0]
    with_sizes = len(names) == 1 and name in _SAME_SIZES
    words = {rank: entry.call(with_sizes) for rank, entry in calls.items()}
    usual, count = Counter(words.values()).most_common(1)[0]
    first = calls[waiting[0]]
    return Stuck(
        world=world,
        name=name,
        number=number,
        group=first.description or group,
        since_ns=min(calls[rank].time_created_ns for rank in waiting),
        waiting=sorted(waiting),
        late=sorted(late),
        unknown=sorted(set(ranks) - members.keys()),
        other={rank: call for rank, call in sorted(words.items()) if call != usual} if count < len(words) else {},
        called=usual if count < len(words) else "",
        frames=first.frames[::-1],
    )


def _confirmed(found: Sequence[Stuck], torch_results: Any) -> list[Stuck]:
    """Return the stuck collectives; `by` is `torch` where torch's analyser agrees."""
    by_torch = set()
    for each in torch_results if isinstance(torch_results, list) else ():
        if isinstance(each, dict) and "sequence" in each:
            by_torch.add(
                (each.get("world"), each["sequence"], tuple(each.get("missing") or ()), bool(each.get("mismatched")))
            )
    return [
        msgspec.structs.replace(one, by=BY_TORCH)
        if {(one.world, one.number, tuple(one.late), bool(one.other))} & by_torch
        else one
        for one in found
    ]


def _sizes(sizes: Sequence[Sequence[int]]) -> str:
    return ", ".join("[" + ", ".join(map(str, each)) + "]" for each in sizes[:4])
